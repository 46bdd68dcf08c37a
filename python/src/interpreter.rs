//! The interpreter thread: runs other threads' tasks that need the GIL.
//!
//! The runtime's thread must never wait for the GIL: any C extension may hold it for seconds, and all lanes would
//! stall. So its tasks that need Python (returning lent memory, completing futures, logging) run on this thread.

use pyo3::prelude::*;
use std::{
    sync::{OnceLock, mpsc},
    thread,
    time::Instant,
};

type InterpreterTask = Box<dyn FnOnce(Python<'_>) + Send>;

/// A message to the thread.
enum Message {
    InterpreterTask(InterpreterTask),
    /// The last message: the thread replies, and ends.
    Finish(mpsc::SyncSender<()>),
}

/// The queue of the thread, and the process that the thread runs in.
struct Queue {
    sender: mpsc::Sender<Message>,
    pid: u32,
}

static QUEUE: OnceLock<Option<Queue>> = OnceLock::new();

/// Queues `task` for the interpreter thread.
///
/// The queue itself is unbounded: each task is for an object that a user has lent or awaits, for a chunk that is being
/// read, whose number the server bounds, or for a log message, whose number [`logging`](crate::logging) bounds. After
/// the interpreter's end, in a forked child, and if the thread could not be started, tasks are leaked with their
/// contents.
pub(crate) fn enqueue(task: impl FnOnce(Python<'_>) + Send + 'static) {
    let message = Message::InterpreterTask(Box::new(task));
    let unsent = match QUEUE.get_or_init(start) {
        Some(queue) if queue.pid == std::process::id() => {
            queue.sender.send(message).err().map(|mpsc::SendError(unsent)| unsent)
        }
        _ => Some(message),
    };
    std::mem::forget(unsent); // Dropping its contents may need an interpreter.
}

fn start() -> Option<Queue> {
    let (sender, receiver) = mpsc::channel();
    let thread = thread::Builder::new().name("tensor-relay-gil".into());
    let started = thread.spawn(move || run(receiver)).ok();
    started.map(|_| Queue { sender, pid: std::process::id() })
}

fn run(messages: mpsc::Receiver<Message>) {
    let mut next = messages.recv().ok();
    while let Some(message) = next {
        next = match message {
            Message::InterpreterTask(task) => run_queued(task, &messages).or_else(|| messages.recv().ok()),
            Message::Finish(reply) => {
                std::mem::forget(messages); // Dropping later tasks may need an interpreter.
                let _ = reply.send(());
                return;
            }
        }
    }
}

/// Runs `task` and all tasks in the queue in one turn with the GIL, because each turn may have to wait for the threads
/// that compute in Python, 5 ms for each. Returns a message of another kind, if that ended the turn.
fn run_queued(task: InterpreterTask, messages: &mpsc::Receiver<Message>) -> Option<Message> {
    let mut task = Some(task);
    let attached = Python::try_attach(|py| {
        while let Some(first) = task.take() {
            first(py);
            match messages.try_recv() {
                Ok(Message::InterpreterTask(next)) => task = Some(next),
                other => return other.ok(),
            }
        }
        None
    });
    attached.unwrap_or_else(|| {
        std::mem::forget(task.take()); // Dropping its contents may need an interpreter.
        None
    })
}

/// Waits until the queued tasks have run; later ones are leaked. Returns false if `deadline` comes first.
pub(crate) fn finish(deadline: Instant) -> bool {
    let queue = QUEUE.get_or_init(|| None).as_ref();
    let Some(queue) = queue.filter(|queue| queue.pid == std::process::id()) else { return true };
    let (reply, finished) = mpsc::sync_channel(1);
    if queue.sender.send(Message::Finish(reply)).is_err() {
        return true;
    }
    finished
        .recv_timeout(deadline.saturating_duration_since(Instant::now()))
        .is_ok()
}
