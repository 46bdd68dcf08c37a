//! The admin port as probes, scrapers and people use it: plain HTTP over a TCP connection of the test.

use crate::{files, http::Response};
use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use tensor_relay_tests::processes::{Home, Process, Serving, Signal, UdpProxy};

/// The deadline of every wait, for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// The address of a server's admin port.
pub(crate) fn admin_address(server: &Serving) -> String {
    server.report["admin"].as_str().unwrap().to_owned()
}

/// The admin address that a subscriber printed on stderr.
fn printed_admin_address(process: &mut Process) -> String {
    let line = process.wait_for_stderr("status page: http://");
    line.split("http://").nth(1).unwrap().trim_end_matches('/').to_owned()
}

/// Repeats a request until `accept` returns true for the response, and returns that response. Fails after [`TIMEOUT`].
#[track_caller]
pub(crate) fn get_until(address: &str, path: &str, accept: impl Fn(&Response) -> bool) -> Response {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let response = Response::get(address, path, &[]);
        if accept(&response) {
            return response;
        }
        assert!(Instant::now() < deadline, "{path} stayed {response:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// The value of the only sample with this `name`, which includes its labels.
#[track_caller]
fn sample(metrics: &str, name: &str) -> f64 {
    let mut values = metrics.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let value = values.next().unwrap_or_else(|| panic!("no {name} in\n{metrics}"));
    assert!(values.next().is_none(), "{name} occurs twice");
    value.parse().unwrap()
}

/// Goal: the numbers in a server's status and metrics are right; its admin port also serves a page.
/// Method: serve a file to a subscriber that stays connected; compare numbers with known values.
#[test]
fn a_server_reports_its_status_and_metrics() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 3 << 20, 1);
    let args =
        ["--topic=policy/a=m", "--chunk-size=1MiB", "--codec=raw", "--admin=127.0.0.1:0", "--transport=quic"];
    let server = home.serve(&args);
    let admin = admin_address(&server);
    let mut follower = home.start(&["subscribe", server.ticket("policy/a"), "--json", "--transport=quic"]);
    follower.wait_for_stdout("committed");

    assert_eq!(Response::get(&admin, "/livez", &[]).expect_code(200).body, "ok\n");
    assert_eq!(Response::get(&admin, "/readyz", &[]).expect_code(200).body, "ready\n");
    let bytes = server.topic("policy/a")["payload_bytes"].as_u64().unwrap();
    let is_committed = |response: &Response| response.json()["committed"] == 1;
    let status = get_until(&admin, "/status", is_committed).json();
    assert_eq!(
        (&status["role"], &status["ready"], &status["draining"]),
        (&"server".into(), &true.into(), &false.into())
    );
    assert_eq!(status["listen"], server.report["listen"]);
    let topic = &status["topics"][0];
    assert_eq!((topic["topic"].as_str(), topic["version"].as_u64()), (Some("policy/a"), Some(1)));
    assert_eq!(
        (topic["payload_bytes"].as_u64(), topic["sent_payload_bytes"].as_u64()),
        (Some(bytes), Some(bytes))
    );
    assert_eq!(topic["epoch"], server.topic("policy/a")["epoch"]);
    let subscriber = &status["subscribers"][0];
    assert_eq!((subscriber["held"].as_u64(), subscriber["lag_versions"].as_u64()), (Some(1), Some(0)));
    assert_eq!((subscriber["transport"].as_str(), subscriber["under_way"].is_null()), (Some("quic"), true));
    assert!(status["lanes"][0]["udp_payload_bytes"].as_u64() >= Some(1_200), "{status}");
    let messages: Vec<_> = status["events"]
        .as_array()
        .unwrap()
        .iter()
        .map(|event| event["message"].clone())
        .collect();
    assert!(messages.contains(&"A version was published.".into()), "{messages:?}");

    let metrics = Response::get(&admin, "/metrics", &[]).expect_code(200);
    assert!(metrics.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    let text = &metrics.body;
    for (name, value) in [
        ("tensor_relay_topics", 1.0),
        ("tensor_relay_sessions", 1.0),
        ("tensor_relay_subscribers", 1.0),
        ("tensor_relay_published_versions_total", 1.0),
        ("tensor_relay_committed_versions_total", 1.0),
        ("tensor_relay_evictions_total", 0.0),
        ("tensor_relay_topic_version{topic=\"policy/a\"}", 1.0),
        ("tensor_relay_topic_lag_versions{topic=\"policy/a\"}", 0.0),
        ("tensor_relay_topic_sent_payload_bytes_total{topic=\"policy/a\"}", bytes as f64),
        ("tensor_relay_sent_payload_bytes_total{codec=\"raw\"}", bytes as f64),
        ("tensor_relay_chunk_seconds_count", bytes.div_ceil(1 << 20) as f64),
        ("tensor_relay_chunk_seconds_bucket{le=\"+Inf\"}", bytes.div_ceil(1 << 20) as f64),
        ("tensor_relay_lanes{transport=\"quic\"}", 1.0),
        ("tensor_relay_lanes{transport=\"tcp\"}", 0.0),
    ] {
        assert!((sample(text, name) - value).abs() < 0.5, "{name} should be {value}\n{text}");
    }
    assert!(sample(text, "tensor_relay_transport_sent_bytes_total{transport=\"quic\"}") > bytes as f64);
    assert!(sample(text, "tensor_relay_lane_rtt_max_seconds{transport=\"quic\"}") > 0.0);
    assert!(sample(text, "tensor_relay_lane_packet_min_bytes{transport=\"quic\"}") >= 1_200.0);
    assert!(!text.contains("127.0.0.1"), "no address of a client is a label");
    check_with_promtool(text);

    let page = Response::get(&admin, "/", &[]).expect_code(200);
    assert!(page.body.starts_with("<!doctype html>"));
    let body = page.body.replace("http://www.w3.org/2000/svg", "the name of SVG's elements");
    assert!(!body.contains("http"), "it loads nothing from other hosts");
    Response::get(&admin, "/nothing", &[]).expect_code(404);
    Response::get(&admin, "/status", &["Host: other.example"]).expect_code(421);
    follower.signal_and_wait(Signal::TERM).expect_code(143);
    get_until(&admin, "/status", |response| response.json()["subscribers_count"] == 0);
    server.process.signal_and_wait(Signal::TERM).expect_code(0);
}

/// Checks the format of `metrics` with `promtool`, if it is installed.
fn check_with_promtool(metrics: &str) {
    let promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut promtool) = promtool else {
        return println!("not checked by promtool: it is not installed (Debian's package prometheus has it)");
    };
    promtool.stdin.take().unwrap().write_all(metrics.as_bytes()).unwrap();
    let checked = promtool.wait_with_output().unwrap();
    assert!(
        checked.status.success() && checked.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&checked.stderr)
    );
}

