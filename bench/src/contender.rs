//! What anything that moves bytes must offer to be compared: two commands, and the lines that they print.
//!
//! `serve` holds bytes and sends them to whoever asks; `receive` asks, several rounds on one connection, and puts them
//! into memory that it has touched before. Each prints JSON, one object a line, on its standard output, so that a
//! harness (or a person with `jq`) can read along; whatever else they have to say goes to standard error.
//!
//! Before the rounds, a receiving side may be told to ask for small messages, one after the other, and before these for a
//! tenth as many that do not count. Their latency is the time from when the serving side begins to send until the
//! receiving side has the whole message: both are on one machine, have one clock, and the message carries the time at
//! which it was begun. What asks for it is not measured.

use crate::{cells::Cells, cpu::Usage, size};
use serde::{Deserialize, Serialize};
use std::{net::SocketAddr, ops::RangeInclusive, time::Instant};

/// What a serving side is told.
#[derive(Debug, Clone, clap::Args)]
pub struct ServeArgs {
    /// Where to listen; port 0 lets the system choose.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// How much to hold and to send in each round, e.g. 1GiB.
    #[arg(long, value_parser = size::parse)]
    pub bytes: u64,
    /// The UDP payload of a full packet: the link's MTU minus 28.
    #[arg(long, default_value_t = LOOPBACK_MTU, value_parser = clap::value_parser!(u16).range(MTU_RANGE))]
    pub mtu: u16,
}

/// What a receiving side is told.
#[derive(Debug, Clone, clap::Args)]
pub struct ReceiveArgs {
    /// Where the serving side listens.
    #[arg(long)]
    pub connect: SocketAddr,
    /// How much to receive in each round; the same as the serving side's.
    #[arg(long, value_parser = size::parse)]
    pub bytes: u64,
    /// The UDP payload of a full packet; the same as the serving side's.
    #[arg(long, default_value_t = LOOPBACK_MTU, value_parser = clap::value_parser!(u16).range(MTU_RANGE))]
    pub mtu: u16,
    /// How often to receive everything.
    #[arg(long, default_value_t = 5)]
    pub rounds: u32,
    /// How many messages of 4 KiB to ask for before that, to measure their latency.
    #[arg(long, default_value_t = 0)]
    pub small: u32,
}

/// The first line of a serving side: it holds its bytes and listens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ready {
    /// Always true; it makes the line readable without its context.
    pub ready: bool,
    /// Where it listens.
    pub port: u16,
}

/// A serving side's line after each round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sent {
    /// How much it sent.
    pub bytes: u64,
    /// The CPU seconds that this took, from the request to the last acknowledgement.
    pub cpu_s: f64,
    /// What else it measured, by name.
    #[serde(flatten)]
    pub(crate) more: Cells<f64>,
}

/// A receiving side's line on small messages, if it was told to ask for any. Times are microseconds from the beginning
/// of sending to having it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Small {
    /// How many there were.
    pub small: u32,
    /// What half of them took at most.
    pub p50_us: f64,
    /// What 99 of 100 took at most.
    pub p99_us: f64,
    /// What the fastest took.
    pub min_us: f64,
    /// What the slowest took.
    pub max_us: f64,
}

/// A receiving side's line after each round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Received {
    /// Which round it was, from 0.
    pub round: u32,
    /// How much arrived.
    pub bytes: u64,
    /// Seconds from the request until the last byte was in place.
    pub seconds: f64,
    /// 10^9 bytes per second.
    pub gb_per_s: f64,
    /// The CPU seconds that this took.
    pub cpu_s: f64,
    /// What else it measured, by name.
    #[serde(flatten)]
    pub(crate) more: Cells<f64>,
}

impl Sent {
    /// A round that began at `begun` and ends now.
    pub fn since(begun: Begun, bytes: u64) -> Self {
        Self { bytes, cpu_s: begun.cpu_s(), more: Cells::default() }
    }
}

impl Received {
    /// Round number `round`, which began at `begun` and ends now.
    pub fn since(begun: Begun, round: u32, bytes: u64) -> Self {
        let seconds = begun.instant.elapsed().as_secs_f64();
        let (gb_per_s, more) = (bytes as f64 / seconds / 1e9, Cells::default());
        Self { round, bytes, seconds, gb_per_s, cpu_s: begun.cpu_s(), more }
    }
}

/// The moment at which a round began, by both clocks.
#[derive(Debug, Clone, Copy)]
pub struct Begun {
    instant: Instant,
    usage: Usage,
}

impl Begun {
    /// This moment.
    pub fn now() -> Self {
        Self { instant: Instant::now(), usage: Usage::now() }
    }

    fn cpu_s(self) -> f64 {
        Usage::now().since(self.usage).total_s()
    }
}

/// Prints `line` for whoever reads along.
///
/// # Errors
/// When nobody does: standard output is closed.
pub fn print(line: &impl Serialize) -> anyhow::Result<()> {
    use std::io::Write;
    let text = serde_json::to_string(line)?;
    writeln!(std::io::stdout(), "{text}")?;
    Ok(())
}

/// What QUIC demands of any link, and what UDP over IPv4 can carry.
pub(crate) const MTU_RANGE: RangeInclusive<i64> = 1200..=65_507;

/// A payload that nearly fills loopback's MTU of 65,536.
pub const LOOPBACK_MTU: u16 = 65_000;
