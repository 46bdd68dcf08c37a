//! The findings of `doctor`: each problem is caused and, where possible, cured.

use crate::files;
use serde_json::Value;
use tensor_relay_tests::{
    processes::{Ended, Home, Host, Lan, Serving, wait_until},
    skip,
};

/// The finding called `name`. Checks that it has a fix if and only if it is not ok.
#[track_caller]
fn finding(ended: &Ended, name: &str) -> Value {
    let report = ended.json();
    let mut found = report["findings"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|finding| finding["name"] == name);
    let finding = found.next().unwrap_or_else(|| panic!("no {name} in {report}")).clone();
    assert!(found.next().is_none() || name == "GPU", "{name} occurs twice");
    let has_fix = ["host", "docker", "kubernetes"]
        .iter()
        .all(|place| finding["fix"][place].is_string());
    assert_eq!(has_fix, finding["state"] != "ok", "{finding}");
    finding
}

#[track_caller]
fn assert_state(ended: &Ended, name: &str, state: &str) -> Value {
    let finding = finding(ended, name);
    assert_eq!(finding["state"], state, "{finding}");
    finding
}

/// Goal: on a working machine no finding fails, and a reachable server is reported, as text and as JSON. Method: the
/// machine of the tests, with a server on it.
#[test]
fn a_working_machine_has_no_failures() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 1_000, 1);
    let server = home.serve(&["--topic=m=m"]);
    let ended = home.run(&["doctor", server.ticket("m"), "--json"]).expect_code(0);
    for name in ["ticket", "server over UDP", "server over TCP", "topic", "packet size"] {
        assert_state(&ended, name, "ok");
    }
    for name in ["GPU", "memory", "UDP buffers", "UDP send batches", "processors", "encryption", "codecs"] {
        finding(&ended, name);
    }
    for name in ["rate over UDP", "rate over TCP"] {
        let measured = finding(&ended, name)["measured"].as_str().unwrap().to_owned();
        assert!(measured.contains("/s, limited by"), "{measured}");
    }
    let report = ended.json();
    let all = report["findings"].as_array().unwrap().len() as u64;
    let counts = ["ok", "warnings", "failures"].map(|count| report[count].as_u64().unwrap());
    assert_eq!((counts.iter().sum::<u64>(), counts[2]), (all, 0), "{report}");
    let output = home.run(&["doctor", server.ticket("m")]).expect_code(0);
    assert!(
        output
            .out
            .lines()
            .any(|line| line.starts_with("ok    topic") && line.contains("m has version 1")),
        "{output:?}"
    );
}

/// Goal: a transport that does not reach the server is found; if no transport does, that is a failure with its reason.
/// Method: a server without TCP, a ticket with another key, a missing topic, and no server.
#[test]
fn an_unreachable_server_is_found() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 1_000, 1);
    let server = home.serve(&["--topic=m=m", "--no-tcp"]);
    let ended = home.run(&["doctor", server.ticket("m"), "--json"]).expect_code(0);
    assert_state(&ended, "server over UDP", "ok");
    let found = assert_state(&ended, "server over TCP", "warn");
    assert!(found["fix"]["docker"].as_str().unwrap().contains("/tcp"), "{found}");
    let stranger = format!("relay://{}?key=sha256:{}", server.listen(), "0".repeat(64));
    let refused = home.run(&["doctor", &stranger, "--json"]).expect_code(1);
    let found = assert_state(&refused, "server over UDP", "fail");
    assert!(found["measured"].as_str().unwrap().contains("key"), "{found}");
    let other = server.ticket("m").replace("/m?", "/n?");
    let absent = home.run(&["doctor", &other, "--json"]).expect_code(0);
    assert_state(&absent, "topic", "warn");
    let ticket = server.ticket("m").to_owned();
    drop(server);
    let gone = home.run(&["doctor", &ticket, "--json"]).expect_code(1);
    assert_state(&gone, "server over UDP", "fail");
    assert_state(&gone, "server over TCP", "fail");
}

