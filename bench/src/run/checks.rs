//! Plausibility checks of workers' reports: a worker on another machine may be another build, or broken.

use crate::node::order::{Prepared, Received, Round, Sent};
use anyhow::{Result, ensure};

/// Checks a producer's report before a round.
pub(super) fn check_prepared(prepared: &Prepared, round: Round) -> Result<()> {
    ensure!(prepared.round == round.number, "it prepared round {}, not {}", prepared.round, round.number);
    let largest = prepared.payload_bytes.max(prepared.tensors);
    ensure!(
        largest <= BYTES_MAX,
        "it prepared {} tensors of {} bytes",
        prepared.tensors,
        prepared.payload_bytes
    );
    Ok(())
}

/// Checks a producer's report after a round.
pub(super) fn check_sent(sent: &Sent, round: Round) -> Result<()> {
    ensure!(sent.round == round.number, "it finished round {}, not {}", sent.round, round.number);
    ensure!(
        sent.versions == round.versions,
        "it published {} versions, not {}",
        sent.versions,
        round.versions
    );
    ensure!(sent.chunks_hashed <= CHUNKS_MAX, "it hashed {} chunks", sent.chunks_hashed);
    ensure!(sent.seconds > 0.0 && is_time(sent.seconds), "it took {} s", sent.seconds);
    ensure!(is_time(sent.cpu_s), "it used {} s of CPU time", sent.cpu_s);
    Ok(())
}

/// Checks a consumer's report after a round: its versions and bytes against those published, and its snapshot hash
/// against the producer's.
pub(super) fn check_received(received: &Received, prepared: &Prepared, round: Round) -> Result<()> {
    ensure!(received.round == round.number, "it finished round {}, not {}", received.round, round.number);
    let published = received.versions.checked_add(received.missed);
    ensure!(
        published == Some(round.versions) && received.versions > 0,
        "it received {} versions and missed {}, where {} were published",
        received.versions,
        received.missed,
        round.versions
    );
    ensure!(
        received.versions.checked_mul(prepared.payload_bytes) == Some(received.bytes),
        "it received {} bytes in {} versions of {} bytes",
        received.bytes,
        received.versions,
        prepared.payload_bytes
    );
    ensure!(received.bytes <= BYTES_MAX, "it received {} bytes", received.bytes);
    ensure!(received.chunks <= CHUNKS_MAX, "it received {} chunks", received.chunks);
    ensure!(
        received.snapshot_hash == prepared.snapshot_hash,
        "the received bytes are not the published ones: the hashes differ"
    );
    ensure!(is_time(received.seconds), "it took {} s", received.seconds);
    ensure!(is_time(received.cpu_s), "it used {} s of CPU time", received.cpu_s);
    Ok(())
}

fn is_time(seconds: f64) -> bool {
    (0.0..=SECONDS_MAX).contains(&seconds)
}

/// The maximum of a reported time: about a year of CPU time on thirty cores.
const SECONDS_MAX: f64 = 1e9;

/// The maxima of reported counts: more than any machine moves in a round, and small enough that sums over all consumers
/// of a round do not overflow.
const BYTES_MAX: u64 = 1 << 52;
const CHUNKS_MAX: u64 = 1 << 40;

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use serde_json::json;

    pub(crate) const ROUND: Round = Round { number: 3, readers: 1, versions: 1 };

    pub(crate) fn prepared() -> Prepared {
        let prepared = json!({"round": 3, "tensors": 2, "payload_bytes": 1 << 30, "proof": "aa"});
        serde_json::from_value(prepared).unwrap()
    }

    pub(crate) fn sent(seconds: f64) -> Sent {
        let traffic =
            json!({"sent_packets": 100, "lost_packets": 1, "sent_bytes": 1000, "received_bytes": 10});
        serde_json::from_value(json!({
            "round": 3, "versions": 1, "seconds": seconds, "cpu_s": 0.5, "traffic": traffic,
            "chunks_hashed": 0, "round_trips": [],
        }))
        .unwrap()
    }

    pub(crate) fn received(seconds: f64) -> Received {
        let traffic = json!({"sent_packets": 7, "lost_packets": 0, "sent_bytes": 70, "received_bytes": 1000});
        serde_json::from_value(json!({
            "round": 3, "versions": 1, "missed": 0, "bytes": 1 << 30, "seconds": seconds, "cpu_s": 0.25,
            "chunks": 256, "traffic": traffic, "path": {"udp_payload_bytes": 1472, "round_trip_us": 90.0, "lanes": 1},
            "proof": "aa", "one_way": [],
        }))
        .unwrap()
    }

    #[test]
    fn possible_reports_pass() {
        check_prepared(&prepared(), ROUND).unwrap();
        check_sent(&sent(1.0), ROUND).unwrap();
        check_received(&received(1.0), &prepared(), ROUND).unwrap();
        let stream = Received { versions: 3, missed: 7, bytes: 3 << 30, ..received(0.0) };
        check_received(&stream, &prepared(), Round { versions: 10, ..ROUND }).unwrap();
    }

    #[test]
    fn impossible_reports_are_refused() {
        for report in [
            Prepared { round: 2, ..prepared() },
            Prepared { payload_bytes: u64::MAX, ..prepared() },
            Prepared { tensors: u64::MAX, ..prepared() },
        ] {
            assert!(check_prepared(&report, ROUND).is_err(), "{report:?}");
        }
        for report in [
            Sent { round: 2, ..sent(1.0) },
            Sent { versions: 2, ..sent(1.0) },
            sent(0.0),
            sent(-1.0),
            Sent { chunks_hashed: u64::MAX, ..sent(1.0) },
            Sent { seconds: f64::NAN, ..sent(1.0) },
            Sent { cpu_s: f64::INFINITY, ..sent(1.0) },
        ] {
            assert!(check_sent(&report, ROUND).is_err(), "{report:?}");
        }
        let wrong_hash = prepared().snapshot_hash.map(|_| serde_json::from_value(json!("bb")).unwrap());
        for report in [
            Received { round: 2, ..received(1.0) },
            Received { versions: 0, missed: 1, bytes: 0, ..received(1.0) },
            Received { versions: 2, ..received(1.0) },
            Received { missed: u64::MAX, ..received(1.0) },
            Received { bytes: 1, ..received(1.0) },
            Received { chunks: u64::MAX, ..received(1.0) },
            Received { snapshot_hash: wrong_hash, ..received(1.0) },
            Received { snapshot_hash: None, ..received(1.0) },
            Received { seconds: f64::NAN, ..received(1.0) },
            Received { cpu_s: -1.0, ..received(1.0) },
        ] {
            assert!(check_received(&report, &prepared(), ROUND).is_err(), "{report:?}");
        }
    }
}
