//! TCP and QUIC on networks that block or degrade one of them, and forced transports.
//!
//! Tests that drop packets need root, `ip` and `nft`. Without them they print why they are skipped, and pass.

use crate::files;
use serde_json::Value;
use std::{thread, time::Duration};
use tensor_relay_tests::processes::{Home, Host, Lan, Process, Serving};

const MODEL_BYTES: usize = 32 << 20;

/// The rate of the link, over which the model takes about five seconds.
const MEGABITS: u32 = 50;

/// The cost of a lost connection with chunks of 1 MiB: those of a subscription's credit, and as much again.
const LOST_BYTES: u64 = 16 << 20;

struct Served {
    lan: Lan,
    home: Home,
    server: Serving,
}

impl Served {
    /// A model on a host that these protocols do not reach; `None` if this system does not permit it.
    fn begin(dropped: &[&str]) -> Option<Self> {
        Self::begin_with(dropped, MODEL_BYTES)
    }

    /// The same with a model of `bytes`.
    fn begin_with(dropped: &[&str], bytes: usize) -> Option<Self> {
        let lan = Lan::new().and_then(|lan| lan.limit_rate(MEGABITS).map(|()| lan));
        let lan = lan.and_then(|lan| lan.drop_protocols(dropped).map(|()| lan));
        let lan = lan
            .inspect_err(|reason| println!("skipped: there are no two hosts here: {reason}"))
            .ok()?;
        let home = Home::new();
        files::noise(&home.path("m"), bytes, 1);
        let listen = format!("--listen={}:4747", Lan::SERVER);
        let words = ["serve", "--json", "--topic=m=m", "--state-dir=keys", "--chunk-size=1MiB", &listen];
        let server = Serving::wait_for_report(lan.start(Host::Server, &home, &words));
        Some(Self { lan, home, server })
    }

    fn start(&self, words: &[&str]) -> Process {
        self.lan.start(Host::Client, &self.home, words)
    }

    /// Receives the model once; returns the event.
    fn receive(&self, options: &[&str]) -> Value {
        let words = ["subscribe", self.server.ticket("m"), "--once", "--out=out", "--json"];
        self.finish(self.start(&[&words, options].concat()))
    }

    fn finish(&self, subscriber: Process) -> Value {
        let said = subscriber.end().expect_code(0).json();
        files::assert_same(&self.home.path("m"), &self.home.path("out/m.safetensors"));
        said
    }

    /// The output of `list` as JSON, and its text on stderr.
    fn list(&self) -> (Value, String) {
        let as_json = self
            .start(&["list", self.server.ticket("m"), "--json"])
            .end()
            .expect_code(0)
            .json();
        let ended = self.start(&["list", self.server.ticket("m")]).end().expect_code(0);
        (as_json, ended.err)
    }
}

/// Goal: if UDP is dropped, everything works over TCP, and `list` reports it.
#[test]
fn udp_does_not_get_through() {
    let Some(served) = Served::begin(&["udp"]) else { return };
    let said = served.receive(&[]);
    assert_eq!(said["transport"], "tcp", "{said}");
    let (as_json, text) = served.list();
    assert_eq!(as_json["topics"][0]["topic"], "m");
    assert_eq!((&as_json["transport"], &as_json["unreachable_over"]), (&"tcp".into(), &"quic".into()));
    assert!(text.contains("does not answer over UDP") && text.contains("/udp"), "{text}");
    let refused =
        served.start(&["list", served.server.ticket("m"), "--transport=quic", "--connect-timeout=1"]);
    refused.end().expect_error(3, &["over UDP", "firewall"]);
}

/// Goal: if TCP is dropped, everything works over QUIC.
#[test]
fn tcp_does_not_get_through() {
    let Some(served) = Served::begin(&["tcp"]) else { return };
    let said = served.receive(&[]);
    assert_eq!(said["transport"], "quic", "{said}");
    let (as_json, text) = served.list();
    assert_eq!((&as_json["transport"], &as_json["unreachable_over"]), (&"quic".into(), &"tcp".into()));
    assert!(text.contains("does not answer over TCP"), "{text}");
}

