//! The bounds of `serve` that `tensor-relay config` shows: the limits on the memory and work that clients can cause,
//! with their reasons.

use super::Layers;
use crate::{
    args::{Args, Command},
    serve,
    subscribe::print_line,
    units,
};
use clap::FromArgMatches;
use serde_json::{Value, json};
use std::time::Duration;
use tensor_relay_server::{Amount, Bound};

/// The bounds of `serve` with the effective configuration.
pub(super) struct ServeBounds {
    bounds: Vec<Bound>,
    memory_bytes_max: u64,
}

impl ServeBounds {
    /// The bounds with the options in `layers`.
    ///
    /// # Errors
    /// When a variable has an invalid value.
    pub(super) fn of(layers: &Layers) -> anyhow::Result<Self> {
        let argv = ["tensor-relay", "serve"];
        let matches = layers.command(&[]).try_get_matches_from(argv)?;
        let Command::Serve(args) = Args::from_arg_matches(&matches)?.command else {
            anyhow::bail!("internal error: `serve` was parsed as another command");
        };
        let config = serve::server_config(&args);
        Ok(Self { memory_bytes_max: config.memory_bytes_max(), bounds: config.bounds() })
    }

    pub(super) fn as_json(&self) -> Value {
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
        let bounds: Vec<Value> = self.bounds.iter().map(of).collect();
        json!({ "memory_bytes_max": self.memory_bytes_max, "bounds": bounds })
    }

    /// Prints a table, and the total memory.
    pub(super) fn print(&self) {
        let title = ["BOUND OF SERVE", "AT MOST", "MEMORY"].map(String::from);
        let rows: Vec<[String; 3]> = self.bounds.iter().map(row).collect();
        let width = |column: usize| {
            let lengths = rows.iter().chain([&title]).map(|row| row[column].chars().count());
            lengths.max().unwrap_or(0)
        };
        let (name, max, memory) = (width(0), width(1), width(2));
        let print = |[a, b, c]: &[String; 3], reason: &str| {
            print_line(&format!("{a:name$}  {b:max$}  {c:memory$}  {reason}"));
        };
        print_line("");
        print(&title, "WHY");
        rows.iter()
            .zip(&self.bounds)
            .for_each(|(cells, bound)| print(cells, bound.reason));
        print_line(&format!(
            "memory in addition to versions: at most {}",
            units::bytes(self.memory_bytes_max)
        ));
    }
}

fn row(bound: &Bound) -> [String; 3] {
    let max = match bound.max {
        Amount::Count(count) => count.to_string(),
        Amount::Bytes(bytes) => units::bytes(bytes),
        Amount::Ms(ms) => units::time(Duration::from_millis(ms)),
    };
    let memory = match bound.memory_bytes {
        0 => String::new(),
        bytes => units::bytes(bytes),
    };
    [bound.name.into(), max, memory]
}
