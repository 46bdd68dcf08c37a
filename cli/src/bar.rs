//! The progress bar of an incoming version.

use crate::{output, units};
use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};
use tensor_relay_client::Progress;

/// The refresh interval.
pub(crate) const REFRESH_INTERVAL: Duration = Duration::from_millis(50);

/// The shortest time over which a rate is shown.
const RATE_MIN_PERIOD: Duration = Duration::from_millis(100);

/// The width of the bar itself, in characters.
const WIDTH: u64 = 32;

/// A progress bar on stderr, drawn on terminals only, with size, rate and remaining time. It is cleared on drop.
pub(crate) struct Bar {
    is_enabled: bool,
    version: u64,
    /// Since when the version is shown; `None` once the bar was cleared.
    began: Option<Instant>,
}

impl Bar {
    /// A bar that is drawn only if `is_enabled` and stderr is a terminal with cursor control.
    pub(crate) fn new(is_enabled: bool) -> Self {
        let is_capable =
            std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        Self { is_enabled: is_enabled && is_capable, version: 0, began: None }
    }

    /// Draws `progress`. Draws nothing before the size is known, or after the bar of this version was cleared.
    pub(crate) fn show(&mut self, progress: Progress) {
        if !self.is_enabled || progress.payload_bytes == 0 {
            return;
        }
        if progress.version != self.version {
            (self.version, self.began) = (progress.version, Some(Instant::now()));
        }
        if let Some(began) = self.began {
            // Without the automatic line break of the terminal: a narrow one cuts the bar off.
            output::show_status(format!("\x1b[?7l{}\x1b[?7h", line(progress, began.elapsed())));
        }
    }

    /// Clears the bar.
    pub(crate) fn clear(&mut self) {
        if self.began.take().is_some() {
            output::show_status(String::new());
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.clear();
    }
}

fn line(progress: Progress, elapsed: Duration) -> String {
    let Progress { version, payload_bytes: total, verified_bytes: done, .. } = progress;
    let filled = (u128::from(done) * u128::from(WIDTH) / u128::from(total.max(1))) as usize;
    let bar = "=".repeat(filled) + if done < total { ">" } else { "" };
    let (rate, left) = match (elapsed >= RATE_MIN_PERIOD, done) {
        (false, _) | (_, 0) => ("…".into(), "…".into()),
        _ => {
            let left_s = elapsed.as_secs_f64() * total.saturating_sub(done) as f64 / done as f64;
            (units::rate(done, elapsed), format!("{left_s:.0} s left"))
        }
    };
    let (version, width) = (format!("version {version}"), WIDTH as usize);
    format!(
        "{version:>10} [{bar:width$.width$}] {} of {}  {rate}  {left}",
        units::bytes(done),
        units::bytes(total)
    )
}

/// Runs `work`. Until it completes, refreshes `bar` from `progress`, if it is drawn at all; then clears the bar.
pub(crate) async fn while_running<T>(
    bar: &mut Bar,
    progress: &(dyn Fn() -> Progress + Send + Sync),
    work: impl Future<Output = T>,
) -> T {
    tokio::pin!(work);
    let mut tick = tokio::time::interval(REFRESH_INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    let (began, is_drawn) = (Instant::now(), bar.is_enabled);
    loop {
        tokio::select! {
            result = &mut work => {
                bar.clear();
                return result;
            }
            _ = tick.tick(), if is_drawn => if began.elapsed() >= REFRESH_INTERVAL { bar.show(progress()) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_line_has_the_size_the_rate_and_the_time() {
        let progress =
            Progress { version: 7, payload_bytes: 4 << 30, verified_bytes: 1 << 30, ..Progress::default() };
        let shown = line(progress, Duration::from_secs(2));
        assert!(shown.starts_with(" version 7 [========>                       ] "), "{shown}");
        assert!(shown.ends_with("  6 s left"), "{shown}");
        let done = Progress { verified_bytes: 4 << 30, ..progress };
        assert!(line(done, Duration::from_secs(2)).contains(&format!("[{}] ", "=".repeat(32))));
        assert!(line(Progress::default(), Duration::ZERO).ends_with("…"));
    }

    /// Goal: a program that follows a thousand topics without bars sleeps between versions. Method: some intervals, in
    /// which a bar that is drawn would ask for the progress.
    #[tokio::test]
    async fn a_bar_that_is_not_drawn_wakes_nothing() {
        let asked = AtomicU32::new(0);
        let progress = || {
            asked.fetch_add(1, Ordering::Relaxed);
            Progress::default()
        };
        let work = tokio::time::sleep(5 * REFRESH_INTERVAL);
        while_running(&mut Bar::new(false), &progress, work).await;
        assert_eq!(asked.into_inner(), 0);
    }
}
