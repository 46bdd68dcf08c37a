//! The bounds of `serve` that `tensor-relay config` shows: the limits on the memory and work that clients can cause,
//! with their reasons.

use super::Layers;
use crate::{
    args::{Args, Command},
    serve,
    subscribe::print_line,
    table, units,
};
use clap::FromArgMatches;
use serde_json::{Value, json};
use std::time::Duration;
use tensor_relay_server::{Amount, Bound, Config};

/// The configuration of `serve` with the options in `layers`.
///
/// # Errors
/// When a variable has an invalid value.
pub(super) fn server_config(layers: &Layers) -> anyhow::Result<Config> {
    let matches = layers.command(&[]).try_get_matches_from(["tensor-relay", "serve"])?;
    match Args::from_arg_matches(&matches)?.command {
        Command::Serve(args) => Ok(serve::server_config(&args)),
        _ => anyhow::bail!("internal error: `serve` was parsed as another command"),
    }
}

pub(super) fn as_json(config: &Config) -> Value {
    let of = |bound: &Bound| {
        let (unit, max) = match bound.max {
            Amount::Count(count) => ("count", count),
            Amount::Bytes(bytes) => ("bytes", bytes),
            Amount::Ms(ms) => ("ms", ms),
        };
        json!({
            "bound": bound.name,
            "most": max,
            "unit": unit,
            "memory_bytes": bound.memory_bytes,
            "reason": bound.reason,
        })
    };
    let bounds: Vec<Value> = config.bounds().iter().map(of).collect();
    json!({ "memory_bytes_max": config.memory_bytes_max(), "bounds": bounds })
}

/// Prints a table, and the total memory.
pub(super) fn print(config: &Config) {
    let row = |bound: &Bound| {
        let max = match bound.max {
            Amount::Count(count) => count.to_string(),
            Amount::Bytes(bytes) => units::bytes(bytes),
            Amount::Ms(ms) => units::time(Duration::from_millis(ms)),
        };
        let memory = if bound.memory_bytes == 0 { String::new() } else { units::bytes(bound.memory_bytes) };
        [bound.name.into(), max, memory, bound.reason.into()]
    };
    print_line("");
    let rows: Vec<_> = config.bounds().iter().map(row).collect();
    table::print(["BOUND OF SERVE", "AT MOST", "MEMORY", "WHY"], &rows);
    let all = units::bytes(config.memory_bytes_max());
    print_line(&format!("memory in addition to versions: at most {all}"));
}
