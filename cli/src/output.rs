//! The output of a command on stdout and stderr.
//!
//! A reader of a pipe may stop reading, and a terminal may be paused (Ctrl-S). A command that serves until it is ended
//! must not wait for either: it writes through queues, each with a thread, and what does not fit is dropped and counted.
//! Other commands write at once, and wait as long as their reader wants.

use crate::log;
use rustix::io::Errno;
use serde_json::json;
use std::{
    collections::VecDeque,
    io::{self, ErrorKind, IsTerminal, Write},
    sync::{Arc, Condvar, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};
use tensor_relay_device::Lock;
use tokio::sync::Notify;

/// The maximum size of the lines that wait in a queue: a minute of `-vv` on a busy server, or the reports of a thousand
/// versions. A longer line waits alone.
const QUEUE_MAX_BYTES: usize = 1 << 20;

/// The time at the end of a command for its last lines to be written.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The interval at which a non-blocking pipe, which a parent process may hand over, is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Moves to the beginning of the terminal's line and clears it.
const CLEAR_LINE: &str = "\r\x1b[K";

/// One of the two standard streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Out,
    Err,
}

/// The queues of this process, once [`queue_from_now_on`] was called. One queue serves both streams if both are
/// terminals, so that their lines keep their order.
static QUEUES: OnceLock<Queues> = OnceLock::new();

struct Queues {
    out: Arc<Queue>,
    err: Arc<Queue>,
}

/// A failed write to stdout.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot write to stdout: {0}")]
pub(crate) struct StdoutClosed(Arc<io::Error>);

impl StdoutClosed {
    /// Whether the reader closed the pipe, which ends the process without a message, as for other tools.
    pub(crate) fn is_expected(&self) -> bool {
        self.0.kind() == ErrorKind::BrokenPipe
    }
}

/// Queues all further output, which no longer waits for its readers. With `as_json`, an object on stdout counts the
/// lines that were dropped.
pub(crate) fn queue_from_now_on(as_json: bool) -> io::Result<()> {
    let out = Queue::begin(as_json, write_all)?;
    let err = match io::stdout().is_terminal() && io::stderr().is_terminal() {
        true => Arc::clone(&out),
        false => Queue::begin(as_json, write_all)?,
    };
    let _ = QUEUES.set(Queues { out, err }); // Called once for each process.
    Ok(())
}

/// Writes a line to stdout, or queues it.
///
/// # Errors
/// [`StdoutClosed`] when this write failed, or an earlier queued one.
pub(crate) fn line(text: &str) -> Result<(), StdoutClosed> {
    line_within(text, QUEUE_MAX_BYTES)
}

/// Writes a line to stdout, or queues it however many wait. For callers that wait until it is [`written`].
///
/// # Errors
/// As [`line()`].
pub(crate) fn kept_line(text: &str) -> Result<(), StdoutClosed> {
    line_within(text, usize::MAX)
}

fn line_within(text: &str, queue_max_bytes: usize) -> Result<(), StdoutClosed> {
    if let Some(queues) = QUEUES.get() {
        queues.out.push(Stream::Out, format!("{text}\n").into_bytes(), queue_max_bytes);
        return queues.out.state.lock().failure.clone().map_or(Ok(()), Err);
    }
    let mut out = io::stdout().lock();
    let written = writeln!(out, "{text}").and_then(|()| out.flush());
    written.map_err(|error| StdoutClosed(Arc::new(error)))
}

/// Waits until every line on stdout so far was written or dropped. Cancel safe.
///
/// # Errors
/// [`StdoutClosed`] when one of them could not be written.
pub(crate) async fn written() -> Result<(), StdoutClosed> {
    let Some(Queues { out, .. }) = QUEUES.get() else { return Ok(()) };
    let last = out.state.lock().pushed;
    out.wait_for(|state| match &state.failure {
        Some(closed) => Some(Err(closed.clone())),
        None => (state.written >= last).then_some(Ok(())),
    })
    .await
}

/// Waits for a write to stdout that fails. Cancel safe.
pub(crate) async fn failed() -> StdoutClosed {
    match QUEUES.get() {
        Some(Queues { out, .. }) => out.wait_for(|state| state.failure.clone()).await,
        None => std::future::pending().await,
    }
}

