//! Versions that other processes publish through a server's socket, with correct and with hostile producers.

use crate::files;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::{
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
    process::{Uid, geteuid},
    thread::set_thread_res_uid,
};
use std::{
    fs,
    io::{IoSlice, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::{fs::PermissionsExt, net::UnixStream},
    },
    path::Path,
    thread,
    time::Duration,
};
use tensor_relay_device::Memfd;
use tensor_relay_protocol::{
    Dtype, Limits, Manifest, Shape, TensorName, TensorSpec, Topic,
    sidecar::{
        Hello, Lend, Memory, ProducerMessage, PublicationId, Publish, Refusal, ServerMessage, encode_producer,
    },
};
use tensor_relay_server::sidecar::{ConnectError, Producer};
use tensor_relay_tests::{
    processes::{ANY_PORT, Home, Process, Serving, Signal, wait_until},
    skip,
};

/// The read timeout of raw producers.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Larger than `/dev/shm` of a container (64 MiB), which the server must not use.
const MODEL_BYTES: usize = 65 << 20;

/// A server without files, with a publish socket.
fn server(home: &Home, args: &[&str]) -> Serving {
    let socket = format!("--publish-socket={}", home.argument("s"));
    home.serve(&[&[&*socket, "--bases=0"], args].concat())
}

/// Runs `publish` for the file `name` with `args`; returns its first event.
fn publish(home: &Home, name: &str, args: &[&str]) -> serde_json::Value {
    let socket = home.argument("s");
    let all = [&["publish", &socket, "policy", name, "--json"], args].concat();
    home.run(&all).expect_code(0).events().remove(0)
}

/// The number of tensor-relay's memfds that a process has mapped.
fn mappings(process: &Process) -> usize {
    process.mapped_files().matches("memfd:tensor-relay").count()
}

