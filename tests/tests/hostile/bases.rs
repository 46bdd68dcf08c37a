//! Deltas against wrong bases, and false reports of bases. A client applies deltas only to a version that it reported
//! as held; a false report of a client affects only that client.

use crate::{
    clients::digest_of,
    raw::{Peer, hello, subscribe},
    script::{CHUNK_BYTES, EPOCH, Script, VERSION, expect_closed},
};
use std::time::Duration;
use tensor_relay_client::{Client, Snapshot, SubscriptionError, Version};
use tensor_relay_protocol::{
    Announce, ChunkHash, ChunkHeader, ClientMessage, CloseCode, CodecId, CodecSet, Context, Dtype, Epoch,
    Have, Hello, RangeSet, ServerMessage, SubscriptionId, VersionDigest, VersionId, codec,
};
use tensor_relay_server::TopicOptions;
use tensor_relay_tests::{
    pair::{client_config, publish, reconnecting, retaining, server_config, simulate, topic},
    tensors,
};

/// The first version, which the client does not retain.
const FIRST: Version = Version(VERSION.0 - 1);

/// The version that is sent as deltas against [`VERSION`].
const NEXT: Version = Version(VERSION.0 + 1);

/// The script of a server that has announced a version whose base the client retains.
struct DeltaScript {
    script: Script,
    id: VersionId,
}

impl DeltaScript {
    /// Sends two versions, of which the client retains the second, and announces a third; all with the same manifest.
    async fn begin(mut script: Script, epoch: Epoch) -> Self {
        script.send_manifest(script.manifest.digest(), script.manifest.encoded()).await;
        for (version, kept) in [(FIRST, false), (VERSION, true)] {
            Self::send(&mut script, version).await;
            assert_eq!(Self::wait_for_committed(&mut script).await, (version, kept));
        }
        let id = VersionId { topic: topic("t"), epoch, version: NEXT };
        let announce = Announce {
            id: id.clone(),
            metadata: tensors::metadata(NEXT.0),
            may_be_base: true,
            ..script.announcement()
        };
        script.announce(announce).await;
        Self { script, id }
    }

    /// Sends all messages of `version`, whose bytes become the script's payload.
    async fn send(script: &mut Script, version: Version) {
        tensors::write_content("noise", version.0, &mut script.payload);
        let id = VersionId { topic: topic("t"), epoch: EPOCH, version };
        let metadata = tensors::metadata(version.0);
        let announce = Announce { id, metadata, may_be_base: true, ..script.announcement() };
        script.announce(announce).await;
        for chunk in 0..3 {
            script
                .send_chunk(ChunkHeader { version, ..script.header(chunk) }, script.raw(chunk))
                .await;
        }
        let (subscription, digest) = (script.subscription, script.digest());
        let complete = ServerMessage::Complete { subscription, epoch: EPOCH, version, digest };
        script.peer.send_to_client(complete).await;
    }

    /// Waits for the client's `Committed`: the version, and whether it retains a copy.
    async fn wait_for_committed(script: &mut Script) -> (Version, bool) {
        loop {
            if let ClientMessage::Committed { version, kept, .. } = script.peer.receive_from_client().await {
                return (version, kept);
            }
        }
    }

    /// The payload of the announced version: the base's, with its first 16 bytes changed.
    fn next_payload(&self) -> Vec<u8> {
        let mut raw = self.script.payload.clone();
        tensors::write_content("noise", NEXT.0, &mut raw[..16]);
        raw
    }

    /// A chunk as a delta against the retained version.
    fn delta(&self, chunk: u32) -> (ChunkHeader, Vec<u8>) {
        let start = (chunk * CHUNK_BYTES) as usize;
        let raw = &self.next_payload()[start..start + CHUNK_BYTES as usize];
        let mut encoded = vec![0; raw.len()];
        let context = Context { dtype: Dtype::U8, base: Some(self.script.raw(chunk)) };
        let written = codec(CodecId::Sparse).encode(context, raw, &mut encoded).unwrap();
        encoded.truncate(written);
        let header = ChunkHeader {
            epoch: self.id.epoch,
            version: NEXT,
            base: Some(VERSION),
            codec: CodecId::Sparse,
            encoded_bytes: written as u32,
            hash: ChunkHash::of(raw),
            ..self.script.header(chunk)
        };
        (header, encoded)
    }

    async fn send_complete(&mut self) {
        let hashes = (0..3).map(|chunk| self.delta(chunk).0.hash);
        let digest = VersionDigest::of(self.script.manifest.digest(), hashes);
        let VersionId { epoch, version, .. } = self.id;
        let subscription = self.script.subscription;
        let complete = ServerMessage::Complete { subscription, epoch, version, digest };
        self.script.peer.send_to_client(complete).await;
    }
}

