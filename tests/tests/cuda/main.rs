//! Tests of the CUDA engine on the fake driver, which injects failures and hangs and reports illegal uses.
//!
//! `engines.rs` has the cases that all engines pass; these tests need a driver. [`sweep`] fails every call once;
//! [`relay`] covers the whole path from device to device; [`failures`] covers devices that fail, hang or disappear,
//! [`order`] callers' streams, [`sharing`] memory shared by two processes; [`overlap`] counts concurrent copies.

use tensor_relay_tests::fake_cuda::{self, Turn};

mod exchange;
mod failures;
mod journey;
mod neighbour;
mod order;
mod overlap;
mod probe;
mod relay;
mod sharing;
mod sidecar;
mod sweep;

#[path = "../fake_cuda/calls.rs"]
#[expect(dead_code, reason = "the tests of the driver itself need more calls")]
mod calls;

/// Exclusive use of a machine with two devices. A process reads the number of devices once, so all tests here have two.
fn machine() -> Turn {
    let fake = fake_cuda::load().exclusive();
    fake.reset_with(2, 64 << 20);
    fake
}
