//! The network between the serving and the receiving end: loopback, or a virtual link with rate, loss and delay.

pub mod delay;
mod link;
mod namespaces;
mod units;

use crate::{
    contender::{LOOPBACK_MTU, MTU_RANGE},
    process::Process,
    program::Program,
};
use anyhow::Result;
use namespaces::Namespaces;
use serde::Serialize;
use std::{fmt, net::Ipv4Addr};
use tokio::process::Command;

/// The requested network.
#[derive(Debug, Clone, Serialize, clap::Args)]
pub struct NetworkArgs {
    /// Puts the two ends into network namespaces joined by a virtual cable of the right MTU. Needs root and `ip`.
    #[arg(long, help_heading = "Network")]
    pub namespaces: bool,
    /// The UDP payload of a full packet: the link's MTU minus 28.
    #[arg(long, default_value_t = LOOPBACK_MTU, value_parser = clap::value_parser!(u16).range(MTU_RANGE), help_heading = "Network")]
    pub mtu: u16,
    /// The rate of the cable, e.g. 1Gbit or 10Gbit; by default unlimited. Needs `tc`.
    #[arg(long, value_parser = units::parse_rate, requires = "namespaces", help_heading = "Network")]
    #[serde(rename = "rate_bits_per_s")]
    pub rate: Option<u64>,
    /// Splits batches into single packets before they enter the cable, as a network card does. Otherwise each batch is
    /// carried, received and lost as one.
    #[arg(long, requires = "namespaces", help_heading = "Network")]
    pub segments: bool,
    /// The percentage of data packets (without --segments, of batches) that are lost, e.g. 0.1. Needs `nft`.
    #[arg(long, value_name = "PERCENT", value_parser = units::parse_loss, requires = "namespaces", help_heading = "Network")]
    #[serde(rename = "loss_percent")]
    pub loss: Option<f64>,
    /// The one-way delay in milliseconds: half of the round trip. Packets then pass through a process of this program,
    /// which takes CPU time. Needs /dev/net/tun.
    #[arg(long, value_name = "MS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=10_000), requires = "namespaces", help_heading = "Network")]
    pub delay_ms: u32,
}

/// The end of the network at which a process runs. The payload goes from the serving to the receiving end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Serving,
    Receiving,
}

/// The network between both ends. Dropping it removes its namespaces and its bridge. A harness that is killed by
/// SIGKILL leaves the namespaces behind; `ip netns delete` removes them.
pub(crate) struct Network {
    /// The bridge that delays packets. Dropped before its namespaces.
    _bridge: Option<Process>,
    /// `None` on loopback.
    namespaces: Option<Namespaces>,
}

impl Network {
    /// Creates the network that `args` describe. `this` is the running program, which is started again as the bridge.
    ///
    /// # Errors
    /// When a tool or the privilege to use it is missing.
    pub(crate) async fn new(args: &NetworkArgs, this: &Program) -> Result<Self> {
        if !args.namespaces {
            return Ok(Self { _bridge: None, namespaces: None });
        }
        let namespaces = Namespaces::new()?;
        let bridge = match args.delay_ms {
            0 => {
                link::add_veth_pair(&namespaces)?;
                None
            }
            delay_ms => Some(link::start_bridge(&namespaces, this, delay_ms).await?),
        };
        link::set_up(&namespaces, args)?;
        Ok(Self { _bridge: bridge, namespaces: Some(namespaces) })
    }

    /// The address of servers at the serving end.
    pub(crate) fn server_ip(&self) -> Ipv4Addr {
        match self.namespaces {
            None => Ipv4Addr::LOCALHOST,
            Some(_) => link::address(Side::Serving),
        }
    }

    /// A command that runs `program` at `side`.
    pub(crate) fn command(&self, side: Side, program: &Program) -> Command {
        match &self.namespaces {
            None => program.command(),
            Some(namespaces) => namespaces.command(side, program),
        }
    }
}

impl fmt::Display for NetworkArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { namespaces, mtu, rate, segments, loss, delay_ms } = self;
        let link = if *namespaces { "a virtual cable" } else { "loopback" };
        write!(f, "{link}, {mtu} bytes a packet")?;
        if let Some(rate) = rate {
            write!(f, ", {}", units::rate_text(*rate))?;
        }
        if *segments {
            write!(f, ", packets one by one")?;
        }
        if let Some(loss) = loss {
            let what = if *segments { "packets" } else { "batches" };
            write!(f, ", {loss} % of {what} lost")?;
        }
        match delay_ms {
            0 => Ok(()),
            ms => write!(f, ", {ms} ms either way"),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: NetworkArgs,
    }

    pub(crate) fn parsed(arguments: &str) -> Result<NetworkArgs, clap::Error> {
        Cli::try_parse_from(arguments.split(' ')).map(|cli| cli.args)
    }

    #[test]
    fn a_network_is_formatted_and_serialised() {
        let arguments = "x --namespaces --mtu=1472 --rate=5Gbit --segments --loss=0.1 --delay-ms=50";
        let args = parsed(arguments).unwrap();
        let expected = "a virtual cable, 1472 bytes a packet, 5 Gbit/s, packets one by one, 0.1 % of packets lost, 50 ms either way";
        assert_eq!(args.to_string(), expected);
        let json = serde_json::to_value(&args).unwrap();
        assert_eq!(
            (&json["rate_bits_per_s"], &json["loss_percent"]),
            (&5_000_000_000u64.into(), &0.1.into())
        );
        assert_eq!(parsed("x").unwrap().to_string(), "loopback, 65000 bytes a packet");
    }

    #[test]
    fn loopback_cannot_be_shaped() {
        for option in ["--rate=1Gbit", "--segments", "--loss=1", "--delay-ms=5"] {
            assert!(parsed(&format!("x {option}")).is_err(), "{option}");
        }
    }
}
