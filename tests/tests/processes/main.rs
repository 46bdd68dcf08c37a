//! The program as people run it: real processes, sockets, files and signals.
//!
//! The binary is what `TENSOR_RELAY_BIN` names, or what `cargo build` puts beside these tests; `tests/run` builds it
//! first. Every test has a folder of its own, servers choose their ports by the system, and every wait has a deadline.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod access;
mod admin;
mod codecs;
mod configuration;
mod devices;
mod doctor;
mod ends;
mod every;
mod failures;
mod files;
mod gpu_suite;
mod hooks;
mod host;
mod http;
mod lanes;
mod logs;
mod lost;
mod mirrors;
mod modes;
mod netns;
mod resume;
mod sidecar;
mod transfers;
mod transports;
mod watches;
mod words;
