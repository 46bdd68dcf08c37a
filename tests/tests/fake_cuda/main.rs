//! Tests of the fake CUDA driver: it follows CUDA's documentation and reports illegal uses.
//!
//! `contract` tests behaviour that every driver must have. With `CUDA_CONTRACT=real` it runs on the machine's own
//! driver, which validates the fake one. `judge` and `pickup` test additions of the fake driver: faults, gates,
//! violations, and protection from accidental use. `sharing` tests memory of several processes on the fake driver only:
//! its rules come from documentation and have not been tested on a real driver.

mod calls;
mod contract;
mod judge;
mod pickup;
mod sharing;
