//! Workloads and measurement for tensor-relay.
//!
//! - [`workload`] generates a model's tensors from a seed: what `tensor-relay demo` moves, and what benchmarks move.
//! - [`cpu`] and [`stats`] measure and summarise.
//! - [`contender`] is what anything that moves bytes must offer to be compared; [`relay`],
//!   [`stock_quinn`] and [`tcp`] offer it.
//! - [`compare`] is the harness that compares them, side by side, in processes of their own.
//! - [`deltas`] measures versions that differ a little, as deltas and whole.
//! - [`report`] makes pages and tables of what was measured.
//! - [`run`] measures what users do, on one machine or across several; [`node`] is its end on another machine.
//! - [`codecs`] measures codecs on a user's own tensors.
//! - [`command`] is all of it as subcommands: of `tensor-relay-bench`, and of `tensor-relay` below `bench`.
//!
//! Every command runs on one thread unless it says otherwise, because that is what the rival is fastest with and what
//! makes CPU seconds comparable.

#![forbid(unsafe_code)]

mod cells;
mod clock;
pub mod codecs;
pub mod command;
pub mod compare;
pub mod contender;
pub mod cpu;
mod date;
pub mod deltas;
#[cfg(feature = "gpu")]
pub mod gpu;
mod latency;
mod machine;
pub mod network;
pub mod node;
mod noise;
pub mod origin;
pub mod process;
pub mod program;
pub mod relay;
pub mod report;
mod results;
pub mod run;
pub mod size;
pub mod stats;
pub mod stock_quinn;
mod table;
pub mod tcp;
mod tls;
mod wire;
pub mod workload;
