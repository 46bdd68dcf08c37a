//! The fake CUDA driver is what CUDA's documentation describes, and a judge besides.
//!
//! `contract` is about the first: it asks only what every driver has to answer alike. With `CUDA_CONTRACT=real` it runs
//! on the driver of the machine instead, and that is how the fake one is held to the truth. `judge` and `pickup` are
//! about what the fake one has on top: faults, gates, violations, and that nobody gets it by mistake. `sharing` is about
//! memory that several processes have, on the fake driver alone: the real one's rules of that are only read so far.

mod calls;
mod contract;
mod judge;
mod pickup;
mod sharing;
