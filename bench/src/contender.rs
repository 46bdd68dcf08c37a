//! The interface of a contender: two commands, and the JSON lines that they print.
//!
//! `serve` holds bytes and sends them on request; `receive` requests them once a round, for several rounds on one
//! connection, and writes them into its memory. Each prints JSON, one object a line, on its standard output, for the
//! harness (or a person with `jq`); other output goes to standard error. Lines may have fields that the harness does
//! not know: further numbers of the round.
//!
//! Before the rounds, a receiver can request small messages, one after the other, preceded by a tenth as many to warm
//! up. Their latency is the time from the beginning of sending until the receiver has the complete message: both
//! processes are on one machine with one clock, and the message carries the time at which its sending began. The
//! request is not included.

use crate::{cells::Cells, cpu, origin::Origin, size};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{net::SocketAddr, ops::RangeInclusive, time::Instant};

/// The options of a server.
#[derive(Debug, Clone, clap::Args)]
pub struct ServeArgs {
    /// The address to listen on; port 0 lets the system choose.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// The number of bytes in a round, e.g. 1GiB.
    #[arg(long, default_value_t = 0, value_parser = size::parse)]
    pub bytes: u64,
    /// The UDP payload of a full packet: the link's MTU minus 28.
    #[arg(long, default_value_t = LOOPBACK_MTU, value_parser = clap::value_parser!(u16).range(MTU_RANGE))]
    pub mtu: u16,
}

/// The options of a receiver, besides the server's address.
#[derive(Debug, Clone, clap::Args)]
pub struct ReceiveArgs {
    /// The size of a round; the same as the server's.
    #[arg(long, default_value_t = 0, value_parser = size::parse)]
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

/// The options of a receiver that is given an address, and no ticket.
#[derive(Debug, Clone, clap::Args)]
pub struct ConnectArgs {
    /// The address of the server.
    #[arg(long)]
    pub connect: SocketAddr,
    /// The options of every receiver.
    #[command(flatten)]
    pub receive: ReceiveArgs,
}

/// The first line of a server, printed once it holds its bytes and listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Always true: the field identifies the line.
    pub ready: bool,
    /// The port that the server listens on.
    pub port: u16,
    /// The ticket that receivers need. Without one, they connect to the port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ticket: Option<String>,
    /// The clock of its machine, if receivers may be on another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock: Option<String>,
}

/// The line that a server prints after each round.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Sent {
    /// The sent bytes: those of one receiver.
    pub bytes: u64,
    /// CPU seconds of the server, from the request until it knows that the receivers have all bytes.
    pub cpu_s: f64,
    /// Seconds until it knew that all receivers have all bytes, if the server began the round.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// What a server and a receiver of tensor-relay add.
    #[serde(flatten)]
    pub(crate) side: SideFacts,
    /// Further measurements of the round, by name.
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
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
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
    /// The bytes of versions that it was not sent, because newer ones were available.
    #[serde(default)]
    pub missed_bytes: u64,
    /// What a server and a receiver of tensor-relay add.
    #[serde(flatten)]
    pub(crate) side: SideFacts,
    /// Further measurements of the round, by name.
    #[serde(flatten)]
    pub(crate) more: Cells<f64>,
}

/// What a side of tensor-relay adds to its lines.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SideFacts {
    /// A hash of the version: both sides must have the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) hash: Option<String>,
    /// Measurements of the process and its connection, by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) process: Option<Cells<f64>>,
    /// Its machine and build.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) machine: Option<Origin>,
}

impl Ready {
    /// The line of a server at `port`.
    pub fn at(port: u16) -> Self {
        Self { ready: true, port, ticket: None, clock: None }
    }
}

impl Sent {
    /// The line for a round that began at `begun` and ends now.
    pub fn since(begun: Begun, bytes: u64) -> Self {
        Self { bytes, cpu_s: begun.cpu_s(), ..Self::default() }
    }
}

impl Received {
    /// The line for round number `round`, which began at `begun` and ends now.
    pub fn since(begun: Begun, round: u32, bytes: u64) -> Self {
        Self { round, bytes, cpu_s: begun.cpu_s(), ..Self::default() }.within(begun.seconds())
    }

    /// The same round, which took `seconds`.
    pub(crate) fn within(self, seconds: f64) -> Self {
        Self { seconds, gb_per_s: self.bytes as f64 / seconds / 1e9, ..self }
    }
}

/// The beginning of a round: the wall-clock time, and the CPU time used before.
#[derive(Debug, Clone, Copy)]
pub struct Begun {
    instant: Instant,
    used_s: f64,
}

impl Begun {
    /// The current moment.
    pub fn now() -> Self {
        Self { instant: Instant::now(), used_s: cpu::used_s() }
    }

    /// The seconds since then.
    pub(crate) fn seconds(self) -> f64 {
        self.instant.elapsed().as_secs_f64()
    }

    /// The CPU seconds of this process since then.
    pub fn cpu_s(self) -> f64 {
        cpu::used_s() - self.used_s
    }
}

/// Parses an argument that the harness wrote as JSON.
///
/// # Errors
/// When `text` is no `T`.
pub fn from_json<T: DeserializeOwned>(text: &str) -> Result<T, serde_json::Error> {
    serde_json::from_str(text)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines of other programs and of older builds have fewer fields, or further numbers.
    #[test]
    fn lines_with_fewer_fields_are_read() {
        let sent: Sent = serde_json::from_str(r#"{"bytes":7,"cpu_s":0.5,"looks":3.0}"#).unwrap();
        assert_eq!((sent.more.get("looks"), sent.seconds), (Some(&3.0), None));
        let line = r#"{"round":1,"bytes":7,"seconds":1,"gb_per_s":2,"cpu_s":0.5}"#;
        let received: Received = serde_json::from_str(line).unwrap();
        assert_eq!((received.missed_bytes, received.side), (0, SideFacts::default()));
        let ready: Ready = serde_json::from_str(r#"{"ready":true,"port":9}"#).unwrap();
        assert_eq!(ready, Ready::at(9));
    }

    #[test]
    fn printed_lines_are_read_again() {
        let side = SideFacts {
            hash: Some("aa".into()),
            process: Some(Cells::of([("a", 1.5)])),
            machine: Some(Origin::here()),
        };
        let received =
            Received { side, more: Cells::of([("b", 2.5)]), missed_bytes: 3, ..Received::default() };
        let text = serde_json::to_string(&received).unwrap();
        assert_eq!(serde_json::from_str::<Received>(&text).unwrap(), received);
    }
}
