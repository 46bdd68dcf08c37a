//! All workers of a run.

use super::{
    barrier::Barrier,
    progress::Progress,
    worker_handle::{Disconnected, Event, WorkerHandle},
};
use crate::node::order::{Order, Report};
use anyhow::{Result, anyhow, bail};
use std::{collections::HashSet, time::Duration};
use tokio::{
    sync::mpsc,
    time::{Instant, Interval, interval, sleep_until, timeout_at},
};

/// The bound of the event queue. Workers that report faster than the driver reads are slowed down.
const EVENTS_MAX: usize = 64;

/// The interval of progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// The time to wait for the failure report of a worker that accepts no more orders.
const FAILURE_REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// The length to which a worker's failure reason is truncated.
const REASON_MAX_CHARS: usize = 2_000;

/// The workers, numbered from 0, and the queue of their events. Every error names the worker that failed, sent an
/// unexpected report or missed a deadline.
pub(crate) struct Workers {
    handles: Vec<WorkerHandle>,
    /// The workers that have reported `Ended`, whose disconnection is no error.
    ended: HashSet<usize>,
    events: mpsc::Receiver<Event>,
    progress: Progress,
    ticks: Interval,
    last_tick: Instant,
}

impl Workers {
    /// A new event queue: the sender for all [`WorkerHandle`]s, and the receiver for [`Workers::new`].
    pub(crate) fn event_queue() -> (mpsc::Sender<Event>, mpsc::Receiver<Event>) {
        mpsc::channel(EVENTS_MAX)
    }

    /// The workers behind `handles`, each numbered by its index there.
    pub(crate) fn new(handles: Vec<WorkerHandle>, events: mpsc::Receiver<Event>) -> Self {
        Self {
            handles,
            ended: HashSet::new(),
            events,
            progress: Progress::default(),
            ticks: interval(PROGRESS_INTERVAL),
            last_tick: Instant::now(),
        }
    }

    /// The number of workers.
    pub(crate) fn len(&self) -> usize {
        self.handles.len()
    }

    pub(crate) fn name(&self, worker: usize) -> &str {
        self.handles[worker].name()
    }

    /// Prints progress lines of `consumers` from now on, for the round called `title`.
    pub(crate) fn start_progress(&mut self, title: String, round_bytes: u64, consumers: &[usize]) {
        let named = consumers
            .iter()
            .map(|worker| (*worker, self.handles[*worker].name().to_owned()));
        self.progress.begin(title, round_bytes, named);
    }

    /// Prints no more progress lines.
    pub(crate) fn stop_progress(&mut self) {
        self.progress = Progress::default();
    }

    /// Sends the same order to each of `workers`.
    ///
    /// # Errors
    /// When a worker accepts no order: the first failure of any worker whose event arrives in time, or else the failure
    /// to send.
    pub(crate) async fn send(&mut self, workers: &[usize], order: &Order) -> Result<()> {
        for worker in workers {
            if let Err(error) = self.handles[*worker].send(order).await {
                return Err(self.reported_failure().await.unwrap_or(error));
            }
        }
        Ok(())
    }

    /// The first failure among the events that arrive within [`FAILURE_REPORT_TIMEOUT`].
    async fn reported_failure(&mut self) -> Option<anyhow::Error> {
        let until = Instant::now() + FAILURE_REPORT_TIMEOUT;
        while let Ok(Some((worker, event))) = timeout_at(until, self.events.recv()).await {
            if let Err(error) = self.handle_event(worker, event).await {
                return Some(error);
            }
        }
        None
    }

    /// Waits for one report from each of `workers`, and returns the values that `extract` takes from them, in the
    /// order of `workers`. `step` names the expected report in errors.
    ///
    /// # Errors
    /// When any worker fails or disconnects, when `extract` returns `None`, when a worker reports twice, or when a
    /// report has not arrived after the time `deadline`.
    pub(crate) async fn gather<T>(
        &mut self,
        workers: &[usize],
        step: &str,
        deadline: Duration,
        extract: impl Fn(Report) -> Option<T>,
    ) -> Result<Vec<T>> {
        let until = Instant::now() + deadline;
        let mut barrier = Barrier::new(workers);
        loop {
            barrier = match barrier.open() {
                Ok(all) => return Ok(all),
                Err(barrier) => barrier,
            };
            tokio::select! {
                Some((worker, event)) = self.events.recv() => {
                    let Some(report) = self.handle_event(worker, event).await? else { continue };
                    let name = report.name();
                    let value = extract(report).ok_or_else(|| self.unexpected_report(worker, name, step))?;
                    let arrived = barrier.arrive(worker, value);
                    arrived.map_err(|error| anyhow!("{} reported `{step}`: {error}", self.name(worker)))?;
                }
                now = self.ticks.tick() => self.show_progress(now),
                () = sleep_until(until) => {
                    let late: Vec<&str> = barrier.missing().map(|worker| self.name(worker)).collect();
                    bail!("{} did not report `{step}` within {deadline:?}", late.join(" and "));
                }
            }
        }
    }

