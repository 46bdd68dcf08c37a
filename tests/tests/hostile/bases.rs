//! Bases that were never granted, and those that are not what they are said to be. The client applies no delta to
//! anything but what it said that it holds, and the server believes no client more than costs that client itself.

use crate::{
    clients::digest_of,
    raw::{Peer, hello, subscribe},
    script::{CHUNK_BYTES, EPOCH, Script, VERSION, expect_closed},
};
use std::time::Duration;
use tensor_relay_client::{Client, Snapshot, SubscriptionError, Version};
use tensor_relay_protocol::{
    Announce, Blame, ChunkHash, ChunkHeader, ClientMessage, CloseCode, CodecId, CodecSet, Context, Dtype,
    Epoch, Have, Hello, RangeSet, ServerMessage, SubscriptionId, VersionDigest, VersionId, codec,
};
use tensor_relay_server::TopicOptions;
use tensor_relay_tests::{
    pair::{client_config, keeping, publish, reconnecting, server_config, simulate, topic},
    tensors,
};

/// A client keeps no copy of the first version that it gets.
const FIRST: Version = Version(VERSION.0 - 1);

const NEXT: Version = Version(VERSION.0 + 1);

/// The version after one that the client holds a copy of.
struct Second {
    script: Script,
    id: VersionId,
}

impl Second {
    /// Sends a first version, and another one, which the client keeps, and announces the next one; all with the same
    /// manifest.
    async fn begin(mut script: Script, epoch: Epoch) -> Self {
        script.manifest(script.manifest.digest(), script.manifest.encoded()).await;
        for (version, kept) in [(FIRST, false), (VERSION, true)] {
            Self::send(&mut script, version).await;
            assert_eq!(Self::committed(&mut script).await, (version, kept));
        }
        let id = VersionId { topic: topic("t"), epoch, version: NEXT };
        let second = Announce {
            id: id.clone(),
            metadata: tensors::metadata(NEXT.0),
            may_be_base: true,
            ..script.announcement()
        };
        script.announce(second).await;
        Self { script, id }
    }

    /// Sends a version whole, of which the script has the bytes from then on.
    async fn send(script: &mut Script, version: Version) {
        tensors::write_content("noise", version.0, &mut script.payload);
        let id = VersionId { topic: topic("t"), epoch: EPOCH, version };
        let metadata = tensors::metadata(version.0);
        let announce = Announce { id, metadata, may_be_base: true, ..script.announcement() };
        script.announce(announce).await;
        for chunk in 0..3 {
            script
                .chunk(ChunkHeader { version, ..script.header(chunk) }, script.raw(chunk))
                .await;
        }
        let (subscription, digest) = (script.subscription, script.digest());
        let complete = ServerMessage::Complete { subscription, epoch: EPOCH, version, digest };
        script.peer.say_to_client(complete).await;
    }

    /// Waits until the client says which version it has, and whether it keeps a copy.
    async fn committed(script: &mut Script) -> (Version, bool) {
        loop {
            if let ClientMessage::Committed { version, kept, .. } = script.peer.hear_client().await {
                return (version, kept);
            }
        }
    }

    fn raw(&self) -> Vec<u8> {
        let mut raw = self.script.payload.clone();
        tensors::write_content("noise", NEXT.0, &mut raw[..16]);
        raw
    }

