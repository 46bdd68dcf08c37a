//! Relays between a server and its subscribers: killed, restarted from their cache, without an origin, with a full or a
//! damaged disk.

use crate::{files, http::Response};
use serde_json::Value;
use std::{
    fs,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};
use tensor_relay_protocol::Topic;
use tensor_relay_server::sidecar::Producer;
use tensor_relay_tests::{
    processes::{Home, Process, Serving, Signal, Switch, wait_until},
    skip,
};

const MODEL_BYTES: usize = 9 << 20;

/// An origin of the model `m`, and the folder of everything.
struct Site {
    home: Home,
    origin: Option<Serving>,
    listen: String,
}

impl Site {
    fn new() -> Self {
        let home = Home::new();
        files::write_noise(&home.path("m"), MODEL_BYTES, 1);
        let origin = home.serve(&ORIGIN);
        let listen = format!("--listen={}", origin.listen());
        Self { home, origin: Some(origin), listen }
    }

    fn ticket(&self) -> String {
        fs::read_to_string(self.home.path("origin/tickets")).unwrap().trim().into()
    }

    /// Kills the origin.
    fn kill_origin(&mut self) {
        drop(self.origin.take());
    }

    fn restart_origin(&mut self) {
        self.origin = Some(self.home.serve(&[&[&*self.listen], &ORIGIN[..]].concat()));
    }

    /// Publishes other content.
    fn publish(&self, seed: u64) {
        files::write_noise(&self.home.path("next"), MODEL_BYTES, seed);
        fs::rename(self.home.path("next"), self.home.path("m")).unwrap();
    }

    /// Starts a relay of the server of `ticket` with this state directory.
    fn relay(&self, name: &str, tickets: &[&str], more: &[&str]) -> Serving {
        Serving::wait_for_report(self.home.start(&arguments(name, tickets, more)))
    }

    /// Receives the newest version once, and compares it with the origin's file.
    fn receive(&self, ticket: &str) {
        let ended =
            self.home
                .run(&["subscribe", ticket, "--once", "--out=out", "--device=cpu", "--once-within=60"]);
        ended.expect_code(0);
        files::assert_same(&self.home.path("m"), &self.home.path("out/m.safetensors"));
    }

    /// The only file in the cache.
    fn cached(&self) -> Option<PathBuf> {
        let files = self.home.files_in("cache");
        files
            .iter()
            .find(|file| file.ends_with(".version"))
            .map(|file| self.home.path("cache").join(file))
    }
}

const ORIGIN: [&str; 6] =
    ["--topic=m=m", "--watch", "--watch-interval=0.05", "--state-dir=origin", "--admin=none", "--device=cpu"];

/// Another server of the same file.
const SECOND: [&str; 6] =
    ["--topic=m=m", "--watch", "--watch-interval=0.05", "--state-dir=second", "--admin=none", "--device=cpu"];

fn arguments<'a>(name: &str, tickets: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    let state: &'static str = Box::leak(format!("--state-dir={name}").into_boxed_str());
    let mut all = vec!["relay"];
    all.extend(tickets);
    all.extend(["--json", state]);
    if !more.iter().any(|arg| arg.starts_with("--listen")) {
        all.push("--listen=127.0.0.1:0");
    }
    if !more.iter().any(|arg| arg.starts_with("--admin")) {
        all.push("--admin=none");
    }
    all.extend(more);
    all
}

/// The status of a relay at its admin port.
fn status(relay: &Serving) -> Value {
    let admin = relay.report["admin"].as_str().unwrap();
    Response::get(admin, "/status", &[]).expect_code(200).json()
}

fn relayed(relay: &mut Serving, version: u64) -> Value {
    serde_json::from_str(&relay.process.wait_for_stdout(&format!("\"version\":{version},"))).unwrap()
}

/// Goal: a model passes through two relays, under the origin's epoch and number, and later versions do too.
#[test]
fn a_model_passes_through_two_relays() {
    let site = Site::new();
    let mut first = site.relay("first", &[&site.ticket()], &[]);
    let mut second = site.relay("second", &[first.ticket("m")], &[]);
    let epoch = site.origin.as_ref().unwrap().topic("m")["epoch"].clone();
    for version in 1..=2 {
        if version > 1 {
            site.publish(version);
        }
        let events = [relayed(&mut first, version), relayed(&mut second, version)];
        assert!(events.iter().all(|event| event["epoch"] == epoch), "{events:?}");
        assert_eq!([&events[0]["relays"], &events[1]["relays"]], [0, 1]);
        site.receive(second.ticket("m"));
    }
    let ended = second.process.signal_and_wait(Signal::TERM).expect_code(0);
    assert!(ended.out.contains("\"event\":\"sent\""), "{}", ended.out);
}

