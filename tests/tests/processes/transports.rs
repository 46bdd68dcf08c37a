//! TCP and QUIC on networks that block or degrade one of them, and forced transports.
//!
//! Tests that drop packets need root, `ip`, `tc` and `nft`. Without them they print why they are skipped, and pass.

use crate::files;
use serde_json::Value;
use tensor_relay_tests::{
    processes::{Home, Host, Lan, Process, Serving},
    skip,
};

const MODEL_BYTES: usize = 32 << 20;

/// The rate of the link: [`MODEL_BYTES`] take about five seconds.
const LINK_MBIT_PER_S: u32 = 50;

/// The most bytes that are sent again after a lost connection: the chunks of a subscription's credit, and as many
/// again.
const LOST_BYTES: u64 = 16 << 20;

/// A model that is served on one host, for a client on the other.
struct ServedModel {
    lan: Lan,
    home: Home,
    server: Serving,
}

impl ServedModel {
    /// Starts a server whose host drops packets of the `dropped` protocols; `None` if this system does not permit it.
    fn try_new(dropped: &[&str]) -> Option<Self> {
        Self::try_new_with(dropped, MODEL_BYTES)
    }

    /// As [`try_new`](Self::try_new), with a model of `bytes`.
    fn try_new_with(dropped: &[&str], bytes: usize) -> Option<Self> {
        let lan = Lan::new().and_then(|lan| lan.limit_rate(LINK_MBIT_PER_S).map(|()| lan));
        let lan = lan.and_then(|lan| lan.drop_protocols(dropped).map(|()| lan));
        let lan = lan
            .inspect_err(|reason| skip(format_args!("the test cannot create two hosts here: {reason}")))
            .ok()?;
        let home = Home::new();
        files::write_noise(&home.path("m"), bytes, 1);
        let listen = format!("--listen={}:4747", Lan::SERVER);
        let args = ["serve", "--json", "--topic=m=m", "--state-dir=keys", "--chunk-size=1MiB", &listen];
        let server = Serving::wait_for_report(lan.start(Host::Server, &home, &args));
        Some(Self { lan, home, server })
    }

    fn start(&self, args: &[&str]) -> Process {
        self.lan.start(Host::Client, &self.home, args)
    }

    fn wait_until_received(&self, bytes: usize) {
        self.lan.wait_until_received(Host::Client, bytes as u64);
    }

    /// Receives the model with `options`; returns the subscriber's event.
    fn receive(&self, options: &[&str]) -> Value {
        let args = ["subscribe", self.server.ticket("m"), "--once", "--out=out", "--json"];
        self.finish(self.start(&[&args, options].concat()))
    }

    /// Waits until `subscriber` has received the model, and checks it; returns the subscriber's event.
    fn finish(&self, subscriber: Process) -> Value {
        let event = subscriber.wait().expect_code(0).json();
        files::assert_same(&self.home.path("m"), &self.home.path("out/m.safetensors"));
        event
    }

    /// The output of `list` as JSON, and its text on stderr.
    fn list(&self) -> (Value, String) {
        let as_json = self
            .start(&["list", self.server.ticket("m"), "--json"])
            .wait()
            .expect_code(0)
            .json();
        let ended = self.start(&["list", self.server.ticket("m")]).wait().expect_code(0);
        (as_json, ended.err)
    }
}

/// Goal: if UDP is dropped, everything works over TCP, and `list` reports it.
#[test]
fn tcp_is_used_where_udp_is_blocked() {
    let Some(served) = ServedModel::try_new(&["udp"]) else { return };
    let event = served.receive(&[]);
    assert_eq!(event["transport"], "tcp", "{event}");
    let (as_json, text) = served.list();
    assert_eq!(as_json["topics"][0]["topic"], "m");
    assert_eq!((&as_json["transport"], &as_json["unreachable_over"]), (&"tcp".into(), &"quic".into()));
    assert!(text.contains("does not answer over UDP") && text.contains("/udp"), "{text}");
    let refused =
        served.start(&["list", served.server.ticket("m"), "--transport=quic", "--connect-timeout=1"]);
    refused.wait().expect_error(3, &["over UDP", "firewall"]);
}

/// Goal: if TCP is dropped, everything works over QUIC.
#[test]
fn quic_is_used_where_tcp_is_blocked() {
    let Some(served) = ServedModel::try_new(&["tcp"]) else { return };
    let event = served.receive(&[]);
    assert_eq!(event["transport"], "quic", "{event}");
    let (as_json, text) = served.list();
    assert_eq!((&as_json["transport"], &as_json["unreachable_over"]), (&"quic".into(), &"tcp".into()));
    assert!(text.contains("does not answer over TCP"), "{text}");
}

