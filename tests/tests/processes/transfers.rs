//! Transfers of files; topics, tickets and restarts of servers.

use crate::files;
use serde_json::{Value, json};
use std::{fs, io::Write, os::unix::fs::PermissionsExt};
use tensor_relay_tests::processes::{Home, Process, Signal, device};

/// Goal: everything that a safetensors file can hold arrives byte for byte, for early and late subscribers, and the
/// report on stdout is right. Method: serve every dtype, a scalar, empty and large tensors in small chunks; two
/// subscribers, one after the other.
#[test]
fn a_file_is_received_unchanged() {
    let home = Home::new();
    files::write_everything(&home.path("m.safetensors"));
    let server = home.serve(&["--topic=m=m.safetensors", "--chunk-size=256KiB", "--codec=raw"]);
    let first = home
        .run(&["subscribe", server.ticket("m"), "--once", "--out=first", "--json"])
        .expect_code(0);
    assert_eq!(first.err.lines().count(), 1, "only the warning that the ticket is an argument: {first:?}");
    check_committed(&first.json(), server.topic("m"));
    let late = home
        .run(&["subscribe", server.ticket("m"), "--once", "--out", &home.argument("late")])
        .expect_code(0);
    let saved = format!("saved to {}", home.path("late/m.safetensors").display());
    assert!(late.out.starts_with("m version 1: ") && late.out.contains(&saved), "{late:?}");
    for folder in ["first", "late"] {
        assert_eq!(home.files_in(folder), ["m.safetensors"]);
        files::assert_same(&home.path("m.safetensors"), &home.path(folder).join("m.safetensors"));
    }
}

/// Checks every field of a version's event from `subscribe --json`.
fn check_committed(event: &Value, served: &Value) {
    let mut event = event.as_object().unwrap().clone();
    assert!(event.remove("duration_s").unwrap().as_f64().unwrap() > 0.0);
    let chunks = event.remove("chunks").unwrap();
    assert!(chunks.as_u64().unwrap() >= 12, "3 MiB in chunks of 256 KiB");
    let codecs = event.remove("codecs").unwrap();
    assert_eq!((codecs.as_object().unwrap().len(), &codecs["raw"]["chunks"]), (1, &chunks));
    let transport = event.remove("transport").unwrap();
    assert!(["quic", "tcp"].contains(&transport.as_str().unwrap()), "{transport}");
    assert!(event.remove("transport_reason").unwrap().is_string());
    let wanted_bytes = event.remove("wanted_bytes").unwrap().as_u64();
    assert!(
        wanted_bytes > Some(0) && wanted_bytes <= served["payload_bytes"].as_u64(),
        "tensors without padding"
    );
    let lanes = event.remove("lanes").unwrap();
    assert_eq!(lanes.as_array().map(Vec::len), Some(1), "{lanes}");
    let received_bytes = lanes[0]["received_bytes"].as_u64();
    assert!(received_bytes > event["wire_bytes"].as_u64(), "packets have headers: {lanes}");
    let expected = json!({
        "event": "committed",
        "topic": "m",
        "epoch": served["epoch"],
        "version": 1,
        "tensors": files::EVERYTHING_TENSORS,
        "payload_bytes": served["payload_bytes"],
        "wire_bytes": served["payload_bytes"],
        "skipped": 0,
        "missed_generations": 0,
        "new_epoch": false,
        "resumed": 0,
        "metadata": {},
        "device": device(),
        "sharing": "chunks",
        "sources": { "origin_bytes": served["payload_bytes"], "server_bytes": 0, "peer_bytes": 0, "peers": 0 },
        "engine_caches": {},
        "path": "first/m.safetensors",
    });
    assert_eq!(Value::from(event), expected);
}

