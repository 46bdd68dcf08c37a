//! What lies between the two sides.

use anyhow::{Context, Result, bail};
use std::{ffi::OsStr, net::Ipv4Addr};
use tokio::process::Command;

/// The way from the serving to the receiving side.
pub(crate) enum Network {
    /// The loopback device, whose MTU is 65,536.
    Loopback,
    /// Two namespaces and a virtual cable.
    Cable(Cable),
}

impl Network {
    /// Prepares the network for UDP payloads of `mtu` bytes.
    pub(crate) fn new(namespaces: bool, mtu: u16) -> Result<Self> {
        if namespaces { Cable::new(mtu).map(Self::Cable) } else { Ok(Self::Loopback) }
    }

    /// Where the serving side listens.
    pub(crate) fn server_ip(&self) -> Ipv4Addr {
        match self {
            Self::Loopback => Ipv4Addr::LOCALHOST,
            Self::Cable(_) => SERVER_IP,
        }
    }

    /// A command that runs `program` where the serving side belongs.
    pub(crate) fn server_command(&self, program: impl AsRef<OsStr>) -> Command {
        match self {
            Self::Loopback => Command::new(program),
            Self::Cable(cable) => within(&cable.server, program),
        }
    }

    /// A command that runs `program` where the receiving side belongs.
    pub(crate) fn client_command(&self, program: impl AsRef<OsStr>) -> Command {
        match self {
            Self::Loopback => Command::new(program),
            Self::Cable(cable) => within(&cable.client, program),
        }
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

/// A command that runs `program` inside of `namespace`. `ip` becomes the program, so its handle kills it.
fn within(namespace: &str, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", namespace]).arg(program);
    command
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
