//! A server and its producers in one process, over a real socket: publishing, refusals, and release of memory.

use super::{
    channel::{FrameReader, FrameWriter, split},
    topics::Topics,
    *,
};
use crate::{Access, Config, Identity, Keep, Listener, Rules, Tuning};
use std::{io, os::fd::AsFd, path::PathBuf};
use tempfile::TempDir;
use tensor_relay_device::{Memfd, Sealed};
use tensor_relay_protocol::{
    Cuts, Dtype, Limits, Manifest, Shape, TensorName, TensorSpec, Topic,
    sidecar::{Hello, Lend, Memory, ProducerMessage, PublicationId, Publish, encode_producer},
};

const TIMEOUT: Duration = Duration::from_secs(30);

struct Home {
    folder: TempDir,
    server: Server,
    open: Option<OpenSocket>,
}

impl Home {
    fn new(config: Config, options: TopicOptions) -> Self {
        Self::with(Access::open(), config, options)
    }

    fn with(access: Access, config: Config, options: TopicOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let identity = Identity::load_or_create(&folder.path().join("state")).unwrap();
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), &identity, Tuning::default()).unwrap();
        let server = Server::start(listener, access, config);
        let socket = PublishSocket::open(&folder.path().join("s"), &[]).unwrap();
        let open = Some(server.publish_from(socket, options, None, |_| {}));
        Self { folder, server, open }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    async fn producer(&self) -> Producer {
        Producer::connect(&self.path()).await.unwrap()
    }

    /// Whether there is a version of the topic called `name`.
    fn offers(&self, name: &str) -> bool {
        let names = self.server.shared().catalogue.names(|_| true);
        names.iter().any(|topic| topic.as_str() == name)
    }

    /// A connection after its handshake, for sending arbitrary messages.
    async fn raw(&self) -> (FrameReader, FrameWriter) {
        let (mut reader, writer) = split(UnixStream::connect(self.path()).await.unwrap());
        let hello = Hello { revision_min: 1, revision_max: 9, agent: "raw".into() };
        writer
            .write(&encode_producer(ProducerMessage::Hello(hello)), None)
            .await
            .unwrap();
        assert!(matches!(answer(&mut reader).await, ServerMessage::Welcome(_)));
        (reader, writer)
    }
}

impl Default for Home {
    fn default() -> Self {
        Self::new(Config::default(), TopicOptions { bases: 0, ..TopicOptions::default() })
    }
}

async fn answer(reader: &mut FrameReader) -> ServerMessage {
    let frame = tokio::time::timeout(TIMEOUT, reader.next()).await.unwrap().unwrap();
    ServerMessage::decode(&frame.expect("it is closed with a reason")).unwrap()
}

fn topic() -> Topic {
    Topic::new("policy").unwrap()
}

fn specs(bytes: u64) -> Vec<TensorSpec> {
    vec![TensorSpec::new(TensorName::new("w").unwrap(), Dtype::U8, Shape::new(&[bytes]).unwrap())]
}

fn version(producer: &Producer, bytes: u64) -> SealedVersion {
    let fill = |_, out: &mut TensorWriter<'_>| -> io::Result<()> { out.write(&vec![7; bytes as usize]) };
    SealedVersion::new(producer.terms(), specs(bytes), vec![], fill).unwrap()
}

async fn publish(producer: &Producer, bytes: u64) -> Publication {
    producer.publish(topic(), version(producer, bytes), vec![]).await.unwrap()
}

#[tokio::test]
async fn a_replaced_version_is_released() {
    let home = Home::default();
    let producer = home.producer().await;
    let mut first = publish(&producer, 10_000).await;
    assert_eq!((first.id().version.0, first.copied_bytes(), first.payload_bytes()), (1, 10_000, 10_240));
    assert_eq!(home.server.stats().staged_bytes, 16_384, "whole pages, and one for the manifest");
    assert!(!first.released(Duration::from_millis(1)).await.unwrap());
    let mut second = publish(&producer, 5000).await;
    assert_eq!((second.id().version.0, second.id().epoch), (2, first.id().epoch));
    assert!(first.released(TIMEOUT).await.unwrap() && first.has_ended());
    assert!(!first.committed(1, TIMEOUT).await.unwrap(), "no subscriber can commit it any more");
    assert_eq!(home.server.stats().staged_bytes, 12_288);
    second.withdraw();
    assert!(second.released(TIMEOUT).await.unwrap());
    assert_eq!(home.server.stats().staged_bytes, 0);
}

