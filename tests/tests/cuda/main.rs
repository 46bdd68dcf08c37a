//! Tests of the CUDA engine on the fake driver, which injects failures and hangs and reports illegal uses.
//!
//! The cases for all engines are in `engines.rs`. [`sweep`] fails every driver call once; [`relay`]
//! covers the path from device to device; [`failures`] covers devices that fail, hang or disappear, [`order`]
//! callers' streams, [`sharing`], [`exchange`] and [`neighbour`] memory shared by two processes, [`sidecar`] the
//! sidecar with GPU memory, [`probe`] the search for devices; [`overlap`] counts concurrent copies; [`journey`] contains
//! the transfer without a network, and helpers for all tests.

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
