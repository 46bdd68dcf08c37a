//! Tests of the program as users run it: real processes, sockets, files and signals.
//!
//! The binary is what `TENSOR_RELAY_BIN` names, or the output of `cargo build`; `tests/run` builds it first. Each test
//! has its own folder, servers use ports that the system chooses, and every wait has a deadline.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod access;
mod admin;
mod changed_files;
mod codecs;
mod commands;
mod configuration;
mod copies;
mod devices;
mod doctor;
mod engine_caches;
mod every;
mod failures;
mod files;
mod gpu_suite;
mod held_transfer;
mod hooks;
mod host;
mod host_sharing;
mod http;
mod hub;
mod lanes;
mod logs;
mod mirrors;
mod modes;
mod netns;
mod output;
mod paths;
mod reachable;
mod relay;
mod resume;
mod shutdown;
mod sidecar;
mod swarm;
mod transfers;
mod transports;
mod watches;