/// Shows `text` as the last line of the terminal on stderr, until it is replaced; an empty text shows nothing. Requires
/// [`queue_from_now_on`].
pub(crate) fn show_status(text: String) {
    if let Some(Queues { err, .. }) = QUEUES.get() {
        err.state.lock().status = text;
        err.changed.notify_all();
    }
}

/// Writes what is left, for [`FLUSH_TIMEOUT`] at most: the reader may have stopped, and the process must end.
pub(crate) fn flush() {
    let Some(Queues { out, err }) = QUEUES.get() else {
        let _ = io::stdout().flush(); // The reader may have closed the pipe.
        return;
    };
    let deadline = Instant::now() + FLUSH_TIMEOUT;
    for queue in [out, err] {
        let timeout = deadline.saturating_duration_since(Instant::now());
        drop(
            queue
                .changed
                .wait_timeout_while(queue.state.lock(), timeout, |state| !state.is_idle()),
        );
    }
}

/// Stderr as a [`Write`], which never fails: whole lines are written or queued. `eprintln` would panic on a full disk.
pub(crate) struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match QUEUES.get() {
            Some(queues) => queues.err.push(Stream::Err, bytes.to_vec(), QUEUE_MAX_BYTES),
            None => drop(io::stderr().write_all(bytes)),
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines that wait for a thread to write them.
struct Queue {
    state: Lock<State>,
    /// Notified when there is work for the thread, and when work is done.
    changed: Condvar,
    /// The same notification for tasks: work is done.
    done: Notify,
}

#[derive(Default)]
struct State {
    lines: VecDeque<(Stream, Vec<u8>)>,
    bytes: usize,
    /// The number of lines ever queued, and of those that were written.
    pushed: u64,
    written: u64,
    /// The number of lines that were dropped after those in `lines`.
    dropped: u64,
    /// The wanted last line of the terminal, and the one that was drawn.
    status: String,
    drawn: String,
    is_writing: bool,
    /// The first failed write to stdout.
    failure: Option<StdoutClosed>,
}

impl State {
    fn is_idle(&self) -> bool {
        self.lines.is_empty() && self.dropped == 0 && self.status == self.drawn && !self.is_writing
    }
}

impl Queue {
    /// A queue whose lines a thread passes to `write`.
    fn begin(
        as_json: bool,
        write: impl FnMut(Stream, &[u8]) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Arc<Self>> {
        let queue = Arc::new(Self { state: Lock::default(), changed: Condvar::new(), done: Notify::new() });
        let writing = Arc::clone(&queue);
        thread::Builder::new()
            .name("relay-output".into())
            .spawn(move || writing.run(as_json, write))?;
        Ok(queue)
    }

    /// Adds a line, unless more than `max_bytes` would wait then. A line for an empty queue is always added.
    fn push(&self, stream: Stream, line: Vec<u8>, max_bytes: usize) {
        let mut state = self.state.lock();
        if state.bytes > 0 && state.bytes + line.len() > max_bytes {
            state.dropped += 1;
            return;
        }
        state.bytes += line.len();
        state.pushed += 1;
        state.lines.push_back((stream, line));
        self.changed.notify_all();
    }

    fn run(&self, as_json: bool, mut write: impl FnMut(Stream, &[u8]) -> io::Result<()>) {
        let mut state = self.state.lock();
        loop {
            state = self
                .changed
                .wait_while(state, |state| state.is_idle())
                .unwrap_or_else(PoisonError::into_inner);
            let (lines, dropped) = (std::mem::take(&mut state.lines), std::mem::take(&mut state.dropped));
            let (drawn, status) = (std::mem::take(&mut state.drawn), state.status.clone());
            let pushed = state.pushed;
            (state.bytes, state.is_writing) = (0, true);
            drop(state);
            let mut failure = None;
            let mut write = |stream, bytes: &[u8]| {
                let written = if bytes.is_empty() { Ok(()) } else { write(stream, bytes) };
                if let (Stream::Out, Err(error)) = (stream, written) {
                    failure.get_or_insert(error);
                }
            };
            let mut next = if drawn.is_empty() { String::new() } else { CLEAR_LINE.to_owned() };
            if let Some((last, _)) = lines.back() {
                let missing = (dropped > 0).then(|| notice(*last, as_json, dropped));
                write(Stream::Err, std::mem::take(&mut next).as_bytes());
                lines.iter().for_each(|(stream, line)| write(*stream, line));
                missing.iter().for_each(|(stream, line)| write(*stream, line.as_bytes()));
            }
            write(Stream::Err, (next + &status).as_bytes()); // In one step, so that it does not flicker.
            state = self.state.lock();
            (state.drawn, state.written, state.is_writing) = (status, pushed, false);
            if let (None, Some(error)) = (&state.failure, failure) {
                state.failure = Some(StdoutClosed(Arc::new(error)));
            }
            self.changed.notify_all();
            self.done.notify_waiters();
        }
    }

    /// Waits until `find` finds something in the state. Cancel safe.
    async fn wait_for<T>(&self, find: impl Fn(&State) -> Option<T>) -> T {
        loop {
            let done = self.done.notified();
            if let Some(found) = find(&self.state.lock()) {
                return found;
            }
            done.await;
        }
    }
}

/// The line that replaces `dropped` lines of `stream`: an object among objects, else a message on stderr.
fn notice(stream: Stream, as_json: bool, dropped: u64) -> (Stream, String) {
    match (stream, as_json) {
        (Stream::Out, true) => {
            (Stream::Out, json!({ "event": "dropped", "lines": dropped }).to_string() + "\n")
        }
        _ => {
            let text = format!(
                "warning: {dropped} lines of output were dropped, because they were not read in time"
            );
            (Stream::Err, log::formatted(&text))
        }
    }
}

/// Writes to the descriptor, without the standard library's lock: the end of the process must not wait for it.
fn write_all(stream: Stream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = match stream {
            Stream::Out => rustix::io::write(io::stdout(), bytes),
            Stream::Err => rustix::io::write(io::stderr(), bytes),
        };
        match written {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => thread::sleep(RETRY_INTERVAL),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};

    /// A queue to a pipe whose writes block until a permit is sent, and what was written.
    fn stuck_queue(as_json: bool) -> (Arc<Queue>, std::sync::mpsc::Sender<()>, Receiver<(Stream, String)>) {
        let (permit, permits) = channel();
        let (written, lines) = channel();
        let write = move |stream, bytes: &[u8]| {
            let _ = permits.recv(); // Without a sender, nothing blocks.
            let _ = written.send((stream, String::from_utf8_lossy(bytes).into_owned()));
            Ok(())
        };
        (Queue::begin(as_json, write).unwrap(), permit, lines)
    }

    /// Goal: a reader that stops holds nobody up, and learns afterwards how much it missed. Method: push more than fits
    /// while nothing is read, then read.
    #[test]
    fn what_does_not_fit_is_dropped_and_counted() {
        for as_json in [true, false] {
            let (queue, permit, lines) = stuck_queue(as_json);
            let line = vec![b'x'; QUEUE_MAX_BYTES / 8];
            let pushed = 100;
            (0..pushed).for_each(|_| queue.push(Stream::Out, line.clone(), QUEUE_MAX_BYTES)); // Returns immediately.
            drop(permit);
            let (mut written, mut dropped) = (0, 0);
            while written + dropped < pushed {
                match lines.recv().unwrap() {
                    (Stream::Out, text) if text.starts_with('x') => written += 1,
                    (Stream::Out, text) => {
                        assert!(as_json);
                        let event: serde_json::Value = serde_json::from_str(&text).unwrap();
                        assert_eq!(event["event"], "dropped");
                        dropped += event["lines"].as_u64().unwrap();
                    }
                    (Stream::Err, text) => {
                        assert!(!as_json && text.ends_with("not read in time\n"), "{text}");
                        dropped += text.split(' ').nth(1).unwrap().parse::<u64>().unwrap();
                    }
                }
            }
            assert!((8..=16).contains(&written), "{written}");
        }
    }

    #[test]
    fn lines_replace_the_status_and_it_is_drawn_again() {
        let (queue, permit, lines) = stuck_queue(false);
        drop(permit);
        queue.state.lock().status = "50 %".into();
        queue.changed.notify_all();
        assert_eq!(lines.recv().unwrap(), (Stream::Err, "50 %".into()));
        queue.push(Stream::Out, b"a line\n".to_vec(), QUEUE_MAX_BYTES);
        let next: Vec<_> = (0..3).map(|_| lines.recv().unwrap().1).collect();
        assert_eq!(next, [CLEAR_LINE, "a line\n", "50 %"]);
    }
}
