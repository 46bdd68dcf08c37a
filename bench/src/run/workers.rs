//! All workers of a run.

use super::{
    barrier::Barrier,
    peer::{Heard, Peer, Silence},
    progress::Progress,
};
use crate::node::order::{Order, Report};
use anyhow::{Result, anyhow, bail};
use std::{collections::HashSet, time::Duration};
use tokio::{
    sync::mpsc,
    time::{Instant, Interval, interval, sleep_until, timeout_at},
};

/// The bound of the queue of reports. Workers that report faster than the driver reads wait for it.
const REPORTS_MAX: usize = 64;

/// The interval of progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// The deadline for a worker's reason for refusing orders.
const LAST_WORDS_MAX: Duration = Duration::from_secs(1);

/// The length to which a worker's reason is cut.
const REASON_MAX_CHARS: usize = 2_000;

/// The workers, by number, and what comes from them. Whoever fails, lies, or is late is named.
pub(crate) struct Workers {
    peers: Vec<Peer>,
    /// The workers that have reported their end, whose disconnection is no error.
    done: HashSet<usize>,
    heard: mpsc::Receiver<Heard>,
    progress: Progress,
    ticks: Interval,
    last_shown: Instant,
}

impl Workers {
    /// Both ends of the queue of reports.
    pub(crate) fn reports() -> (mpsc::Sender<Heard>, mpsc::Receiver<Heard>) {
        mpsc::channel(REPORTS_MAX)
    }

    /// The crew of `peers`, whose numbers are their places.
    pub(crate) fn new(peers: Vec<Peer>, heard: mpsc::Receiver<Heard>) -> Self {
        Self {
            peers,
            done: HashSet::new(),
            heard,
            progress: Progress::default(),
            ticks: interval(PROGRESS_INTERVAL),
            last_shown: Instant::now(),
        }
    }

    /// The number of workers.
    pub(crate) fn len(&self) -> usize {
        self.peers.len()
    }

    pub(crate) fn name(&self, worker: usize) -> &str {
        self.peers[worker].name()
    }

    /// Shows from now on how far `consumers` are in the round called `title`.
    pub(crate) fn show(&mut self, title: String, round_bytes: u64, consumers: &[usize]) {
        let named = consumers.iter().map(|worker| (*worker, self.peers[*worker].name().to_owned()));
        self.progress.begin(title, round_bytes, named);
    }

    /// Shows nothing, until there is something to show again.
    pub(crate) fn show_nothing(&mut self) {
        self.progress = Progress::default();
    }

    /// Gives the same order to each of `workers`.
    ///
    /// # Errors
    /// When one of them is gone.
    pub(crate) async fn tell(&mut self, workers: &[usize], order: &Order) -> Result<()> {
        for worker in workers {
            if let Err(error) = self.peers[*worker].tell(order).await {
                return Err(self.last_words().await.unwrap_or(error));
            }
        }
        Ok(())
    }

    /// The first unread failure that a worker reported.
    async fn last_words(&mut self) -> Option<anyhow::Error> {
        let until = Instant::now() + LAST_WORDS_MAX;
        while let Ok(Some((worker, said))) = timeout_at(until, self.heard.recv()).await {
            if let Err(error) = self.report(worker, said).await {
                return Some(error);
            }
        }
        None
    }

    /// Waits until each of `workers` has said what `wanted` picks out of its report; `step` is the name of that.
    ///
    /// # Errors
    /// When one of the crew fails, goes away, says anything else, or when one of `workers` says nothing in time.
    pub(crate) async fn gather<T>(
        &mut self,
        workers: &[usize],
        step: &str,
        deadline: Duration,
        wanted: impl Fn(Report) -> Option<T>,
    ) -> Result<Vec<T>> {
        let until = Instant::now() + deadline;
        let mut barrier = Barrier::new(workers);
        loop {
            barrier = match barrier.open() {
                Ok(all) => return Ok(all),
                Err(barrier) => barrier,
            };
            tokio::select! {
                Some((worker, said)) = self.heard.recv() => {
                    let Some(report) = self.report(worker, said).await? else { continue };
                    let name = report.name();
                    let what = wanted(report).ok_or_else(|| self.out_of_turn(worker, name, step))?;
                    let arrived = barrier.arrive(worker, what);
                    arrived.map_err(|error| anyhow!("{} said `{step}`: {error}", self.name(worker)))?;
                }
                now = self.ticks.tick() => self.show_progress(now),
                () = sleep_until(until) => {
                    let late: Vec<&str> = barrier.missing().map(|worker| self.name(worker)).collect();
                    bail!("{} did not say `{step}` within {deadline:?}", late.join(" and "));
                }
            }
        }
    }