/// Goal: a transport that fails during a transfer is replaced by the other, and received chunks are kept. Method: drop
/// TCP, and in the middle of the transfer UDP instead; and vice versa.
#[test]
fn a_blocked_transport_is_replaced_during_a_transfer() {
    for (dropped_first, dropped_then, ends_over) in [("tcp", "udp", "tcp"), ("udp", "tcp", "quic")] {
        let Some(served) = ServedModel::try_new(&[dropped_first]) else { return };
        let served = ServedModel { home: served.home.with_idle_timeout(2_000), ..served };
        let ticket = served.server.ticket("m");
        let subscriber = served.start(&["subscribe", ticket, "--once", "--out=out", "--json"]);
        served.wait_until_received(MODEL_BYTES / 2);
        served.lan.drop_protocols(&[dropped_then]).unwrap();
        let event = served.finish(subscriber);
        assert_eq!((&event["resumed"], &event["transport"]), (&1.into(), &ends_over.into()), "{event}");
        let wire_bytes = event["wire_bytes"].as_u64().unwrap();
        assert!(wire_bytes <= MODEL_BYTES as u64 + LOST_BYTES, "{event}");
    }
}

/// Goal: if a transport begins to lose packets, the session moves to the other one and reports the reason; received
/// chunks are kept. Method: TCP loses a quarter of its packets once a third of the model has arrived, and QUIC none.
#[test]
fn a_lossy_transport_is_replaced() {
    let Some(served) = ServedModel::try_new_with(&[], 2 * MODEL_BYTES) else { return };
    let ticket = served.server.ticket("m");
    let subscriber = served.start(&["subscribe", ticket, "--once", "--out=out", "--json"]);
    served.wait_until_received(MODEL_BYTES * 3 / 4);
    served.lan.drop_percentage("tcp", 25).unwrap();
    let event = served.finish(subscriber);
    assert_eq!((&event["resumed"], &event["transport"]), (&1.into(), &"quic".into()), "{event}");
    assert_eq!(event["transport_reason"], "it is faster on this path, or being tried", "{event}");
    let wire_bytes = event["wire_bytes"].as_u64().unwrap();
    assert!(wire_bytes <= 2 * MODEL_BYTES as u64 + LOST_BYTES, "{event}");
}

/// Goal: if UDP and TCP of one address lead to two servers with one key, a session stays with one of them, and a client
/// reports why it does not change its transport. Method: redirect TCP to a second server; receive over several lanes;
/// then receive while TCP loses packets for some time.
#[test]
fn a_session_stays_with_one_of_two_servers() {
    let Some(served) = ServedModel::try_new_with(&[], 2 * MODEL_BYTES) else { return };
    if let Err(reason) = served.lan.redirect("tcp", 4747, 4748) {
        return skip(format_args!("this system cannot translate addresses: {reason}"));
    }
    let listen = format!("--listen={}:4748", Lan::SERVER);
    let args = [
        "serve",
        "--json",
        "--topic=m=m",
        "--state-dir=keys",
        "--ticket-file=other",
        "--chunk-size=1MiB",
        &listen,
    ];
    let _other = Serving::wait_for_report(served.lan.start(Host::Server, &served.home, &args));
    let event = served.receive(&["--lanes=4"]);
    assert_eq!((&event["resumed"], &event["skipped"]), (&0.into(), &0.into()), "{event}");
    let ticket = served.server.ticket("m");
    let mut subscriber = served.start(&["subscribe", ticket, "--once", "--out=out", "--json"]);
    served.wait_until_received(MODEL_BYTES * 3 / 4);
    served.lan.drop_percentage("tcp", 25).unwrap();
    subscriber.wait_for_stderr("QUIC reaches another server");
    served.lan.drop_percentage("tcp", 0).unwrap();
    let event = served.finish(subscriber);
    assert_eq!((&event["transport"], &event["resumed"]), (&"tcp".into(), &0.into()), "{event}");
}

/// Goal: either side can force a transport, and the reason is reported.
#[test]
fn a_transport_can_be_forced() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 1_000, 1);
    let server = home.serve(&["--topic=m=m"]);
    for transport in ["quic", "tcp"] {
        let arg = format!("--transport={transport}");
        let event = home
            .run(&["subscribe", server.ticket("m"), "--once", "--json", &arg])
            .expect_code(0)
            .json();
        assert_eq!(event["transport"], transport);
        assert_eq!(event["transport_reason"], "no other transport is allowed");
    }
    let quic_alone = home.serve(&["--topic=m=m", "--no-tcp", "--state-dir=a"]);
    let tcp_alone = home.serve(&["--topic=m=m", "--transport=tcp", "--state-dir=b"]);
    for (server, transport) in [(&quic_alone, "quic"), (&tcp_alone, "tcp")] {
        let event = home
            .run(&["subscribe", server.ticket("m"), "--once", "--json"])
            .expect_code(0)
            .json();
        assert_eq!(event["transport"], transport);
    }
    let args = ["list", quic_alone.ticket("m"), "--transport=tcp"];
    home.run(&args).expect_error(3, &["over TCP", "refused"]);
    home.run(&["list", quic_alone.ticket("m"), "--transport=udp"])
        .expect_error(2, &["auto, quic or tcp"]);
}
