//! Tests of the fake CUDA driver: it follows CUDA's documentation and reports illegal uses.
//!
//! `contract` tests behaviour that every driver must have. With `CUDA_CONTRACT=real` it runs on the machine's own
//! driver, which validates the fake one. `additions` tests what only the fake driver has: faults, gates and violations.
//! `loading` tests that programs load the fake driver only where a test arranges it. `sharing` tests memory that
//! processes share, on the fake driver only: its rules come from documentation. What `bench/gpu/run` checks of them
//! holds on driver 580, too, except that handles of that driver cross PID namespaces.

mod additions;
mod calls;
mod contract;
mod loading;
mod sharing;