/// Goal: a version without bytes is on offer until it is withdrawn, like any other. Method: its state at the producer,
/// before and after; later answers of the server prove that earlier messages were handled.
#[tokio::test]
async fn an_empty_version_is_published_like_any_other() {
    let home = Home::default();
    let producer = home.producer().await;
    let mut empty = publish(&producer, 0).await;
    assert_eq!(empty.payload_bytes(), 0);
    producer.end(Topic::new("none").unwrap(), false).await.unwrap_err(); // Waits for one answer.
    producer
        .publish(Topic::new("other").unwrap(), version(&producer, 10), vec![])
        .await
        .unwrap();
    assert!(!empty.is_released() && !empty.has_ended());
    assert!(home.offers("policy"));
    empty.withdraw();
    assert!(empty.released(TIMEOUT).await.unwrap());
    assert!(!home.offers("policy"));
}

/// Goal: a version withdrawn before its turn is never published. Method: send `Publish` and `Withdraw` in a single
/// write, many times.
#[tokio::test]
async fn a_version_withdrawn_before_its_turn_is_not_published() {
    let home = Home::default();
    let (mut reader, writer) = home.raw().await;
    for number in 1..=20 {
        let withdraw = encode_producer(ProducerMessage::Withdraw(PublicationId(number)));
        let messages = [manifest(0, 4 << 20), publish_message(number), withdraw].concat();
        writer.write(&messages, None).await.unwrap();
        let refused = answer(&mut reader).await;
        assert!(
            matches!(refused, ServerMessage::Refused { reason: Refusal::TopicEnded, .. }),
            "{number}: {refused:?}"
        );
    }
    assert!(!home.offers("policy"));
}

#[tokio::test]
async fn version_numbers_continue_when_a_producer_reconnects() {
    let home = Home::default();
    let first = publish(&home.producer().await, 100).await; // The producer is dropped here.
    let producer = home.producer().await;
    let second = publish(&producer, 100).await;
    assert_eq!((second.id().version.0, second.id().epoch), (2, first.id().epoch));
    producer.end(topic(), false).await.unwrap();
    let again = producer.end(topic(), false).await.unwrap_err();
    assert!(matches!(again, PublishError::Refused { reason: Refusal::TopicEnded, .. }), "{again}");
    let third = publish(&producer, 100).await;
    assert_ne!(third.id().epoch, first.id().epoch, "an ended topic begins a new epoch");
}

#[tokio::test]
async fn producers_share_topics_with_one_another_and_not_with_files() {
    let home = Home::default();
    let (one, two) = (home.producer().await, home.producer().await);
    for number in 1..=3 {
        let (first, second) = (publish(&one, 100).await, publish(&two, 100).await);
        assert_eq!((first.id().version.0, second.id().version.0), (2 * number - 1, 2 * number));
        assert_eq!(first.id().epoch, second.id().epoch);
    }
    let file = home.server.publisher(Topic::new("file").unwrap()).unwrap();
    let refused = two.publish(file.topic().clone(), version(&two, 100), vec![]).await.unwrap_err();
    assert!(matches!(refused, PublishError::Refused { reason: Refusal::TopicTaken, .. }), "{refused}");
}

#[tokio::test]
async fn a_version_without_room_is_refused_and_holds_nothing() {
    let home = Home::new(Config { staged_bytes: 20_000, ..Config::default() }, TopicOptions::default());
    let producer = home.producer().await;
    let refused = producer.publish(topic(), version(&producer, 30_000), vec![]).await.unwrap_err();
    let PublishError::Refused { reason: Refusal::NoRoom, text } = refused else { panic!("{refused}") };
    assert!(text.contains("20000"), "{text}");
    let metadata = vec![("k".into(), "v".repeat(40_000))];
    let refused = producer.publish(topic(), version(&producer, 10), metadata).await.unwrap_err();
    assert!(matches!(refused, PublishError::Metadata(_)), "{refused}");
    assert_eq!(home.server.stats().staged_bytes, 0);
    publish(&producer, 10_000).await;
}

