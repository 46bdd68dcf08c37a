//! Paths that are slow, lose large packets, cut or damage connections, or on which another program answers.
//!
//! Tests with two hosts need root, `ip`, `tc` and `nft`. Without them they print why they are skipped, and pass.

use crate::files;
use serde_json::Value;
use std::thread;
use tensor_relay_tests::{
    processes::{Home, Host, Lan, Process, Serving, TcpPath, TcpProxy, wait_until},
    skip,
};

/// A model that is served on one host, for clients on the other.
struct ServedModel {
    lan: Lan,
    home: Home,
    server: Serving,
}

impl ServedModel {
    /// Serves a model of `bytes` over a link of `megabits` per second with `options`; `None` if this system does not
    /// permit it.
    fn try_new(bytes: usize, megabits: u32, options: &[&str]) -> Option<Self> {
        let lan = Lan::new().and_then(|lan| lan.limit_rate(megabits).map(|()| lan));
        let lan = lan
            .inspect_err(|reason| skip(format_args!("the test cannot create two hosts here: {reason}")))
            .ok()?;
        let home = Home::new();
        files::write_noise(&home.path("m"), bytes, 1);
        let listen = format!("--listen={}:4747", Lan::SERVER);
        let args = [&["serve", "--json", "--topic=m=m", &listen][..], options].concat();
        let server = Serving::wait_for_report(lan.start(Host::Server, &home, &args));
        Some(Self { lan, home, server })
    }

    /// Starts a subscriber that receives the model once, into the folder `out`.
    fn subscribe(&self, out: &str, transport: &str) -> Process {
        let args = ["subscribe", self.server.ticket("m"), "--once", "--json", "--lanes=1", "-v"];
        let (out, transport) = (format!("--out={out}"), format!("--transport={transport}"));
        self.lan
            .start(Host::Client, &self.home, &[&args[..], &[&out, &transport]].concat())
    }
}

/// Goal: a subscriber that receives all the time is not evicted, however long a chunk takes. Method: one chunk of 2 MiB
/// at 1 Mbit/s, 17 s, over TCP and then over QUIC; the server's stall timeout is 3 s.
#[test]
fn a_slow_subscriber_is_not_silent() {
    let Some(served) = ServedModel::try_new(2 << 20, 1, &["--stall-timeout=3"]) else { return };
    for transport in ["tcp", "quic"] {
        let event = served.subscribe(transport, transport).wait().expect_code(0).json();
        assert_eq!(event["resumed"], 0, "{event}");
    }
    files::assert_same(&served.home.path("m"), &served.home.path("quic/m.safetensors"));
}

