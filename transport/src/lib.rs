//! tensor-relay-transport
