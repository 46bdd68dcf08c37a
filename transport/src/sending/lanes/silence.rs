//! [`Silence`]: detects lanes on which nothing arrives any more.

use crate::LaneStats;

/// Detects a silent QUIC lane: data sent before the previous check is still unanswered, and not a byte was received
/// since. A TCP lane is never silent in this sense, because its acknowledgements are not seen.
///
/// Data sent just before a check may be answered right after it, so a single check proves nothing. A lane whose client
/// does not read is not silent: sent data is acknowledged, and no more is sent. Acknowledgements that we send are not
/// ack-eliciting, so they do not count as data that awaits an answer.
#[derive(Debug)]
pub struct Silence {
    eliciting_frames: u64,
    received_bytes: u64,
    /// Whether data was sent before the last check and nothing was received since.
    unanswered: bool,
}

impl Silence {
    /// Begins with the counters of a lane.
    pub fn new(stats: &LaneStats) -> Self {
        let LaneStats { eliciting_frames, received_bytes, .. } = *stats;
        Self { eliciting_frames, received_bytes, unanswered: false }
    }

    /// Checks the lane's counters since the last check; returns whether it is silent.
    pub fn check(&mut self, stats: &LaneStats) -> bool {
        let has_received = stats.received_bytes > self.received_bytes;
        let has_sent = stats.eliciting_frames > self.eliciting_frames;
        let was_unanswered = self.unanswered;
        *self = Self { unanswered: !has_received && (was_unanswered || has_sent), ..Self::new(stats) };
        !has_received && was_unanswered
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_lane_is_silent_after_two_checks_with_unanswered_data() {
        let stats = |eliciting_frames, received_bytes| LaneStats {
            udp_payload_bytes: 1_200,
            rtt: Duration::ZERO,
            sent_bytes: 0,
            received_bytes,
            sent_packets: 0,
            lost_packets: 0,
            eliciting_frames,
        };
        let mut silence = Silence::new(&stats(5, 100));
        assert!(!silence.check(&stats(9, 180)));
        assert!(!silence.check(&stats(9, 180)), "nothing new was sent, so no answer is due");
        assert!(!silence.check(&stats(10, 180)), "data was sent just before the check");
        assert!(!silence.check(&stats(10, 200)), "and was answered after it");
        assert!(!silence.check(&stats(12, 200)));
        assert!(silence.check(&stats(12, 200)));
        assert!(silence.check(&stats(13, 200)), "until something is received again");
        assert!(!silence.check(&stats(13, 220)));
        assert!(!silence.check(&stats(14, 220)), "earlier silence does not count");
    }
}