/// Goal: where large packets are lost without a notice, the model arrives, and the subscriber, its report and `doctor`
/// say what was wrong. Method: drop packets of more than 1,300 bytes, with TCP alone and with both transports, and of
/// more than 1,000 bytes, which QUIC cannot pass.
#[test]
fn large_packets_that_vanish_are_avoided() {
    let case = |allowed: &str, dropped_above, arrives_over: &str| {
        let Some(served) = ServedModel::try_new(1 << 20, 50, &[]) else { return };
        if let Err(reason) = served.lan.lose_larger(dropped_above) {
            return skip(reason);
        }
        let mut subscriber = served.subscribe("out", allowed);
        subscriber.wait_for_stderr("Connections over TCP open, but carry no chunk to its end");
        let event = subscriber.wait().expect_code(0).json();
        assert_eq!(event["transport"], arrives_over, "{event}");
        assert!(event["transport_reason"].as_str().unwrap().contains("larger packets"), "{event}");
        files::assert_same(&served.home.path("m"), &served.home.path("out/m.safetensors"));
        if allowed == "tcp" {
            let args = ["doctor", served.server.ticket("m"), "--json"];
            let report = served.lan.start(Host::Client, &served.home, &args).wait();
            for name in ["packet size", "packet size over TCP"] {
                assert!(report.out.contains(&format!(r#""{name}""#)), "{}", report.out);
            }
            assert!(report.out.contains("larger packets are lost"), "{}", report.out);
        }
    };
    thread::scope(|scope| {
        for (allowed, dropped_above, arrives_over) in
            [("tcp", 1_300, "tcp"), ("auto", 1_300, "quic"), ("auto", 1_000, "tcp")]
        {
            scope.spawn(move || case(allowed, dropped_above, arrives_over));
        }
    });
}

/// Goal: a client whose only address is replaced connects again and continues. Method: remove the address of its host,
/// and add another, during a transfer over each transport.
#[test]
fn a_replaced_address_interrupts_no_subscription() {
    let case = |transport: &str| {
        let Some(served) = ServedModel::try_new(16 << 20, 20, &["--chunk-size=1MiB"]) else { return };
        let mut subscriber = served.subscribe("out", transport);
        subscriber.wait_for_stderr("Connected");
        served.lan.remove_address(Host::Client, Lan::CLIENT);
        served.lan.add_address(Host::Client, Lan::CLIENT_MOVED);
        let event = subscriber.wait().expect_code(0).json();
        assert_eq!(event["transport"], transport, "{event}");
    };
    thread::scope(|scope| {
        for transport in ["tcp", "quic"] {
            scope.spawn(move || case(transport));
        }
    });
}

/// Goal: over a path that ends or damages each connection before a chunk has arrived, a subscriber waits longer and
/// longer, and ends with the reason. Method: a proxy that cuts connections after 1 MiB, or inverts a bit at 3 MiB.
#[test]
fn a_path_that_carries_no_chunk_ends_the_subscriber() {
    let case = |path| {
        let (home, proxy) = (Home::new(), TcpProxy::new());
        files::write_noise(&home.path("m"), 8 << 20, 1);
        let server = home.serve(&["--topic=m=m", &proxy.advertise()]);
        proxy.set_path(path);
        proxy.forward_to(server.listen());
        let args =
            ["subscribe", server.ticket("m"), "--once", "--transport=tcp", "--reconnect=5", "--lanes=1"];
        home.run(&args).expect_error(3, &["connections in a row", "--chunk-size"]);
        assert!((8..16).contains(&proxy.connections()), "{} connections", proxy.connections());
    };
    thread::scope(|scope| {
        for path in [TcpPath::CutAfter(1 << 20), TcpPath::DamageAt(3 << 20)] {
            scope.spawn(move || case(path));
        }
    });
}

/// Goal: other programs that answer at the server's address for a while, and damaged handshakes, do not end a
/// subscriber. Method: a proxy that answers as a server of HTTP, then damages bytes of the handshake, one after the
/// other.
#[test]
fn other_answers_during_a_restart_are_passed_over() {
    let (home, proxy) = (Home::new(), TcpProxy::new());
    files::write_noise(&home.path("m"), 1_000, 1);
    let server = home.serve(&["--topic=m=m", "--watch", "--watch-interval=0.05", &proxy.advertise()]);
    proxy.forward_to(server.listen());
    let args = ["subscribe", server.ticket("m"), "--out=out", "--json", "--transport=tcp", "--lanes=1"];
    let mut subscriber = home.start(&args);
    subscriber.wait_for_stdout(r#""event":"committed""#);
    for path in [TcpPath::Http, TcpPath::DamageAt(0), TcpPath::DamageAt(50), TcpPath::DamageAt(300)] {
        let before = proxy.connections();
        proxy.set_path(path);
        wait_until("the client has tried twice", || proxy.connections() >= before + 2);
        assert!(subscriber.is_running(), "{path:?}");
    }
    proxy.set_path(TcpPath::Open);
    files::write_noise(&home.path("next"), 1_000, 2);
    std::fs::rename(home.path("next"), home.path("m")).unwrap();
    let line = subscriber.wait_for_stdout(r#""version":2"#);
    assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["event"], "committed");
}
