//! Two hosts on one Ethernet, as network namespaces of this machine.

use super::{Home, Process, wait_until};
use std::{
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

/// The number of networks that this process has created: part of their names.
static CREATED: AtomicU32 = AtomicU32::new(0);

/// A link of MTU 1500 between a server's host and a client's, removed on drop.
pub struct Lan {
    server: String,
    client: String,
}

/// A host on the link.
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
    /// The initial address of the client's host.
    pub const CLIENT: &str = "10.47.47.2";
    /// Another address for the client's host.
    pub const CLIENT_MOVED: &str = "10.47.47.3";

    /// Creates the hosts and the link; the error says why this system does not permit it.
    pub fn new() -> Result<Self, String> {
        let number = next_number();
        let name = |host: &str| format!("relay-{}-{number}-{host}", std::process::id());
        let lan = Self { server: name("s"), client: name("c") };
        try_ip(&["netns", "add", &lan.server])?;
        try_ip(&["netns", "add", &lan.client])?;
        let peer = ["peer", "name", "lan", "netns", &lan.client];
        let link = [&["-n", &lan.server, "link", "add", "lan", "mtu", "1500", "type", "veth"][..], &peer];
        try_ip(&link.concat())?;
        lan.add_address(Host::Server, Self::SERVER);
        lan.add_address(Host::Client, Self::CLIENT);
        lan.set_link_up(Host::Server, true);
        lan.set_link_up(Host::Client, true);
        for host in [Host::Server, Host::Client] {
            // The only one that every kernel permits here. BBR, the default of some systems, is hardly slowed by losses.
            lan.set(host, "net.ipv4.tcp_congestion_control=reno")?;
        }
        Ok(lan)
    }

    /// Limits the sending rate of the server's host. Fails if this system does not support that. The queue holds 40 ms
    /// of slow rates, so that a lost packet is noticed and sent again within a second.
    pub fn limit_rate(&self, megabits: u32) -> Result<(), String> {
        let (rate, burst) = (format!("{megabits}mbit"), format!("{}kb", (5 * megabits).clamp(16, 256)));
        let shape = ["dev", "lan", "root", "tbf", "rate", &rate, "burst", &burst, "latency", "50ms"];
        let args = [&["netns", "exec", &self.server, "tc", "qdisc", "replace"][..], &shape];
        try_ip(&args.concat())
    }

    /// Connects a host to the link, or disconnects it.
    pub fn set_link_up(&self, host: Host, is_up: bool) {
        let state = if is_up { "up" } else { "down" };
        try_ip(&["-n", self.name(host), "link", "set", "lan", state]).unwrap();
    }

    /// Adds an address to a host.
    pub fn add_address(&self, host: Host, address: &str) {
        let address = format!("{address}/24");
        try_ip(&["-n", self.name(host), "address", "add", &address, "dev", "lan"]).unwrap();
    }

    /// Removes an address from a host; its other addresses remain.
    pub fn remove_address(&self, host: Host, address: &str) {
        self.set(host, &format!("net.ipv4.conf.lan.{PROMOTE_SECONDARIES}=1")).unwrap();
        let address = format!("{address}/24");
        try_ip(&["-n", self.name(host), "address", "delete", &address, "dev", "lan"]).unwrap();
    }

    /// Changes a setting of a host's kernel.
    fn set(&self, host: Host, setting: &str) -> Result<(), String> {
        try_ip(&["netns", "exec", self.name(host), "sysctl", "-qw", setting])
    }

    /// Drops packets of these protocols ("udp", "tcp") to the server's host, and removes that host's earlier drop
    /// rules. Fails if this system does not support that.
    pub fn drop_protocols(&self, protocols: &[&str]) -> Result<(), String> {
        self.filter(Host::Server, protocols.iter().map(|protocol| format!("meta l4proto {protocol} drop")))
    }

    /// Drops this percentage of `protocol`'s packets to the client's host, at regular intervals, and removes that host's
    /// earlier drop rules. Not at random: the kernel delivers many TCP segments as one packet, so few packets are counted.
    pub fn drop_percentage(&self, protocol: &str, percent: u32) -> Result<(), String> {
        let interval = 100_u32.checked_div(percent);
        let rule = |interval| format!("meta l4proto {protocol} numgen inc mod {interval} 0 drop");
        self.filter(Host::Client, interval.map(rule))
    }

    /// Drops packets of `protocol` to the server's host that are larger than `bytes`, and removes that host's earlier
    /// drop rules.
    pub fn drop_larger(&self, protocol: &str, bytes: u32) -> Result<(), String> {
        self.filter(Host::Server, [format!("meta l4proto {protocol} meta length > {bytes} drop")])
    }

    /// Drops packets larger than `bytes` in both directions, in place of earlier drop rules. The hosts then send packets
    /// one by one, as a network card does.
    pub fn lose_larger(&self, bytes: u32) -> Result<(), String> {
        for host in [Host::Server, Host::Client] {
            try_ip(&["-n", self.name(host), "link", "set", "dev", "lan", "gso_max_segs", "1"])?;
            self.filter(host, [format!("meta length > {bytes} drop")])?;
        }
        Ok(())
    }

    /// Redirects `protocol` on the server's host from one port to another.
    pub fn redirect(&self, protocol: &str, from: u16, to: u16) -> Result<(), String> {
        let rules = format!(
            "add table ip relay_nat\nadd chain ip relay_nat prerouting {{ type nat hook prerouting priority -100; }}\n\
             add rule ip relay_nat prerouting {protocol} dport {from} redirect to :{to}"
        );
        try_ip(&["netns", "exec", self.name(Host::Server), "nft", &rules])
    }

    /// Replaces a host's drop rules for incoming packets by `rules`.
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

    /// Starts the program with `args` on a host. `ip` executes the program in its own place, so signals reach it.
    pub fn start(&self, host: Host, home: &Home, args: &[&str]) -> Process {
        let mut command = home.isolated(Command::new("ip"));
        command
            .args(["netns", "exec", self.name(host)])
            .arg(home.program().get_program())
            .args(args);
        home.choose_transport(&mut command, args);
        Process::start(command)
    }

    /// Waits until a host has received `bytes` more over the link.
    pub fn wait_until_received(&self, host: Host, bytes: u64) {
        let wanted = self.received_bytes(host) + bytes;
        wait_until("bytes arrive", || self.received_bytes(host) >= wanted);
    }

    fn received_bytes(&self, host: Host) -> u64 {
        let counter = ["netns", "exec", self.name(host), "cat", "/sys/class/net/lan/statistics/rx_bytes"];
        let output = Command::new("ip").args(counter).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    }

    fn name(&self, host: Host) -> &str {
        match host {
            Host::Server => &self.server,
            Host::Client => &self.client,
        }
    }
}

/// A number for the names of a network's hosts, which no other network of this process has.
pub(super) fn next_number() -> u32 {
    CREATED.fetch_add(1, Ordering::Relaxed)
}

/// The kernel setting that keeps a host's other addresses when the first is removed.
const PROMOTE_SECONDARIES: &str = "promote_secondaries";

impl Drop for Lan {
    fn drop(&mut self) {
        // Deleting a host removes the link. A host that was never created cannot be deleted.
        for name in [&self.server, &self.client] {
            let _ = try_ip(&["netns", "delete", name]);
        }
    }
}

pub(super) fn try_ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip")
        .args(args)
        .output()
        .map_err(|e| format!("`ip` cannot be run: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim())),
    }
}
