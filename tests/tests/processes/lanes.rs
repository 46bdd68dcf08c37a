//! Sessions of several lanes with real sockets, in which both ends run further lanes on threads of their own.

use crate::files;
use tensor_relay_tests::processes::{Home, Signal};

/// Large enough that every lane gets some of its chunks.
const MODEL_BYTES: usize = 64 << 20;

/// Goal: with `--lanes 2` a version arrives intact over two connections, and the subscriber reports both. Method:
/// follow a watched file; when the second lane has joined, replace the file.
#[test]
fn two_lanes_share_a_transfer() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 1_000, 1);
    let server = home.serve(&["--topic=m=m", "--watch", "--watch-interval=0.05", "--chunk-size=1MiB"]);
    let addresses = "--lane-address=127.0.0.1,127.0.0.2";
    let args = [
        "subscribe",
        server.ticket("m"),
        "--out=out",
        "--json",
        "--lanes=2",
        addresses,
        "-v",
        "--transport=quic",
    ];
    let mut follower = home.start(&args);
    follower.wait_for_stdout(r#""version":1"#);
    follower.wait_for_stderr("A lane joined the session");
    files::replace(&home.path("m"), |path| files::write_noise(path, MODEL_BYTES, 2));
    follower.wait_for_stdout(r#""version":2"#);
    files::assert_same(&home.path("m"), &home.path("out/m.safetensors"));
    let events = follower.signal_and_wait(Signal::TERM).expect_code(143).events();
    let lanes = events[1]["lanes"].as_array().unwrap().clone();
    let received_bytes: Vec<u64> =
        lanes.iter().map(|lane| lane["received_bytes"].as_u64().unwrap()).collect();
    assert_eq!(received_bytes.len(), 2, "{lanes:?}");
    assert!(
        received_bytes.iter().all(|bytes| *bytes > 1 << 20),
        "each lane carried at least one chunk: {received_bytes:?}"
    );
    assert!(lanes.iter().all(|lane| lane["udp_payload_bytes"].as_u64() >= Some(1_200)), "{lanes:?}");
}

/// Goal: with a server that allows one lane, the session has one; an invalid number of lanes is refused. Method:
/// `--lanes-max 1` with `--lanes 4`; `--lanes 0` and `17`.
#[test]
fn the_number_of_lanes_is_limited() {
    let home = Home::new();
    files::write_noise(&home.path("m"), 1_000, 1);
    let server = home.serve(&["--topic=m=m", "--lanes-max=1"]);
    let one = home
        .run(&["subscribe", server.ticket("m"), "--once", "--json", "--lanes=4"])
        .expect_code(0);
    assert_eq!(one.json()["lanes"].as_array().map(Vec::len), Some(1));
    for lanes in ["0", "17"] {
        home.run(&["subscribe", server.ticket("m"), "--lanes", lanes])
            .expect_error(2, &["--lanes", "1 to 16"]);
    }
}
