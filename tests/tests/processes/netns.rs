//! Two hosts on an Ethernet of MTU 1500 with real processes: slow links, unplugged cables, killed processes, and
//! changed addresses.
//!
//! Needs root, `ip` and `tc`. Without them each test prints why it is skipped, and passes.

use crate::files;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::Value;
use std::{
    fs, thread,
    time::{Duration, Instant},
};
use tensor_relay_tests::{
    processes::{Home, Host, Lan, Process, Serving, Signal, is_soak},
    skip,
};

const MODEL_BYTES: u64 = 64 << 20;
const CHUNK_BYTES: u64 = 1 << 20;

/// The most bytes that are sent again after a lost connection: the chunks of a subscription's credit, and as many
/// again.
const LOST_PER_KILL_BYTES: u64 = 16 * CHUNK_BYTES;

/// The rate of the slow link: [`MODEL_BYTES`] take about five seconds.
const LINK_MBIT_PER_S: u32 = 100;

/// The duration of a transfer over the link.
const TRANSFER_TIME: Duration = Duration::from_millis(MODEL_BYTES * 8 / (LINK_MBIT_PER_S as u64 * 1_000));

/// A model that is served on one host, for a client on the other.
struct ServedModel {
    lan: Lan,
    home: Home,
    server: Option<Serving>,
}

impl ServedModel {
    /// As [`try_new`](Self::try_new), with subscribers that choose no other transport in the middle.
    fn try_over_one_transport() -> Option<Self> {
        let served = Self::try_new()?;
        Some(Self { home: served.home.over_one_transport(), ..served })
    }

    /// Starts a server on a link of [`LINK_MBIT_PER_S`]; `None` if this system does not permit it.
    fn try_new() -> Option<Self> {
        let lan = Lan::new().and_then(|lan| lan.limit_rate(LINK_MBIT_PER_S).map(|()| lan));
        let lan = lan
            .inspect_err(|reason| skip(format_args!("the test cannot create two hosts here: {reason}")))
            .ok()?;
        let home = Home::new();
        files::write_noise(&home.path("m"), MODEL_BYTES as usize, 1);
        let mut served = Self { lan, home, server: None };
        served.serve();
        Some(served)
    }

    fn serve(&mut self) {
        let listen = format!("--listen={}:4747", Lan::SERVER);
        let args = ["serve", "--json", "--topic=m=m", "--state-dir=keys", "--chunk-size=1MiB", &listen];
        self.server = Some(Serving::wait_for_report(self.lan.start(Host::Server, &self.home, &args)));
    }

    fn subscribe(&self) -> Process {
        let ticket = self.server.as_ref().unwrap().ticket("m");
        // A lane that is tried and given up loses a part of a chunk.
        let args = ["subscribe", ticket, "--once", "--out=out", "--json", "--lanes=1"];
        self.lan.start(Host::Client, &self.home, &args)
    }

    /// Waits until the client's host has received this part of the model.
    fn wait_until_received(&self, part: f64) {
        self.lan.wait_until_received(Host::Client, (MODEL_BYTES as f64 * part) as u64);
    }

    fn kill_server(&mut self) {
        self.server.take().unwrap().process.signal_and_wait(Signal::KILL);
    }

    /// Waits until `subscriber` has the model; checks that the model is complete, and that at most
    /// [`LOST_PER_KILL_BYTES`] were sent again for each of `losses` lost connections.
    fn finish(&self, subscriber: Process, losses: u64) -> Value {
        let event = subscriber.wait().expect_code(0).json();
        let payload = event["payload_bytes"].as_u64().unwrap();
        let wire_bytes = event["wire_bytes"].as_u64().unwrap();
        let max_bytes = payload + losses * LOST_PER_KILL_BYTES;
        assert!((payload..=max_bytes).contains(&wire_bytes), "at most {max_bytes}: {event}");
        files::assert_same(&self.home.path("m"), &self.home.path("out/m.safetensors"));
        event
    }
}

/// Goal: a model arrives over a slow Ethernet at about line rate, each byte once. Method: 64 MiB at 100 Mbit/s.
#[test]
fn a_slow_link_carries_each_byte_once() {
    let Some(served) = ServedModel::try_over_one_transport() else { return };
    let started = Instant::now();
    let event = served.finish(served.subscribe(), 0);
    assert_eq!(event["resumed"], 0);
    let elapsed = started.elapsed();
    assert!(
        (TRANSFER_TIME..TRANSFER_TIME * 2).contains(&elapsed),
        "{elapsed:?} where the link needs {TRANSFER_TIME:?}"
    );
}