    /// A chunk as a delta against the first version.
    fn delta(&self, chunk: u32) -> (ChunkHeader, Vec<u8>) {
        let start = (chunk * CHUNK_BYTES) as usize;
        let raw = &self.raw()[start..start + CHUNK_BYTES as usize];
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

    async fn complete(&mut self) {
        let hashes = (0..3).map(|chunk| self.delta(chunk).0.hash);
        let digest = VersionDigest::of(self.script.manifest.digest(), hashes);
        let VersionId { epoch, version, .. } = self.id;
        let subscription = self.script.subscription;
        let complete = ServerMessage::Complete { subscription, epoch, version, digest };
        self.script.peer.say_to_client(complete).await;
    }
}

/// Runs `server` against a good user; gives what that makes of the second version.
fn second_version(
    epoch: Epoch,
    server: impl AsyncFnOnce(&mut Second),
) -> Result<Snapshot, SubscriptionError> {
    simulate(1, async |sim| {
        let user = async {
            let client: Client = sim.client(1, client_config()).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            for _ in [FIRST, VERSION] {
                tensors::check(&subscription.next().await.unwrap());
            }
            let second = subscription.next().await;
            tokio::time::sleep(Duration::from_secs(1)).await; // The last words are heard.
            second
        };
        let server = async {
            let mut second = Second::begin(Script::begin(&sim).await, epoch).await;
            server(&mut second).await;
            second
        };
        tokio::join!(user, server).0
    })
}

/// Goal: the scripts below are good but for what they change.
/// Method: play the second version unchanged.
#[test]
fn good_deltas() {
    let snapshot = second_version(EPOCH, async |second| {
        for chunk in 0..3 {
            let (header, encoded) = second.delta(chunk);
            second.script.chunk(header, &encoded).await;
        }
        second.complete().await;
        assert_eq!(Second::committed(&mut second.script).await, (NEXT, true));
    });
    let snapshot = snapshot.unwrap();
    assert_eq!((snapshot.id().version, snapshot.receipt().codecs.deltas().chunks), (NEXT, 3));
}

/// Goal: deltas are applied to the version that the client said it holds, and to no other.
/// Method: no base at all, one before it, the version itself, one of another epoch; a base beside a codec that needs none.
#[test]
fn bases_that_are_not_held() {
    type Change = fn(&mut ChunkHeader);
    let changes: [(&str, Epoch, Change); 5] = [
        ("needs a base if and only if", EPOCH, |header| header.base = None),
        ("against version 2", EPOCH, |header| header.base = Some(FIRST)),
        ("against version 4", EPOCH, |header| header.base = Some(NEXT)),
        ("against version 3", Epoch(6), |_| ()),
        ("needs a base if and only if", EPOCH, |header| header.codec = CodecId::Zstd),
    ];
    for (word, epoch, change) in changes {
        let error = second_version(epoch, async |second| {
            let (mut header, encoded) = second.delta(0);
            change(&mut header);
            second.script.chunk(header, &encoded).await;
            let (told, text) = second.script.peer.closed_because().await;
            assert_eq!(told, Some(CloseCode::Misbehaved), "{text}");
        });
        let error = error.map(|snapshot| snapshot.id().clone()).unwrap_err();
        let SubscriptionError::Disconnected { source, .. } = &error else { panic!("{error}") };
        assert_eq!(source.blame(), Blame::Peer);
        assert!(source.to_string().contains(word), "{source} says nothing of {word:?}");
    }
    expect_closed(CloseCode::Misbehaved, "needs a base if and only if", async |script| {
        script.good_beginning().await;
        let header = ChunkHeader { codec: CodecId::Sparse, ..script.header(0) };
        script.chunk(header, script.raw(0)).await;
    });
}

/// Goal: deltas that do not give what was hashed are never shown, and end the base with their version.
/// Method: the delta of another chunk; then any bytes.
#[test]
fn wrong_deltas() {
    for bytes in [None, Some([0x5a; 64])] {
        let error = second_version(EPOCH, async |second| {
            let (header, _) = second.delta(0);
            let (_, other) = second.delta(1);
            let encoded = bytes.map_or(other, |bytes| bytes.to_vec());
            let header = ChunkHeader { encoded_bytes: encoded.len() as u32, ..header };
            second.script.chunk(header, &encoded).await;
        });
        let error = error.map(|snapshot| snapshot.id().clone()).unwrap_err();
        assert!(matches!(error, SubscriptionError::Corrupt { .. }), "{error}");
    }
}

/// Goal: a client names its base when it comes back: the whole of it, or what it needs for the rest of a part.
/// Method: lose the connection after the commit, and after each chunk of the next version.
#[test]
fn who_comes_back_names_its_base() {
    for came in 0..=3 {
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
                let mut second = Second::begin(Script::begin(&sim).await, EPOCH).await;
                for chunk in 0..came {
                    let (header, encoded) = second.delta(chunk);
                    second.script.chunk(header, &encoded).await;
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
                let (script, subscribe) = second.script.again().await;
                let base = (came < 3).then_some((EPOCH, VERSION));
                assert_eq!(subscribe.base.map(|base| base.of()), base, "after {came} chunks");
                second.script = script;
                let announce = Announce {
                    id: second.id.clone(),
                    metadata: tensors::metadata(NEXT.0),
                    may_be_base: true,
                    ..second.script.announcement()
                };
                second.script.announce(announce).await;
                for chunk in came..3 {
                    let (header, encoded) = second.delta(chunk);
                    second.script.chunk(header, &encoded).await;
                }
                second.complete().await;
                assert_eq!(Second::committed(&mut second.script).await, (NEXT, true));
                second
            };
            tokio::join!(user, server);
        });
    }
}

