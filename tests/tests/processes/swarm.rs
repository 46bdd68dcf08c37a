//! Members of a swarm on hosts of their own, behind slow links: killed, stopped, slowed down, or left without the origin.
//!
//! Bounds are on the bytes that the origin sends, never on time, and wide: on a busy machine chunks are late, and sent
//! again. Needs root, `ip` and `tc`. Without them each test prints why it is skipped, and passes.

use crate::files;
use serde_json::Value;
use std::{collections::BTreeMap, fs, os::unix::fs::MetadataExt};
use tensor_relay_tests::{
    processes::{Home, Process, Serving, Signal, Switch},
    skip,
};

const MODEL_BYTES: u64 = 48 << 20;

/// The rate of each link: the model takes four seconds.
const LINK_MBIT_PER_S: u32 = 100;

/// The number of the origin's host; the members are on the next ones.
const ORIGIN: usize = 0;

/// An origin of a model, and hosts for members.
struct Swarm {
    switch: Switch,
    home: Home,
    origin: Serving,
}

impl Swarm {
    /// Starts an origin, with this many hosts for members; `None` if this system does not permit it.
    fn try_new(members: usize) -> Option<Self> {
        Self::try_on(Switch::new(members + 1, LINK_MBIT_PER_S), &Switch::address(ORIGIN))
    }

    /// Starts an origin at `address` of the first host of a switch, unless it could not be created.
    fn try_on(switch: Result<Switch, String>, address: &str) -> Option<Self> {
        let switch = switch
            .inspect_err(|reason| skip(format_args!("the test cannot create hosts here: {reason}")))
            .ok()?;
        let home = Home::new();
        files::write_noise(&home.path("m"), MODEL_BYTES as usize, 1);
        let listen = format!("--listen={address}:4747");
        let args = [
            "serve",
            "--json",
            "-v",
            "--topic=m=m",
            "--state-dir=keys",
            "--chunk-size=1MiB",
            "--admin=none",
            &listen,
        ];
        let origin = Serving::wait_for_report(switch.start(ORIGIN, &home, &args));
        Some(Self { switch, home, origin })
    }

    /// Starts a member that shares, on a host from 1.
    fn member(&self, host: usize) -> Process {
        self.member_of(&self.origin, host)
    }

    /// Starts a member that shares with others of this server.
    fn member_of(&self, server: &Serving, host: usize) -> Process {
        let out = format!("--out=out{host}");
        let args = ["subscribe", server.ticket("m"), "--share", "--json", "--device=cpu", &out];
        self.switch.start(host, &self.home, &args)
    }

    fn members<const N: usize>(&self) -> [Process; N] {
        std::array::from_fn(|index| self.member(index + 1))
    }

    /// Waits until the member on a host has this share of the model.
    fn wait_until_received(&self, host: usize, share: f64) {
        self.switch.wait_until_received(host, (MODEL_BYTES as f64 * share) as u64);
    }

    /// Waits until the member on a host has saved the model, and returns its report.
    fn finish(&self, host: usize, member: &mut Process) -> Value {
        let event: Value = serde_json::from_str(&member.wait_for_stdout("committed")).unwrap();
        files::assert_same(&self.home.path("m"), &self.home.path(&format!("out{host}/m.safetensors")));
        event
    }

    /// What the origin has sent, in sizes of the model.
    fn sent_by_origin(&self) -> f64 {
        self.switch.sent_bytes(ORIGIN) as f64 / MODEL_BYTES as f64
    }
}

/// The bytes that came from the origin and from peers, by a member's report.
fn sources(event: &Value) -> (u64, u64) {
    let bytes = |key: &str| event["sources"][key].as_u64().unwrap_or_else(|| panic!("no {key}: {event}"));
    (bytes("origin_bytes"), bytes("peer_bytes"))
}

/// Goal: a member that is killed costs the others what only it had, and nothing else. Method: three members at once, one
/// is killed after a third of the model. The two others would cost the origin two models without sharing.
#[test]
fn a_killed_member_costs_what_only_it_had() {
    let Some(swarm) = Swarm::try_new(3) else { return };
    let [mut first, mut second, third] = swarm.members();
    swarm.wait_until_received(3, 0.33);
    drop(third); // Killed.
    let (first, second) = (swarm.finish(1, &mut first), swarm.finish(2, &mut second));
    for event in [first, second] {
        let (_, from_peers) = sources(&event);
        assert!(from_peers > MODEL_BYTES / 10, "{event}");
    }
    assert!(swarm.sent_by_origin() < 2.0, "{}", swarm.sent_by_origin());
}

