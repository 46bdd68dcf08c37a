//! tensor-relay-client