    /// The report of `worker`, unless it is progress only.
    async fn report(&mut self, worker: usize, said: Result<Report, Silence>) -> Result<Option<Report>> {
        match said {
            Ok(Report::Moving { bytes }) => {
                self.progress.record(worker, bytes);
                Ok(None)
            }
            Ok(Report::Failed { reason }) => bail!("{} failed: {}", self.name(worker), printable(&reason)),
            Ok(report) => {
                if matches!(report, Report::Ended { .. }) {
                    self.done.insert(worker);
                }
                Ok(Some(report))
            }
            Err(_) if self.done.contains(&worker) => Ok(None),
            Err(Silence::Ended) => {
                let obituary = self.peers[worker].obituary().await;
                bail!("{} is gone: {obituary}", self.name(worker))
            }
            Err(silence) => Err(anyhow!(silence).context(format!("cannot hear {}", self.name(worker)))),
        }
    }

    fn out_of_turn(&self, worker: usize, said: &str, step: &str) -> anyhow::Error {
        let name = self.name(worker);
        anyhow!("{name} said `{said}` when it was to say `{step}`: run the same build on all hosts")
    }

    fn show_progress(&mut self, now: Instant) {
        if let Some(line) = self.progress.line(now - self.last_shown) {
            eprintln!("{line}");
        }
        self.last_shown = now;
    }
}

/// A stranger's text, as a terminal may show it.
fn printable(text: &str) -> String {
    let shown = text.chars().take(REASON_MAX_CHARS);
    shown.map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::process::Command;

    const LONG: Duration = Duration::from_secs(30);

    /// A crew of one, which runs `script` in a shell.
    fn one_worker(script: &str) -> Workers {
        let (tell, heard) = Workers::reports();
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        Workers::new(vec![Peer::start("consumer 1".into(), shell, 0, tell).unwrap()], heard)
    }

    fn connected(report: Report) -> Option<()> {
        matches!(report, Report::Connected).then_some(())
    }

    async fn failure(script: &str, deadline: Duration) -> String {
        let error = one_worker(script).gather(&[0], "connected", deadline, connected).await.unwrap_err();
        format!("{error:#}")
    }

    #[tokio::test]
    async fn who_says_what_is_waited_for_is_heard() {
        let mut workers = one_worker(r#"echo '{"moving":{"bytes":1}}'; echo '"connected"'; exec sleep 60"#);
        workers.gather(&[0], "connected", LONG, connected).await.unwrap();
    }

    #[tokio::test]
    async fn whoever_fails_is_named() {
        let late = failure("exec sleep 60", Duration::from_millis(20)).await;
        assert_eq!(late, "consumer 1 did not say `connected` within 20ms");
        let dead = failure("exit 3", LONG).await;
        assert!(dead.starts_with("consumer 1 is gone: it ended early, with exit status: 3"), "{dead}");
        let liar = failure(r#"echo '{"waiting":{"round":1}}'; exec sleep 60"#, LONG).await;
        assert!(liar.starts_with("consumer 1 said `waiting` when it was to say `connected`"), "{liar}");
        let garbage = failure("echo hello; exec sleep 60", LONG).await;
        assert!(garbage.starts_with("cannot hear consumer 1: it sent \"hello\""), "{garbage}");
        let endless = failure("yes | tr -d '\\n'", LONG).await;
        assert!(endless.contains("a line of more than"), "{endless}");
        let failed =
            failure(r#"echo '{"failed":{"reason":"no\u001b[2Jmemory"}}'; exec sleep 60"#, LONG).await;
        assert_eq!(failed, "consumer 1 failed: no [2Jmemory", "and does nothing to the terminal");
    }

    /// Goal: who takes no orders any more has a reason, and the user hears it. Method: a worker that closes its ears.
    #[tokio::test]
    async fn last_words_are_heard() {
        let mut workers = one_worker(r#"exec <&-; echo '{"failed":{"reason":"no memory"}}'; exec sleep 60"#);
        let error = loop {
            if let Err(error) = workers.tell(&[0], &Order::End).await {
                break error;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        };
        assert_eq!(error.to_string(), "consumer 1 failed: no memory");
    }

    #[tokio::test]
    async fn saying_it_again_is_out_of_turn() {
        let mut workers = one_worker(r#"echo '"connected"'; echo '"connected"'; exec sleep 60"#);
        workers.gather(&[0], "connected", LONG, connected).await.unwrap();
        let error = workers.gather(&[0], "ended", LONG, |_| None::<()>).await.unwrap_err();
        assert!(error.to_string().contains("said `connected` when it was to say `ended`"), "{error}");
    }
}
