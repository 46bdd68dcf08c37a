//! Two hosts on one Ethernet, as network namespaces of this machine.

use super::{Home, Process};
use std::{
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

/// Counts the networks of this process, so that their names differ.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// A link of MTU 1500 between a server's host and a client's. It is taken down when this is dropped.
pub struct Lan {
    server: String,
    client: String,
}

/// One end of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Host {
    /// Where servers run: [`Lan::SERVER`].
    Server,
    /// Where clients run: [`Lan::CLIENT`].
    Client,
}

impl Lan {
    /// The address of the server's host.
    pub const SERVER: &str = "10.47.47.1";
    /// The address of the client's host at first.
    pub const CLIENT: &str = "10.47.47.2";
    /// Another address that it may take.
    pub const CLIENT_MOVED: &str = "10.47.47.3";

    /// Makes the hosts and the link; an error says why this system does not let it.
    pub fn new() -> Result<Self, String> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |host: &str| format!("relay-{}-{number}-{host}", std::process::id());
        let lan = Self { server: name("s"), client: name("c") };
        try_ip(&["netns", "add", &lan.server])?;
        try_ip(&["netns", "add", &lan.client])?;
        let peer = ["peer", "name", "lan", "netns", &lan.client];
        let link = [&["-n", &lan.server, "link", "add", "lan", "mtu", "1500", "type", "veth"][..], &peer];
        try_ip(&link.concat())?;
        lan.give_address(Host::Server, Self::SERVER);
        lan.give_address(Host::Client, Self::CLIENT);
        lan.set_up(Host::Server, true);
        lan.set_up(Host::Client, true);
        Ok(lan)
    }

    /// Bounds the rate of what the server's host sends. An error says that this system cannot.
    pub fn limit_rate(&self, megabits: u32) -> Result<(), String> {
        let rate = format!("{megabits}mbit");
        let shape = ["dev", "lan", "root", "tbf", "rate", &rate, "burst", "256kb", "latency", "50ms"];
        let words = [&["netns", "exec", &self.server, "tc", "qdisc", "replace"][..], &shape];
        try_ip(&words.concat())
    }

    /// Pulls the cable of a host, or puts it back.
    pub fn set_up(&self, host: Host, up: bool) {
        let state = if up { "up" } else { "down" };
        try_ip(&["-n", self.name(host), "link", "set", "lan", state]).unwrap();
    }

    /// Gives a host one more address.
    pub fn give_address(&self, host: Host, address: &str) {
        let address = format!("{address}/24");
        try_ip(&["-n", self.name(host), "address", "add", &address, "dev", "lan"]).unwrap();
    }

    /// Takes an address from a host. Others that it has stay.
    pub fn take_address(&self, host: Host, address: &str) {
        let keep = format!("net.ipv4.conf.lan.{PROMOTE}=1");
        try_ip(&["netns", "exec", self.name(host), "sysctl", "-qw", &keep]).unwrap();
        let address = format!("{address}/24");
        try_ip(&["-n", self.name(host), "address", "delete", &address, "dev", "lan"]).unwrap();
    }

    /// Drops what comes to the server's host over these protocols ("udp", "tcp"), and nothing else any more. An error says
    /// that this system cannot.
    pub fn drop_protocols(&self, protocols: &[&str]) -> Result<(), String> {
        self.filter(Host::Server, protocols.iter().map(|protocol| format!("meta l4proto {protocol} drop")))
    }

    /// Loses this fraction, in percent, of what comes to the client's host over `protocol`.
    pub fn lose(&self, protocol: &str, percent: u32) -> Result<(), String> {
        let rule = format!("meta l4proto {protocol} numgen random mod 100 < {percent} drop");
        self.filter(Host::Client, [rule])
    }

    /// Drops what comes to the server's host over `protocol` in packets of more than `bytes`.
    pub fn drop_larger(&self, protocol: &str, bytes: u32) -> Result<(), String> {
        self.filter(Host::Server, [format!("meta l4proto {protocol} meta length > {bytes} drop")])
    }

    /// Leads what comes to the server's host over `protocol` for one port to another.
    pub fn redirect(&self, protocol: &str, from: u16, to: u16) -> Result<(), String> {
        let rules = format!(
            "add table ip relay_nat\nadd chain ip relay_nat prerouting {{ type nat hook prerouting priority -100; }}\n\
             add rule ip relay_nat prerouting {protocol} dport {from} redirect to :{to}"
        );
        try_ip(&["netns", "exec", self.name(Host::Server), "nft", &rules])
    }

    /// Puts these rules of nftables on what comes to a host, in place of others.
    fn filter(&self, host: Host, rules: impl IntoIterator<Item = String>) -> Result<(), String> {
        let rules: String = rules
            .into_iter()
            .map(|rule| format!("add rule inet relay input {rule}\n"))
            .collect();
        let rules = format!(
            "add table inet relay\ndelete table inet relay\nadd table inet relay\n\
             add chain inet relay input {{ type filter hook input priority 0; }}\n{rules}"
        );
        try_ip(&["netns", "exec", self.name(host), "nft", &rules])
    }

    /// Starts the program with `words` on a host. The process is the program itself.
    pub fn start(&self, host: Host, home: &Home, words: &[&str]) -> Process {
        let mut command = home.at_home(Command::new("ip"));
        command
            .args(["netns", "exec", self.name(host)])
            .arg(home.program().get_program())
            .args(words);
        Process::start(command)
    }

    fn name(&self, host: Host) -> &str {
        match host {
            Host::Server => &self.server,
            Host::Client => &self.client,
        }
    }
}

/// Lets the second address of a network live on when the first goes.
const PROMOTE: &str = "promote_secondaries";

impl Drop for Lan {
    fn drop(&mut self) {
        // The link goes with the host at either end. What was never made cannot be deleted.
        for name in [&self.server, &self.client] {
            let _ = try_ip(&["netns", "delete", name]);
        }
    }
}

fn try_ip(words: &[&str]) -> Result<(), String> {
    let done = Command::new("ip")
        .args(words)
        .output()
        .map_err(|e| format!("no `ip` can be run: {e}"))?;
    match done.status.success() {
        true => Ok(()),
        false => Err(format!("ip {}: {}", words.join(" "), String::from_utf8_lossy(&done.stderr).trim())),
    }
}