/// Goal: `list` shows the topics of a server, as text and as JSON. Method: list two topics, with one subscriber on one
/// of them.
#[test]
fn list_shows_topics_and_subscribers() {
    let home = Home::new();
    files::write_everything(&home.path("m"));
    files::write_noise(&home.path("w"), 1000, 1);
    let server = home.serve(&["--topic=m=m", "--topic=policy/w=w"]);
    let mut follower = home.start(&["subscribe", server.ticket("m"), "--json"]);
    follower.wait_for_stdout("committed");
    let entry = |topic: &str, subscribers: u64| {
        let served = server.topic(topic);
        json!({
            "topic": topic,
            "epoch": served["epoch"],
            "version": served["version"],
            "tensors": served["tensors"],
            "payload_bytes": served["payload_bytes"],
            "subscribers": subscribers,
        })
    };
    let listed = home.run(&["list", server.ticket_for_all(), "--json"]).expect_code(0);
    assert_eq!(listed.json()["topics"], json!([entry("m", 1), entry("policy/w", 0)]));
    assert_eq!(listed.json()["unreachable_over"], Value::Null);
    let table = home.run(&["list", server.ticket_for_all()]).expect_code(0);
    let rows: Vec<Vec<&str>> = table.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["TOPIC", "VERSION", "TENSORS", "SIZE", "SUBSCRIBERS"]);
    assert_eq!(rows[1][..3], ["m", "1", &files::EVERYTHING_TENSORS.to_string()]);
    assert_eq!((rows[2][0], rows[2].last(), rows.len()), ("policy/w", Some(&"0"), 3));
}

/// Goal: `serve --json` reports everything that a program needs, and `serve` prints only the path of the ticket file;
/// it prints tickets only with `--open`. Method: serve one file in each of these ways.
#[test]
fn serve_reports_topics_without_printing_tickets() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    let server = home.serve(&["--topic=w=w", "--admin=none"]);
    let (key, epoch) = (server.report["key"].as_str().unwrap(), server.topic("w")["epoch"].as_str().unwrap());
    let ticket = server.ticket("w");
    assert!(ticket.starts_with(&format!("relay://{}/w?key={key}&token=", server.listen())), "{ticket}");
    let topic = json!({
        "topic": "w",
        "epoch": epoch,
        "version": 1,
        "tensors": 1,
        "payload_bytes": server.topic("w")["payload_bytes"],
        "file": "w",
        "files": ["w"],
        "ticket": ticket,
    });
    let expected = json!({
        "event": "serving",
        "listen": server.listen(),
        "key": key,
        "ticket_file": home.path("state/tensor-relay/tickets"),
        "ticket": Value::Null,
        "memory_bytes_max": server.report["memory_bytes_max"],
        "device": device(),
        "topics": [topic],
    });
    assert_eq!(server.report, expected);
    assert_eq!(key.len(), "sha256:".len() + 64);
    let mut plain = home.start(&["serve", "--listen=127.0.0.1:0", "--topic=w=w"]);
    let line = plain.wait_for_stdout("");
    assert_eq!(
        line,
        home.argument("state/tensor-relay/tickets"),
        "no ticket is printed: stdout may be a log"
    );
    plain.wait_for_stderr("run there: tensor-relay subscribe TICKET_FILE --out DIR");
    assert_eq!(plain.signal_and_wait(Signal::TERM).expect_code(0).out, format!("{line}\n"), "other output");
    let mut open = home.start(&["serve", "--listen=127.0.0.1:0", "--topic=w=w", "--open"]);
    let line = open.wait_for_stdout("");
    assert!(line.starts_with("relay://127.0.0.1:") && line.ends_with(&format!("/w?key={key}")), "{line}");
    open.wait_for_stderr("--open gives everybody");
    assert_eq!(
        open.signal_and_wait(Signal::TERM).expect_code(0).out,
        format!("{line}\n"),
        "other output than the tickets"
    );
}

