//! Log messages, forwarded to Python's `logging`.

use crate::interpreter;
use pyo3::prelude::*;
use std::{
    fmt::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

/// The logger's name, and the prefix of the libraries' targets.
const LOGGER: &str = "tensor_relay";

/// The prefix of this package's targets.
const PACKAGE: &str = env!("CARGO_CRATE_NAME");

/// The maximum number of messages queued for the interpreter; further ones are dropped and counted. A minute of
/// failures logs about a thousand, less than a megabyte.
const WAITING_MAX: usize = 1_000;

/// Forwards `tracing` events to the logger `tensor_relay`: level `info` and above, and `debug` if the logger is set to
/// it when the first server or client starts.
pub(crate) fn begin(py: Python<'_>) {
    let wants_debug = || -> PyResult<bool> {
        let logger = py.import("logging")?.call_method1("getLogger", (LOGGER,))?;
        logger.call_method1("isEnabledFor", (python_level(&Level::DEBUG),))?.is_truthy()
    };
    let most_verbose = if wants_debug().unwrap_or(false) { Level::DEBUG } else { Level::INFO };
    // It fails only if a subscriber is set already, as by `run_command`.
    let _ = tracing::subscriber::set_global_default(Logger { most_verbose, backlog: Arc::default() });
}

/// The number of a level in Python's `logging`.
fn python_level(level: &Level) -> u8 {
    match *level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG | Level::TRACE => 10,
    }
}

struct Logger {
    /// The most verbose level that is forwarded.
    most_verbose: Level,
    backlog: Arc<Backlog>,
}

#[derive(Default)]
struct Backlog {
    waiting: AtomicUsize,
    dropped: AtomicUsize,
}

impl Subscriber for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let target = metadata.target();
        let is_ours = target.starts_with(LOGGER) || target.starts_with(PACKAGE);
        metadata.is_event() && *metadata.level() <= self.most_verbose && is_ours
    }

    fn event(&self, event: &Event<'_>) {
        let backlog = Arc::clone(&self.backlog);
        if backlog.waiting.fetch_add(1, Ordering::Relaxed) >= WAITING_MAX {
            backlog.waiting.fetch_sub(1, Ordering::Relaxed);
            backlog.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let (level, text) = (python_level(event.metadata().level()), Line::of(event));
        interpreter::enqueue(move |py| {
            backlog.waiting.fetch_sub(1, Ordering::Relaxed);
            let dropped = backlog.dropped.swap(0, Ordering::Relaxed);
            // `logging` reports the failure of a handler on stderr.
            let _ = log(py, level, &text);
            if dropped > 0 {
                let _ = log(
                    py,
                    python_level(&Level::WARN),
                    &format!("{dropped} log messages were dropped, because there were too many at once."),
                );
            }
        });
    }

    // There are no spans: `enabled` refuses them.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

fn log(py: Python<'_>, level: u8, text: &str) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", (LOGGER,))?;
    logger.call_method1("log", (level, "%s", text))?;
    Ok(())
}

/// A log message, followed by its fields.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Line {
    fn of(event: &Event<'_>) -> String {
        let mut line = Self::default();
        event.record(&mut line);
        line.message + &line.fields
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