#[tokio::test]
async fn producers_notice_the_end_of_the_server() {
    let mut home = Home::default();
    let producer = home.producer().await;
    let mut publication = publish(&producer, 100).await;
    home.open.take();
    let lost = publication.committed(1, TIMEOUT).await.unwrap_err();
    assert!(lost.to_string().contains("has ended"), "{lost}");
    assert!(!home.path().exists());
    let refused = producer.publish(topic(), version(&producer, 100), vec![]).await.unwrap_err();
    assert!(matches!(refused, PublishError::ConnectionLost(_)), "{refused}");
    let error = Producer::connect(&home.path()).await.unwrap_err();
    assert!(matches!(error, ConnectError::NoSocket { .. }), "{error}");
}

/// A manifest for chunks of `chunk_bytes`.
fn manifest(bytes: u64, chunk_bytes: u32) -> Vec<u8> {
    let manifest = Manifest::layout(specs(bytes), vec![], chunk_bytes, &Limits::default()).unwrap();
    encode_producer(ProducerMessage::Manifest(manifest.encoded().clone()))
}

fn lend(range: std::ops::Range<u64>, offset: u64) -> Vec<u8> {
    encode_producer(ProducerMessage::Lend(Lend { range, memory: Memory::Memfd { offset } }))
}

fn publish_message(number: u64) -> Vec<u8> {
    let publication = PublicationId(number);
    let publish = Publish { publication, topic: topic(), metadata: vec![], reason: "".into() };
    encode_producer(ProducerMessage::Publish(publish))
}

fn sealed(bytes: u64) -> tensor_relay_device::SealedFd {
    let mut memfd = Memfd::new(bytes).unwrap();
    memfd.write_at(&vec![1; bytes as usize], 0).unwrap();
    memfd.seal().unwrap()
}

/// Goal: an inconsistent version is refused with the right reason, nothing is published or kept, and the producer may
/// continue. Method: every inconsistency, on one connection; then a valid version.
#[tokio::test]
async fn an_inconsistent_version_is_refused() {
    let home = Home::default();
    let (mut reader, writer) = home.raw().await;
    let (right, chunk_bytes) = (manifest(1000, 4 << 20), 4 << 20);
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let (fit, short, long) = (sealed(1024), sealed(1023), sealed(8192));
    let (fit, short, long, file) =
        (Some(fit.as_fd()), Some(short.as_fd()), Some(long.as_fd()), Some(file.as_fd()));
    let wrong = [
        (vec![], Refusal::BadManifest),
        (vec![(right.clone(), None)], Refusal::UnfitMemory),
        (vec![(right.clone(), None), (lend(0..1024, 0), None)], Refusal::UnfitMemory),
        (vec![(right.clone(), None), (lend(0..1024, 0), short)], Refusal::UnfitMemory),
        (vec![(right.clone(), None), (lend(0..1024, 0), long)], Refusal::UnfitMemory),
        (vec![(right.clone(), None), (lend(0..1024, 4096), long)], Refusal::UnfitMemory),
        (vec![(right.clone(), None), (lend(0..1024, 0), file)], Refusal::UnfitMemory),
        (vec![(right.clone(), None), (lend(0..1000, 0), fit)], Refusal::UnfitMemory),
        (vec![(right.clone(), None), (lend(1..1025, 0), fit)], Refusal::UnfitMemory),
        (vec![(right.clone(), None), (lend(0..1024, 1), fit)], Refusal::UnfitMemory),
        (vec![(right.clone(), None), (lend(0..1024, 0), fit), (lend(0..1024, 0), fit)], Refusal::UnfitMemory),
        (vec![(manifest(1000, chunk_bytes / 2), None), (lend(0..1024, 0), fit)], Refusal::BadManifest),
        (vec![(right.clone(), None), (right.clone(), None), (lend(0..1024, 0), fit)], Refusal::BadManifest),
    ];
    for (number, (messages, expected)) in (1..).zip(wrong) {
        for (message, descriptor) in messages {
            writer.write(&message, descriptor).await.unwrap();
        }
        writer.write(&publish_message(number), None).await.unwrap();
        match answer(&mut reader).await {
            ServerMessage::Refused { publication, reason, text } => {
                assert_eq!((publication.0, reason), (number, expected), "{text:?}");
            }
            other => panic!("case {number}: {other:?}"),
        }
        assert_eq!(home.server.stats().staged_bytes, 0);
    }
    for (message, descriptor) in [(right, None), (lend(0..1024, 0), fit), (publish_message(100), None)] {
        writer.write(&message, descriptor).await.unwrap();
    }
    let published = answer(&mut reader).await;
    assert!(matches!(published, ServerMessage::Published { version, .. } if version.0 == 1), "{published:?}");
}