/// Runs `server` against a good client; returns the client's result for the announced version.
fn run_deltas(
    epoch: Epoch,
    server: impl AsyncFnOnce(&mut DeltaScript),
) -> Result<Snapshot, SubscriptionError> {
    simulate(1, async |sim| {
        let user = async {
            let client: Client = sim.client(1, client_config()).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            for _ in [FIRST, VERSION] {
                tensors::check(&subscription.next().await.unwrap());
            }
            let received = subscription.next().await;
            tokio::time::sleep(Duration::from_secs(1)).await; // Lets the last messages arrive.
            received
        };
        let server = async {
            let mut deltas = DeltaScript::begin(Script::start(&sim).await, epoch).await;
            server(&mut deltas).await;
            deltas
        };
        tokio::join!(user, server).0
    })
}

/// Goal: the script is valid, so that failures of the tests below are due to their changes. Method: send the announced
/// version unchanged.
#[test]
fn valid_deltas_are_committed() {
    let snapshot = run_deltas(EPOCH, async |deltas| {
        for chunk in 0..3 {
            let (header, encoded) = deltas.delta(chunk);
            deltas.script.send_chunk(header, &encoded).await;
        }
        deltas.send_complete().await;
        assert_eq!(DeltaScript::wait_for_committed(&mut deltas.script).await, (NEXT, true));
    });
    let snapshot = snapshot.unwrap();
    assert_eq!((snapshot.id().version, snapshot.receipt().codecs.deltas().chunks), (NEXT, 3));
}

/// Goal: deltas are applied only to the version that the client reported as held. Method: no base, an older one, the
/// version itself, one of another epoch; a base for a codec without bases.
#[test]
fn deltas_against_other_bases_end_the_session() {
    type Change = fn(&mut ChunkHeader);
    let changes: [(&str, Epoch, Change); 5] = [
        ("needs a base if and only if", EPOCH, |header| header.base = None),
        ("against version 2", EPOCH, |header| header.base = Some(FIRST)),
        ("against version 4", EPOCH, |header| header.base = Some(NEXT)),
        ("against version 3", Epoch(6), |_| ()),
        ("needs a base if and only if", EPOCH, |header| header.codec = CodecId::Zstd),
    ];
    for (expected, epoch, change) in changes {
        let error = run_deltas(epoch, async |deltas| {
            let (mut header, encoded) = deltas.delta(0);
            change(&mut header);
            deltas.script.send_chunk(header, &encoded).await;
            let (code, text) = deltas.script.peer.wait_for_close().await;
            assert_eq!(code, Some(CloseCode::ProtocolViolation), "{text}");
        });
        let error = error.map(|snapshot| snapshot.id().clone()).unwrap_err();
        let SubscriptionError::Disconnected { source, .. } = &error else { panic!("{error}") };
        assert!(source.to_string().contains(expected), "{source} lacks {expected:?}");
    }
    expect_closed(CloseCode::ProtocolViolation, "needs a base if and only if", async |script| {
        script.begin_version().await;
        let header = ChunkHeader { codec: CodecId::Sparse, ..script.header(0) };
        script.send_chunk(header, script.raw(0)).await;
    });
}

/// Goal: deltas whose decoded content does not match the hash are never delivered.
/// Method: the delta of another chunk; then arbitrary bytes.
#[test]
fn wrong_deltas_are_corrupt() {
    for bytes in [None, Some([0x5a; 64])] {
        let error = run_deltas(EPOCH, async |deltas| {
            let (header, _) = deltas.delta(0);
            let (_, other) = deltas.delta(1);
            let encoded = bytes.map_or(other, |bytes| bytes.to_vec());
            let header = ChunkHeader { encoded_bytes: encoded.len() as u32, ..header };
            deltas.script.send_chunk(header, &encoded).await;
        });
        let error = error.map(|snapshot| snapshot.id().clone()).unwrap_err();
        assert!(matches!(error, SubscriptionError::Corrupt { .. }), "{error}");
    }
}