/// Goal: a relay that shares is a peer of the origin's other clients, and its own clients are peers of each other. Method: a
/// relay and a member of the origin at once; then two members of the relay at once.
#[test]
fn a_relay_shares_with_members_of_its_origin_and_its_members_share() {
    let Some(swarm) = Swarm::try_new(4) else { return };
    let listen = format!("--listen={}:4747", Switch::address(1));
    let origin = swarm.origin.ticket("m");
    let relay = ["relay", origin, "--share", "--json", "--state-dir=relay", "--admin=none", &listen];
    let mut relay = Serving::wait_for_report(swarm.switch.start(1, &swarm.home, &relay));
    let event = swarm.finish(2, &mut swarm.member(2));
    assert!(sources(&event).1 > MODEL_BYTES / 10, "{event}");
    relay.process.wait_for_stdout(r#""version":1,"#);
    assert!(swarm.sent_by_origin() < 1.9, "{}", swarm.sent_by_origin());
    let before = swarm.switch.sent_bytes(1);
    let mut members = [3, 4].map(|host| (host, swarm.member_of(&relay, host)));
    for (host, member) in &mut members {
        let event = swarm.finish(*host, member);
        assert!(sources(&event).1 > MODEL_BYTES / 10, "{event}");
    }
    let sent = swarm.switch.sent_bytes(1) - before;
    assert!(sent < MODEL_BYTES * 19 / 10, "the relay has sent {sent}");
}

/// Goal: a member that never runs again delays nobody for ever, and costs the origin little; when it runs again it has the
/// version too. Method: three members at once, one is stopped after a third of the model, and continued in the end.
#[test]
fn a_stopped_member_keeps_nobody_from_the_version() {
    let Some(swarm) = Swarm::try_new(3) else { return };
    let [mut first, mut second, mut third] = swarm.members();
    swarm.wait_until_received(3, 0.33);
    third.signal(Signal::STOP);
    swarm.finish(1, &mut first);
    swarm.finish(2, &mut second);
    assert!(swarm.sent_by_origin() < 2.0, "{}", swarm.sent_by_origin());
    third.signal(Signal::CONT);
    swarm.finish(3, &mut third);
    assert!(swarm.sent_by_origin() < 2.6, "{}", swarm.sent_by_origin());
}

/// Goal: a member behind a link of a tenth of the rate holds up no other. Method: three members at once, one of them slow:
/// the others have the model while it does not, and the origin sends little more than one.
#[test]
fn a_slow_member_delays_no_other() {
    let Some(swarm) = Swarm::try_new(3) else { return };
    swarm.switch.limit_rate(3, LINK_MBIT_PER_S / 10).unwrap();
    let [mut first, mut second, third] = swarm.members();
    swarm.finish(1, &mut first);
    swarm.finish(2, &mut second);
    assert!(swarm.sent_by_origin() < 2.0, "{}", swarm.sent_by_origin());
    assert!(!swarm.home.path("out3/m.safetensors").exists(), "the slow one took as long");
    drop(third);
}

/// Goal: the loss of the origin ends nothing that its members can finish among themselves. Method: two members have the
/// model; a third one begins, and the origin is killed once that one has some of it.
#[test]
fn members_finish_without_the_origin() {
    let Some(swarm) = Swarm::try_new(3) else { return };
    let [mut first, mut second] = swarm.members();
    swarm.finish(1, &mut first);
    swarm.finish(2, &mut second);
    let sent = swarm.sent_by_origin();
    let mut late = swarm.member(3);
    swarm.wait_until_received(3, 0.2);
    swarm.origin.process.signal(Signal::KILL);
    let event = swarm.finish(3, &mut late);
    let (_, from_peers) = sources(&event);
    assert!(from_peers > MODEL_BYTES / 2, "{event}");
    assert!(swarm.sent_by_origin() - sent < 0.3, "{}", swarm.sent_by_origin() - sent);
}

/// Goal: who only takes is served and serves nobody, and a subscriber without the option receives from the origin alone.
/// Method: a member has the model; one that takes begins, and then one that does not share.
#[test]
fn some_only_take_and_others_do_neither() {
    let Some(swarm) = Swarm::try_new(3) else { return };
    let mut first = swarm.member(1);
    swarm.finish(1, &mut first);
    let ticket = swarm.origin.ticket("m");
    let take = ["subscribe", ticket, "--share=take", "--json", "--device=cpu", "--out=out2"];
    let mut taker = swarm.switch.start(2, &swarm.home, &take);
    let (from_origin, from_peers) = sources(&swarm.finish(2, &mut taker));
    assert!(from_peers > from_origin, "{from_origin} {from_peers}");
    let sent_by_taker = swarm.switch.sent_bytes(2);
    let alone = ["subscribe", ticket, "--json", "--device=cpu", "--out=out3", "--once"];
    let mut alone = swarm.switch.start(3, &swarm.home, &alone);
    assert_eq!(sources(&swarm.finish(3, &mut alone)).1, 0);
    assert!(swarm.switch.sent_bytes(2) - sent_by_taker < MODEL_BYTES / 50, "a taker serves nobody");
    fs::metadata(swarm.home.path("out2/m.safetensors")).unwrap();
}

/// Goal: a member behind NAT takes from others, although none can connect to it, and the origin says why it is not named.
/// Method: a member has the model; one behind a router that masquerades it begins, and then one on the switch, which has
/// everything from the first one.
#[test]
fn a_member_behind_nat_takes_and_is_not_named() {
    let mut switch = Switch::new(4, LINK_MBIT_PER_S);
    let inside = switch.as_mut().ok().map(|switch| switch.add_behind_nat(2));
    let switch = match inside {
        Some(Err(reason)) => Err(reason),
        _ => switch,
    };
    let Some(mut swarm) = Swarm::try_on(switch, &Switch::address(ORIGIN)) else { return };
    let inside = 4;
    let mut first = swarm.member(1);
    swarm.finish(1, &mut first);
    let mut hidden = swarm.member(inside);
    let (from_origin, from_peers) = sources(&swarm.finish(inside, &mut hidden));
    assert!(from_peers > from_origin, "{from_origin} {from_peers}");
    swarm
        .origin
        .process
        .wait_for_stderr("A client's port is not named to its peers.");
    let sent_by_hidden = swarm.switch.sent_bytes(inside);
    let mut late = swarm.member(3);
    let (_, from_peers) = sources(&swarm.finish(3, &mut late));
    assert!(from_peers > MODEL_BYTES / 2, "{from_peers}");
    assert!(swarm.switch.sent_bytes(inside) - sent_by_hidden < MODEL_BYTES / 50, "it serves nobody");
}

/// Goal: members serve each other where there is IPv6 alone. Method: a member has the model, and a second one begins.
#[test]
fn members_serve_each_other_over_ipv6() {
    let address = format!("[{}]", Switch::address_v6(ORIGIN));
    let Some(swarm) = Swarm::try_on(Switch::over_ipv6(3, LINK_MBIT_PER_S), &address) else { return };
    let mut first = swarm.member(1);
    swarm.finish(1, &mut first);
    let mut second = swarm.member(2);
    let (from_origin, from_peers) = sources(&swarm.finish(2, &mut second));
    assert!(from_peers > from_origin, "{from_origin} {from_peers}");
}

/// Goal: a member that serves its host, too, keeps one copy for all who take. Method: a member with a socket has the model; a
/// process of its host takes it from memory, and a member on another host chunk by chunk.
#[test]
fn a_member_that_serves_its_host_keeps_one_copy() {
    let Some(swarm) = Swarm::try_new(2) else { return };
    let (ticket, socket) = (swarm.origin.ticket("m"), swarm.home.path("s"));
    let share_host = format!("--share-host={}", socket.display());
    let args = ["subscribe", ticket, "--share", &share_host, "--json", "--device=cpu", "--out=out1"];
    let mut first = swarm.switch.start(1, &swarm.home, &args);
    swarm.finish(1, &mut first);
    let of_host = format!("unix:{}?topic=m", socket.display());
    let args = ["subscribe", &of_host, "--once", "--json", "--out=neighbour"];
    let taken = swarm.switch.start(1, &swarm.home, &args).wait().expect_code(0).json();
    assert_eq!(taken["sharing"], "memory", "{taken}");
    files::assert_same(&swarm.home.path("m"), &swarm.home.path("neighbour/m.safetensors"));
    let mut second = swarm.member(2);
    let (_, from_peers) = sources(&swarm.finish(2, &mut second));
    assert!(from_peers > MODEL_BYTES / 2, "{from_peers}");
    let copies = memory_bytes(first.id()) as f64 / MODEL_BYTES as f64;
    assert!((0.99..1.3).contains(&copies), "{copies}");
}

/// The size of the shareable memory that a process has open, each region once.
fn memory_bytes(id: u32) -> u64 {
    let open = fs::read_dir(format!("/proc/{id}/fd")).unwrap().flatten();
    let regions = open.filter(|entry| {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        target.to_string_lossy().contains("memfd:tensor-relay")
    });
    let regions: BTreeMap<u64, u64> = regions
        .filter_map(|entry| fs::metadata(entry.path()).ok())
        .map(|region| (region.ino(), region.blocks() * 512))
        .collect();
    regions.into_values().sum()
}