/// Goal: a producer that breaks a rule receives the reason and is disconnected. Method: every violation.
#[tokio::test]
async fn a_producer_that_breaks_a_rule_is_disconnected() {
    let home = Home::default();
    let hello = encode_producer(ProducerMessage::Hello(Hello {
        revision_min: 1,
        revision_max: 1,
        agent: "x".into(),
    }));
    let frame = |bytes: &[u8]| [&(bytes.len() as u32).to_le_bytes(), bytes].concat();
    let broken = [
        (frame(b"\xff\xff\xff"), "malformed"),
        (frame(b""), "kind"),
        (vec![0xff; 4], "at most"),
        (hello, "not allowed here"),
        ([publish_message(1), publish_message(1)].concat(), "two versions under one number"),
    ];
    for (bytes, why) in broken {
        let (mut reader, writer) = home.raw().await;
        writer.write(&bytes, None).await.unwrap();
        let text = loop {
            match answer(&mut reader).await {
                ServerMessage::Close { text } => break text,
                ServerMessage::Refused { .. } => {} // The first of the two.
                other => panic!("{other:?}"),
            }
        };
        assert!(text.contains(why), "{text:?}");
        assert!(!matches!(reader.next().await, Ok(Some(_))), "it is closed");
    }
    let early = UnixStream::connect(home.path()).await.unwrap();
    let (mut reader, writer) = split(early);
    writer.write(&publish_message(1), None).await.unwrap();
    assert!(
        matches!(answer(&mut reader).await, ServerMessage::Close { text } if text.contains("before its Hello"))
    );
    let (mut reader, writer) = split(UnixStream::connect(home.path()).await.unwrap());
    let late = Hello { revision_min: 2, revision_max: 3, agent: "later".into() };
    writer
        .write(&encode_producer(ProducerMessage::Hello(late)), None)
        .await
        .unwrap();
    assert!(matches!(answer(&mut reader).await, ServerMessage::Close { text } if text.contains("revisions")));
}

/// Goal: a tensor in pieces, written in parts of any size, is sealed as a server would lay it out.
#[tokio::test]
async fn a_sealed_version_may_be_in_pieces() {
    let home = Home::default();
    let producer = home.producer().await;
    let shape = Shape::new(&[60, 100]).unwrap();
    let spec = TensorSpec::new(TensorName::new("w").unwrap(), Dtype::U8, shape);
    let specs = vec![TensorSpec { cuts: Cuts::equal(1, 100, 3), ..spec }];
    let content: Vec<u8> = (0..6000).map(|at| (at % 251) as u8).collect();
    let write = |_, out: &mut TensorWriter<'_>| content.chunks(77).try_for_each(|part| out.write(part));
    let version = SealedVersion::new(producer.terms(), specs, vec![], write).unwrap();
    let len_bytes = version.manifest().payload_bytes();
    let sealed = Sealed::map(version.memory.as_ref().unwrap(), len_bytes).unwrap();
    let tensor = version.manifest().tensor("w").unwrap();
    for (piece, columns) in tensor.pieces().zip([0..34, 34..68, 68..100]) {
        let rows = content.chunks(100).flat_map(|row| &row[columns.clone()]);
        assert!(
            sealed.as_ref()[piece.range.start as usize..piece.range.end as usize]
                .iter()
                .eq(rows)
        );
    }
}