/// Goal: a base of which the server knows nothing, or that cannot be one, is no error: chunks come whole.
/// Method: name versions that never were, one that is newer, and one of another epoch.
#[test]
fn bases_that_nobody_knows() {
    for base in [(EPOCH, 0), (EPOCH, 1), (EPOCH, 7), (EPOCH, u64::MAX), (Epoch(6), 1)] {
        simulate(1, async |sim| {
            let server = sim.server(server_config());
            let mut publisher =
                server.publisher_with(topic("t"), Some(EPOCH), TopicOptions::default()).unwrap();
            publish(&server, &mut publisher, 1, 1000).await;
            let mut peer = Peer::greeted_client(&sim, 2).await;
            let ClientMessage::Subscribe(wanted) = subscribe(1, 4) else { panic!("it subscribes") };
            let digest = VersionDigest([7; 32]);
            let base = Some(Have { epoch: base.0, version: Version(base.1), digest });
            peer.say_to_server(ClientMessage::Subscribe(tensor_relay_protocol::Subscribe { base, ..wanted }))
                .await;
            let ServerMessage::Announce(announce) = peer.hear_server().await else { panic!("no version") };
            assert_eq!(announce.subscription, SubscriptionId(1));
            assert!(matches!(peer.hear_server().await, ServerMessage::Complete { .. }));
            assert_eq!(server.stats().encoder.compared, 0);
        });
    }
}

/// Goal: nothing is coded against a base of other content, nor compared with it.
/// Method: a base with the digest of what the server has, and with another one.
#[test]
fn a_base_of_other_content() {
    let digest = digest_of(&RangeSet::from_range(0..16));
    for (digest, is_believed) in [(digest, true), (VersionDigest([7; 32]), false)] {
        simulate(1, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = server.publisher_with(topic("t"), Some(EPOCH), keeping(2)).unwrap();
            for version in [1, 2] {
                publish(&server, &mut publisher, version, 1 << 20).await;
            }
            let mut peer = Peer::greeted_client(&sim, 2).await;
            let ClientMessage::Subscribe(wanted) = subscribe(1, 16) else { panic!("it subscribes") };
            let base = Some(Have { epoch: EPOCH, version: Version(1), digest });
            peer.say_to_server(ClientMessage::Subscribe(tensor_relay_protocol::Subscribe { base, ..wanted }))
                .await;
            while !matches!(peer.hear_server().await, ServerMessage::Complete { .. }) {}
            assert_eq!(server.stats().encoder.compared > 0, is_believed);
        });
    }
}

/// Goal: who decodes no deltas is not told to keep copies for them.
/// Method: a client that offers every codec, and one that offers all but that of deltas.
#[test]
fn who_decodes_no_deltas_hears_of_no_base() {
    for (codecs, may_be_base) in [(CodecSet::all(), true), (CodecSet::all().without_bases(), false)] {
        simulate(1, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = server.publisher(topic("t")).unwrap();
            publish(&server, &mut publisher, 1, 1000).await;
            let mut peer = Peer::client(&sim, 2).await;
            peer.say_to_server(ClientMessage::Hello(Hello { codecs, ..hello() })).await;
            assert!(matches!(peer.hear_server().await, ServerMessage::Welcome(_)));
            peer.say_to_server(subscribe(1, 4)).await;
            let ServerMessage::Announce(announce) = peer.hear_server().await else { panic!("no version") };
            assert_eq!(announce.may_be_base, may_be_base);
        });
    }
}
