//! tensor-relay
