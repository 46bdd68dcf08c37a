//! The link between two namespaces: its devices, and the rate, loss and delay of its packets.

use super::{NetworkArgs, Side, delay::DELAY_BRIDGE, namespaces::Namespaces, units};
use crate::{
    contender::Ready,
    process::{EXIT_ON_STDIN_EOF, Process},
    program::Program,
};
use anyhow::Result;
use std::{net::Ipv4Addr, process::Stdio, time::Duration};

/// The name of the network device in each namespace.
const DEVICE: &str = "relay0";

/// The address of `side`.
pub(super) fn address(side: Side) -> Ipv4Addr {
    match side {
        Side::Serving => Ipv4Addr::new(10, 213, 0, 1),
        Side::Receiving => Ipv4Addr::new(10, 213, 0, 2),
    }
}

/// Joins `namespaces` by a veth pair.
pub(super) fn add_veth_pair(namespaces: &Namespaces) -> Result<()> {
    let receiving = namespaces.name(Side::Receiving);
    namespaces.ip(Side::Serving, &format!("link add {DEVICE} type veth peer name {DEVICE} netns {receiving}"))
}

/// Joins `namespaces` by a process of `this` program that delays each packet.
///
/// The process creates both devices in its own namespace; the far one is then moved to the receiving end.
pub(super) async fn start_bridge(namespaces: &Namespaces, this: &Program, delay_ms: u32) -> Result<Process> {
    let far = "relay1";
    let mut command = namespaces.command(Side::Serving, this);
    command
        .args([EXIT_ON_STDIN_EOF, DELAY_BRIDGE, DEVICE, far])
        .arg(format!("--delay-ms={delay_ms}"));
    let mut bridge = Process::start("the delay bridge".into(), command, Stdio::piped())?;
    let Ready { .. } = bridge.line(BRIDGE_TIMEOUT).await?;
    let receiving = namespaces.name(Side::Receiving);
    namespaces.ip(Side::Serving, &format!("link set {far} netns {receiving} name {DEVICE}"))?;
    for side in [Side::Serving, Side::Receiving] {
        // Long enough to hold packets until the bridge's thread runs.
        namespaces.ip(side, &format!("link set {DEVICE} txqueuelen 10000"))?;
    }
    Ok(bridge)
}

/// Sets the addresses of both ends of the link, and the properties that `args` request.
pub(super) fn set_up(namespaces: &Namespaces, args: &NetworkArgs) -> Result<()> {
    let mtu = u32::from(args.mtu) + HEADER_BYTES;
    for side in [Side::Serving, Side::Receiving] {
        namespaces.ip(side, &format!("addr add {}/24 dev {DEVICE}", address(side)))?;
        if args.segments {
            // A batch of more segments than the device may send is split just before it is sent.
            namespaces.ip(side, &format!("link set {DEVICE} gso_max_segs 1"))?;
        }
        namespaces.ip(side, &format!("link set {DEVICE} mtu {mtu} up"))?;
        if let Some(rule) = token_bucket(args) {
            namespaces.tc(side, &format!("qdisc add dev {DEVICE} root {rule}"))?;
        }
    }
    match loss_rules(args) {
        Some(rules) => namespaces.nft(Side::Receiving, &rules),
        None => Ok(()),
    }
}

/// The queueing discipline that limits the rate, if the link has one.
///
/// The token bucket splits batches that are larger than itself. To keep batches together, the bucket is as large as the
/// largest batch; to split them, it is small on slow links, so that packets leave one by one. The bucket always covers
/// the delay of a late timer, which would otherwise reduce the rate.
fn token_bucket(args: &NetworkArgs) -> Option<String> {
    let rate = args.rate?;
    let bytes_in_us = |us: u64| (u128::from(rate) * u128::from(us) / 8_000_000) as u64;
    let frames = 4 * (u64::from(args.mtu) + u64::from(HEADER_BYTES) + 14);
    let burst = match args.segments {
        true => bytes_in_us(TIMER_DELAY_MAX_US).max(frames),
        false => bytes_in_us(TIMER_DELAY_MAX_US).max(BATCH_BYTES).max(frames),
    };
    // Five milliseconds of queue, like that of a switch, but at least 1 MiB.
    let limit = burst + bytes_in_us(5000).max(1 << 20);
    Some(format!("tbf rate {rate}bit burst {burst} limit {limit}"))
}

/// The nftables rules that drop a share of the packets from the serving end; `None` without loss.
fn loss_rules(args: &NetworkArgs) -> Option<String> {
    let per_million = units::per_million(args.loss?);
    let from = address(Side::Serving);
    Some(format!(
        "table ip relay {{ chain input {{ type filter hook input priority 0; \
         ip saddr {from} numgen random mod 1000000 < {per_million} drop; }}; }}"
    ))
}

/// The size of the headers of IPv4 and UDP.
const HEADER_BYTES: u32 = 28;

/// More than the size of any batch: at most 64 KiB of payload, and the headers of its packets.
const BATCH_BYTES: u64 = 128 << 10;

/// The maximum delay of a timer on a busy machine.
const TIMER_DELAY_MAX_US: u64 = 400;

/// The deadline for the bridge to make two devices.
const BRIDGE_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    fn args(rate: Option<&str>, segments: bool, loss: Option<&str>) -> NetworkArgs {
        NetworkArgs {
            namespaces: true,
            mtu: 1472,
            rate: rate.map(|rate| units::parse_rate(rate).unwrap()),
            segments,
            loss: loss.map(|loss| units::parse_loss(loss).unwrap()),
            delay_ms: 0,
        }
    }

    #[test]
    fn a_bucket_holds_a_batch_unless_batches_are_split() {
        let rule = |rate, segments| token_bucket(&args(Some(rate), segments, None)).unwrap();
        assert_eq!(rule("1Gbit", false), "tbf rate 1000000000bit burst 131072 limit 1179648");
        assert_eq!(rule("10Gbit", false), "tbf rate 10000000000bit burst 500000 limit 6750000");
        assert_eq!(rule("1Gbit", true), "tbf rate 1000000000bit burst 50000 limit 1098576");
        assert_eq!(rule("100Mbit", true), "tbf rate 100000000bit burst 6056 limit 1054632");
        assert_eq!(token_bucket(&args(None, true, None)), None);
    }

    #[test]
    fn only_packets_of_the_serving_end_are_lost() {
        let rules = loss_rules(&args(None, false, Some("1"))).unwrap();
        assert!(rules.contains("ip saddr 10.213.0.1 numgen random mod 1000000 < 10000 drop"), "{rules}");
        assert_eq!(loss_rules(&args(None, false, None)), None);
    }
}
