//! Complete servers and clients on a simulated network: the promises to users, under faults that are derived from
//! seeds.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod access;
mod bases;
mod buffers;
mod codecs;
mod connecting;
mod contract;
mod deltas;
mod device_landing;
mod device_serving;
mod ends;
mod every;
mod faults;
mod files;
mod getting;
mod lanes;
mod lives;
mod loads;
mod other_content;
mod read_errors;
mod resume;
mod snapshots;
mod sources;
mod stalls;
mod topics;
mod watching;

use std::time::Duration;
use tensor_relay_tests::{pair::Sim, simnet::Path};

/// Longer than the idle timeout of both ends.
const OUTAGE_DURATION: Duration = Duration::from_secs(15);

/// Sets a delay of 20 ms each way, so that tests can act during a transfer: simulated clients receive four chunks for
/// each round trip.
fn slow_path(sim: &Sim) {
    let delay = Duration::from_millis(20);
    sim.net.set_path(Path { delay: delay..=delay, ..Path::default() });
}
