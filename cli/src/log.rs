//! The output on stderr: the log, and the messages of commands. It is text, or JSON with one object per line.

use crate::{admin, config, exit::UsageError, output};
use clap::ValueEnum;
use serde_json::json;
use std::{
    fmt::Arguments,
    io::{IsTerminal, Write},
    sync::atomic::{AtomicBool, Ordering},
};
use tracing::{Level, Metadata};
use tracing_subscriber::{
    Registry,
    filter::{ParseError, Targets, filter_fn},
    fmt::{
        format::Writer,
        time::{FormatTime, SystemTime},
    },
    prelude::*,
};

/// The environment variable with the log filter.
const FILTER_VARIABLE: &str = "TENSOR_RELAY_LOG";

/// The format of stderr.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines of text.
    Text,
    /// One JSON object per line, with `timestamp`, `level`, `target` and `message`.
    Json,
}

/// Whether stderr is JSON. Set once the command line and the configuration are read: earlier errors are text.
static IS_JSON: AtomicBool = AtomicBool::new(false);

/// Writes a message of a command to stderr: as plain text, or as a JSON object like that of a log event. The level of
/// the object is WARN or ERROR for the prefixes `warning: ` and `error: `, else INFO.
macro_rules! message {
    ($($message:tt)*) => { $crate::log::write(format_args!($($message)*)) };
}
pub(crate) use message;

/// Starts logging to stderr: warnings by default, `info` with `-v`, `debug` with `-vv`. `TENSOR_RELAY_LOG` overrides
/// this level.
pub(crate) fn to_stderr(verbose: u8, format: LogFormat) -> Result<(), UsageError> {
    IS_JSON.store(format == LogFormat::Json, Ordering::Relaxed);
    let default = match verbose {
        0 => Level::WARN,
        1 => Level::INFO,
        _ => Level::DEBUG,
    };
    let filter = match config::variable::value_of(FILTER_VARIABLE) {
        Some(filter) => log_filter(&filter.to_string_lossy())?,
        None => Targets::new().with_default(default),
    };
    let lines = tracing_subscriber::fmt::layer().with_writer(|| output::Stderr);
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
        .with(admin::recorder())
        .with(filter_fn(is_free_of_secrets));
    // Fails if the process has a log already, e.g. a Python program with a client that runs a command.
    let _ = log.try_init();
    Ok(())
}

/// Writes `message` to stderr; see [`message!`].
pub(crate) fn write(message: Arguments<'_>) {
    let _ = output::Stderr.write_all(formatted(&message.to_string()).as_bytes()); // It never fails.
}

/// The line of a message.
pub(crate) fn formatted(message: &str) -> String {
    match IS_JSON.load(Ordering::Relaxed) {
        true => as_json(message) + "\n",
        false => format!("{message}\n"),
    }
}

fn as_json(text: &str) -> String {
    let levels = [("error: ", "ERROR"), ("warning: ", "WARN")];
    let found = levels
        .iter()
        .find_map(|(prefix, level)| Some((*level, text.strip_prefix(prefix)?)));
    let (level, message) = found.unwrap_or(("INFO", text));
    let mut timestamp = String::new();
    let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp)); // Writing to a string cannot fail.
    let line =
        json!({ "timestamp": timestamp, "level": level, "target": "tensor_relay", "message": message });
    line.to_string()
}

/// The filter that `text` describes: a level, and levels by module, separated by commas. Fields and spans are no part of
/// it.
fn log_filter(text: &str) -> Result<Targets, UsageError> {
    let parts: Vec<&str> = text.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
    let is_known = |part: &&str| {
        let (module, level) = part.split_once('=').unwrap_or((part, "trace"));
        !level.is_empty() && module.chars().all(|c| c.is_ascii_alphanumeric() || "_:-.".contains(c))
    };
    let filter = match parts.iter().find(|part| !is_known(part)) {
        Some(part) => Err(format!("{part:?} is neither a level nor a module with one")),
        None => parts.join(",").parse().map_err(|error: ParseError| error.to_string()),
    };
    filter.map_err(|error| {
        UsageError(format!(
            "the environment variable {FILTER_VARIABLE} cannot be {text:?}: {error}; write a level (error, warn, info, \
             debug, trace), or levels by module, such as `info,tensor_relay_client=debug`"
        ))
    })
}

/// Whether an event may be logged, regardless of the filter. At level `trace`, quinn logs the content of every frame; a
/// logged stateless reset token would let any reader of the log end the connection.
fn is_free_of_secrets(metadata: &Metadata<'_>) -> bool {
    *metadata.level() != Level::TRACE || !metadata.target().starts_with("quinn_proto")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_levels_by_module_and_nothing_else() {
        for text in [
            "info,tensor_relay_client=debug",
            " info, tensor_relay_client=debug,",
            "tensor_relay_client=debug,info",
        ] {
            let filter = log_filter(text).unwrap();
            assert!(filter.would_enable("tensor_relay_client::session", &Level::DEBUG), "{text}");
            assert!(
                filter.would_enable("quinn", &Level::INFO) && !filter.would_enable("quinn", &Level::DEBUG),
                "{text}"
            );
        }
        for text in [
            "[transfer]=debug",
            "quinn[session{peer=a}]=debug",
            "*=debug",
            "quinn=",
            "quinn=loud",
            "info debug",
        ] {
            assert!(log_filter(text).is_err(), "{text}");
        }
    }

    #[test]
    fn messages_have_a_level_in_json() {
        let event = |text| serde_json::from_str::<serde_json::Value>(&as_json(text)).unwrap();
        let warning = event("warning: the disk is full");
        assert_eq!((&warning["level"], &warning["message"]), (&json!("WARN"), &json!("the disk is full")));
        assert_eq!(event("error: no")["level"], "ERROR");
        let info = event("serving \"x\"");
        assert_eq!((&info["level"], &info["message"]), (&json!("INFO"), &json!("serving \"x\"")));
        assert!(
            info["timestamp"]
                .as_str()
                .is_some_and(|at| at.starts_with("20") && at.ends_with('Z')),
            "{info}"
        );
    }
}
