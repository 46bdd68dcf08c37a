//! The progress bar of an incoming version.

use crate::units;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};
use tensor_relay_client::Progress;

/// The refresh interval.
pub(crate) const REFRESH_INTERVAL: Duration = Duration::from_millis(50);

/// The shortest time over which a rate is shown.
const RATE_MIN_PERIOD: Duration = Duration::from_millis(100);

/// A progress bar on stderr, drawn on terminals only, with size, rate and remaining time.
pub(crate) struct Bar {
    bar: ProgressBar,
    version: u64,
}

impl Bar {
    /// A bar that is drawn only if `is_enabled` and stderr is a terminal with cursor control.
    pub(crate) fn new(is_enabled: bool) -> Self {
        let is_capable =
            std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let target = if is_enabled && is_capable {
            ProgressDrawTarget::stderr_with_hz(20)
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(0), target);
        bar.set_style(style());
        Self { bar, version: 0 }
    }

    /// Draws `progress`. Draws nothing before the size is known, or after the bar of this version was cleared.
    pub(crate) fn show(&mut self, progress: Progress) {
        if progress.payload_bytes == 0 {
            return;
        }
        if progress.version != self.version {
            self.version = progress.version;
            self.bar.set_length(progress.payload_bytes);
            self.bar.reset();
            self.bar.set_message(format!("version {}", progress.version));
        }
        if self.bar.is_finished() {
            return;
        }
        self.bar.set_length(progress.payload_bytes);
        self.bar.set_position(progress.verified_bytes);
        self.bar.tick();
    }

    /// Clears the bar, so that other lines can be printed.
    pub(crate) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

fn style() -> ProgressStyle {
    let template = "{msg:>10} [{bar:32}] {done} of {total}  {rate}  {left}";
    let style = ProgressStyle::with_template(template).expect("the template above is valid");
    style
        .progress_chars("=> ")
        .with_key("done", |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            let _ = write!(out, "{}", units::bytes(state.pos()));
        })
        .with_key("total", |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            let _ = write!(out, "{}", units::bytes(state.len().unwrap_or(0)));
        })
        .with_key("rate", |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            let _ = match state.elapsed() {
                early if early < RATE_MIN_PERIOD => write!(out, "…"),
                elapsed => write!(out, "{}", units::rate(state.pos(), elapsed)),
            };
        })
        .with_key("left", |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            let _ = write!(out, "{} s left", state.eta().as_secs());
        })
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
    let (began, is_drawn) = (Instant::now(), !bar.bar.is_hidden());
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