/// Goal: a consumer is ready when it holds a version, and with `--ready-within` only while that is recent. Method:
/// follow a topic that does not exist yet; publish it; wait until the version is too old.
#[test]
fn a_consumer_is_ready_when_it_holds_a_version() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 100_000, 1);
    let server = home.serve(&["--publish-socket=relay.sock", "--admin=none"]);
    assert!(server.report.get("admin").is_none(), "{}", server.report);
    let ticket = server.ticket_for_all();
    let mut args = vec!["subscribe", ticket, "--topic=m", "--wait=100", "--admin=127.0.0.1:0"];
    let mut unlimited = home.start(&args);
    args.push("--ready-within=0.2");
    let mut limited = home.start(&args);
    let (unlimited_address, limited_address) =
        (printed_admin_address(&mut unlimited), printed_admin_address(&mut limited));
    let is_waiting = |response: &Response| response.body.contains("no version of topic m");
    get_until(&unlimited_address, "/readyz", is_waiting).expect_code(503);
    get_until(&limited_address, "/readyz", is_waiting).expect_code(503);
    home.run(&["publish", "relay.sock", "m", "m"]).expect_code(0);
    get_until(&unlimited_address, "/readyz", |response| response.code == 200);
    get_until(&limited_address, "/readyz", |response| {
        response.body.contains("version 1 of topic m was received")
    })
    .expect_code(503);
    Response::get(&unlimited_address, "/readyz", &[]).expect_code(200);
    let status = Response::get(&unlimited_address, "/status", &[]).json();
    assert_eq!((&status["role"], &status["topics"][0]["version"]), (&"consumer".into(), &1.into()));
    let metrics = Response::get(&unlimited_address, "/metrics", &[]).body;
    assert!((sample(&metrics, "tensor_relay_held_version{topic=\"m\"}") - 1.0).abs() < 0.5);
    assert!((sample(&metrics, "tensor_relay_ready") - 1.0).abs() < 0.5);
    check_with_promtool(&metrics);
}

