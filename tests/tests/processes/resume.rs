//! Lost connections: servers that are killed, stopped and restarted, and subscribers that die. Received chunks are not
//! sent again.

use crate::files;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::Value;
use std::{
    fs, thread,
    time::{Duration, Instant},
};
use tensor_relay_tests::processes::{Home, Process, Serving, Signal, UdpProxy, wait_until};

const MODEL_BYTES: u64 = 64 << 20;
const CHUNK_BYTES: u64 = 1 << 20;

/// The most bytes that are sent again after a lost connection: the chunks of a subscription's credit, which were in
/// flight, and as many again that were not yet verified.
const LOST_PER_KILL_BYTES: u64 = 16 * CHUNK_BYTES;

/// The maximum overhead of packet headers and messages.
const OVERHEAD_PERCENT: u64 = 10;

/// The time without a packet after which the peer is considered dead (`Tuning::idle_timeout_ms`, 10 s), plus time to
/// react.
const DEAD_WITHIN: Duration = Duration::from_secs(20);

/// A subscriber that receives incompressible bytes through a proxy, and its server, which can be restarted on the same
/// port.
struct Transfer {
    home: Home,
    proxy: UdpProxy,
    server: Option<Serving>,
    report: Value,
    args: Vec<String>,
    subscriber: Process,
}

impl Transfer {
    /// Begins a transfer, and holds it after `bytes`.
    fn start_held(more_args: &[&str], bytes: u64) -> Self {
        let (home, mut proxy) = (Home::new().over_quic(), UdpProxy::new());
        files::write_noise(&home.path("m"), MODEL_BYTES as usize, 1);
        let common = ["--topic=m=m", "--state-dir=keys", "--chunk-size=1MiB", &proxy.advertise()];
        let args: Vec<String> = common.iter().chain(more_args).map(|arg| (*arg).into()).collect();
        let server = home.serve(&as_strs(&args));
        proxy.forward_to(server.listen(), bytes);
        let subscriber = home.start(&["subscribe", server.ticket("m"), "--once", "--out=out", "--json"]);
        proxy.wait_until_held();
        Self { home, proxy, report: server.report.clone(), server: Some(server), args, subscriber }
    }

    fn take_server(&mut self) -> Process {
        self.server.take().unwrap().process
    }

    fn serve_again(&mut self) {
        self.server = Some(self.home.serve_again(&self.report, &as_strs(&self.args)));
    }

    /// Lets the transfer complete; checks the received file, and that at most [`LOST_PER_KILL_BYTES`] were sent again
    /// for each kill.
    fn finish(self, kills: u64) {
        self.proxy.release();
        let ended = self.subscriber.wait().expect_code(0);
        let event = ended.json();
        assert_eq!(event["resumed"], kills, "{event}");
        let payload = event["payload_bytes"].as_u64().unwrap();
        let max_bytes = payload + kills * LOST_PER_KILL_BYTES;
        let wire_bytes = event["wire_bytes"].as_u64().unwrap();
        assert!((payload..=max_bytes).contains(&wire_bytes), "{wire_bytes} of at most {max_bytes}");
        let passed_bytes = self.proxy.passed_bytes();
        let max_bytes = max_bytes + max_bytes * OVERHEAD_PERCENT / 100;
        assert!(
            (payload..=max_bytes).contains(&passed_bytes),
            "{passed_bytes} of at most {max_bytes} went over the wire"
        );
        files::assert_same(&self.home.path("m"), &self.home.path("out/m.safetensors"));
        assert_eq!(self.home.files_in("out"), ["m.safetensors"]);
    }
}

fn as_strs(args: &[String]) -> Vec<&str> {
    args.iter().map(|arg| &**arg).collect()
}

/// Goal: a server that is killed during a transfer and restarted costs its subscriber only time and a few chunks: it
/// resumes, and the received model is complete. Method: kill -9 at two random moments, and restart the server on its
/// port with its key. No close is sent, so each kill is noticed after the idle timeout.
#[test]
fn a_transfer_survives_killed_servers() {
    kill_at_random_moments("--hold=stage", 1, 2);
}

