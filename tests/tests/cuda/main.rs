//! Tests of the CUDA engine on the fake driver, which injects failures and hangs and reports illegal uses.
//!
//! The cases for all engines are in `engines.rs`; these tests need a driver. [`sweep`] fails every call once; [`relay`]
//! covers the whole path from device to device; [`failures`] covers devices that fail, hang or disappear, [`order`]
//! callers' streams, [`sharing`] memory shared by two processes; [`overlap`] counts concurrent copies.

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
#[expect(dead_code, reason = "some calls are only for the tests of the driver itself")]
mod calls;

/// Exclusive use of a machine with two devices. All tests of this binary have two, since a process reads the number of
/// devices only once.
fn machine() -> Turn {
    let fake = fake_cuda::load().exclusive();
    fake.reset_with(2, 64 << 20);
    fake
}