/// Goal: without its origin, a relay serves what it has, stays ready, and says since when the origin is lost; then it goes
/// on with the origin's next version.
#[test]
fn a_killed_origin_is_survived_and_told() {
    let mut site = Site::new();
    let mut relay = site.relay("relay", &[&site.ticket()], &["--admin=127.0.0.1:0", "--ready-within=2"]);
    relayed(&mut relay, 1);
    assert_eq!(status(&relay)["origins"][0]["connected"], true);
    site.kill_origin();
    wait_until("the loss is told", || status(&relay)["origins"][0]["connected"] == false);
    let lost = status(&relay);
    assert!(lost["origins"][0]["lost"].as_str().is_some_and(|why| !why.is_empty()), "{lost}");
    assert!(lost["topics"][0]["age_s"].as_f64().unwrap() > 0.0, "{lost}");
    site.receive(relay.ticket("m"));
    wait_until("it is not ready after two seconds", || status(&relay)["ready"] == false);
    let why = status(&relay)["not_ready"].as_str().unwrap().to_owned();
    assert!(why.contains("has been lost for"), "{why}");
    let metrics = Response::get(relay.report["admin"].as_str().unwrap(), "/metrics", &[]).body;
    assert!(metrics.contains("tensor_relay_origin_connected{origin="), "{metrics}");
    site.publish(2);
    site.restart_origin();
    relayed(&mut relay, 2);
    wait_until("the return is told", || {
        let told = status(&relay);
        told["ready"] == true && told["origins"][0]["connected"] == true
    });
    site.receive(relay.ticket("m"));
}

/// Goal: a relay that was killed serves at once what it kept on disk, without its origin, under the same epoch and number;
/// what an origin withdrew is not there any more.
#[test]
fn a_killed_relay_serves_from_its_cache() {
    let mut site = Site::new();
    let cache = ["--cache-dir=cache"];
    let mut relay = site.relay("relay", &[&site.ticket()], &cache);
    let epoch = relayed(&mut relay, 1)["epoch"].clone();
    wait_until("the version is kept", || site.cached().is_some());
    let listen = format!("--listen={}", relay.listen());
    site.kill_origin();
    drop(relay); // Killed.
    let relay = site.relay("relay", &[&site.ticket()], &[&*listen, cache[0]]);
    site.receive(relay.ticket("m"));
    let listed = site.home.run(&["list", relay.ticket("m"), "--json"]).expect_code(0).json();
    assert_eq!((&listed["topics"][0]["epoch"], &listed["topics"][0]["version"]), (&epoch, &1.into()));
}

/// Goal: a bit that flipped on the disk is a named error, never a wrong byte: the version comes from the origin again.
#[test]
fn a_flipped_bit_in_the_cache_is_named() {
    let site = Site::new();
    for at in [200, MODEL_BYTES as u64 / 2] {
        let _ = fs::remove_dir_all(site.home.path("cache")); // Of the round before.
        let mut relay = site.relay("relay", &[&site.ticket()], &["--cache-dir=cache"]);
        relayed(&mut relay, 1);
        wait_until("the version is kept", || site.cached().is_some());
        drop(relay);
        let file = site.cached().unwrap();
        let mut bytes = fs::read(&file).unwrap();
        bytes[at as usize] ^= 4;
        fs::write(&file, bytes).unwrap();
        let mut relay = site.relay("relay", &[&site.ticket()], &["--cache-dir=cache"]);
        let said = relay.process.wait_for_stderr("is damaged");
        assert!(said.contains("comes from the origin again"), "{said}");
        relayed(&mut relay, 1);
        site.receive(relay.ticket("m"));
    }
}

