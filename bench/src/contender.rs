//! The interface of a contender in a comparison: two commands, and the JSON lines that they print.
//!
//! `serve` holds bytes and sends them on request; `receive` requests them once a round, for several rounds on one
//! connection, and writes them into its memory. Each prints JSON, one object a line, on its standard output, for the
//! harness (or a person with `jq`); other output goes to standard error.
//!
//! Before the rounds, a receiver can request small messages, one after the other, preceded by a tenth as many to warm
//! up. Their latency is the time from the beginning of sending until the receiver has the complete message: both
//! processes are on one machine with one clock, and the message carries the time at which its sending began. The
//! request is not included.

use crate::{cells::Cells, cpu::Usage, size};
use serde::{Deserialize, Serialize};
use std::{net::SocketAddr, ops::RangeInclusive, time::Instant};

/// The options of a server.
#[derive(Debug, Clone, clap::Args)]
pub struct ServeArgs {
    /// The address to listen on; port 0 lets the system choose.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// The number of bytes in a round, e.g. 1GiB.
    #[arg(long, value_parser = size::parse)]
    pub bytes: u64,
    /// The UDP payload of a full packet: the link's MTU minus 28.
    #[arg(long, default_value_t = LOOPBACK_MTU, value_parser = clap::value_parser!(u16).range(MTU_RANGE))]
    pub mtu: u16,
}

/// The options of a receiver.
#[derive(Debug, Clone, clap::Args)]
pub struct ReceiveArgs {
    /// The address of the server.
    #[arg(long)]
    pub connect: SocketAddr,
    /// The size of a round; the same as the server's.
    #[arg(long, value_parser = size::parse)]
    pub bytes: u64,
    /// The UDP payload of a full packet; the same as the server's.
    #[arg(long, default_value_t = LOOPBACK_MTU, value_parser = clap::value_parser!(u16).range(MTU_RANGE))]
    pub mtu: u16,
    /// The number of rounds.
    #[arg(long, default_value_t = 5)]
    pub rounds: u32,
    /// The number of 4 KiB messages to request before the rounds, to measure their latency.
    #[arg(long, default_value_t = 0)]
    pub small: u32,
}

/// The first line of a server, printed once it holds its bytes and listens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ready {
    /// Always true: the field identifies the line.
    pub ready: bool,
    /// The port that the server listens on.
    pub port: u16,
}

/// The line that a server prints after each round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sent {
    /// The sent bytes.
    pub bytes: u64,
    /// CPU seconds of the server, from the request until it knows that the receiver has all bytes.
    pub cpu_s: f64,
    /// Further measurements, by name.
    #[serde(flatten)]
    pub(crate) more: Cells<f64>,
}

/// The line that a receiver prints after its small messages, if it requested any. Times are microseconds from the
/// beginning of sending until the receiver has the complete message.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SmallMessages {
    /// The number of messages.
    pub small: u32,
    /// The median.
    pub p50_us: f64,
    /// The 99th percentile.
    pub p99_us: f64,
    /// The fastest.
    pub min_us: f64,
    /// The slowest.
    pub max_us: f64,
}

/// The line that a receiver prints after each round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Received {
    /// The number of the round, from 0.
    pub round: u32,
    /// The received bytes.
    pub bytes: u64,
    /// Seconds from the request until the last byte was in place.
    pub seconds: f64,
    /// 10^9 bytes per second.
    pub gb_per_s: f64,
    /// CPU seconds of the receiver in the round.
    pub cpu_s: f64,
    /// Further measurements, by name.
    #[serde(flatten)]
    pub(crate) more: Cells<f64>,
}

impl Sent {
    /// The line for a round that began at `begun` and ends now.
    pub fn since(begun: Begun, bytes: u64) -> Self {
        Self { bytes, cpu_s: begun.cpu_s(), more: Cells::default() }
    }
}

impl Received {
    /// The line for round number `round`, which began at `begun` and ends now.
    pub fn since(begun: Begun, round: u32, bytes: u64) -> Self {
        let seconds = begun.instant.elapsed().as_secs_f64();
        let (gb_per_s, more) = (bytes as f64 / seconds / 1e9, Cells::default());
        Self { round, bytes, seconds, gb_per_s, cpu_s: begun.cpu_s(), more }
    }
}

/// The beginning of a round: the wall-clock time, and the CPU time used before.
#[derive(Debug, Clone, Copy)]
pub struct Begun {
    instant: Instant,
    usage: Usage,
}

impl Begun {
    /// The current moment.
    pub fn now() -> Self {
        Self { instant: Instant::now(), usage: Usage::now() }
    }

    fn cpu_s(self) -> f64 {
        Usage::now().since(self.usage).total_s()
    }
}

/// Prints `line` for the harness.
///
/// # Errors
/// When standard output is closed.
pub fn print(line: &impl Serialize) -> anyhow::Result<()> {
    use std::io::Write;
    let text = serde_json::to_string(line)?;
    writeln!(std::io::stdout(), "{text}")?;
    Ok(())
}

/// The smallest UDP payload that QUIC requires of any link, and the largest of UDP over IPv4.
pub(crate) const MTU_RANGE: RangeInclusive<i64> = 1200..=65_507;

/// A UDP payload that nearly fills loopback's MTU of 65,536.
pub const LOOPBACK_MTU: u16 = 65_000;
