//! The test harness: simulated networks, fake devices and real processes, with control of time, loss and order.
//!
//! [`simnet`] is a network in memory whose every fault follows from a seed; [`pair`] puts a real server and real clients
//! on it, on a clock that jumps to the next event; [`tensors`] makes snapshots in which every byte says which tensor and
//! which version it belongs to; [`engine`] is a device whose copies do as a test says. A scenario is a function of its seed: it takes milliseconds for minutes of simulated
//! time, and a failure can be run again. [`processes`] is the opposite: the program itself, on this machine, in real time.
//! [`fake_cuda`] is the driver of GPUs that are not there; [`gated`] is an engine whose copies wait, or fail, at will.

#![deny(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

pub mod engine;
pub mod fake_cuda;
pub mod gated;
pub mod pair;
pub mod processes;
pub mod simnet;
pub mod tensors;
