//! tensor-relay-server