/// Goal: weights are encoded where the link is slow, although TCP begins without that; and a client that comes back has
/// them encoded from the first chunk. Method: 32 MiB of bf16 at 25 Mbit/s, twice: so slow that encoding is worth its time
/// also in a debug build whose processors are busy.
#[test]
fn weights_are_encoded_on_a_slow_link() {
    let Some(mut served) = ServedModel::try_over_one_transport() else { return };
    served.kill_server();
    files::write_weights(&served.home.path("m"), 16 << 20, 1);
    served.serve();
    served.lan.limit_rate(25).unwrap();
    let codecs = || {
        let event = served.subscribe().wait().expect_code(0).json();
        fs::remove_dir_all(served.home.path("out")).unwrap();
        let codecs = event["codecs"].as_object().unwrap();
        codecs.keys().map(String::clone).collect::<Vec<_>>().join(", ")
    };
    assert_eq!([codecs(), codecs()], ["bitplanes, raw", "bitplanes"]);
}

/// Goal: an outage longer than the idle timeout costs its time and a few chunks. Method: take the link down during a
/// transfer, until the subscriber, with an idle timeout of two seconds, has given up the connection.
#[test]
fn a_transfer_resumes_after_an_outage() {
    let Some(served) = ServedModel::try_over_one_transport() else { return };
    let served = ServedModel { home: served.home.with_idle_timeout(2_000), ..served };
    let mut subscriber = served.subscribe();
    served.wait_until_received(0.5);
    served.lan.set_link_up(Host::Server, false);
    subscriber.wait_for_stderr("The connection was lost; reconnecting.");
    served.lan.set_link_up(Host::Server, true);
    assert_eq!(served.finish(subscriber, 1)["resumed"], 1);
}

/// Goal: one of two servers with the same file may die; the version is complete, and nothing verified travels again.
/// Method: two servers on one slow link; kill the origin, or the other one, in the middle.
#[test]
fn one_of_two_servers_is_killed() {
    for kills_origin in [true, false] {
        let Some(mut served) = ServedModel::try_over_one_transport() else { return };
        let listen = format!("--listen={}:4748", Lan::SERVER);
        let args = ["serve", "--json", "--topic=m=m", "--state-dir=other-keys", "--chunk-size=1MiB", &listen];
        let other = Serving::wait_for_report(served.lan.start(Host::Server, &served.home, &args));
        let source = format!("--source={}", other.ticket("m"));
        let ticket = served.server.as_ref().unwrap().ticket("m").to_owned();
        let args = ["subscribe", &ticket, &source, "--once", "--out=out", "--json", "--lanes=1"];
        let subscriber = served.lan.start(Host::Client, &served.home, &args);
        served.wait_until_received(0.5);
        match kills_origin {
            true => served.kill_server(),
            false => drop(other.process.signal_and_wait(Signal::KILL)),
        }
        let event = served.finish(subscriber, 1);
        assert_eq!(event["resumed"], u64::from(kills_origin), "{event}");
    }
}

/// Goal: a connection survives an outage shorter than the idle timeout. Method: take the link down for a second during
/// a transfer.
#[test]
fn a_connection_survives_a_short_outage() {
    let Some(served) = ServedModel::try_over_one_transport() else { return };
    let subscriber = served.subscribe();
    served.wait_until_received(0.5);
    served.lan.set_link_up(Host::Client, false);
    thread::sleep(Duration::from_secs(1));
    served.lan.set_link_up(Host::Client, true);
    assert_eq!(served.finish(subscriber, 0)["resumed"], 0);
}

/// Goal: whichever side is killed at any moment, the model arrives. Method: chosen by a seed, kill -9 the server or the
/// subscriber during a transfer, and restart it. More seeds in a soak.
#[test]
fn a_transfer_survives_killed_processes() {
    for seed in if is_soak() { 0..12 } else { 1..3 } {
        let Some(mut served) = ServedModel::try_new() else { return };
        let mut rng = StdRng::seed_from_u64(seed);
        let mut subscriber = served.subscribe();
        let mut losses = 0;
        for _ in 0..2 {
            served.wait_until_received(rng.random_range(0.0..0.4));
            if rng.random_bool(0.5) {
                println!("seed {seed}: the server is killed");
                served.kill_server();
                served.serve();
                losses += 1;
            } else {
                println!("seed {seed}: the subscriber is killed");
                subscriber.signal_and_wait(Signal::KILL);
                subscriber = served.subscribe();
                losses = 0;
            }
        }
        served.finish(subscriber, losses);
        assert_eq!(served.home.files_in("out"), ["m.safetensors"]);
    }
}

/// Goal: a client whose address changes keeps what it has received. Method: give its host another address and remove
/// the first during a transfer. QUIC migrates the connection, or the client reconnects; either way few bytes are sent
/// again.
#[test]
fn a_transfer_survives_a_changed_address() {
    let Some(served) = ServedModel::try_new() else { return };
    let subscriber = served.subscribe();
    served.wait_until_received(0.5);
    served.lan.add_address(Host::Client, Lan::CLIENT_MOVED);
    served.lan.remove_address(Host::Client, Lan::CLIENT);
    let event = served.finish(subscriber, 1);
    println!("resumed: {}, {} s", event["resumed"], event["duration_s"]);
}
