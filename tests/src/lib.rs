//! tensor-relay-tests
