//! The CUDA engine on the fake driver, which fails, hangs and judges.
//!
//! `engines.rs` has the cases that all engines pass. Here is what only a driver can do to one: [`sweep`] fails every call
//! once; [`relay`] is the whole way from device to device; [`failures`] are whole devices that fail, hang or are taken away; [`order`] is about callers' streams,
//! [`sharing`] about memory that two processes have, and [`overlap`] counts what goes on at the same time.

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

/// A turn with a machine of two devices. A process learns once how many there are, so all tests here have as many.
fn machine() -> Turn {
    let fake = fake_cuda::load().exclusive();
    fake.reset_with(2, 64 << 20);
    fake
}
