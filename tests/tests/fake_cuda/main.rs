//! Tests of the fake CUDA driver: it follows CUDA's documentation and reports illegal uses.
//!
//! `contract` tests only behaviour that every driver must have. With `CUDA_CONTRACT=real` it runs on the machine's own
//! driver, which validates the fake one. `judge` and `pickup` test what the fake driver adds: faults, gates,
//! violations, and protection from accidental use. `sharing` tests memory of several processes on the fake driver only:
//! those rules come from documentation and were not yet tried on a real driver.

mod calls;
mod contract;
mod judge;
mod pickup;
mod sharing;
