//! Workloads and measurement for tensor-relay.
//!
//! - [`contender`] is the interface of all programs that are measured; [`relay`], [`stock_quinn`] and [`tcp`] implement
//!   it.
//! - `harness` runs contenders in processes of their own, on this machine or on other hosts, and compares them.
//! - [`run`], [`compare`] and [`deltas`] choose its contenders.
//! - [`codecs`] measures codecs on a user's own tensors.
//! - [`command`] has the subcommands of `tensor-relay-bench`, which are also those of `tensor-relay bench`.
//! - [`workload`] generates a model's tensors from a seed, for `tensor-relay demo` and for benchmarks.
//! - [`cpu`] measures CPU time, and [`stats`] summarises samples.
//!
//! The tokio runtime of each process has one thread, except in the GPU suite: bare quinn is fastest on one thread, and
//! CPU seconds stay comparable.

#![forbid(unsafe_code)]

mod cells;
mod clock;
pub mod codecs;
pub mod command;
pub mod compare;
pub mod contender;
pub mod cpu;
pub mod deltas;
#[cfg(feature = "gpu")]
pub mod gpu;
mod harness;
mod latency;
mod machine;
pub mod network;
mod noise;
pub mod origin;
pub mod process;
pub mod program;
pub mod relay;
mod results;
pub mod run;
mod server;
pub mod size;
pub mod stats;
pub mod stock_quinn;
mod table;
pub mod tcp;
mod tls;
pub mod workload;
