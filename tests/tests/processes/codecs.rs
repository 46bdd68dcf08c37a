//! Codecs of chunks, and their reports.

use crate::files;
use serde_json::Value;
use tensor_relay_tests::processes::{Home, Signal};

/// Goal: by default, weights are sent in a codec that compresses them; server and subscriber report the codec and its
/// payload bytes. Method: a file of weights and one of noise, over QUIC, where a first version is encoded; subscribers
/// with JSON and with text output; then stop the server.
#[test]
fn both_ends_report_the_codec() {
    let home = Home::new().over_quic();
    files::write_weights(&home.path("m"), 3 << 20, 1);
    files::write_noise(&home.path("n"), 3 << 20, 2);
    let server = home.serve(&["--topic=m=m", "--topic=n=n"]);
    let receive = |topic: &str, args: &[&str]| {
        let args = [&["subscribe", server.ticket(topic), "--once", "--out=out"], args].concat();
        let received = home.run(&args).expect_code(0);
        files::assert_same(&home.path(topic), &home.path("out").join(format!("{topic}.safetensors")));
        received
    };
    let received = receive("m", &["--json"]).json();
    let codecs = received["codecs"].as_object().unwrap();
    assert_eq!(codecs.keys().collect::<Vec<_>>(), ["bitplanes"], "{received}");
    assert_eq!(codecs["bitplanes"]["wire_bytes"], received["wire_bytes"]);
    assert_eq!(codecs["bitplanes"]["payload_bytes"], received["payload_bytes"]);
    assert!(codecs["bitplanes"]["ratio"].as_f64().unwrap() > 1.3, "{received}");
    assert!(codecs["bitplanes"]["decode_s"].as_f64().unwrap() > 0.0, "{received}");
    let line = receive("m", &[]).out;
    assert!(line.contains(" on the wire (bitplanes), ") && line.contains("saved to "), "{line}");
    let line = receive("n", &[]).out;
    assert!(!line.contains(" on the wire"), "noise is not compressible: {line}");

    let ended = server.process.signal_and_wait(Signal::TERM).expect_code(0);
    assert!(
        ended.err.contains("sent m: 12.0 MiB, ") && ended.err.contains("sent n: 3.00 MiB\n"),
        "{ended:?}"
    );
    let memory = ended.out.lines().find(|line| line.contains(r#""event":"memory""#)).unwrap();
    let memory: Value = serde_json::from_str(memory).unwrap();
    let encoded = memory["encoded_bytes"].as_u64().unwrap();
    assert!((1 << 20..12 << 20).contains(&encoded), "the encoded chunks of `m` are cached: {memory}");
    assert!(ended.err.contains("memory: ") && memory["staged_bytes"].is_u64(), "{ended:?}");
    let sent = |topic: &str| -> Value {
        let mut lines = ended.out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.find(|line| line["event"] == "sent" && line["topic"] == topic).unwrap()
    };
    assert_eq!(
        sent("m")["codecs"]["bitplanes"]["payload_bytes"],
        12 << 20,
        "6 MiB to each of two subscribers"
    );
    assert_eq!(sent("n")["codecs"]["raw"]["wire_bytes"], 3 << 20);
}

/// Goal: server and subscriber can force a codec, and the subscriber's option takes precedence. Method: force one at
/// the server and then another at the subscriber.
#[test]
fn a_codec_can_be_forced() {
    let home = Home::new();
    files::write_weights(&home.path("m"), 1 << 20, 1);
    let server = home.serve(&["--topic=m=m", "--codec=planes"]);
    for (args, expected) in [(&[][..], "planes"), (&["--codec=raw"], "raw"), (&["--codec=auto"], "planes")] {
        let args = [&["subscribe", server.ticket("m"), "--once", "--json"], args].concat();
        let received = home.run(&args).expect_code(0).json();
        assert_eq!(
            received["codecs"].as_object().unwrap().keys().collect::<Vec<_>>(),
            [expected],
            "{received}"
        );
    }
}
