//! The hub, as a client sees it that knows HTTP and nothing else. `python/tests/integrations/test_hub.py` has Hugging Face's
//! own client.

use crate::{admin::admin_address, files, http::Response};
use serde_json::Value;
use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    ops::Deref,
    path::Path,
    process::Command,
    thread,
    time::Duration,
};
use tensor_relay_tests::processes::{Home, Process, Serving, Signal, wait_until};

/// A hub that has printed its report.
struct Hub {
    process: Process,
    client: Client,
    report: Value,
}

/// A client of a hub.
struct Client {
    address: String,
    token: String,
}

impl Deref for Hub {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Hub {
    fn start(home: &Home, tickets: &[&str], args: &[&str]) -> Self {
        let mut process = home.start(&[&["hub", "--json", "--listen=127.0.0.1:0"], tickets, args].concat());
        let report: Value = serde_json::from_str(&process.wait_for_stdout("")).unwrap();
        Self { process, client: Client::of(&report), report }
    }
}

impl Client {
    /// The client of a hub that printed this.
    fn of(report: &Value) -> Self {
        let address = report["hub"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned();
        Self { address, token: format!("Authorization: Bearer {}", report["token"].as_str().unwrap()) }
    }

    #[track_caller]
    fn to(&self, method: &str, path: &str, headers: &[&str]) -> Response {
        Response::to(method, (&self.address, path), &[&[&*self.token], headers].concat())
    }

    #[track_caller]
    fn get(&self, path: &str) -> Response {
        self.to("GET", path, &[])
    }

    /// Bytes of a file, in a range such as `0-9`.
    #[track_caller]
    fn range(&self, path: &str, range: &str) -> Response {
        self.to("GET", path, &[&format!("Range: bytes={range}")])
    }
}

/// The bytes that a server has sent of the versions of topic `w`.
fn sent_bytes(server: &Serving) -> u64 {
    let status = Response::get(&admin_address(server), "/status", &[]).json();
    let topics = status["topics"].as_array().unwrap();
    topics.iter().find(|topic| topic["topic"] == "w").unwrap()["sent_payload_bytes"]
        .as_u64()
        .unwrap()
}

fn content(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap()
}

/// Goal: a model folder and a single file are repositories, by their names, versions, epochs and commits; sizes are known
/// before a tensor is sent; ranges are those of the files. Method: two topics; every request of Hugging Face's client.
#[test]
fn topics_are_repositories() {
    let home = Home::new();
    files::write_sharded(&home.path("model"), 1);
    files::write_noise(&home.path("w.safetensors"), 9_000_000, 2);
    let server = home.serve(&["--topic=org/model=model", "--topic=w=w.safetensors", "--admin=127.0.0.1:0"]);
    let hub = Hub::start(&home, &[server.ticket_for_all()], &["--hub-repo=other/name=w"]);
    let repos: Vec<&str> = hub.report["repos"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| it["repo"].as_str().unwrap())
        .collect();
    assert_eq!(repos, ["org/model", "other/name", "w"]);

    let info = hub.get("/api/models/org/model").expect_code(200).json();
    let commit = info["sha"].as_str().unwrap();
    assert!(commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit()), "{commit}");
    let epoch = server.topic("org/model")["epoch"].as_str().unwrap();
    for revision in ["main", "v1", &format!("{epoch}%3A1"), commit] {
        let found = hub.get(&format!("/api/models/org/model/revision/{revision}")).expect_code(200);
        assert_eq!(
            (found.header("X-Repo-Commit"), &found.json()["sha"]),
            (Some(commit), &info["sha"]),
            "{revision}"
        );
    }
    let head = hub.to("HEAD", "/w/resolve/main/model.safetensors", &[]).expect_code(200);
    let whole = content(&home.path("w.safetensors"));
    assert_eq!(head.header("Content-Length"), Some(&*whole.len().to_string()));
    assert!(head.bytes.is_empty());
    assert_eq!(sent_bytes(&server), 0, "sizes cost no tensor");