/// Goal: a version published from the shell arrives byte by byte; the server makes no copy, and releases the memory
/// when it is no longer needed. Method: a model larger than 64 MiB, a subscriber, a second version, and the server's
/// mappings.
#[test]
fn a_published_version_is_received_without_a_copy() {
    let home = Home::new();
    files::write_noise(&home.path("one"), MODEL_BYTES, 1);
    files::write_noise(&home.path("two"), 1000, 2);
    let mut server = server(&home, &[]);
    assert_eq!(server.report["topics"].as_array().unwrap().len(), 0);
    let mode = fs::metadata(home.path("s")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let args = ["subscribe", server.ticket_for_all(), "--topic=policy", "--out=out", "--json", "--wait=60"];
    let mut subscriber = home.start(&args);
    let socket = home.argument("s");
    let args = ["publish", &socket, "policy", "one", "--wait-committed=1", "--wait-released", "--json"];
    let mut first = home.start(&[&args[..], &["--metadata=step=7"]].concat());
    let published: serde_json::Value =
        serde_json::from_str(&first.wait_for_stdout(r#""event":"published""#)).unwrap();
    assert_eq!(
        (published["version"].as_u64(), published["path"].as_str()),
        (Some(1), Some("memfd")),
        "{published}"
    );
    assert_eq!(published["copied_bytes"], MODEL_BYTES, "the tensors were copied once");
    assert!(published["reason"].as_str().unwrap().contains("host memory"), "{published}");
    first.wait_for_stdout(r#""event":"committed""#);
    assert_eq!(mappings(&server.process), 1);
    let event: serde_json::Value =
        serde_json::from_str(&subscriber.wait_for_stdout(r#""version":1"#)).unwrap();
    assert_eq!(event["metadata"]["step"], "7", "{event}");
    files::assert_same(&home.path("one"), &home.path("out/policy.safetensors"));
    let second = publish(&home, "two", &["--wait-committed=1"]);
    assert_eq!((&second["version"], &second["epoch"]), (&2.into(), &published["epoch"]));
    let released = first.wait().expect_code(0);
    assert_eq!(released.events().last().unwrap()["event"], "released", "{released:?}");
    wait_until("the first version is unmapped", || mappings(&server.process) == 1);
    subscriber.wait_for_stdout(r#""version":2"#); // The line is printed after the file is written.
    files::assert_same(&home.path("two"), &home.path("out/policy.safetensors"));
    let line = server.process.wait_for_stdout(r#""event":"published""#);
    let event: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&event["topic"], &event["path"]), (&"policy".into(), &"memfd".into()), "{event}");
    assert_eq!(event["reason"], "the tensors are in host memory", "{event}");
    assert!(event["from"].as_str().unwrap().starts_with("process "), "{event}");
    subscriber.signal_and_wait(Signal::TERM).expect_code(143);
    server.process.signal_and_wait(Signal::TERM).expect_code(0);
    assert!(!home.path("s").exists(), "the server removes its socket");
}

/// Goal: waits that cannot succeed, and publishing without a server, end at their timeout with a reason. Method:
/// publish a version without subscribers and without a successor; publish without a socket, and to one left by a killed
/// server.
#[test]
fn waits_end_at_their_timeout() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    let socket = home.argument("s");
    let args = ["publish", &socket, "policy", "w", "--connect-timeout=0.2"];
    home.run(&args).expect_error(3, &["there is no socket", "--publish-socket"]);
    let server = server(&home, &[]);
    let wait_committed = [&args[..], &["--timeout=2", "--wait-committed=2"]].concat();
    home.run(&wait_committed)
        .expect_error(3, &["0 of 2 subscribers", "policy version 1"]);
    let wait_released = [&args[..], &["--timeout=2", "--wait-released"]].concat();
    home.run(&wait_released).expect_error(3, &["policy version 2", "still in use"]);
    home.run(&["publish", &socket, "policy", "missing"])
        .expect_error(1, &["missing"]);
    server.process.signal_and_wait(Signal::KILL);
    assert!(home.path("s").exists());
    home.run(&args).expect_error(3, &["no server listens"]);
}

/// Goal: a server replaces the socket of a killed server, but no socket in use and no other kind of file. Method: kill
/// a server and start another; start a second one on the same path, and one on the path of a file.
#[test]
fn only_a_stale_socket_is_replaced() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    server(&home, &[]).process.signal_and_wait(Signal::KILL);
    let live = server(&home, &[]);
    let socket = format!("--publish-socket={}", home.argument("s"));
    home.run(&["serve", ANY_PORT, &socket])
        .expect_error(1, &["another server listens at", "choose another path"]);
    publish(&home, "w", &[]);
    home.run(&["serve", ANY_PORT, "--publish-socket=w"])
        .expect_error(1, &["is not a socket", "left unchanged"]);
    assert!(home.path("w").is_file());
    live.process.signal_and_wait(Signal::TERM).expect_code(0);
}

/// The result of connecting as user `uid`.
fn connect_as(uid: u32, path: &Path) -> Result<(), ConnectError> {
    let path = path.to_owned();
    let connect = move || {
        let uid = Uid::from_raw(uid);
        set_thread_res_uid(uid, uid, uid).unwrap(); // Of this thread only.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(Producer::connect(&path)).map(drop)
    };
    thread::spawn(connect).join().unwrap()
}

/// Goal: other users cannot publish unless the operator allows them: the mode of the socket and a check of the user id
/// prevent it. Method: threads of other users; needs root.
#[test]
fn only_permitted_users_publish() {
    if !geteuid().is_root() {
        return skip("only root can run as other users");
    }
    let (home, trainer_uid, other_uid) = (Home::new(), 12_344, 12_345);
    fs::set_permissions(home.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    let path = home.path("s");
    let private = server(&home, &[]);
    assert!(connect_as(0, &path).is_ok());
    let refused = connect_as(trainer_uid, &path).unwrap_err();
    assert!(matches!(refused, ConnectError::NotPermitted { uid: 12_344, .. }), "{refused}");
    private.process.signal_and_wait(Signal::TERM).expect_code(0);
    let mut shared = server(&home, &["--publish-uid=12344"]);
    connect_as(trainer_uid, &path).unwrap();
    let refused = connect_as(other_uid, &path).unwrap_err();
    let ConnectError::Refused { why, .. } = refused else { panic!("{refused}") };
    assert!(why.contains("user 12345 may not publish") && why.contains("--publish-uid 12345"), "{why}");
    shared.process.wait_for_stderr("user 12345 may not publish");
}

/// Goal: a user with the maximum number of connections does not block other users. Method: the maximum number of
/// connections by one user, and one more; then publish as another user. Needs root.
#[test]
fn connections_are_limited_per_user() {
    if !geteuid().is_root() {
        return skip("only root can run as other users");
    }
    let home = Home::new();
    fs::set_permissions(home.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    files::write_noise(&home.path("w"), 1000, 1);
    let _server = server(&home, &["--publish-uid=12344,12345"]);
    let path = home.path("s");
    let first_user = thread::spawn(move || {
        let uid = Uid::from_raw(12_344);
        set_thread_res_uid(uid, uid, uid).unwrap(); // Of this thread only.
        let connections: Vec<RawProducer> = (0..64).map(|_| RawProducer::connect_with_hello(&path)).collect();
        let mut one_more = RawProducer::connect(&path);
        let refused = one_more.receive();
        let ServerMessage::Close { text } = refused else { panic!("{refused:?}") };
        assert!(text.contains("64 producers of user 12344"), "{text:?}");
        connections
    });
    let connections = first_user.join().unwrap();
    publish(&home, "w", &[]);
    connect_as(12_345, &home.path("s")).unwrap();
    drop(connections);
}

/// A producer's connection on which tests can send arbitrary bytes.
struct RawProducer(UnixStream);

impl RawProducer {
    fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Self(stream)
    }

    fn connect_with_hello(path: &Path) -> Self {
        let mut raw = Self::connect(path);
        let hello = Hello { revision_min: 1, revision_max: 1, agent: "raw".into() };
        raw.send(ProducerMessage::Hello(hello));
        assert!(matches!(raw.receive(), ServerMessage::Welcome(_)));
        raw
    }

    fn send(&mut self, message: ProducerMessage) {
        self.0.write_all(&encode_producer(message)).unwrap();
    }

    fn receive(&mut self) -> ServerMessage {
        let mut prefix = [0; 4];
        self.0.read_exact(&mut prefix).unwrap();
        let mut frame = vec![0; u32::from_le_bytes(prefix) as usize];
        self.0.read_exact(&mut frame).unwrap();
        ServerMessage::decode(&frame).unwrap()
    }

    /// Lends `fd` for a version of one tensor of `bytes` bytes.
    fn lend(&mut self, bytes: u64, fd: BorrowedFd<'_>) {
        let name = TensorName::new("w").unwrap();
        let spec = TensorSpec::new(name, Dtype::U8, Shape::new(&[bytes]).unwrap());
        let manifest = Manifest::layout(vec![spec], vec![], 4 << 20, &Limits::default()).unwrap();
        self.send(ProducerMessage::Manifest(manifest.encoded().clone()));
        let lend = Lend { range: 0..manifest.payload_bytes(), memory: Memory::Memfd { offset: 0 } };
        let frame = encode_producer(ProducerMessage::Lend(lend));
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let rights = [fd];
        assert!(control.push(SendAncillaryMessage::ScmRights(&rights)));
        let sent = sendmsg(&self.0, &[IoSlice::new(&frame)], &mut control, SendFlags::empty()).unwrap();
        assert_eq!(sent, frame.len());
    }

    fn publish(&mut self, number: u64) -> ServerMessage {
        let topic = Topic::new("policy").unwrap();
        let publication = PublicationId(number);
        self.send(ProducerMessage::Publish(Publish {
            publication,
            topic,
            metadata: vec![],
            reason: "test".into(),
        }));
        self.receive()
    }
}

fn memfd(bytes: u64) -> Memfd {
    let mut memfd = Memfd::new(bytes).unwrap();
    memfd.write_at(&vec![3; bytes as usize], 0).unwrap();
    memfd
}

/// Goal: a producer that dies halfway leaves no partial version; its completed version stays available. Method:
/// complete one version, lend the memory of a second without publishing it, and disconnect.
#[test]
fn a_dead_producer_leaves_no_partial_version() {
    let home = Home::new();
    let server = server(&home, &[]);
    let mut raw = RawProducer::connect_with_hello(&home.path("s"));
    raw.lend(1024, memfd(1024).seal().unwrap().as_fd());
    let published = raw.publish(1);
    assert!(matches!(published, ServerMessage::Published { .. }), "{published:?}");
    raw.lend(1024, memfd(1024).seal().unwrap().as_fd());
    drop(raw);
    files::write_noise(&home.path("w"), 1000, 1);
    let before = home.list(&server);
    assert_eq!((before.as_array().unwrap().len(), &before[0]["version"]), (1, &1.into()), "{before}");
    assert_eq!(publish(&home, "w", &[])["version"], 2, "the next producer continues the numbers");
    wait_until("one version is mapped", || mappings(&server.process) == 1);
    home.run(&["subscribe", server.ticket_for_all(), "--topic=policy", "--once", "--out=out"])
        .expect_code(0);
    files::assert_same(&home.path("w"), &home.path("out/policy.safetensors"));
}

/// Goal: memory that the producer could change, or that is shorter than the manifest says, is refused and never read.
/// Method: a memfd without seals, and one that is too short.
#[test]
fn unsealed_or_short_memory_is_refused() {
    let home = Home::new();
    let server = server(&home, &[]);
    let mut raw = RawProducer::connect_with_hello(&home.path("s"));
    let unsealed = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::io::pwrite(&unsealed, &[1; 1024], 0).unwrap();
    raw.lend(1024, unsealed.as_fd());
    let refused = raw.publish(1);
    let ServerMessage::Refused { reason: Refusal::UnfitMemory, text, .. } = refused else {
        panic!("{refused:?}")
    };
    assert!(text.contains("not sealed"), "{text:?}");
    raw.lend(1024, memfd(1023).seal().unwrap().as_fd());
    let refused = raw.publish(2);
    let ServerMessage::Refused { reason: Refusal::UnfitMemory, text, .. } = refused else {
        panic!("{refused:?}")
    };
    assert!(text.contains("has 1023 bytes"), "{text:?}");
    assert!(home.list(&server).as_array().unwrap().is_empty());
    assert_eq!(mappings(&server.process), 0);
}

/// Goal: garbage on a connection ends only that connection, and leaks no descriptor. Method: random bytes, frames with
/// a flipped bit, and truncated frames, over many connections; then a valid version.
#[test]
fn garbage_closes_only_its_connection() {
    let home = Home::new();
    files::write_noise(&home.path("w"), 1000, 1);
    let server = server(&home, &[]);
    publish(&home, "w", &[]);
    let before = server.process.descriptors();
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let hello = encode_producer(ProducerMessage::Hello(Hello {
        revision_min: 1,
        revision_max: 1,
        agent: "x".repeat(200).into(),
    }));
    for round in 0..200 {
        let mut raw = if round % 2 == 0 {
            RawProducer::connect(&home.path("s"))
        } else {
            RawProducer::connect_with_hello(&home.path("s"))
        };
        let mut bytes = hello.clone();
        match round % 3 {
            0 => rng.fill(&mut bytes[..]),
            1 => bytes[rng.random_range(0..40)] ^= 1 << rng.random_range(0..8),
            _ => bytes.truncate(rng.random_range(1..bytes.len())),
        }
        let _ = raw.0.write_all(&bytes); // The server may have closed the connection by then.
    }
    let published = publish(&home, "w", &[]);
    assert_eq!(published["version"], 2);
    wait_until("all descriptors are closed", || server.process.descriptors() <= before);
    server.process.signal_and_wait(Signal::TERM).expect_code(0);
}

/// Goal: publishing many versions leaks neither descriptors nor mappings. Method: 300 versions by one producer; count
/// the server's descriptors and mappings.
#[test]
fn many_versions_leak_nothing() {
    let home = Home::new();
    let server = server(&home, &["--keep-versions=2"]);
    let mut raw = RawProducer::connect_with_hello(&home.path("s"));
    let mut number = 0;
    let mut publish_versions = |raw: &mut RawProducer, count| {
        for _ in 0..count {
            number += 1;
            raw.lend(8192, memfd(8192).seal().unwrap().as_fd());
            let mut answer = raw.publish(number);
            while let ServerMessage::Progress(_) = answer {
                answer = raw.receive(); // Progress of versions that were replaced.
            }
            assert!(matches!(answer, ServerMessage::Published { .. }), "{answer:?}");
        }
    };
    publish_versions(&mut raw, 10);
    let before = server.process.descriptors();
    publish_versions(&mut raw, 300);
    wait_until("only retained versions are mapped", || mappings(&server.process) == 2);
    assert!(server.process.descriptors() <= before);
    drop(raw);
    server.process.signal_and_wait(Signal::TERM).expect_code(0);
}