/// Goal: a transfer of a borrowed file resumes as well: its version has the same id after the restart. Method: one kill
/// -9 at a random moment.
#[test]
fn a_transfer_of_a_borrowed_file_survives_a_killed_server() {
    kill_at_random_moments("--hold=borrow", 2, 1);
}

fn kill_at_random_moments(hold: &str, seed: u64, kills: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut bytes_until_kill = || rng.random_range(CHUNK_BYTES..MODEL_BYTES / 4);
    let mut transfer = Transfer::start_held(&[hold], bytes_until_kill());
    for kill in 1..=kills {
        transfer.take_server().signal_and_wait(Signal::KILL);
        transfer.serve_again();
        if kill < kills {
            transfer.proxy.hold_after(bytes_until_kill());
            transfer.proxy.wait_until_held();
        }
    }
    transfer.finish(kills);
}

/// Goal: a server that cancels a transfer at its shutdown reports it; the subscriber waits for the server, and resumes.
/// Method: SIGTERM with a short grace while the proxy holds.
#[test]
fn a_transfer_resumes_after_a_shutdown() {
    let mut transfer = Transfer::start_held(&["--grace=0.2"], MODEL_BYTES / 3);
    let ended = transfer.take_server().signal_and_wait(Signal::TERM).expect_code(0);
    assert!(ended.err.contains("transfers were cut off"), "{ended:?}");
    transfer.serve_again();
    transfer.finish(1);
}

/// Goal: a subscriber that waits for its next version survives restarts of the server, receives nothing twice, and gets
/// new versions from the restarted server. Method: SIGTERM, the same file again, SIGTERM, another file.
#[test]
fn a_subscriber_reconnects_to_a_restarted_server() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 100_000, 1);
    let args = ["--topic=w=w", "--state-dir=keys", "--watch", "--admin=none"];
    let first = home.serve(&args);
    let mut follower = home.start(&["subscribe", first.ticket("w"), "--out=out", "--json"]);
    follower.wait_for_stdout("committed");
    let report = first.report.clone();
    first.process.signal_and_wait(Signal::TERM).expect_code(0);
    follower.wait_for_stderr("The connection was lost");
    let second = home.serve_again(&report, &args);
    assert_eq!(second.report, report, "the same file is the same version");
    follower.wait_for_stderr("Connected again");
    second.process.signal_and_wait(Signal::TERM).expect_code(0);
    files::write_noise(&home.path("w"), 100_000, 2);
    let third = home.serve_again(&report, &args);
    assert_eq!(third.topic("w")["epoch"], report["topics"][0]["epoch"]);
    assert_eq!(third.topic("w")["version"], 2, "other content is the next version");
    follower.wait_for_stdout(r#""version":2"#);
    files::assert_same(&home.path("w"), &home.path("out/w.safetensors"));
    let events = follower.signal_and_wait(Signal::TERM).expect_code(143).events();
    let versions: Vec<_> = events.iter().map(|event| (&event["version"], &event["new_epoch"])).collect();
    assert_eq!(
        versions,
        [(&1.into(), &false.into()), (&2.into(), &false.into())],
        "nothing was received twice"
    );
}