    for entry in hub
        .get("/api/models/org/model/tree/main?recursive=true")
        .expect_code(200)
        .json()
        .as_array()
        .unwrap()
    {
        let name = entry["path"].as_str().unwrap();
        let path = format!("/org/model/resolve/{commit}/{name}");
        let (head, file) = (hub.to("HEAD", &path, &[]).expect_code(200), hub.get(&path).expect_code(200));
        assert!(file.bytes == content(&home.path("model").join(name)), "{name}");
        let tag = entry["oid"].as_str().unwrap();
        assert_eq!(head.header("ETag"), Some(&*format!("\"{tag}\"")));
        assert_ne!(tag.len(), 64, "clients take it for a SHA-256");
        assert_eq!(
            (head.header("Content-Length"), &entry["size"]),
            (file.header("Content-Length"), &Value::from(file.bytes.len()))
        );
        assert_eq!(head.header("X-Linked-Size"), head.header("Content-Length"));
    }
    let wanted = r#"{"paths": ["config.json", "none", "config.json"]}"#;
    let paths = (&*hub.address, "/api/models/org/model/paths-info/main");
    let headers =
        [&*hub.token, "Content-Type: application/json", &format!("Content-Length: {}", wanted.len())];
    let found = Response::with_body("POST", paths, &headers, wanted).expect_code(200).json();
    let names: Vec<_> = found.as_array().unwrap().iter().map(|entry| &entry["path"]).collect();
    assert_eq!(names, ["config.json"], "each file once");
    let first = hub.get("/api/models/org/model/tree/main?limit=4").expect_code(200);
    let next = first.header("Link").unwrap().split(['<', '>']).nth(1).unwrap();
    let second = hub.get(next.split_once(&hub.address).unwrap().1).expect_code(200);
    assert_eq!((first.json().as_array().unwrap().len(), second.json().as_array().unwrap().len()), (4, 2));
    assert_eq!(second.header("Link"), None);

