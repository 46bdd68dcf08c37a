//! Logs on stderr: `--log-format json`, and no secrets in them.

use crate::{
    admin::{admin_address, get_until},
    files,
};
use serde_json::Value;
use tensor_relay_tests::processes::{ANY_PORT, Home, Process, Serving, Signal};

/// Goal: with `--log-format json` every line on stderr is an object with the common keys. Method: a server with one
/// session, and a command that fails.
#[test]
fn json_logs_are_objects_with_common_keys() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 1_000, 1);
    let server = home.serve(&["--topic=m=m", "--log-format=json", "-vv", "--admin=127.0.0.1:0"]);
    home.run(&["subscribe", server.ticket("m"), "--once"]).expect_code(0);
    get_until(&admin_address(&server), "/status", |response| response.json()["sessions"] == 0);
    let bytes = server.topic("m")["payload_bytes"].clone();
    let ended = server.process.signal_and_wait(Signal::TERM).expect_code(0);
    let lines = objects(&ended.err);
    let published = lines.iter().find(|line| line["message"] == "A version was published.").unwrap();
    assert_eq!((&published["level"], &published["payload_bytes"]), (&"INFO".into(), &bytes));
    let ended_session = lines.iter().find(|line| line["message"] == "The client closed the session.");
    let ended_session = ended_session.unwrap_or_else(|| panic!("{}", ended.err));
    let spans = |line: &Value| line["spans"].as_array().unwrap().clone();
    assert_eq!(spans(ended_session)[0]["name"], "session");
    assert!(spans(ended_session)[0]["peer"].is_string(), "{ended_session}");
    assert!(lines.iter().any(|line| line["message"] == "A client subscribed."));
    let sent = |line: &&Value| line["message"] == "A subscriber committed a version.";
    let sent = spans(lines.iter().find(sent).unwrap());
    assert_eq!((&sent[0]["name"], &sent[1]["name"]), (&"session".into(), &"transfer".into()));
    assert!(sent[1]["version"].as_str().unwrap().contains("m"), "{sent:?}");
    let failed = home.run(&["list", "relay://127.0.0.1:1?key=0", "--log-format=json"]);
    assert_ne!(failed.code, Some(0));
    assert_eq!(objects(&failed.err).pop().unwrap()["level"], "ERROR");
}

/// Goal: no log shows a stateless reset token, which lets anyone end the connection, or the token of a ticket, which
/// lets anyone connect. Method: a transfer with full logs of all components, then of quinn alone; with the former,
/// check that other messages are logged.
#[test]
fn no_secret_is_logged() {
    for filter in ["trace", "warn,quinn_proto::connection=trace,quinn=trace"] {
        let home = Home::new();
        files::write_noise(&home.path("m"), 1 << 20, 1);
        let start = |args: &[&str]| {
            let mut command = home.program();
            command.args(args).env("TENSOR_RELAY_LOG", filter);
            Process::start(command)
        };
        let server = Serving::wait_for_report(start(&[
            "serve",
            "--json",
            ANY_PORT,
            "--topic=m=m",
            "--transport=quic",
        ]));
        let token = server.ticket("m").split("&token=").nth(1).unwrap().to_owned();
        let args = [
            "subscribe",
            server.report["ticket_file"].as_str().unwrap(),
            "--once",
            "--out=out",
            "--transport=quic",
        ];
        let subscribed = start(&args).wait().expect_code(0);
        let served = server.process.signal_and_wait(Signal::TERM).expect_code(0);
        for log in [&subscribed.err, &served.err] {
            assert!(!log.to_lowercase().contains("reset_token"), "{filter}: {log}");
            assert!(!log.contains(&token), "{filter}: {log}");
        }
        if filter == "trace" {
            assert!(subscribed.err.contains("INFO") && served.err.contains("INFO"), "nothing is logged");
        }
    }
}

/// Parses every line of a log, and checks the common keys.
#[track_caller]
fn objects(log: &str) -> Vec<Value> {
    let lines: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}")))
        .collect();
    assert!(!lines.is_empty());
    for line in &lines {
        for key in ["timestamp", "level", "target", "message"] {
            assert!(line[key].is_string(), "no {key} in {line}");
        }
    }
    lines
}
