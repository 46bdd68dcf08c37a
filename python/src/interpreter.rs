//! The interpreter thread: runs other threads' work that needs the GIL.
//!
//! The runtime's thread must never wait for the GIL: any C extension may hold that for seconds, and all lanes would stand
//! still. So whatever needs Python there (giving back what was lent, results of coroutines, log messages) is left here.

use crate::gpu;
use pyo3::prelude::*;
use std::{
    sync::{OnceLock, mpsc},
    thread::{self, ThreadId},
    time::Duration,
};

type InterpreterTask = Box<dyn FnOnce(Python<'_>) + Send>;

/// A message to the thread.
enum Message {
    InterpreterTask(InterpreterTask),
    /// Nothing more: say when all before it is done.
    Finish(mpsc::SyncSender<()>),
}

/// The way to the thread, which lives in the process that started it.
struct Inbox {
    sender: mpsc::Sender<Message>,
    pid: u32,
}

static INBOX: OnceLock<Option<Inbox>> = OnceLock::new();

/// The time that the exit of the interpreter waits for remaining work.
const FINISH: Duration = Duration::from_secs(1);

/// Lets the interpreter do `errand` soon, in order.
///
/// The queue has no bound of its own: each errand stands for something that a user has lent, awaits, or logs, and logs
/// are bounded where they are made. When the interpreter is gone, and in a fork, errands are leaked with what they hold.
pub(crate) fn later(errand: impl FnOnce(Python<'_>) + Send + 'static) {
    let message = Message::InterpreterTask(Box::new(errand));
    let unsent = match INBOX.get_or_init(start) {
        Some(inbox) if inbox.pid == std::process::id() => {
            inbox.sender.send(message).err().map(|mpsc::SendError(unsent)| unsent)
        }
        _ => Some(message),
    };
    std::mem::forget(unsent); // What it holds may need an interpreter to go.
}

fn start() -> Option<Inbox> {
    let (sender, inbox) = mpsc::channel();
    let thread = thread::Builder::new().name("tensor-relay-gil".into());
    let started = thread.spawn(move || run(&inbox)).ok();
    started.map(|_| Inbox { sender, pid: std::process::id() })
}

fn run(inbox: &mpsc::Receiver<Message>) {
    for message in inbox {
        match message {
            Message::InterpreterTask(errand) => {
                let mut errand = Some(errand);
                let attached =
                    Python::try_attach(|py| errand.take().into_iter().for_each(|errand| errand(py)));
                if attached.is_none() {
                    std::mem::forget(errand); // What it holds may need an interpreter to go.
                }
            }
            Message::Finish(done) => {
                let _ = done.send(());
                return;
            }
        }
    }
}

/// The thread that ends the interpreter, once it does.
static ENDING: OnceLock<ThreadId> = OnceLock::new();

/// Notes that this thread ends the interpreter, before it closes what is open. Other threads that still run then are daemon
/// threads: Python has waited for the rest.
#[pyfunction]
pub(crate) fn begin_finish() {
    let _ = ENDING.set(thread::current().id());
}

/// Whether another thread than this one ends the interpreter.
pub(crate) fn ends_elsewhere() -> bool {
    ENDING.get().is_some_and(|ending| *ending != thread::current().id())
}

/// Does what is left to do, and nothing later: called right before the interpreter ends, which no thread may wait for.
#[pyfunction]
pub(crate) fn finish(py: Python<'_>) {
    py.detach(|| {
        finish_errands();
        gpu::close_all(); // Now that what was lent is back.
    });
}

fn finish_errands() {
    let inbox = INBOX.get_or_init(|| None).as_ref();
    let Some(inbox) = inbox.filter(|inbox| inbox.pid == std::process::id()) else { return };
    let (done, finished) = mpsc::sync_channel(1);
    if inbox.sender.send(Message::Finish(done)).is_ok() {
        let _ = finished.recv_timeout(FINISH);
    }
}