/// Goal: a full disk is a named error, and costs no version: it is served from memory. Method: the cache is a file system of
/// a megabyte.
#[test]
fn a_full_disk_is_named() {
    let site = Site::new();
    fs::create_dir(site.home.path("cache")).unwrap();
    let on_small_disk = |program: &std::ffi::OsStr| {
        let mut command = site.home.isolated(Command::new("unshare"));
        let script = "mount -t tmpfs -o size=1m none cache && exec \"$0\" \"$@\"";
        command.args(["--map-root-user", "--mount", "sh", "-c", script]).arg(program);
        command
    };
    if !on_small_disk("true".as_ref())
        .output()
        .is_ok_and(|tried| tried.status.success())
    {
        return skip("the test cannot mount a file system here");
    }
    let mut command = on_small_disk(site.home.program().get_program());
    command.args(arguments("relay", &[&site.ticket()], &["--cache-dir=cache"]));
    let mut relay = Serving::wait_for_report(Process::start(command));
    let said = relay.process.wait_for_stderr("is not kept on disk");
    assert!(said.contains("No space left") && said.contains("--cache-bytes"), "{said}");
    site.receive(relay.ticket("m"));
}

/// Goal: the cache stays within its bytes, and keeps the newest versions.
#[test]
fn the_cache_is_bounded() {
    let site = Site::new();
    let more = ["--cache-dir=cache", "--cache-bytes=20MiB", "--keep-versions=9", "--mode=every"];
    let mut relay = site.relay("relay", &[&site.ticket()], &more);
    for version in 1..=4 {
        if version > 1 {
            site.publish(version);
        }
        relayed(&mut relay, version);
    }
    let kept = || {
        site.home
            .files_in("cache")
            .into_iter()
            .filter(|file| file.ends_with(".version"))
            .collect()
    };
    wait_until("the newest two are kept", || {
        let kept: Vec<String> = kept();
        kept.len() == 2
            && [3, 4]
                .iter()
                .all(|version| kept.iter().any(|name| name.ends_with(&format!("{version}.version"))))
    });
}

/// Goal: the end of a relay's right ends the topic here within ten seconds, also for those who have it, and what was kept is
/// deleted.
#[test]
fn a_revoked_right_ends_the_topic() {
    let site = Site::new();
    let created = site.home.run(&[
        "tickets",
        "create",
        "--json",
        "--topic=m",
        "--state-dir=origin",
        &format!("--address={}", site.origin.as_ref().unwrap().listen()),
    ]);
    let created = created.expect_code(0).json();
    let (ticket, id) = (created["ticket"].as_str().unwrap(), created["id"].as_str().unwrap());
    let mut relay = site.relay("relay", &[ticket], &["--cache-dir=cache"]);
    relayed(&mut relay, 1);
    wait_until("the version is kept", || site.cached().is_some());
    let mut subscriber = site.home.start(&["subscribe", relay.ticket("m"), "--json", "--device=cpu"]);
    subscriber.wait_for_stdout("committed");
    let began = Instant::now();
    site.home.run(&["tickets", "revoke", id, "--state-dir=origin"]).expect_code(0);
    let ended = subscriber.wait().expect_error(4, &["does not allow to subscribe"]);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}: {}", began.elapsed(), ended.err);
    wait_until("nothing is kept", || site.cached().is_none());
    let said = relay.process.wait_for_stderr("revoked");
    assert!(said.contains("topic=m"), "by name: {said}");
}

/// Goal: a topic that its publisher ends, and opens again in the same server, is relayed again in the same session.
/// Method: a process publishes a version into a server, ends its topic, and publishes again.
#[test]
fn a_topic_that_returns_is_relayed_again() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1_000, 1);
    let socket = home.argument("s");
    let server = home.serve(&[&format!("--publish-socket={socket}"), "--admin=none"]);
    let publish = || home.run(&["publish", &socket, "t", "w", "--json"]).expect_code(0);
    let relay = arguments("relay", &[server.ticket_for_all()], &["-v"]);
    let mut relay = Serving::wait_for_report(home.start(&relay));
    let begun = Instant::now();
    publish();
    let first = relayed(&mut relay, 1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let producer = Producer::connect(&home.path("s")).await.unwrap();
        producer.end(Topic::new("t").unwrap(), false).await.unwrap();
    });
    relay.process.wait_for_stderr("A topic ended at its origin");
    wait_until("the session no longer asks for what the origin has not named", || {
        begun.elapsed() > Duration::from_secs(6)
    });
    publish();
    let again = relayed(&mut relay, 1);
    assert_ne!(first["epoch"], again["epoch"], "{again}");
}