/// Goal: a tensor with too few or too many bytes is refused.
#[tokio::test]
async fn a_tensor_with_a_wrong_number_of_bytes_is_refused() {
    let home = Home::default();
    let producer = home.producer().await;
    let short = SealedVersion::new(producer.terms(), specs(10), vec![], |_, out| out.write(b"123"));
    assert!(
        matches!(short, Err(SealError::WrongSize { expected_bytes: 10, given_bytes: 3, .. })),
        "{short:?}"
    );
    let long = SealedVersion::new(producer.terms(), specs(2), vec![], |_, out| out.write(b"123"));
    assert!(matches!(long, Err(SealError::Fill(_))), "{long:?}");
}

/// Goal: several producers with many versions leak nothing. Method: count descriptors and mappings of this process,
/// which is producer and server.
#[tokio::test]
async fn many_versions_leak_no_memory() {
    let home = Home::new(
        Config::default(),
        TopicOptions { keep: Keep { versions: 2, ..Keep::default() }, bases: 0, ..TopicOptions::default() },
    );
    let held = || {
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().filter(|entry| {
            let link = std::fs::read_link(entry.as_ref().unwrap().path()).unwrap_or_default();
            link.to_string_lossy().contains("memfd:tensor-relay")
        });
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        (descriptors.count(), maps.matches("memfd:tensor-relay").count())
    };
    let producer = home.producer().await;
    let mut last = publish(&producer, 8192).await;
    for _ in 0..300 {
        last = publish(&producer, 8192).await;
    }
    assert_eq!(last.id().version.0, 301);
    drop(producer);
    let producer = home.producer().await;
    let mut last = publish(&producer, 8192).await;
    producer.end(topic(), true).await.unwrap();
    assert!(last.released(TIMEOUT).await.unwrap());
    assert_eq!(home.server.stats().staged_bytes, 0);
    // Other tests of this process have some, but not hundreds.
    let (descriptors, mappings) = held();
    assert!(descriptors < 50 && mappings < 50, "{descriptors} descriptors, {mappings} mappings");
}

/// Goal: refused producers take no place of others and hold resources only briefly. Method: take all places; connect
/// many more that never read the refusal; free one place.
#[tokio::test]
async fn refused_producers_take_no_place() {
    let home = Home::default();
    let mut inside = Vec::new();
    for _ in 0..PRODUCERS_MAX {
        inside.push(home.producer().await);
    }
    let refused = Producer::connect(&home.path()).await.unwrap_err();
    let ConnectError::Refused { why, .. } = refused else { panic!("{refused}") };
    assert!(why.contains("64 producers of user"), "{why}");
    let mut silent = Vec::new();
    for _ in 0..2 * PRODUCERS_MAX {
        silent.push(loop {
            match UnixStream::connect(home.path()).await {
                Ok(stream) => break stream,
                Err(_) => tokio::task::yield_now().await, // The backlog is full.
            }
        });
    }
    inside.pop();
    let deadline = Instant::now() + channel::MESSAGE_TIMEOUT / 2;
    while Producer::connect(&home.path()).await.is_err() {
        assert!(Instant::now() < deadline, "the free place is not given");
        tokio::task::yield_now().await;
    }
}

