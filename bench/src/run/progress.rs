//! The progress lines of a run.

use std::time::Duration;

/// The progress of consumers in a round, formatted as a line of text.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    title: String,
    round_bytes: u64,
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    worker: usize,
    name: String,
    bytes: u64,
    /// `bytes` at the last line.
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
        let rows = consumers
            .map(|(worker, name)| Row { worker, name, bytes: 0, shown_bytes: 0 })
            .collect();
        *self = Self { title, round_bytes, rows };
    }

    /// Records that a consumer has received `bytes` of the round. Other workers are ignored.
    pub(crate) fn record(&mut self, worker: usize, bytes: u64) {
        if let Some(row) = self.rows.iter_mut().find(|row| row.worker == worker) {
            row.bytes = bytes;
        }
    }

    /// The next line, `elapsed` after the last one; `None` if no consumer has made progress.
    pub(crate) fn line(&mut self, elapsed: Duration) -> Option<String> {
        if self.rows.iter().all(|row| row.bytes == row.shown_bytes) {
            return None;
        }
        let total = self.round_bytes.max(1) as f64;
        let describe = |row: &mut Row| {
            let rate =
                row.bytes.saturating_sub(row.shown_bytes) as f64 / elapsed.as_secs_f64().max(1e-9) / 1e9;
            row.shown_bytes = row.bytes;
            format!("{} {:.0} % at {rate:.2} GB/s", row.name, 100.0 * row.bytes as f64 / total)
        };
        let rows: Vec<String> = self.rows.iter_mut().map(describe).collect();
        Some(format!("{}: {}", self.title, rows.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_count_from_the_last_line() {
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