/// Goal: a ticket that expires soon or has expired is found; a new one cures that. Method: tickets that are valid for
/// an hour, a second and a year.
#[test]
fn an_expiring_ticket_is_found() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 1_000, 1);
    let server = home.serve(&["--topic=m=m", "--state-dir=keys"]);
    let ticket = |expires: &str| {
        let address = format!("--address={}", server.listen());
        let args = ["tickets", "create", "--state-dir=keys", "--topic=m", "--json", expires, &address];
        home.run(&args).expect_code(0).json()["ticket"].as_str().unwrap().to_owned()
    };
    let soon = home.run(&["doctor", &ticket("--expires=1h"), "--json"]).expect_code(0);
    assert_state(&soon, "ticket", "warn");
    let short = ticket("--expires=1s");
    wait_until("the ticket has expired", || home.run(&["list", &short]).code == Some(4));
    let gone = home.run(&["doctor", &short, "--json"]).expect_code(1);
    assert!(
        assert_state(&gone, "ticket", "fail")["measured"]
            .as_str()
            .unwrap()
            .contains("expired")
    );
    assert_state(&gone, "server over UDP", "fail");
    let good = home.run(&["doctor", &ticket("--expires=365d"), "--json"]).expect_code(0);
    let found = assert_state(&good, "ticket", "ok")["measured"].as_str().unwrap().to_owned();
    assert!(found.contains("list,subscribe") && found.contains("expires in"), "{found}");
}

/// A server with a topic, on the server's host.
fn serve_on(lan: &Lan, home: &Home) -> Serving {
    files::write_noise(&home.path("m"), 1_000, 1);
    let listen = format!("--listen={}:4747", Lan::SERVER);
    Serving::wait_for_report(lan.start(Host::Server, home, &["serve", "--json", "--topic=m=m", &listen]))
}

/// Goal: the limit of the rate to a server is named, the line or loss; a small packet size is found. Method: two hosts
/// and a line of 50 Mbit/s; then a line that loses 5 % of UDP packets; then one that also drops large UDP packets
/// silently; then one that loses 5 % of TCP packets; finally the line without faults.
#[test]
fn the_limit_of_the_rate_is_found() {
    let lan = match Lan::new().and_then(|lan| lan.limit_rate(50).map(|()| lan)) {
        Ok(lan) => lan,
        Err(reason) => return skip(format_args!("the test cannot create two hosts here: {reason}")),
    };
    let home = Home::new();
    let server = serve_on(&lan, &home);
    let doctor = || {
        lan.start(Host::Client, &home, &["doctor", server.ticket("m"), "--json"])
            .wait()
            .expect_code(0)
    };
    let clean = doctor();
    for name in ["rate over UDP", "rate over TCP"] {
        let found = assert_state(&clean, name, "ok");
        assert!(found["measured"].as_str().unwrap().contains("limited by the line"), "{found}");
    }
    assert_state(&clean, "packet size", "ok");
    if let Err(reason) = lan.drop_percentage("udp", 5) {
        return skip(reason);
    }
    let lossy = doctor();
    let found = assert_state(&lossy, "rate over UDP", "warn");
    assert!(found["measured"].as_str().unwrap().contains("limited by loss"), "{found}");
    assert_state(&lossy, "rate over TCP", "ok");
    lan.drop_larger("udp", 1_300).unwrap();
    assert_state(&doctor(), "packet size", "warn");
    lan.drop_protocols(&[]).unwrap();
    lan.drop_percentage("udp", 0).unwrap();
    lan.drop_percentage("tcp", 5).unwrap();
    let lossy = doctor();
    let found = assert_state(&lossy, "rate over TCP", "warn");
    assert!(found["measured"].as_str().unwrap().contains("limited by loss"), "{found}");
    lan.drop_percentage("tcp", 0).unwrap();
    let cured = doctor();
    assert_state(&cured, "rate over UDP", "ok");
    assert_state(&cured, "rate over TCP", "ok");
    assert_state(&cured, "packet size", "ok");
}

/// Goal: blocked UDP is distinguished from a missing server, and unblocking it cures it. Method: two hosts; the
/// server's host drops UDP, then passes it. Needs root, `ip` and `nft`.
#[test]
fn blocked_udp_is_found() {
    let lan = match Lan::new() {
        Ok(lan) => lan,
        Err(reason) => return skip(format_args!("the test cannot create two hosts here: {reason}")),
    };
    let home = Home::new();
    let server = serve_on(&lan, &home);
    let doctor = || lan.start(Host::Client, &home, &["doctor", server.ticket("m"), "--json"]).wait();
    if let Err(reason) = lan.drop_protocols(&["udp"]) {
        return skip(reason);
    }
    let blocked = doctor().expect_code(0);
    assert_state(&blocked, "server over UDP", "warn");
    assert_state(&blocked, "server over TCP", "ok");
    lan.drop_protocols(&[]).unwrap();
    assert_state(&doctor().expect_code(0), "server over UDP", "ok");
}