/// Goal: versions beyond the maximum of waiting ones are refused, and the connection continues. Method: send more, all
/// invalid, in a single write; count the refusals by reason.
#[tokio::test]
async fn versions_beyond_the_queue_are_refused() {
    let home = Home::default();
    let (mut reader, writer) = home.raw().await;
    let more = connection::WAITING_MAX as u64 + 20;
    let messages: Vec<u8> = (0..more).flat_map(publish_message).collect();
    writer.write(&messages, None).await.unwrap();
    let (mut full, mut wrong) = (0, 0);
    for _ in 0..more {
        match answer(&mut reader).await {
            ServerMessage::Refused { reason: Refusal::NoRoom, .. } => full += 1,
            ServerMessage::Refused { reason: Refusal::BadManifest, .. } => wrong += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((full, wrong), (20, connection::WAITING_MAX));
}

/// Goal: a producer without permission for a topic can neither end nor withdraw it, even if it loses the permission
/// while it waits. Method: revoke the permission of one that publishes and of one that waits.
#[tokio::test]
async fn ending_a_topic_requires_the_permission_to_publish() {
    let uid = rustix::process::geteuid().as_raw();
    let rules = |user: u32| {
        let acl = format!("uid:{user} publish **").parse().unwrap();
        Arc::new(Rules { acl, ..Rules::default() })
    };
    let sender = tokio::sync::watch::Sender::new(rules(uid));
    let home = Home::with(Access::following(sender.subscribe()), Config::default(), TopicOptions::default());
    let producer = home.producer().await;
    publish(&producer, 64).await;
    sender.send_replace(rules(uid + 1));
    for withdraw in [false, true] {
        let refused = producer.end(topic(), withdraw).await.unwrap_err().to_string();
        assert!(refused.contains("does not let user"), "{refused}");
    }
    assert!(home.offers("policy"));
    sender.send_replace(rules(uid));

    let topics = Topics::new(Arc::clone(home.server.shared()), TopicOptions::default());
    let lease = topics.lease(0, &topic()).await.unwrap();
    let other = topic();
    let end = topics.end(uid, &other, true);
    let mut end = std::pin::pin!(end);
    assert!(tokio::time::timeout(Duration::from_millis(20), &mut end).await.is_err(), "it waits its turn");
    sender.send_replace(rules(uid + 1));
    drop(lease);
    let refused = end.await.unwrap_err();
    assert_eq!(refused.0, Refusal::Forbidden, "{refused:?}");
}

/// Goal: a refused version does not open its topic.
#[tokio::test]
async fn a_refused_version_opens_no_topic() {
    let home = Home::default();
    let (mut reader, writer) = home.raw().await;
    writer.write(&publish_message(1), None).await.unwrap();
    assert!(matches!(answer(&mut reader).await, ServerMessage::Refused { .. }));
    let end = ProducerMessage::End { request: PublicationId(2), topic: topic(), withdraw: false };
    writer.write(&encode_producer(end), None).await.unwrap();
    let refused = answer(&mut reader).await;
    assert!(matches!(refused, ServerMessage::Refused { reason: Refusal::TopicEnded, .. }), "{refused:?}");
}

/// Goal: a producer waits for an unresponsive or busy server no longer than its timeout. Method: a socket that accepts
/// no connection, with a backlog of one; paused time.
#[tokio::test(start_paused = true)]
async fn an_unresponsive_server_times_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let began = Instant::now();
    let silent = Producer::connect_to(&path, Duration::ZERO, None).await.unwrap_err();
    assert!(matches!(silent, ConnectError::NoAnswer { .. }), "{silent}");
    assert!(began.elapsed() < channel::MESSAGE_TIMEOUT / 2, "{:?}", began.elapsed());
    let _waiting = UnixStream::connect(&path).await;
    let busy = Producer::connect_to(&path, Duration::ZERO, None).await.unwrap_err();
    assert!(matches!(busy, ConnectError::Busy { .. }), "{busy}");
}

#[tokio::test]
async fn a_producer_can_require_the_listening_user() {
    let home = Home::default();
    let ours = rustix::process::geteuid().as_raw();
    Producer::connect_to(&home.path(), TIMEOUT, Some(ours)).await.unwrap();
    let stranger = Producer::connect_to(&home.path(), TIMEOUT, Some(ours + 1)).await.unwrap_err();
    let ConnectError::Stranger { found_uid, expected_uid, .. } = stranger else { panic!("{stranger}") };
    assert_eq!((found_uid, expected_uid), (ours, ours + 1));
}
