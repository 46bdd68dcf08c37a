//! Several hosts on one switch, as network namespaces of this machine, each behind a link of its own.

use super::{
    Home, Process,
    lan::{next_number, try_ip},
    wait_until,
};
use std::process::Command;

/// Hosts on a switch, removed on drop. Each one's link has a limited rate in both directions, and counts what it carries.
pub struct Switch {
    switch: String,
    hosts: Vec<String>,
}

impl Switch {
    /// Creates `hosts` hosts with [`address`](Self::address)es, numbered from 0; the error says why this system does not
    /// permit it.
    pub fn new(hosts: usize, megabits: u32) -> Result<Self, String> {
        Self::with_addresses(hosts, megabits, |host| vec![format!("{}/24", Self::address(host))])
    }

    /// The same with [`address_v6`](Self::address_v6)es alone.
    pub fn over_ipv6(hosts: usize, megabits: u32) -> Result<Self, String> {
        let addresses = |host| vec![format!("{}/64", Self::address_v6(host)), "nodad".into()];
        Self::with_addresses(hosts, megabits, addresses)
    }

    fn with_addresses(
        hosts: usize,
        megabits: u32,
        address: impl Fn(usize) -> Vec<String>,
    ) -> Result<Self, String> {
        let name = format!("relay-{}-{}-h", std::process::id(), next_number());
        let mut switch = Self { switch: format!("{name}s"), hosts: vec![] };
        try_ip(&["netns", "add", &switch.switch])?;
        try_ip(&["-n", &switch.switch, "link", "add", "bridge", "type", "bridge"])?;
        try_ip(&["-n", &switch.switch, "link", "set", "bridge", "up"])?;
        for number in 0..hosts {
            let (host, port) = (format!("{name}{number}"), port(number));
            try_ip(&["netns", "add", &host])?;
            switch.hosts.push(host.clone());
            let peer = ["peer", "name", &port, "netns", &switch.switch];
            let link = [&["-n", &host, "link", "add", "lan", "mtu", "1500", "type", "veth"][..], &peer];
            try_ip(&link.concat())?;
            try_ip(&["-n", &switch.switch, "link", "set", &port, "master", "bridge", "up"])?;
            let address = address(number);
            let address: Vec<&str> = address.iter().map(String::as_str).collect();
            try_ip(&[&["-n", &host, "address", "add"][..], &address, &["dev", "lan"]].concat())?;
            for device in ["lo", "lan"] {
                try_ip(&["-n", &host, "link", "set", device, "up"])?;
            }
            switch.limit_rate(number, megabits)?;
        }
        Ok(switch)
    }

    /// The address of a host.
    pub fn address(host: usize) -> String {
        format!("10.47.48.{}", host + 1)
    }

    /// The address of a host on a switch for IPv6.
    pub fn address_v6(host: usize) -> String {
        format!("fd47:48::{}", host + 1)
    }

    /// Adds a host behind another one, which masquerades it, as a home router does; returns its number.
    pub fn add_behind_nat(&mut self, router: usize) -> Result<usize, String> {
        let (router, number) = (self.hosts[router].clone(), self.hosts.len());
        let inside = format!("{router}n");
        try_ip(&["netns", "add", &inside])?;
        self.hosts.push(inside.clone());
        let link = ["link", "add", "lan", "mtu", "1500", "type", "veth", "peer", "name", "inside", "netns"];
        try_ip(&[&["-n", &inside][..], &link, &[router.as_str()]].concat())?;
        for (host, device, address) in
            [(&router, "inside", "192.168.47.1/24"), (&inside, "lan", "192.168.47.2/24")]
        {
            try_ip(&["-n", host, "address", "add", address, "dev", device])?;
            try_ip(&["-n", host, "link", "set", device, "up"])?;
        }
        try_ip(&["-n", &inside, "link", "set", "lo", "up"])?;
        try_ip(&["-n", &inside, "route", "add", "default", "via", "192.168.47.1"])?;
        try_ip(&["netns", "exec", &router, "sysctl", "-qw", "net.ipv4.ip_forward=1"])?;
        let rules = "add table ip relay_nat\n\
             add chain ip relay_nat postrouting { type nat hook postrouting priority 100; }\n\
             add rule ip relay_nat postrouting oifname lan masquerade";
        try_ip(&["netns", "exec", &router, "nft", rules])?;
        Ok(number)
    }

    /// Limits the rate of a host's link in each direction. Fails if this system does not support that.
    pub fn limit_rate(&self, host: usize, megabits: u32) -> Result<(), String> {
        let (rate, burst) = (format!("{megabits}mbit"), format!("{}kb", (5 * megabits).clamp(16, 256)));
        let shape = ["root", "tbf", "rate", &rate, "burst", &burst, "latency", "50ms"];
        for (space, device) in [(&self.hosts[host], "lan"), (&self.switch, &port(host))] {
            let tc = ["netns", "exec", space, "tc", "qdisc", "replace", "dev", device];
            try_ip(&[&tc[..], &shape].concat())?;
        }
        Ok(())
    }

    /// Starts the program with `args` on a host. `ip` executes the program in its own place, so signals reach it.
    pub fn start(&self, host: usize, home: &Home, args: &[&str]) -> Process {
        let mut command = home.isolated(Command::new("ip"));
        command
            .args(["netns", "exec", &self.hosts[host]])
            .arg(home.program().get_program())
            .args(args);
        home.choose_transport(&mut command, args);
        Process::start(command)
    }

    /// The bytes that a host has sent, with headers.
    pub fn sent_bytes(&self, host: usize) -> u64 {
        self.counter(host, "tx_bytes")
    }

    /// Waits until a host has received `bytes`, with headers, since its creation.
    pub fn wait_until_received(&self, host: usize, bytes: u64) {
        wait_until("bytes arrive", || self.counter(host, "rx_bytes") >= bytes);
    }

    fn counter(&self, host: usize, counter: &str) -> u64 {
        let file = format!("/sys/class/net/lan/statistics/{counter}");
        let read = ["netns", "exec", &self.hosts[host], "cat", &file];
        let output = Command::new("ip").args(read).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    }
}

/// The switch's end of a host's link.
fn port(host: usize) -> String {
    format!("port{host}")
}

impl Drop for Switch {
    fn drop(&mut self) {
        // Deleting a host removes its link. One that was never created cannot be deleted.
        for name in self.hosts.iter().chain([&self.switch]) {
            let _ = try_ip(&["netns", "delete", name]);
        }
    }
}