    for path in ["/w/resolve/v1/model.safetensors", "/other/name/resolve/main/model.safetensors"] {
        assert!(hub.get(path).expect_code(200).bytes == whole);
        let part = hub.range(path, "4200000-4200099").expect_code(206);
        assert_eq!(part.bytes, &whole[4_200_000..4_200_100]);
        assert_eq!(part.header("Content-Range"), Some(&*format!("bytes 4200000-4200099/{}", whole.len())));
        assert_eq!(hub.range(path, "-7").expect_code(206).bytes, &whole[whole.len() - 7..]);
    }
    let beyond = hub
        .range("/w/resolve/main/model.safetensors", &format!("{}-", whole.len()))
        .expect_code(416);
    assert_eq!(beyond.header("Content-Range"), Some(&*format!("bytes */{}", whole.len())));
    let tag = head.header("ETag").unwrap();
    let if_range = |tag: &str| {
        let headers = ["Range: bytes=0-9".to_owned(), format!("If-Range: {tag}")];
        hub.to("GET", "/w/resolve/main/model.safetensors", &headers.each_ref().map(|header| &**header))
            .code
    };
    assert_eq!((if_range(tag), if_range("\"other\"")), (206, 200));
    hub.to("GET", "/w/resolve/main/model.safetensors", &[&format!("If-None-Match: {tag}")])
        .expect_code(304);
}

/// Goal: each refusal has the code by which Hugging Face's client names it, and a reason; nothing is told without the token
/// or to a page of another host. Method: what does not exist, a wrong token, a host name.
#[test]
fn refusals_are_told_apart() {
    let home = files::home_with_model();
    let server = home.serve(&["--topic=w=w"]);
    let hub = Hub::start(&home, &[server.ticket("w")], &["--hub-host=hub.svc"]);
    for (path, code, name) in [
        ("/api/models/none", 404, Some("RepoNotFound")),
        ("/datasets/w/resolve/main/model.safetensors", 404, Some("RepoNotFound")),
        ("/w/resolve/main/config.json", 404, Some("EntryNotFound")),
        ("/w/resolve/v9/model.safetensors", 404, Some("RevisionNotFound")),
        ("/w/resolve/develop/model.safetensors", 404, Some("RevisionNotFound")),
        ("/w/resolve/00000000000000ff:1/model.safetensors", 410, Some("RevisionNotFound")),
        ("/status", 404, None),
        ("/", 404, None),
    ] {
        let answer = hub.get(path).expect_code(code);
        assert_eq!(answer.header("X-Error-Code"), name, "{path}");
        assert!(answer.header("X-Error-Message").is_some_and(|message| message.len() > 20), "{answer:?}");
    }
    hub.to("DELETE", "/w/resolve/main/model.safetensors", &[]).expect_code(404);
    let path = "/w/resolve/main/model.safetensors";
    for headers in [&[][..], &["Authorization: Bearer hf_00000000000000000000000000000000"]] {
        let refused = Response::get(&hub.address, path, headers).expect_code(401);
        assert!(refused.header("X-Error-Message").unwrap().contains("HF_TOKEN"));
    }
    hub.to("GET", path, &["Host: evil.example"]).expect_code(421);
    hub.to("GET", path, &["Host: hub.svc:8470"]).expect_code(200);
    hub.process.signal_and_wait(Signal::TERM).expect_code(143);
    let anonymous = home.run(&["hub", server.ticket("w"), "--listen=0.0.0.0:0", "--hub-anonymous"]);
    anonymous.expect_error(2, &["--hub-anonymous", "127.0.0.1"]);
}

/// Goal: a version that is being read stays until it was read although others replace it, and one that nobody reads is gone
/// with a clear answer. Method: a server that retains one version; a client asks for the files of version 1, then version 2 is
/// published; the client reads version 1 while another one reads version 2; then version 3 is published.
#[test]
fn a_version_that_is_read_stays() {
    let home = Home::new();
    let publish = |seed| files::replace(&home.path("w"), |path| files::write_noise(path, 20 << 20, seed));
    publish(1);
    let one = content(&home.path("w"));
    let mut server = home.serve(&["--topic=w=w", "--watch", "--watch-interval=0.05"]);
    let mut next = |seed| {
        publish(seed);
        server.process.wait_for_stdout(&format!(r#""version":{seed}"#));
        content(&home.path("w"))
    };
    let ticket = server.report["topics"][0]["ticket"].as_str().unwrap().to_owned();
    let hub = Hub::start(&home, &[&ticket], &[]);
    let commit = hub.get("/api/models/w").json()["sha"].as_str().unwrap().to_owned();
    let path = |revision: &str| format!("/w/resolve/{revision}/model.safetensors");
    let two = next(2);
    let both = [(commit, one), ("v2".to_owned(), two)];
    thread::scope(|scope| {
        for (revision, expected) in &both {
            let path = path(revision);
            let hub = &hub.client;
            scope.spawn(move || assert!(hub.get(&path).expect_code(200).bytes == *expected, "{revision}"));
        }
    });
    next(3);
    next(4);
    wait_until("version 4 is main", || {
        hub.get("/api/models/w").json()["sha"]
            .as_str()
            .is_some_and(|sha| sha[..32].ends_with('4'))
    });
    // Its description is new to the hub, and it was never read.
    let gone = hub.get(&path("v3")).expect_code(410);
    assert!(gone.header("X-Error-Message").unwrap().contains("--keep-versions"), "{gone:?}");
}

/// Goal: when the server is killed during a download, the client receives no wrong byte, sees that bytes are missing, is told
/// why when it asks again, and continues when the server is back. Method: a client that reads slowly; a killed server.
#[test]
fn a_download_continues_after_its_server_was_lost() {
    const SIZE: usize = 96 << 20;
    let home = Home::new();
    files::write_noise(&home.path("w"), SIZE, 1);
    let whole = content(&home.path("w"));
    let server = home.serve(&["--topic=w=w", "--state-dir=state"]);
    let hub = Hub::start(&home, &[server.ticket("w")], &["--hub-mem=64MiB"]);
    let path = "/w/resolve/main/model.safetensors";
    let mut stream = TcpStream::connect(&hub.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {}\r\n{}\r\n\r\n", hub.address, hub.token).unwrap();
    let mut received = vec![0; 1 << 20];
    stream.read_exact(&mut received).unwrap();
    let report = server.report.clone();
    server.process.signal_and_wait(Signal::KILL);
    let mut part = [0; 64 << 10];
    while let Ok(bytes @ 1..) = stream.read(&mut part) {
        received.extend_from_slice(&part[..bytes]);
    }
    let head = received.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap() + 4;
    let found = received.split_off(head);
    assert!(found.len() < whole.len(), "it was lost midway");
    assert!(whole.starts_with(&found), "no byte is wrong");
    let last = format!("{}-", whole.len() - 1);
    let refused = hub.range(path, &last).expect_code(503);
    assert!(refused.header("X-Error-Message").is_some_and(|message| message.len() > 20), "{refused:?}");
    let _server = home.serve_again(&report, &["--topic=w=w", "--state-dir=state"]);
    wait_until("the hub has the server again", || hub.range(path, &last).code == 206);
    let rest = hub.range(path, &format!("{}-", found.len())).expect_code(206);
    assert!(whole[found.len()..] == rest.bytes, "the rest is that of the same file");
}

/// Goal: 200 clients at once receive a file, which crosses the network about once, in bounded memory. Method: a file of three
/// blocks; 200 connections.
#[test]
fn two_hundred_clients_share_what_is_received() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 12 << 20, 1);
    let whole = content(&home.path("w"));
    let server = home.serve(&["--topic=w=w", "--admin=127.0.0.1:0"]);
    let hub = Hub::start(&home, &[server.ticket("w")], &["--hub-mem=64MiB"]);
    let client = &hub.client;
    thread::scope(|scope| {
        for _ in 0..200 {
            scope.spawn(|| {
                let file = client.get("/w/resolve/main/model.safetensors").expect_code(200);
                assert!(file.bytes == whole);
            });
        }
    });
    assert!(sent_bytes(&server) < 2 * whole.len() as u64, "{} bytes were sent", sent_bytes(&server));
    let resident_bytes = hub.process.resident_bytes();
    assert!(resident_bytes < 512 << 20, "{resident_bytes} bytes");
}

/// Goal: what was received for many readers at once does not stay beyond the hub's memory. Method: forty readers, of a
/// part of the file each that no other one reads; the growth of the hub.
#[test]
fn readers_of_many_parts_leave_a_bounded_memory() {
    const PARTS: u64 = 40;
    let home = Home::new();
    files::write_noise(&home.path("w"), (PARTS as usize + 1) << 22, 1);
    let whole = content(&home.path("w"));
    let server = home.serve(&["--topic=w=w"]);
    let hub = Hub::start(&home, &[server.ticket("w")], &["--hub-mem=64MiB"]);
    let path = "/w/resolve/main/model.safetensors";
    hub.range(path, "0-9").expect_code(206);
    let before = hub.process.resident_bytes();
    let (client, whole) = (&hub.client, &whole);
    thread::scope(|scope| {
        for part in 1..=PARTS {
            scope.spawn(move || {
                let at = (part << 22) as usize;
                let found = client.range(path, &format!("{at}-{}", at + 99)).expect_code(206);
                assert!(found.bytes == whole[at..at + 100], "{part}");
            });
        }
    });
    let growth = hub.process.resident_bytes().saturating_sub(before);
    assert!(growth < 112 << 20, "{growth} bytes, of {} that were received", PARTS << 22);
}

/// Goal: a version whose files are asked for again and again stays at its server, also if none of it is received.
/// Method: a server that retains one version, and keeps what is read in parts for 12 s; requests for the size of a
/// file, for longer.
#[test]
fn a_version_that_is_asked_for_stays() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1 << 20, 1);
    let one = content(&home.path("w"));
    let args = ["--topic=w=w", "--watch", "--watch-interval=0.05", "--reader-linger=12"];
    let mut server = home.serve(&args);
    let hub = Hub::start(&home, &[server.ticket("w")], &[]);
    let path = "/w/resolve/v1/model.safetensors";
    hub.to("HEAD", path, &[]).expect_code(200);
    files::replace(&home.path("w"), |path| files::write_noise(path, 1 << 20, 2));
    server.process.wait_for_stdout(r#""version":2"#);
    for _ in 0..32 {
        hub.to("HEAD", path, &[]).expect_code(200);
        thread::sleep(Duration::from_millis(500));
    }
    assert!(hub.get(path).expect_code(200).bytes == one);
}

/// Goal: other content under an epoch and number that the hub knows, as after a restored backup of the server's state,
/// is not mixed with what the hub has of it. Method: version 2 is read; the server is restarted from a copy of its
/// state at version 1, with another file, which becomes version 2.
#[test]
fn a_restored_backup_is_other_content() {
    const SIZE: usize = 9 << 20;
    let home = Home::new();
    let args = ["--topic=w=w", "--state-dir=state", "--watch"];
    let path = "/w/resolve/main/model.safetensors";
    let publish = |seed| {
        files::write_noise(&home.path("w"), SIZE, seed);
        content(&home.path("w"))
    };
    let copy = |from: &str, to: &str| {
        let copied = Command::new("cp").arg("-a").args([home.path(from), home.path(to)]).status();
        assert!(copied.unwrap().success());
    };
    publish(1);
    let first = home.serve(&args);
    let report = first.report.clone();
    first.process.signal_and_wait(Signal::TERM).expect_code(0);
    copy("state", "backup");
    let two = publish(2);
    let second = home.serve_again(&report, &args);
    let hub = Hub::start(&home, &[second.ticket("w")], &[]);
    assert!(hub.get(path).expect_code(200).bytes == two);
    second.process.signal_and_wait(Signal::TERM).expect_code(0);
    fs::remove_dir_all(home.path("state")).unwrap();
    copy("backup", "state");
    let other = publish(3);
    let third = home.serve_again(&report, &args);
    assert_eq!(third.topic("w")["epoch"], second.report["topics"][0]["epoch"]);
    wait_until("the hub has the other content", || {
        let found = hub.get(path);
        assert!(found.code != 200 || [&two, &other].contains(&&found.bytes), "it is mixed");
        found.code == 200 && found.bytes == other
    });
}

/// Goal: a relay's hub has what is relayed, also once the origin is gone.
#[test]
fn a_relay_has_a_hub() {
    let home = Home::new();
    files::write_noise(&home.path("w.safetensors"), 3_000_000, 6);
    let server = home.serve(&["--topic=w=w.safetensors"]);
    let mut relay = home.start(&[
        "relay",
        server.ticket("w"),
        "--json",
        "--state-dir=relay",
        "--listen=127.0.0.1:0",
        "--admin=none",
        "--hub=127.0.0.1:0",
    ]);
    let hub = Client::of(&serde_json::from_str(&relay.wait_for_stdout("\"hub\":")).unwrap());
    relay.wait_for_stdout("\"version\":1,");
    drop(server);
    wait_until("the hub's list of topics is renewed", || {
        hub.to("HEAD", "/w/resolve/main/model.safetensors", &[]).code == 200
    });
    let file = hub.get("/w/resolve/main/model.safetensors").expect_code(200);
    assert!(file.bytes == content(&home.path("w.safetensors")));
}