/// Goal: a server whose admin port other hosts can reach does not start without a token, and requires it in all
/// requests but probes. Method: listen on all addresses; request without a token, with a wrong and with the right
/// token.
#[test]
fn a_reachable_admin_port_requires_a_token() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 1_000, 1);
    fs::write(home.path("token"), format!("{TOKEN}\n")).unwrap();
    fs::write(home.path("short"), "123").unwrap();
    let open = "--admin=0.0.0.0:0";
    home.run(&["serve", "--topic=m=m", open])
        .expect_error(2, &["--admin-token-file", "127.0.0.1"]);
    home.run(&["serve", "--topic=m=m", open, "--admin-token-file=short"])
        .expect_error(2, &["16 characters"]);
    home.run(&["serve", "--topic=m=m", open, "--admin-token-file=none"])
        .expect_error(1, &["cannot read", "none"]);
    let server = home.serve(&["--topic=m=m", open, "--admin-token-file=token"]);
    let admin = admin_address(&server).replace("0.0.0.0", "127.0.0.1");
    Response::get(&admin, "/livez", &[]).expect_code(200);
    Response::get(&admin, "/readyz", &["Host: pod-0.relay"]).expect_code(200);
    let wrong = format!("Authorization: Bearer {}", TOKEN.replace('0', "1"));
    for path in ["/metrics", "/status", "/"] {
        let refused = Response::get(&admin, path, &[]).expect_code(401);
        assert!(refused.header("www-authenticate").unwrap().contains("Bearer"));
        Response::get(&admin, path, &[&wrong]).expect_code(401);
        Response::get(&admin, path, &[&format!("Authorization: Bearer {TOKEN}")]).expect_code(200);
    }
    // Unknown paths require the token as well, so that paths added later require it.
    for path in ["/new", "/livez/", "//livez", "/status/x", "/readyz/../status"] {
        Response::get(&admin, path, &[]).expect_code(401);
    }
    Response::get(&admin, "/new", &[&format!("Authorization: Bearer {TOKEN}")]).expect_code(404);
    // What a browser sends after its login dialog: the user `admin` and the token.
    let basic = "Authorization: Basic YWRtaW46MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";
    Response::get(&admin, "/", &[basic]).expect_code(200);
}

/// Goal: a client that holds connections to the admin port does not block probes from another address. Method: more
/// connections from another address than the limit, silent or with half a request; then probes.
#[test]
fn silent_connections_block_no_probe() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 1_000, 1);
    let server = home.serve(&["--topic=m=m", "--admin=127.0.0.1:0"]);
    let admin = admin_address(&server);
    let address: std::net::SocketAddr = admin.parse().unwrap();
    let connections: Vec<_> = (0..100)
        .map(|number| {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            socket.bind(&std::net::SocketAddr::from(([127, 0, 0, 9], 0)).into()).unwrap();
            let _ = socket.connect_timeout(&address.into(), Duration::from_secs(5));
            if number % 2 == 0 {
                let _ = socket.send(b"GET /livez HTTP/1.1\r\nHost: ");
            }
            socket
        })
        .collect();
    let started = Instant::now();
    for _ in 0..10 {
        Response::get(&admin, "/livez", &[]).expect_code(200);
    }
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    drop(connections);
}

/// Goal: a port in use is an error only if `--admin` names it. Method: hold the default port; serve without `--admin`,
/// with a port in use, and with a port number without an address.
#[test]
fn a_port_in_use_is_an_error_only_if_requested() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 1_000, 1);
    let _held = listen_when_free("127.0.0.1:9470");
    let server = home.serve(&["--topic=m=m"]);
    assert!(server.report.get("admin").is_none(), "{}", server.report);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let arg = format!("--admin={}", taken.local_addr().unwrap());
    home.run(&["serve", "--topic=m=m", "--listen=127.0.0.1:0", &arg])
        .expect_error(1, &["cannot listen", "--admin"]);
    home.run(&["serve", "--topic=m=m", "--admin=9470"]).expect_code(2);
}

/// Listens on `address` once servers of other tests have released it.
fn listen_when_free(address: &str) -> TcpListener {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match TcpListener::bind(address) {
            Ok(listener) => return listener,
            Err(error) => assert!(Instant::now() < deadline, "{address}: {error}"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Goal: the admin port cannot be blocked by silent connections or oversized requests. Method: more silent connections
/// than the limit; a request head that is too large.
#[test]
fn oversized_and_silent_requests_are_closed() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 1_000, 1);
    let server = home.serve(&["--topic=m=m", "--admin=127.0.0.1:0"]);
    let admin = admin_address(&server);
    let large = format!("X-Large: {}", "x".repeat(64 << 10));
    assert_eq!(Response::get(&admin, "/status", &[&large]).code, 431);
    let silent: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(&admin).unwrap()).collect();
    Response::get(&admin, "/livez", &[]).expect_code(200);
    for mut stream in silent {
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut bytes = vec![];
        // The server has closed or reset the connection.
        let result = stream.read_to_end(&mut bytes).map_err(|error| error.kind());
        assert!(result.is_ok() || result == Err(std::io::ErrorKind::ConnectionReset), "{result:?}");
    }
}

/// Goal: failures are counted by place and reason. Method: a server of one session, and a second client.
#[test]
fn failures_are_counted_by_place_and_reason() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 1_000, 1);
    let server = home.serve(&["--topic=m=m", "--sessions=1", "--admin=127.0.0.1:0"]);
    let mut follower = home.start(&["subscribe", server.ticket("m"), "--json"]);
    follower.wait_for_stdout("committed");
    let second = home.run(&["list", server.ticket("m")]);
    assert_ne!(second.code, Some(0), "{second:?}");
    let metrics = Response::get(&admin_address(&server), "/metrics", &[]).body;
    let name = "tensor_relay_failures_total{at=\"session\",reason=\"too_busy\"}";
    assert!(sample(&metrics, name) > 0.5, "{metrics}");
}

