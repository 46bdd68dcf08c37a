//! What lies between the two sides.

use crate::{
    contender::{LOOPBACK_MTU, MTU_RANGE},
    program::Program,
};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::{ffi::OsStr, fmt, net::Ipv4Addr};
use tokio::process::Command;

/// The network that is asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, clap::Args)]
pub struct NetworkArgs {
    /// Puts the two ends into network namespaces joined by a virtual cable of the right MTU. Needs root and `ip`.
    #[arg(long)]
    pub namespaces: bool,
    /// The UDP payload of a full packet: the link's MTU minus 28.
    #[arg(long, default_value_t = LOOPBACK_MTU, value_parser = clap::value_parser!(u16).range(MTU_RANGE))]
    pub mtu: u16,
}

/// Which end of the network a process is at. Bytes go from the serving to the receiving end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Serving,
    Receiving,
}

/// The way from the serving to the receiving end.
pub(crate) enum Network {
    /// The loopback device, whose MTU is 65,536.
    Loopback,
    /// Two namespaces and a virtual cable.
    Cable(Cable),
}

impl Network {
    /// Prepares the network that `args` ask for.
    ///
    /// # Errors
    /// When a tool is missing, or the right to make namespaces.
    pub(crate) fn new(args: &NetworkArgs) -> Result<Self> {
        if args.namespaces { Cable::new(args.mtu).map(Self::Cable) } else { Ok(Self::Loopback) }
    }

    /// Where what is at the serving end listens.
    pub(crate) fn server_ip(&self) -> Ipv4Addr {
        match self {
            Self::Loopback => Ipv4Addr::LOCALHOST,
            Self::Cable(_) => SERVER_IP,
        }
    }

    /// A command that runs `program` at `end`.
    pub(crate) fn command(&self, end: End, program: &Program) -> Command {
        let mut words = program.words();
        match self {
            Self::Loopback => {
                let mut command = Command::new(words.next().expect("a program is at least its executable"));
                command.args(words);
                command
            }
            Self::Cable(cable) => cable.command(end, words),
        }
    }
}

impl fmt::Display for NetworkArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let network = if self.namespaces { "a virtual cable" } else { "loopback" };
        write!(f, "{network}, {} bytes a packet", self.mtu)
    }
}

/// Two network namespaces joined by a pair of virtual devices; dropping it removes them. Only a harness that is killed
/// by SIGKILL leaves them behind, for `ip netns delete`.
pub(crate) struct Cable {
    server: String,
    client: String,
}

impl Cable {
    fn new(mtu: u16) -> Result<Self> {
        let name = |side| format!("relay-bench-{}-{side}", std::process::id());
        let cable = Self { server: name("server"), client: name("client") };
        let Self { server, client } = &cable;
        ip(&format!("netns add {server}"))?;
        ip(&format!("netns add {client}"))?;
        ip(&format!("link add {DEVICE} netns {server} type veth peer name {DEVICE} netns {client}"))?;
        for (namespace, address) in [(server, SERVER_IP), (client, CLIENT_IP)] {
            let mtu = u32::from(mtu) + HEADER_BYTES;
            ip(&format!("-n {namespace} addr add {address}/24 dev {DEVICE}"))?;
            ip(&format!("-n {namespace} link set {DEVICE} mtu {mtu} up"))?;
        }
        Ok(cable)
    }

    /// A command of `words` inside of the namespace at `end`. `ip` becomes the program, so its handle kills it.
    fn command<'a>(&self, end: End, words: impl Iterator<Item = &'a OsStr>) -> Command {
        let namespace = match end {
            End::Serving => &self.server,
            End::Receiving => &self.client,
        };
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace]).args(words);
        command
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for namespace in [&self.server, &self.client] {
            if let Err(error) = ip(&format!("netns delete {namespace}")) {
                eprintln!("{error:#}");
            }
        }
    }
}

/// Runs `ip`, which takes milliseconds.
fn ip(arguments: &str) -> Result<()> {
    let output = std::process::Command::new("ip").args(arguments.split(' ')).output();
    let output = output.context("cannot run `ip`, which --namespaces needs: install iproute2")?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        bail!("`ip {arguments}` failed (--namespaces needs root): {}", reason.trim());
    }
    Ok(())
}

const DEVICE: &str = "relay0";
const SERVER_IP: Ipv4Addr = Ipv4Addr::new(10, 213, 0, 1);
const CLIENT_IP: Ipv4Addr = Ipv4Addr::new(10, 213, 0, 2);

/// What IPv4 and UDP add to a payload.
const HEADER_BYTES: u32 = 28;