/// Goal: a right that was revoked while the relay was down ends the topic, too, and deletes what was kept of it.
#[test]
fn a_right_that_was_revoked_while_the_relay_was_down_ends_the_topic() {
    let site = Site::new();
    let address = format!("--address={}", site.origin.as_ref().unwrap().listen());
    let create = ["tickets", "create", "--json", "--topic=m", "--state-dir=origin", &address];
    let created = site.home.run(&create).expect_code(0).json();
    let (ticket, id) = (created["ticket"].as_str().unwrap(), created["id"].as_str().unwrap());
    let mut relay = site.relay("relay", &[ticket], &["--cache-dir=cache"]);
    relayed(&mut relay, 1);
    wait_until("the version is kept", || site.cached().is_some());
    drop(relay);
    site.home.run(&["tickets", "revoke", id, "--state-dir=origin"]).expect_code(0);
    let mut relay = site.relay("relay", &[ticket], &["--cache-dir=cache"]);
    let said = relay.process.wait_for_stderr("revoked");
    assert!(said.contains("topic=m"), "by name: {said}");
    wait_until("nothing is kept", || site.cached().is_none());
    let listed = site.home.run(&["list", relay.ticket("m"), "--json"]).expect_code(0).json();
    assert_eq!(listed["topics"].as_array().unwrap().len(), 0, "{listed}");
}

/// Goal: while an origin is lost, a topic comes from another one that has it. Method: two servers of the same file, of
/// which the first is killed.
#[test]
fn a_topic_comes_from_another_origin_while_the_first_is_lost() {
    let mut site = Site::new();
    let second = site.home.serve(&SECOND);
    let mut relay = site.relay("relay", &[&site.ticket(), second.ticket("m")], &[]);
    let first = relayed(&mut relay, 1);
    assert_eq!(first["epoch"], site.origin.as_ref().unwrap().topic("m")["epoch"]);
    site.kill_origin();
    assert_eq!(relayed(&mut relay, 1)["epoch"], second.topic("m")["epoch"]);
    site.publish(2);
    relayed(&mut relay, 2);
    site.receive(relay.ticket("m"));
}

/// Goal: an origin that returns without a topic does not hold it: the topic comes from another one. Method: two servers of
/// the same file, of which the first restarts with another topic.
#[test]
fn a_topic_comes_from_another_origin_when_the_first_returns_without_it() {
    let mut site = Site::new();
    let second = site.home.serve(&SECOND);
    let mut relay = site.relay("relay", &[&site.ticket(), second.ticket("m")], &["--admin=127.0.0.1:0"]);
    let first = relayed(&mut relay, 1);
    assert_eq!(first["epoch"], site.origin.as_ref().unwrap().topic("m")["epoch"]);
    site.kill_origin();
    let without = ORIGIN.map(|arg| if arg == "--topic=m=m" { "--topic=other=m" } else { arg });
    let _first = site.home.serve(&[&[&*site.listen], &without[..]].concat());
    assert_eq!(relayed(&mut relay, 1)["epoch"], second.topic("m")["epoch"]);
    assert_eq!(status(&relay)["origins"][0]["connected"], true, "it is not lost");
    site.publish(2);
    relayed(&mut relay, 2);
    site.receive(relay.ticket("m"));
}

/// Goal: what came from an origin that is down is not deleted because another one refuses it. Method: a relay is restarted
/// with its cache, without the first origin; the ticket of the second one grants another topic. It refused the topic, if it
/// was asked, after the five seconds in which an origin names what it has.
#[test]
fn a_refusal_ends_no_topic_of_another_origin() {
    let mut site = Site::new();
    let second = site.home.serve(&SECOND);
    let address = format!("--address={}", second.listen());
    let create = ["tickets", "create", "--json", "--topic=other", "--state-dir=second", &address];
    let created = site.home.run(&create).expect_code(0).json();
    let tickets = [site.ticket(), created["ticket"].as_str().unwrap().to_owned()];
    let tickets = tickets.each_ref().map(String::as_str);
    let more = ["--topic=m", "--cache-dir=cache", "--admin=127.0.0.1:0"];
    let mut relay = site.relay("relay", &tickets, &more);
    relayed(&mut relay, 1);
    wait_until("the version is kept", || site.cached().is_some());
    site.kill_origin();
    drop(relay);
    let relay = site.relay("relay", &tickets, &more);
    wait_until("the second origin is there", || status(&relay)["origins"][1]["connected"] == true);
    let connected = Instant::now();
    wait_until("it would have been asked", || connected.elapsed() > Duration::from_secs(8));
    assert!(site.cached().is_some());
    site.receive(relay.ticket("m"));
}