/// Goal: one server offers several topics; tickets come from an argument, a file, stdin or the environment; a ticket
/// file is private; a topic with a slash becomes a file in a folder. Method: serve two topics with a ticket file that
/// others could read before; receive in each way.
#[test]
fn a_ticket_is_read_from_every_source() {
    let home = Home::new();
    files::write_noise(&home.path("a"), 5000, 1);
    files::write_noise(&home.path("b"), 5000, 2);
    fs::write(home.path("tickets"), "from before").unwrap();
    fs::set_permissions(home.path("tickets"), fs::Permissions::from_mode(0o644)).unwrap();
    let topics = ["--topic=a=a", "--topic=policy/eu/b=b"];
    let server = home.serve(&[topics[0], topics[1], "--ticket-file=tickets"]);
    let mode = fs::metadata(home.path("tickets")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "a ticket grants access");
    let tickets = [server.ticket("a"), server.ticket("policy/eu/b"), server.ticket_for_all()]
        .map(|ticket| format!("{ticket}\n"))
        .concat();
    assert_eq!(fs::read_to_string(home.path("tickets")).unwrap(), tickets);

    let subscribe = ["subscribe", "--once", "--out=out"];
    let ambiguous = home.run(&["subscribe", "tickets", "--once"]);
    ambiguous.expect_error(2, &["it holds 3", "--topic NAME"]);
    home.run(&[&subscribe[..], &["tickets", "--topic=policy/eu/b"]].concat())
        .expect_code(0);
    files::assert_same(&home.path("b"), &home.path("out/policy/eu/b.safetensors"));

    let (reader, mut writer) = std::io::pipe().unwrap();
    writeln!(writer, "\n{}", server.ticket("a")).unwrap();
    drop(writer);
    let mut from_stdin = home.program();
    from_stdin.args(subscribe).arg("-");
    Process::start_with(from_stdin, reader).wait().expect_code(0);
    files::assert_same(&home.path("a"), &home.path("out/a.safetensors"));

    let mut from_environment = home.program();
    from_environment
        .args(["subscribe", "--once", "--out=env"])
        .env("TENSOR_RELAY_TICKET", server.ticket("a"));
    Process::start(from_environment).wait().expect_code(0);
    home.run(&["subscribe", server.ticket("a"), "--once", "--out=env", "--topic=policy/eu/b"])
        .expect_error(4, &["does not allow to subscribe to this topic"]);
    home.run(&["subscribe", server.ticket_for_all(), "--once", "--out=env", "--topic=policy/eu/b"])
        .expect_code(0);
    assert_eq!(home.files_in("out"), ["a.safetensors", "policy/eu/b.safetensors"]);
    assert_eq!(home.files_in("env"), home.files_in("out"), "a ticket for all topics serves any of them");
}

/// Goal: encoding reduces the sent bytes, and does not change the received file. Method: with zstd, a file of zeros,
/// and one of mostly incompressible tensors.
#[test]
fn an_encoded_file_is_received_unchanged() {
    let home = Home::new();
    files::write_everything(&home.path("m"));
    files::write_zeros(&home.path("z"), 5 << 20);
    let server = home.serve(&["--topic=m=m", "--topic=z=z", "--codec=zstd"]);
    for (topic, max_percent) in [("m", 100), ("z", 1)] {
        let event = home
            .run(&["subscribe", server.ticket(topic), "--once", "--out=out", "--json"])
            .expect_code(0)
            .json();
        let number = |field: &str| event[field].as_u64().unwrap();
        assert!(number("wire_bytes") * 100 <= number("payload_bytes") * max_percent, "{event}");
        files::assert_same(&home.path(topic), &home.path("out").join(format!("{topic}.safetensors")));
    }
}

/// Goal: a restarted server is the same for its clients: tickets stay valid, and the same file has the same epoch and
/// version; another file has another epoch. Method: serve, stop, and serve on the same port from the same state; again
/// with another file, and with another state.
#[test]
fn a_restarted_server_keeps_its_key_and_versions() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 100_000, 1);
    let first = home.serve(&["--topic=w=w", "--state-dir=keys", "--admin=none"]);
    let listen = format!("--listen={}", first.listen());
    let args = ["--topic=w=w", "--state-dir=keys", "--admin=none", &listen];
    let report = first.report;
    first.process.signal_and_wait(Signal::TERM).expect_code(0);
    let second = home.serve(&args);
    assert_eq!(second.report, report, "the same key, ticket, epoch and version");
    home.run(&["subscribe", second.ticket("w"), "--once", "--out=out"])
        .expect_code(0);
    second.process.signal_and_wait(Signal::TERM).expect_code(0);

    files::write_noise(&home.path("w"), 100_000, 2);
    let third = home.serve(&args);
    assert_ne!(third.topic("w")["epoch"], report["topics"][0]["epoch"], "other content");
    home.run(&["subscribe", third.ticket("w"), "--once", "--out=out"])
        .expect_code(0);
    files::assert_same(&home.path("w"), &home.path("out/w.safetensors"));
    assert_eq!(home.files_in("out"), ["w.safetensors"], "the file was replaced");
    assert_eq!(home.files_in("keys"), ["access/secrets", "identity.key", "tickets"]);
    let other = home.serve(&["--topic=w=w", "--state-dir=other-keys"]);
    assert_ne!(other.report["key"], report["key"]);
}