/// Goal: a transport that dies during a transfer is replaced by the other, and received chunks are kept. Method: pass
/// only QUIC, then only TCP; and vice versa.
#[test]
fn a_transport_that_dies_in_the_middle() {
    for (dropped_first, dropped_then, ends_over) in [("tcp", "udp", "tcp"), ("udp", "tcp", "quic")] {
        let Some(served) = Served::begin(&[dropped_first]) else { return };
        let ticket = served.server.ticket("m");
        let subscriber = served.start(&["subscribe", ticket, "--once", "--out=out", "--json"]);
        thread::sleep(Duration::from_secs(3));
        served.lan.drop_protocols(&[dropped_then]).unwrap();
        let said = served.finish(subscriber);
        assert_eq!((&said["resumed"], &said["transport"]), (&1.into(), &ends_over.into()), "{said}");
        let wire_bytes = said["wire_bytes"].as_u64().unwrap();
        assert!(wire_bytes <= MODEL_BYTES as u64 + LOST_BYTES, "{said}");
    }
}

/// Goal: if a transport begins to lose packets, the session moves to the other one and reports the reason; received
/// chunks are kept. Method: TCP loses every tenth packet from the fourth second on, and QUIC none.
#[test]
fn a_transport_that_turns_lossy() {
    let Some(served) = Served::begin_with(&[], 2 * MODEL_BYTES) else { return };
    let ticket = served.server.ticket("m");
    let subscriber = served.start(&["subscribe", ticket, "--once", "--out=out", "--json"]);
    thread::sleep(Duration::from_secs(4));
    served.lan.drop_percentage("tcp", 10).unwrap();
    let said = served.finish(subscriber);
    assert_eq!((&said["resumed"], &said["transport"]), (&1.into(), &"quic".into()), "{said}");
    assert_eq!(said["transport_reason"], "it is faster on this path", "{said}");
    let wire_bytes = said["wire_bytes"].as_u64().unwrap();
    assert!(wire_bytes <= 2 * MODEL_BYTES as u64 + LOST_BYTES, "{said}");
}

/// Goal: if UDP and TCP of one address lead to two servers with one key, a session stays with one of them; a client
/// that would change its transport reports why it does not. Method: TCP's port leads to a second server; several lanes;
/// and a path over which TCP collapses for a while.
#[test]
fn two_servers_behind_one_address() {
    let Some(served) = Served::begin_with(&[], 2 * MODEL_BYTES) else { return };
    if let Err(reason) = served.lan.redirect("tcp", 4747, 4748) {
        return println!("skipped: this system cannot translate addresses: {reason}");
    }
    let listen = format!("--listen={}:4748", Lan::SERVER);
    let words = [
        "serve",
        "--json",
        "--topic=m=m",
        "--state-dir=keys",
        "--ticket-file=other",
        "--chunk-size=1MiB",
        &listen,
    ];
    let _other = Serving::wait_for_report(served.lan.start(Host::Server, &served.home, &words));
    let said = served.receive(&["--lanes=4"]);
    assert_eq!((&said["resumed"], &said["skipped"]), (&0.into(), &0.into()), "{said}");
    let ticket = served.server.ticket("m");
    let mut subscriber = served.start(&["subscribe", ticket, "--once", "--out=out", "--json"]);
    thread::sleep(Duration::from_secs(4));
    served.lan.drop_percentage("tcp", 10).unwrap();
    subscriber.wait_for_stderr("QUIC reaches another server");
    served.lan.drop_percentage("tcp", 0).unwrap();
    let said = served.finish(subscriber);
    assert_eq!((&said["transport"], &said["resumed"]), (&"tcp".into(), &0.into()), "{said}");
}

/// Goal: either side can force a transport, and the reason is reported.
#[test]
fn a_transport_that_is_forced() {
    let home = Home::new();
    files::noise(&home.path("m"), 1_000, 1);
    let server = home.serve(&["--topic=m=m"]);
    for transport in ["quic", "tcp"] {
        let word = format!("--transport={transport}");
        let said = home
            .run(&["subscribe", server.ticket("m"), "--once", "--json", &word])
            .expect_code(0)
            .json();
        assert_eq!(said["transport"], transport);
        assert_eq!(said["transport_reason"], "no other transport is allowed");
    }
    let quic_alone = home.serve(&["--topic=m=m", "--no-tcp", "--state-dir=a"]);
    let tcp_alone = home.serve(&["--topic=m=m", "--transport=tcp", "--state-dir=b"]);
    for (server, transport) in [(&quic_alone, "quic"), (&tcp_alone, "tcp")] {
        let said = home
            .run(&["subscribe", server.ticket("m"), "--once", "--json"])
            .expect_code(0)
            .json();
        assert_eq!(said["transport"], transport);
    }
    let words = ["list", quic_alone.ticket("m"), "--transport=tcp"];
    home.run(&words).expect_error(3, &["over TCP", "refused"]);
    home.run(&["list", quic_alone.ticket("m"), "--transport=udp"])
        .expect_error(2, &["auto, quic or tcp"]);
}