/// Goal: processes of the relay's host take versions from its memory.
#[test]
fn takers_of_the_host_map_what_was_relayed() {
    let site = Site::new();
    let socket = site.home.argument("socket");
    let mut relay = site.relay("relay", &[&site.ticket()], &["--socket=socket"]);
    relayed(&mut relay, 1);
    let ticket = format!("unix:{socket}");
    let mut taker =
        site.home
            .start(&["subscribe", &ticket, "--topic=m", "--json", "--out=taken", "--device=cpu"]);
    for version in 1..=2 {
        if version > 1 {
            site.publish(version);
        }
        let event: Value = serde_json::from_str(&taker.wait_for_stdout("committed")).unwrap();
        assert_eq!((&event["version"], &event["sharing"]), (&version.into(), &"memory".into()), "{event}");
        files::assert_same(&site.home.path("m"), &site.home.path("taken/m.safetensors"));
    }
}

/// Goal: relays form no ring, also when each has in its cache what the other one has. Method: a relay is restarted with the
/// ticket of a relay of its own before that of the origin.
#[test]
fn a_ring_is_refused_by_name() {
    let site = Site::new();
    let mut first = site.relay("first", &[&site.ticket()], &["--cache-dir=cache"]);
    let listen = format!("--listen={}", first.listen());
    let mut second = site.relay("second", &[first.ticket("m")], &["--cache-dir=cache2"]);
    relayed(&mut first, 1);
    relayed(&mut second, 1);
    wait_until("the version is kept", || site.cached().is_some());
    let ticket = second.ticket("m").to_owned();
    drop(first);
    let mut first = site.relay("first", &[&ticket, &site.ticket()], &[&*listen, "--cache-dir=cache"]);
    let said = first.process.wait_for_stderr("ring");
    assert!(said.contains("sha256:"), "by name: {said}");
    site.publish(2);
    relayed(&mut first, 2);
    relayed(&mut second, 2);
    site.receive(&ticket);
}

/// Goal: three consumers behind a relay cost the origin about one transfer, and begin to receive long before the relay has
/// all of it. Method: hosts behind links of 100 Mbit/s, whose bytes are counted from the second version on.
#[test]
fn the_origin_sends_once_and_the_relay_sends_on_meanwhile() {
    const LARGE_BYTES: u64 = 32 << 20;
    let switch = match Switch::new(5, 100) {
        Ok(switch) => switch,
        Err(reason) => return skip(format_args!("the test cannot create hosts here: {reason}")),
    };
    let home = Home::new();
    files::write_noise(&home.path("m"), 1_000, 1);
    let listen = |host| format!("--listen={}:4747", Switch::address(host));
    let at = listen(0);
    let origin = [&["serve", "--json"][..], &ORIGIN, &["--chunk-size=1MiB", &at]].concat();
    let origin = Serving::wait_for_report(switch.start(0, &home, &origin));
    let relay = arguments("relay", &[origin.ticket("m")], &[]);
    let relay: Vec<String> = relay
        .into_iter()
        .map(|arg| arg.replace("--listen=127.0.0.1:0", &listen(1)))
        .collect();
    let relay: Vec<&str> = relay.iter().map(String::as_str).collect();
    let relay = Serving::wait_for_report(switch.start(1, &home, &relay));
    let consumers = [2, 3, 4].map(|host| {
        let out = format!("--out=out{host}");
        let mut consumer = switch.start(host, &home, &["subscribe", relay.ticket("m"), "--device=cpu", &out]);
        consumer.wait_for_stdout("version 1");
        consumer
    });
    let before = switch.sent_bytes(0);
    files::replace(&home.path("m"), |path| files::write_noise(path, LARGE_BYTES as usize, 2));
    switch.wait_until_received(2, LARGE_BYTES / 8);
    let sent = switch.sent_bytes(0) - before;
    assert!(sent < LARGE_BYTES * 9 / 10, "the origin has sent {sent} already");
    for (host, mut consumer) in [2, 3, 4].into_iter().zip(consumers) {
        consumer.wait_for_stdout("version 2");
        files::assert_same(&home.path("m"), &home.path(&format!("out{host}/m.safetensors")));
    }
    let sent = switch.sent_bytes(0) - before;
    assert!(sent < LARGE_BYTES * 5 / 4, "the origin has sent {sent}");
}