/// Goal: the lag of a slow reader is shown, in versions. Method: a reader in mode `every` that is busy with the first
/// version, and two more versions.
#[test]
fn the_lag_of_a_slow_reader_is_reported() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 1_000, 1);
    let server = home.serve(&[
        "--topic=m=m",
        "--watch",
        "--watch-interval=0.05",
        "--keep-versions=9",
        "--admin=127.0.0.1:0",
    ]);
    let admin = admin_address(&server);
    let args =
        ["subscribe", server.ticket("m"), "--mode=every", "--window=1", "--exec=echo at work; sleep 1000"];
    let mut reader = home.start(&args);
    reader.wait_for_stdout("at work");
    let has_lag =
        |lag: u64| move |response: &Response| response.json()["subscribers"][0]["lag_versions"] == lag;
    get_until(&admin, "/status", has_lag(0));
    for lag in 1..3 {
        files::replace(&home.path("m"), |path| files::write_noise(path, 1_000, 1 + lag));
        get_until(&admin, "/status", has_lag(lag));
    }
    let metrics = Response::get(&admin, "/metrics", &[]).body;
    assert!(
        (sample(&metrics, "tensor_relay_topic_lag_versions{topic=\"m\"}") - 2.0).abs() < 0.5,
        "{metrics}"
    );
    assert!(sample(&metrics, "tensor_relay_topic_lag_seconds{topic=\"m\"}") > 0.0, "{metrics}");
    reader.signal_and_wait(Signal::TERM).expect_code(143);
}

/// Goal: a transfer in progress is shown with its sent bytes and its limit. Method: a proxy that holds in the middle of
/// the transfer.
#[test]
fn the_limit_of_a_transfer_is_reported() {
    const MODEL_BYTES: u64 = 256 << 20;
    let (home, mut proxy) = (Home::new().over_quic(), UdpProxy::new());
    files::write_zeros(&home.path("m"), MODEL_BYTES);
    let server = home.serve(&[
        "--topic=m=m",
        "--codec=raw",
        "--admin=127.0.0.1:0",
        "--transport=quic",
        &proxy.advertise(),
    ]);
    proxy.forward_to(server.listen(), 24 << 20);
    let subscriber = home.start(&["subscribe", server.ticket("m"), "--once", "--transport=quic"]);
    proxy.wait_until_held();
    let is_held = |response: &Response| response.json()["subscribers"][0]["under_way"]["limit"] == "network";
    let status = get_until(&admin_address(&server), "/status", is_held).json();
    let under_way = &status["subscribers"][0]["under_way"];
    let sent_bytes = under_way["sent_bytes"].as_u64().unwrap();
    assert!((1..MODEL_BYTES).contains(&sent_bytes), "{under_way}");
    assert_eq!((under_way["version"].as_u64(), status["transfers"].as_u64()), (Some(1), Some(1)));
    proxy.release();
    subscriber.wait().expect_code(0);
}

/// Goal: the dashboard and the alerts use only metrics that exist. Method: compare every name in them with the metrics
/// of a server and a consumer, after a failure, which some metrics count.
#[test]
fn dashboard_and_alerts_use_existing_metrics() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 1_000, 1);
    let server = home.serve(&["--topic=m=m", "--sessions=1", "--admin=127.0.0.1:0"]);
    let mut follower = home.start(&["subscribe", server.ticket("m"), "--json", "--admin=127.0.0.1:0"]);
    let follower_address = printed_admin_address(&mut follower);
    follower.wait_for_stdout("committed");
    home.run(&["list", server.ticket("m")]).expect_code(3);
    let exposed: String = [admin_address(&server), follower_address]
        .iter()
        .map(|address| Response::get(address, "/metrics", &[]).expect_code(200).body)
        .collect();
    let dashboard = include_str!("../../../docker/monitoring/dashboard.json");
    let used = names(dashboard).chain(names(include_str!("../../../docker/monitoring/rules.yml")));
    let mut count = 0;
    for name in used {
        let is_exposed =
            |line: &str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
        assert!(exposed.lines().any(is_exposed), "there is no metric {name}\n{exposed}");
        count += 1;
    }
    assert!(count > 20, "{count} names were found");
}

/// The names of tensor-relay's metrics in `text`.
fn names(text: &str) -> impl Iterator<Item = &str> {
    let is_name_character = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(move |c| !is_name_character(c))
        .filter(|name| name.starts_with("tensor_relay_"))
}
