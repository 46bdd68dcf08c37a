//! The output on stderr: the log, and messages of commands. As text, or as JSON, one object a line.

use crate::{admin, config, exit::UsageError};
use clap::ValueEnum;
use serde_json::json;
use std::{
    fmt::Arguments,
    io::IsTerminal,
    sync::atomic::{AtomicBool, Ordering},
};
use tracing::{Level, Metadata};
use tracing_subscriber::{
    EnvFilter, Registry,
    filter::filter_fn,
    fmt::{
        format::Writer,
        time::{FormatTime, SystemTime},
    },
    prelude::*,
};

/// The variable that says what is logged.
const LOG: &str = "TENSOR_RELAY_LOG";

/// How stderr is written, as a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line, with `timestamp`, `level`, `target` and `message`.
    Json,
}

/// Whether stderr is JSON. Set once, before anything is said.
static IS_JSON: AtomicBool = AtomicBool::new(false);

/// Says something on stderr that is no log: as text as it is, and in JSON like an event. `warning: ` and `error: ` before it
/// are its level there.
macro_rules! say {
    ($($words:tt)*) => { $crate::log::write(format_args!($($words)*)) };
}
pub(crate) use say;

/// Warnings are shown by default; `-v` adds information, `-vv` everything; `TENSOR_RELAY_LOG` overrides both.
pub(crate) fn to_stderr(verbose: u8, format: LogFormat) -> Result<(), UsageError> {
    IS_JSON.store(format == LogFormat::Json, Ordering::Relaxed);
    let default = match verbose {
        0 => "warn",
        1 => "info",
        _ => "debug",
    };
    let filter = match config::variable::value_of(LOG) {
        Some(filter) => log_filter(&filter.to_string_lossy())?,
        None => EnvFilter::new(default),
    };
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = match format {
        LogFormat::Text => {
            let is_coloured = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            lines.with_target(false).with_ansi(is_coloured).boxed()
        }
        LogFormat::Json => lines
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(true)
            .boxed(),
    };
    let log = Registry::default()
        .with(lines.with_filter(filter))
        .with(admin::remember())
        .with(filter_fn(shows_no_secret));
    // It fails where the process has a log already: a program in Python that runs a command beside a client of its own.
    let _ = log.try_init();
    Ok(())
}

/// Says `words` on stderr; see [`say!`].
pub(crate) fn write(words: Arguments<'_>) {
    match IS_JSON.load(Ordering::Relaxed) {
        true => eprintln!("{}", as_json(&words.to_string())),
        false => eprintln!("{words}"),
    }
}

fn as_json(words: &str) -> String {
    let levels = [("error: ", "ERROR"), ("warning: ", "WARN")];
    let found = levels
        .iter()
        .find_map(|(prefix, level)| Some((*level, words.strip_prefix(prefix)?)));
    let (level, message) = found.unwrap_or(("INFO", words));
    let mut timestamp = String::new();
    let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp)); // A string takes everything.
    let line =
        json!({ "timestamp": timestamp, "level": level, "target": "tensor_relay", "message": message });
    line.to_string()
}

fn log_filter(text: &str) -> Result<EnvFilter, UsageError> {
    EnvFilter::try_new(text).map_err(|why| {
        UsageError(format!(
            "the environment variable {LOG} cannot be {text:?}: {why}; write a level (error, warn, info, debug, trace), or levels \
             by module, such as `info,tensor_relay_client=debug`"
        ))
    })
}

/// Whether something may be logged, whatever the filter says. On the level `trace`, QUIC prints every frame with what is in
/// it; those with a stateless reset token let any reader of the log end the connection.
fn shows_no_secret(metadata: &Metadata<'_>) -> bool {
    *metadata.level() != Level::TRACE || !metadata.target().starts_with("quinn_proto")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_has_a_level() {
        let said = |words| serde_json::from_str::<serde_json::Value>(&as_json(words)).unwrap();
        let warning = said("warning: the disk is full");
        assert_eq!((&warning["level"], &warning["message"]), (&json!("WARN"), &json!("the disk is full")));
        assert_eq!(said("error: no")["level"], "ERROR");
        let told = said("serving \"x\"");
        assert_eq!((&told["level"], &told["message"]), (&json!("INFO"), &json!("serving \"x\"")));
        assert!(
            told["timestamp"]
                .as_str()
                .is_some_and(|at| at.starts_with("20") && at.ends_with('Z')),
            "{told}"
        );
    }
}