/// Goal: repeated restarts of a server under load lose no version of a reader in mode `every`. Method: a reader whose
/// command is slower than new versions, so that it lags; three versions, SIGTERM, and a restart, four times.
#[test]
fn rolling_restarts_lose_no_version() {
    const ROUNDS: u64 = 4;
    const BURST: u64 = 3;
    let home = Home::new();
    files::write_noise(&home.path("w"), 100_000, 1);
    let args = [
        "--topic=w=w",
        "--state-dir=keys",
        "--watch",
        "--watch-interval=0.05",
        "--keep-versions=8",
        "--grace=30",
    ];
    let mut server = home.serve(&args);
    let report = server.report.clone();
    let every = ["subscribe", server.ticket("w"), "--mode=every", "--reader=r", "--exec=sleep 0.5"];
    let mut reader = home.start(&[&every[..], &["--out=out", "--json"]].concat());
    reader.wait_for_stdout(r#""version":1,"#);
    for round in 0..ROUNDS {
        let before = 1 + round * BURST;
        for version in before + 1..=before + BURST {
            files::write_noise(&home.path("next"), 100_000, version);
            fs::rename(home.path("next"), home.path("w")).unwrap();
            let deadline = Instant::now() + DEAD_WITHIN;
            while home.list(&server)[0]["version"] != version {
                assert!(Instant::now() < deadline, "version {version} is not published");
            }
        }
        // Only connected readers receive what a server publishes before its shutdown.
        wait_until("the reader is connected", || home.list(&server)[0]["subscribers"] == 1);
        let ended = server.process.signal_and_wait(Signal::TERM).expect_code(0);
        assert!(!ended.err.contains("cut off"), "{ended:?}");
        server = home.serve_again(&report, &args);
        reader.wait_for_stdout(&format!(r#""version":{},"#, before + BURST));
    }
    let events = reader.signal_and_wait(Signal::TERM).expect_code(143).events();
    let versions: Vec<_> = events.iter().map(|event| event["version"].as_u64()).collect();
    let published: Vec<_> = (1..=1 + ROUNDS * BURST).map(Some).collect();
    assert_eq!(versions, published, "each version arrives once, in order");
}

/// Goal: a subscriber waits for a lost server for the time of `--reconnect`, then fails. Method: end the server of a
/// subscriber with `--reconnect=2`.
#[test]
fn a_lost_server_is_an_error_after_the_reconnect_timeout() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    let server = home.serve(&["--topic=w=w"]);
    let mut follower = home.start(&["subscribe", server.ticket("w"), "--reconnect=2"]);
    follower.wait_for_stdout("w version 1");
    server.process.signal_and_wait(Signal::TERM).expect_code(0);
    let causes =
        ["the connection was lost", "the server is shutting down", "not reached again within 2000 ms"];
    let ended = follower.wait().expect_error(3, &causes);
    assert!(ended.run_time >= Duration::from_secs(2), "{ended:?}");
}

/// Goal: a server forgets dead subscribers after the idle timeout, and releases their buffers. Method: kill -9 a
/// subscriber that is held during a transfer, and several more at random moments; count subscribers and memory.
#[test]
fn the_server_releases_killed_subscribers() {
    let mut transfer = Transfer::start_held(&["--hold=borrow"], MODEL_BYTES / 2);
    let server = transfer.server.take().unwrap();
    let ticket = transfer.home.create_ticket_for_all(&server).replace('?', "/m?");
    let subscribers = || transfer.home.list(&server)[0]["subscribers"].as_u64().unwrap();
    assert_eq!(subscribers(), 1);
    let mut rng = StdRng::seed_from_u64(3);
    for _ in 0..6 {
        let other = transfer.home.start(&["subscribe", &ticket, "--out=other", "--json"]);
        thread::sleep(Duration::from_millis(rng.random_range(0..150)));
        other.signal_and_wait(Signal::KILL);
    }
    transfer.subscriber.signal_and_wait(Signal::KILL);
    let deadline = Instant::now() + DEAD_WITHIN;
    while subscribers() > 0 {
        assert!(Instant::now() < deadline, "{} dead subscribers were not released", subscribers());
        thread::sleep(Duration::from_millis(200));
    }
    // The server holds no copy of the model. Further requests let it release the buffers of the seven subscribers.
    let deadline = Instant::now() + DEAD_WITHIN;
    while server.process.resident_bytes() >= MODEL_BYTES {
        assert!(Instant::now() < deadline, "{} bytes", server.process.resident_bytes());
        subscribers();
        thread::sleep(Duration::from_millis(200));
    }
    transfer.home.run(&["subscribe", &ticket, "--once", "--out=out"]).expect_code(0);
    server.process.signal_and_wait(Signal::TERM).expect_code(0);
}
