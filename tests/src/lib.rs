//! The test harness: simulated networks, fake devices and real processes, with control of time, loss and order.
//!
//! [`simnet`] is a network in memory whose random faults follow from a seed. [`pair`] runs a real server and real
//! clients on it, on a clock that jumps to the next event. A scenario takes the same course each time it runs with the
//! same seed, so a failure can be repeated; it simulates minutes in milliseconds. [`tensors`] makes snapshots whose
//! content follows from tensor names and the version. [`engine`] is a copy engine that a test controls, [`read_switch`]
//! makes reads fail for a while. [`processes`] runs the program itself, on this machine, in real time. [`fake_cuda`] loads
//! and controls a fake CUDA driver. [`skip()`] counts tests that this system cannot run.

#![deny(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

pub mod engine;
pub mod fake_cuda;
pub mod pair;
pub mod processes;
pub mod read_switch;
pub mod simnet;
mod skip;
pub mod tensors;

pub use skip::skip;
