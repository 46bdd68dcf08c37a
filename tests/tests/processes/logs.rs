//! Logs on stderr with `--log-format json`.

use crate::{
    admin::{admin_of, ask_until},
    files,
};
use serde_json::Value;
use tensor_relay_tests::processes::{Home, Signal};

/// Goal: with `--log-format json` every line on stderr is an object with the same keys. Method: a server with a session
/// on it, and a command that fails.
#[test]
fn logs_are_objects() {
    let home = Home::new();
    files::noise(&home.path("m"), 1_000, 1);
    let server = home.serve(&["--topic=m=m", "--log-format=json", "-vv", "--admin=127.0.0.1:0"]);
    home.run(&["subscribe", server.ticket("m"), "--once"]).expect_code(0);
    ask_until(&admin_of(&server), "/status", |asked| asked.json()["sessions"] == 0);
    let bytes = server.topic("m")["payload_bytes"].clone();
    let ended = server.process.end_by(Signal::TERM).expect_code(0);
    let lines = objects(&ended.err);
    let published = lines.iter().find(|line| line["message"] == "A version was published.").unwrap();
    assert_eq!((&published["level"], &published["payload_bytes"]), (&"INFO".into(), &bytes));
    let over = lines
        .iter()
        .find(|line| line["message"] == "The session ended, as its client wished.");
    let over = over.unwrap_or_else(|| panic!("{}", ended.err));
    let spans = |line: &Value| line["spans"].as_array().unwrap().clone();
    assert_eq!(spans(over)[0]["name"], "session");
    assert!(spans(over)[0]["peer"].is_string(), "{over}");
    assert!(lines.iter().any(|line| line["message"] == "A client subscribed."));
    let sent = |line: &&Value| line["message"] == "A subscriber committed a version.";
    let sent = spans(lines.iter().find(sent).unwrap());
    assert_eq!((&sent[0]["name"], &sent[1]["name"]), (&"session".into(), &"transfer".into()));
    assert!(sent[1]["version"].as_str().unwrap().contains("m"), "{sent:?}");
    let failed = home.run(&["list", "relay://127.0.0.1:1?key=0", "--log-format=json"]);
    assert_ne!(failed.code, Some(0));
    assert_eq!(objects(&failed.err).pop().unwrap()["level"], "ERROR");
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
        for word in ["timestamp", "level", "target", "message"] {
            assert!(line[word].is_string(), "no {word} in {line}");
        }
    }
    lines
}