/// Goal: a client that reconnects reports its base if its partial version still needs it. Method: lose the connection
/// after the commit, and after each chunk of the next version.
#[test]
fn a_reconnecting_client_reports_its_base() {
    for received in 0..=3 {
        simulate(1, async |sim| {
            let user = async {
                let client = sim.client(1, reconnecting()).await.unwrap();
                let mut subscription = client.subscribe(&topic("t")).await.unwrap();
                for _ in [FIRST, VERSION] {
                    tensors::check(&subscription.next().await.unwrap());
                }
                let next = subscription.next().await.unwrap();
                assert_eq!((next.receipt().chunks, next.receipt().codecs.deltas().chunks), (3, 3));
                client
            };
            let server = async {
                let mut deltas = DeltaScript::begin(Script::start(&sim).await, EPOCH).await;
                for chunk in 0..received {
                    let (header, encoded) = deltas.delta(chunk);
                    deltas.script.send_chunk(header, &encoded).await;
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
                let (script, subscribe) = deltas.script.reconnect().await;
                let base = (received < 3).then_some((EPOCH, VERSION));
                assert_eq!(subscribe.base.map(|base| base.key()), base, "after {received} chunks");
                deltas.script = script;
                let announce = Announce {
                    id: deltas.id.clone(),
                    metadata: tensors::metadata(NEXT.0),
                    may_be_base: true,
                    ..deltas.script.announcement()
                };
                deltas.script.announce(announce).await;
                for chunk in received..3 {
                    let (header, encoded) = deltas.delta(chunk);
                    deltas.script.send_chunk(header, &encoded).await;
                }
                deltas.send_complete().await;
                assert_eq!(DeltaScript::wait_for_committed(&mut deltas.script).await, (NEXT, true));
                deltas
            };
            tokio::join!(user, server);
        });
    }
}

/// Goal: an unknown or impossible base is not an error: the server sends no deltas. Method: report versions that never
/// existed, the published version with another digest, and one of another epoch.
#[test]
fn unknown_bases_are_ignored() {
    for base in [(EPOCH, 0), (EPOCH, 1), (EPOCH, 7), (EPOCH, u64::MAX), (Epoch(6), 1)] {
        simulate(1, async |sim| {
            let server = sim.server(server_config());
            let mut publisher =
                server.publisher_with(topic("t"), Some(EPOCH), TopicOptions::default()).unwrap();
            publish(&server, &mut publisher, 1, 1000).await;
            let mut peer = Peer::welcomed_client(&sim, 2).await;
            let ClientMessage::Subscribe(wanted) = subscribe(1, 4) else { panic!("it subscribes") };
            let digest = VersionDigest([7; 32]);
            let base = Some(Have { epoch: base.0, version: Version(base.1), digest });
            peer.send_to_server(ClientMessage::Subscribe(tensor_relay_protocol::Subscribe {
                base,
                ..wanted
            }))
            .await;
            let ServerMessage::Announce(announce) = peer.receive_from_server().await else {
                panic!("no version")
            };
            assert_eq!(announce.subscription, SubscriptionId(1));
            assert!(matches!(peer.receive_from_server().await, ServerMessage::Complete { .. }));
            assert_eq!(server.stats().encoder.compared, 0);
        });
    }
}

/// Goal: nothing is encoded against, or compared with, a base of other content. Method: a base with the digest of the
/// server's version, and with another digest.
#[test]
fn a_base_with_other_content_is_not_used() {
    let digest = digest_of(&RangeSet::from_range(0..16));
    for (digest, is_used) in [(digest, true), (VersionDigest([7; 32]), false)] {
        simulate(1, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = server.publisher_with(topic("t"), Some(EPOCH), retaining(2)).unwrap();
            for version in [1, 2] {
                publish(&server, &mut publisher, version, 1 << 20).await;
            }
            let mut peer = Peer::welcomed_client(&sim, 2).await;
            let ClientMessage::Subscribe(wanted) = subscribe(1, 16) else { panic!("it subscribes") };
            let base = Some(Have { epoch: EPOCH, version: Version(1), digest });
            peer.send_to_server(ClientMessage::Subscribe(tensor_relay_protocol::Subscribe {
                base,
                ..wanted
            }))
            .await;
            while !matches!(peer.receive_from_server().await, ServerMessage::Complete { .. }) {}
            assert_eq!(server.stats().encoder.compared > 0, is_used);
        });
    }
}

/// Goal: a client that decodes no deltas is not asked to retain bases. Method: a client that offers all codecs, and one
/// that offers only codecs without bases.
#[test]
fn a_client_without_delta_codecs_is_not_asked_to_keep_bases() {
    for (codecs, may_be_base) in [(CodecSet::all(), true), (CodecSet::all().without_bases(), false)] {
        simulate(1, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = server.publisher(topic("t")).unwrap();
            publish(&server, &mut publisher, 1, 1000).await;
            let mut peer = Peer::client(&sim, 2).await;
            peer.send_to_server(ClientMessage::Hello(Hello { codecs, ..hello() })).await;
            assert!(matches!(peer.receive_from_server().await, ServerMessage::Welcome(_)));
            peer.send_to_server(subscribe(1, 4)).await;
            let ServerMessage::Announce(announce) = peer.receive_from_server().await else {
                panic!("no version")
            };
            assert_eq!(announce.may_be_base, may_be_base);
        });
    }
}