    /// The report in `event`; `None` if it only reports progress, or the expected disconnection of an ended worker.
    async fn handle_event(
        &mut self,
        worker: usize,
        event: Result<Report, Disconnected>,
    ) -> Result<Option<Report>> {
        match event {
            Ok(Report::Progress { bytes }) => {
                self.progress.record(worker, bytes);
                Ok(None)
            }
            Ok(Report::Failed { reason }) => bail!("{} failed: {}", self.name(worker), printable(&reason)),
            Ok(report) => {
                if matches!(report, Report::Ended { .. }) {
                    self.ended.insert(worker);
                }
                Ok(Some(report))
            }
            Err(_) if self.ended.contains(&worker) => Ok(None),
            Err(Disconnected::Ended) => {
                let reason = self.handles[worker].end_reason().await;
                bail!("{} is gone: {reason}", self.name(worker))
            }
            Err(error) => {
                Err(anyhow!(error).context(format!("cannot read reports of {}", self.name(worker))))
            }
        }
    }

    fn unexpected_report(&self, worker: usize, report: &str, step: &str) -> anyhow::Error {
        let name = self.name(worker);
        anyhow!("{name} reported `{report}` instead of `{step}`: run the same build on all hosts")
    }

    fn show_progress(&mut self, now: Instant) {
        if let Some(line) = self.progress.line(now - self.last_tick) {
            eprintln!("{line}");
        }
        self.last_tick = now;
    }
}

/// `text` from another host, truncated and without control characters, so that it is safe to print on a terminal.
fn printable(text: &str) -> String {
    let shown = text.chars().take(REASON_MAX_CHARS);
    shown.map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::process::Command;

    const TIMEOUT: Duration = Duration::from_secs(30);

    /// One worker, which runs `script` in a shell.
    fn one_worker(script: &str) -> Workers {
        let (sender, events) = Workers::event_queue();
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        Workers::new(vec![WorkerHandle::start("consumer 1".into(), shell, 0, sender).unwrap()], events)
    }

    fn connected(report: Report) -> Option<()> {
        matches!(report, Report::Connected).then_some(())
    }

    async fn failure(script: &str, deadline: Duration) -> String {
        let error = one_worker(script)
            .gather(&[0], "connected", deadline, connected)
            .await
            .unwrap_err();
        format!("{error:#}")
    }

    #[tokio::test]
    async fn the_expected_report_is_returned() {
        let mut workers = one_worker(r#"echo '{"progress":{"bytes":1}}'; echo '"connected"'; exec sleep 60"#);
        workers.gather(&[0], "connected", TIMEOUT, connected).await.unwrap();
    }

    #[tokio::test]
    async fn errors_name_the_worker() {
        let late = failure("exec sleep 60", Duration::from_millis(20)).await;
        assert_eq!(late, "consumer 1 did not report `connected` within 20ms");
        let dead = failure("exit 3", TIMEOUT).await;
        assert!(dead.starts_with("consumer 1 is gone: it ended early, with exit status: 3"), "{dead}");
        let other = failure(r#"echo '{"subscribed":{"round":1}}'; exec sleep 60"#, TIMEOUT).await;
        assert!(other.starts_with("consumer 1 reported `subscribed` instead of `connected`"), "{other}");
        let garbage = failure("echo hello; exec sleep 60", TIMEOUT).await;
        assert!(garbage.starts_with("cannot read reports of consumer 1: it sent \"hello\""), "{garbage}");
        let endless = failure("yes | tr -d '\\n'", TIMEOUT).await;
        assert!(endless.contains("a line of more than"), "{endless}");
        let failed =
            failure(r#"echo '{"failed":{"reason":"no\u001b[2Jmemory"}}'; exec sleep 60"#, TIMEOUT).await;
        assert_eq!(failed, "consumer 1 failed: no [2Jmemory", "without the control character");
    }

    /// Goal: sending to a failed worker returns the failure that it reported. Method: a worker that closes its standard
    /// input.
    #[tokio::test]
    async fn sending_to_a_failed_worker_returns_its_failure() {
        let mut workers = one_worker(r#"exec <&-; echo '{"failed":{"reason":"no memory"}}'; exec sleep 60"#);
        let error = loop {
            if let Err(error) = workers.send(&[0], &Order::End).await {
                break error;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        };
        assert_eq!(error.to_string(), "consumer 1 failed: no memory");
    }

    #[tokio::test]
    async fn a_repeated_report_is_unexpected() {
        let mut workers = one_worker(r#"echo '"connected"'; echo '"connected"'; exec sleep 60"#);
        workers.gather(&[0], "connected", TIMEOUT, connected).await.unwrap();
        let error = workers.gather(&[0], "ended", TIMEOUT, |_| None::<()>).await.unwrap_err();
        assert!(error.to_string().contains("reported `connected` instead of `ended`"), "{error}");
    }
}
