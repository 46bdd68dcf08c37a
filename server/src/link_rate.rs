//! Measures how fast the network takes what one subscription sends.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tensor_relay_protocol::LinkClass;
use tokio::time::Instant;

/// Measures the rate at which the network takes bytes, and puts it into a class.
///
/// Only time in which the network is the bottleneck counts: a *busy period* lasts for as long as there is always at least
/// one chunk being sent. Where encoding, the source or the receiver's credit is what takes long, busy periods are
/// short and say nothing. The first [`BUFFERED_BYTES`] of each say nothing either, since they may only have filled a buffer.
/// So a version of a few MiB does not count, and a subscription that has nothing to send stays what it was. One that comes
/// back over a new connection is a new one here: it begins with a guess again, since the path may be another.
#[derive(Debug, Default)]
pub(crate) struct LinkRate {
    class: LinkClass,
    sending: u32,
    busy: BusyPeriod,
    /// The rate that was measured before, in bytes per second: one measurement alone moves nothing.
    before: Option<f64>,
}

/// A time in which something was always being sent.
#[derive(Debug, Default)]
struct BusyPeriod {
    bytes: u64,
    /// When the bytes that fill buffers were through.
    began: Option<Instant>,
}

/// Twice the window of unacknowledged bytes on a short path. On a long one, where it is larger, the first measurement is
/// too high, and the second puts it right.
const BUFFERED_BYTES: u64 = 8 << 20;

/// How much is sent for one measurement: a seventh of a second's worth at 1 Gbit/s, and 5 ms at 25.
const MEASURED_BYTES: u64 = 16 << 20;

impl LinkRate {
    /// The class of what was measured, or a guess.
    pub(crate) fn class(&self) -> LinkClass {
        self.class
    }

    /// A chunk begins to be sent.
    pub(crate) fn begin(&mut self) {
        if self.sending == 0 {
            self.busy = BusyPeriod::default();
        }
        self.sending += 1;
    }

    /// The network took `bytes` of a chunk that is being sent.
    pub(crate) fn note(&mut self, bytes: u64, now: Instant) {
        if let Some(bytes_per_s) = self.busy.note(bytes, now) {
            self.handle_measured(bytes_per_s);
        }
    }

    /// A chunk is sent, or was given up.
    pub(crate) fn end(&mut self) {
        self.sending = self.sending.saturating_sub(1);
    }

    /// Moves to another class when two measurements, one after the other, are out of this one on the same side.
    fn handle_measured(&mut self, bytes_per_s: f64) {
        let before = self.before.replace(bytes_per_s).unwrap_or_else(|| self.class.bytes_per_s());
        let (slower, faster) =
            (self.class.after(bytes_per_s.max(before)), self.class.after(bytes_per_s.min(before)));
        let next = if slower < self.class { slower } else { self.class.max(faster) };
        if next != self.class {
            tracing::debug!(from = ?self.class, to = ?next, "The rate of a subscription is in another class.");
            self.class = next;
        }
    }
}

impl BusyPeriod {
    /// Counts bytes; returns a rate once there are enough for one.
    fn note(&mut self, bytes: u64, now: Instant) -> Option<f64> {
        self.bytes += bytes;
        match self.began {
            None if self.bytes >= BUFFERED_BYTES => *self = Self { bytes: 0, began: Some(now) },
            Some(began) if self.bytes >= MEASURED_BYTES => {
                let seconds = now.duration_since(began).as_secs_f64();
                let rate = self.bytes as f64 / seconds.max(1e-9);
                *self = Self { bytes: 0, began: Some(now) };
                return Some(rate);
            }
            _ => {}
        }
        None
    }
}

/// The meter of one subscription, shared by its sends. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct LinkMeter(Arc<Mutex<LinkRate>>);

/// A chunk that is being sent, until it is dropped.
#[derive(Debug)]
#[must_use = "the chunk counts as sent when this is dropped"]
pub(crate) struct Sending<'a>(&'a LinkMeter);

impl LinkMeter {
    pub(crate) fn class(&self) -> LinkClass {
        self.rate().class()
    }

