//! Tests of the CUDA engine on the fake driver, which injects failures and hangs and reports illegal uses.
//!
//! The cases for all engines are in `engines.rs`. [`sweep`] makes driver calls fail or hang in three transfers: from
//! engine to engine ([`endpoint`]), through a server and a client ([`relay`]), and through shared memory
//! ([`exchange`]). [`failures`] covers devices that fail, hang or disappear, [`order`] callers' streams, [`sharing`]
//! memory shared with a second process ([`neighbour`]), [`lending`] versions for processes of the host, [`sidecar`] the
//! sidecar with GPU memory, and [`probe`] the search for devices; [`staged`] versions that are copied within a device;
//! [`overlap`] counts concurrent copies, and [`counts`] driver calls; [`runs`] covers copies of short runs.
//! [`endpoint`] also has the helpers of all tests.

use tensor_relay_tests::fake_cuda::{self, Turn};

mod counts;
mod endpoint;
mod exchange;
mod failures;
mod lending;
mod neighbour;
mod order;
mod overlap;
mod probe;
mod relay;
mod runs;
mod sharing;
mod sidecar;
mod staged;
mod sweep;

#[path = "../fake_cuda/calls.rs"]
#[expect(dead_code, reason = "only the tests of the fake driver use all of them")]
mod calls;

/// Exclusive use of a machine with two devices. All tests of this binary use two devices, since a process reads their
/// number only once.
fn machine() -> Turn {
    let fake = fake_cuda::load().exclusive();
    fake.reset_with(2, 64 << 20);
    fake
}
