//! Probes: measurements of a lane's rate (PROTOCOL.md §3.17).

/// The size of a probe, limited so that one request cannot occupy the server for long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeBytes(u32);

impl ProbeBytes {
    /// The largest probe: a quarter of a second at 34 Gbit/s.
    pub const MAX: u32 = 1 << 30;

    /// A size of `bytes` bytes; `None` beyond [`MAX`](Self::MAX).
    pub fn new(bytes: u32) -> Option<Self> {
        (bytes <= Self::MAX).then_some(Self(bytes))
    }

    /// The number of bytes.
    pub fn get(self) -> u32 {
        self.0
    }
}

/// The size of an encoded [`ProbeReport`].
pub const PROBE_REPORT_BYTES: usize = 16;

/// The report at the end of a probe's stream: the sender's counters when it had written the probe's bytes. They have
/// arbitrary origins and wrap, so only differences are meaningful: to measure a large probe, a client subtracts the
/// report of a probe before it from that of a probe after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProbeReport {
    /// The sender's clock, in microseconds.
    pub clock_us: u32,
    /// The processor time of the sender's process, in microseconds.
    pub processor_us: u32,
    /// The packets that the lane sent; over TCP the segments that the sender's network namespace sent.
    pub sent_packets: u32,
    /// The lane's packets that were detected as lost; over TCP the segments that the network namespace retransmitted.
    pub lost_packets: u32,
}

impl ProbeReport {
    /// Encodes the report.
    pub fn encode(&self) -> [u8; PROBE_REPORT_BYTES] {
        let mut out = [0; PROBE_REPORT_BYTES];
        let fields = [self.clock_us, self.processor_us, self.sent_packets, self.lost_packets];
        for (slot, field) in out.chunks_exact_mut(4).zip(fields) {
            slot.copy_from_slice(&field.to_le_bytes());
        }
        out
    }

    /// Decodes a report; all byte strings of this length are valid.
    pub fn decode(bytes: &[u8; PROBE_REPORT_BYTES]) -> Self {
        let field = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Self { clock_us: field(0), processor_us: field(4), sent_packets: field(8), lost_packets: field(12) }
    }

    /// The difference to an `earlier` report. Each counter must have advanced by less than 2^32, which is 71 minutes of
    /// time or of processor time.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            clock_us: self.clock_us.wrapping_sub(earlier.clock_us),
            processor_us: self.processor_us.wrapping_sub(earlier.processor_us),
            sent_packets: self.sent_packets.wrapping_sub(earlier.sent_packets),
            lost_packets: self.lost_packets.wrapping_sub(earlier.lost_packets),
        }
    }

    /// For a difference of two reports: the mean number of processors that the sender's process used.
    pub fn processors(&self) -> f64 {
        f64::from(self.processor_us) / f64::from(self.clock_us.max(1))
    }

    /// For a difference of two reports: the fraction of packets that were lost.
    pub fn loss(&self) -> f64 {
        f64::from(self.lost_packets) / f64::from(self.sent_packets.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// PROTOCOL.md §6.1.
    #[test]
    fn a_report_is_four_numbers() {
        let report =
            ProbeReport { clock_us: 0x0403_0201, processor_us: 5, sent_packets: 6, lost_packets: u32::MAX };
        let wire = [1, 2, 3, 4, 5, 0, 0, 0, 6, 0, 0, 0, 255, 255, 255, 255];
        assert_eq!((report.encode(), ProbeReport::decode(&wire)), (wire, report));
    }

    #[test]
    fn differences_wrap() {
        let earlier = ProbeReport { clock_us: u32::MAX - 9, sent_packets: 100, ..ProbeReport::default() };
        let later = ProbeReport { clock_us: 90, processor_us: 50, sent_packets: 200, lost_packets: 1 };
        let since = later.since(&earlier);
        assert_eq!((since.clock_us, since.processors(), since.loss()), (100, 0.5, 0.01));
    }
}