    /// A chunk begins to be sent.
    pub(crate) fn begin(&self) -> Sending<'_> {
        self.rate().begin();
        Sending(self)
    }

    /// The network took `bytes`.
    pub(crate) fn note(&self, bytes: u64) {
        self.rate().note(bytes, Instant::now());
    }

    fn rate(&self) -> MutexGuard<'_, LinkRate> {
        // Numbers cannot be left half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        self.0.rate().end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    const MIB: u64 = 1 << 20;
    const CHUNK: u64 = 4 * MIB;

    /// Sends `chunks`, of which the next begins before the last ends, over a link of this rate.
    fn send_without_pause(rate: &mut LinkRate, now: &mut Instant, chunks: u64, gbit_per_s: f64) {
        rate.begin();
        for _ in 0..chunks {
            rate.begin();
            for _ in 0..4 {
                *now += Duration::from_secs_f64(MIB as f64 * 8.0 / (gbit_per_s * 1e9));
                rate.note(MIB, *now);
            }
            rate.end();
        }
        rate.end();
    }

    #[tokio::test]
    async fn a_busy_link_is_put_into_its_class() {
        for (gbit_per_s, class) in [
            (0.2, LinkClass::UpTo1),
            (0.95, LinkClass::UpTo1),
            (4.7, LinkClass::UpTo5),
            (9.5, LinkClass::UpTo10),
            (23.0, LinkClass::UpTo25),
            (80.0, LinkClass::Beyond25),
        ] {
            let (mut rate, mut now) = (LinkRate::default(), Instant::now());
            send_without_pause(&mut rate, &mut now, 32, gbit_per_s);
            assert_eq!(rate.class(), class, "{gbit_per_s} Gbit/s");
        }
    }

    #[tokio::test]
    async fn small_versions_and_pauses_say_nothing() {
        let (mut rate, mut now) = (LinkRate::default(), Instant::now());
        for _ in 0..100 {
            send_without_pause(&mut rate, &mut now, 5, 0.1);
            now += Duration::from_secs(5);
        }
        assert_eq!(rate.class(), LinkClass::default(), "20 MiB each are too little");
        send_without_pause(&mut rate, &mut now, 100, 0.1);
        assert_eq!(rate.class(), LinkClass::UpTo1);
        now += Duration::from_secs(3600);
        assert_eq!(rate.class(), LinkClass::UpTo1, "an idle link is as fast as it was");
    }

    /// One chunk after the other, each taken at once, because the next is not encoded yet.
    #[tokio::test]
    async fn waiting_for_the_encoder_is_no_slow_link_and_no_fast_one() {
        let (mut rate, mut now) = (LinkRate::default(), Instant::now());
        for _ in 0..1000 {
            rate.begin();
            rate.note(CHUNK, now);
            rate.end();
            now += Duration::from_millis(50);
        }
        assert_eq!(rate.class(), LinkClass::default());
    }

    #[tokio::test]
    async fn one_measurement_alone_moves_nothing() {
        let (mut rate, mut now) = (LinkRate::default(), Instant::now());
        send_without_pause(&mut rate, &mut now, 100, 9.0);
        send_without_pause(&mut rate, &mut now, 6, 0.5);
        assert_eq!(rate.class(), LinkClass::UpTo10, "one slow measurement among fast ones");
        send_without_pause(&mut rate, &mut now, 10, 0.5);
        assert_eq!(rate.class(), LinkClass::UpTo1, "two of them");
    }

    #[tokio::test]
    async fn a_link_that_changes_is_followed_without_a_pause() {
        let (mut rate, mut now) = (LinkRate::default(), Instant::now());
        rate.begin();
        send_without_pause(&mut rate, &mut now, 100, 9.0);
        send_without_pause(&mut rate, &mut now, 12, 0.5);
        assert_eq!(rate.class(), LinkClass::UpTo1, "what was before says nothing any more");
        send_without_pause(&mut rate, &mut now, 6, 80.0);
        assert_eq!(rate.class(), LinkClass::UpTo1, "one fast measurement among slow ones");
        send_without_pause(&mut rate, &mut now, 8, 80.0);
        assert_eq!(rate.class(), LinkClass::Beyond25);
    }

    #[tokio::test(start_paused = true)]
    async fn a_meter_measures_while_something_is_being_sent() {
        let meter = LinkMeter::default();
        for _ in 0..100 {
            let _sending = meter.begin();
            meter.note(CHUNK);
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!(meter.class(), LinkClass::default(), "one at a time");
        let _sending = meter.begin();
        for _ in 0..100 {
            tokio::time::advance(Duration::from_millis(100)).await;
            meter.note(MIB);
        }
        assert_eq!(meter.class(), LinkClass::UpTo1);
    }

    proptest! {
        /// However the bytes are cut into pieces, a link of one rate ends in one class.
        #[test]
        fn pieces_do_not_matter(pieces in prop::collection::vec(1u64..MIB, 200..400), gbit_per_s in 0.05f64..100.0) {
            let (mut rate, mut now) = (LinkRate::default(), Instant::from_std(std::time::Instant::now()));
            rate.begin();
            for bytes in pieces.iter().cycle().take(4_000) {
                now += Duration::from_secs_f64(*bytes as f64 * 8.0 / (gbit_per_s * 1e9));
                rate.note(*bytes, now);
            }
            let bytes_per_s = gbit_per_s * 1e9 / 8.0;
            // A piece that ends a measurement counts for it whole, and rates at a bound may fall to either side.
            let (low, high) = (bytes_per_s * 0.99, bytes_per_s * 1.01);
            let expected = LinkClass::default().after(low)..=LinkClass::default().after(high);
            prop_assert!(expected.contains(&rate.class()), "{:?} is not in {:?}", rate.class(), expected);
        }
    }
}
