//! Complete servers and clients on a simulated network: the promises to users, under faults that are derived from
//! seeds.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod access;
mod bases;
mod boxes;
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
mod relaying;
mod resume;
mod snapshots;
mod sources;
mod splits;
mod stalls;
mod swarm;
mod topics;
mod watching;

use std::time::Duration;
use tensor_relay_client::Subscription;
use tensor_relay_tests::{
    pair::{Sim, eventually},
    simnet::Path,
};
use tokio::time::sleep;

/// Longer than the idle timeout of both ends.
const OUTAGE_DURATION: Duration = Duration::from_secs(15);

/// Sets a delay of 20 ms each way, so that tests can act during a transfer: simulated clients receive four chunks for
/// each round trip.
fn slow_path(sim: &Sim) {
    let delay = Duration::from_millis(20);
    sim.net.set_path(Path { delay: delay..=delay, ..Path::default() });
}

/// Cuts the path of client 1 once a part of `version` is verified, for longer than the idle timeout.
async fn cut_during(sim: &Sim, subscription: &Subscription, version: u64) {
    let is_begun = || {
        let progress = subscription.progress();
        progress.version == version && progress.verified_bytes > 0
    };
    eventually("the transfer runs", is_begun).await;
    sim.cut(1);
    sleep(OUTAGE_DURATION).await;
    sim.mend(1);
}
