//! The progress lines of a run.

use std::time::Duration;

/// The progress of consumers in a round, formatted as a line of text.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    title: String,
    round_bytes: u64,
    consumers: Vec<ConsumerProgress>,
}

#[derive(Debug)]
struct ConsumerProgress {
    worker: usize,
    name: String,
    bytes: u64,
    /// The `bytes` that the last line showed.
    shown_bytes: u64,
}

impl Progress {
    /// Starts a round called `title`, in which each consumer is to receive `round_bytes`.
    pub(crate) fn begin(
        &mut self,
        title: String,
        round_bytes: u64,
        consumers: impl Iterator<Item = (usize, String)>,
    ) {
        let consumers = consumers
            .map(|(worker, name)| ConsumerProgress { worker, name, bytes: 0, shown_bytes: 0 })
            .collect();
        *self = Self { title, round_bytes, consumers };
    }

    /// Records that a consumer has received `bytes` of the round so far. Other workers are ignored.
    pub(crate) fn record(&mut self, worker: usize, bytes: u64) {
        if let Some(consumer) = self.consumers.iter_mut().find(|consumer| consumer.worker == worker) {
            consumer.bytes = bytes;
        }
    }

    /// The next line, with the rates since the previous call, `elapsed` ago; `None` if no consumer has made progress
    /// since then.
    pub(crate) fn line(&mut self, elapsed: Duration) -> Option<String> {
        if self.consumers.iter().all(|consumer| consumer.bytes == consumer.shown_bytes) {
            return None;
        }
        let total = self.round_bytes.max(1) as f64;
        let describe = |consumer: &mut ConsumerProgress| {
            let moved_bytes = consumer.bytes.saturating_sub(consumer.shown_bytes);
            let rate = moved_bytes as f64 / elapsed.as_secs_f64().max(1e-9) / 1e9;
            consumer.shown_bytes = consumer.bytes;
            format!("{} {:.0} % at {rate:.2} GB/s", consumer.name, 100.0 * consumer.bytes as f64 / total)
        };
        let consumers: Vec<String> = self.consumers.iter_mut().map(describe).collect();
        Some(format!("{}: {}", self.title, consumers.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_since_the_previous_call() {
        let mut progress = Progress::default();
        assert_eq!(progress.line(Duration::from_secs(1)), None, "nothing has begun");
        progress.begin("round 1".into(), 4_000_000_000, [(1, "a".into()), (2, "b".into())].into_iter());
        assert_eq!(progress.line(Duration::from_secs(1)), None, "nothing has moved");
        progress.record(1, 1_000_000_000);
        progress.record(9, 5);
        let line = progress.line(Duration::from_secs(2)).unwrap();
        assert_eq!(line, "round 1: a 25 % at 0.50 GB/s, b 0 % at 0.00 GB/s");
        progress.record(1, 3_000_000_000);
        progress.record(2, 400_000_000);
        let line = progress.line(Duration::from_secs(1)).unwrap();
        assert_eq!(line, "round 1: a 75 % at 2.00 GB/s, b 10 % at 0.40 GB/s");
        progress.begin("round 2".into(), 0, [(1, "a".into())].into_iter());
        progress.record(1, 1);
        assert!(progress.line(Duration::ZERO).is_some(), "nothing is divided by zero");
    }
}
