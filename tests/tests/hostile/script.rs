//! The messages of a valid server, which tests modify for attacks, and checks of the client's reaction.

use crate::raw::Peer;
use std::ops::Range;
use tensor_relay_client::{SubscriptionError, Version};
use tensor_relay_protocol::{
    AbortReason, Announce, ChunkHash, ChunkHeader, ChunkIndex, ClientMessage, CloseCode, CodecId, Epoch,
    Limits, Manifest, ManifestDigest, ManifestHeader, RelayPath, ServerMessage, StreamHeader, Subscribe,
    SubscriptionId, VersionDigest, VersionId,
};
use tensor_relay_tests::{
    pair::{Sim, client_config, simulate, topic},
    tensors,
};

pub(crate) const CHUNK_BYTES: u32 = 4096;
pub(crate) const CHUNKS: u32 = 3;
pub(crate) const EPOCH: Epoch = Epoch(5);
pub(crate) const VERSION: Version = Version(3);

/// The messages of a valid server that sends a version of three chunks.
pub(crate) struct Script {
    pub(crate) peer: Peer,
    pub(crate) subscription: SubscriptionId,
    pub(crate) manifest: Manifest,
    pub(crate) payload: Vec<u8>,
}

impl Script {
    /// Waits until a client has subscribed.
    pub(crate) async fn start(sim: &Sim) -> Self {
        Self::new(Peer::server(sim).await)
    }

    /// A script for a client that has subscribed.
    pub(crate) fn new((peer, subscribe): (Peer, Subscribe)) -> Self {
        let bytes = u64::from(CHUNKS * CHUNK_BYTES);
        let specs = vec![tensors::noise("noise", bytes)];
        let mut payload = vec![0; bytes as usize];
        tensors::write_content("noise", VERSION.0, &mut payload);
        Self {
            peer,
            subscription: subscribe.subscription,
            manifest: Manifest::layout(specs, vec![], CHUNK_BYTES, &Limits::default()).unwrap(),
            payload,
        }
    }

    /// Closes the connection, and waits until the client has reconnected and subscribed; returns its request.
    pub(crate) async fn reconnect(self) -> (Self, Subscribe) {
        let (peer, subscribe) = self.peer.reconnect().await;
        assert_eq!(subscribe.subscription, self.subscription);
        (Self { peer, ..self }, subscribe)
    }

    pub(crate) fn announcement(&self) -> Announce {
        Announce {
            subscription: self.subscription,
            id: VersionId { topic: topic("t"), epoch: EPOCH, version: VERSION },
            manifest: self.manifest.digest(),
            skipped: 0,
            metadata: tensors::metadata(VERSION.0),
            may_be_base: false,
            afresh: false,
            shared: false,
            lost_place: None,
            lending: None,
            relays: RelayPath::default(),
        }
    }

    pub(crate) fn raw(&self, chunk: u32) -> &[u8] {
        let start = (chunk % CHUNKS * CHUNK_BYTES) as usize;
        &self.payload[start..start + CHUNK_BYTES as usize]
    }

    pub(crate) fn header(&self, chunk: u32) -> ChunkHeader {
        ChunkHeader {
            subscription: self.subscription,
            epoch: EPOCH,
            version: VERSION,
            chunk: ChunkIndex(chunk),
            codec: CodecId::Raw,
            raw_bytes: CHUNK_BYTES,
            encoded_bytes: CHUNK_BYTES,
            hash: ChunkHash::of(self.raw(chunk)),
            base: None,
        }
    }

    pub(crate) fn digest(&self) -> VersionDigest {
        self.digest_of(0..CHUNKS)
    }

    pub(crate) fn digest_of(&self, chunks: Range<u32>) -> VersionDigest {
        let hashes = chunks.map(|chunk| ChunkHash::of(self.raw(chunk)));
        VersionDigest::of(self.manifest.digest(), hashes)
    }

    pub(crate) async fn announce(&mut self, announce: Announce) {
        self.peer.send_to_client(ServerMessage::Announce(announce)).await;
    }

    pub(crate) async fn send_manifest(&self, digest: ManifestDigest, encoded: &[u8]) {
        self.send_manifest_over(&self.peer, digest, encoded).await;
    }

    pub(crate) async fn send_manifest_over(&self, lane: &Peer, digest: ManifestDigest, encoded: &[u8]) {
        let header = ManifestHeader { subscription: self.subscription, bytes: encoded.len() as u32, digest };
        lane.send_stream(&[&StreamHeader::Manifest(header).encode(), encoded]).await;
    }

    pub(crate) async fn send_chunk(&self, header: ChunkHeader, encoded: &[u8]) {
        self.peer.send_stream(&[&StreamHeader::Chunk(header).encode(), encoded]).await;
    }

    pub(crate) async fn send_valid_chunk(&self, chunk: u32) {
        self.send_chunk(self.header(chunk), self.raw(chunk)).await;
    }

    /// Sends the announcement and the manifest.
    pub(crate) async fn begin_version(&mut self) {
        self.announce(self.announcement()).await;
        self.send_manifest(self.manifest.digest(), self.manifest.encoded()).await;
    }

    pub(crate) async fn send_complete(&mut self, digest: VersionDigest) {
        self.peer
            .send_to_client(ServerMessage::Complete {
                subscription: self.subscription,
                epoch: EPOCH,
                version: VERSION,
                digest,
            })
            .await;
    }

    /// Waits for the client's `Committed`.
    pub(crate) async fn wait_for_committed(&mut self) {
        loop {
            if let ClientMessage::Committed { version, .. } = self.peer.receive_from_client().await {
                return assert_eq!(version, VERSION);
            }
        }
    }

    /// Sends the complete version.
    pub(crate) async fn send_version(&mut self) {
        self.begin_version().await;
        for chunk in 0..CHUNKS {
            self.send_valid_chunk(chunk).await;
        }
        self.send_complete(self.digest()).await;
    }
}

/// The result of an attack: the client's error, and the server's end of the connection.
pub(crate) struct Outcome {
    pub(crate) error: SubscriptionError,
    pub(crate) script: Script,
}

/// Runs `attack` against a client that subscribes to "t" and must deliver nothing, then `check` on the outcome.
pub(crate) fn run_attack(attack: impl AsyncFnOnce(&mut Script), check: impl AsyncFnOnce(Outcome)) {
    simulate(1, async |sim| {
        let user = async {
            let client = sim.client(1, client_config()).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            let error = subscription.next().await.map(|snapshot| snapshot.id().clone()).unwrap_err();
            let again = subscription.next().await.unwrap_err();
            assert_eq!(again.to_string(), error.to_string(), "the error is final");
            (client, error)
        };
        let server = async {
            let mut script = Script::start(&sim).await;
            attack(&mut script).await;
            script
        };
        let ((_client, error), script) = tokio::join!(user, server);
        check(Outcome { error, script }).await;
    });
}

/// Checks that the client aborts the version as corrupt, and that the session continues.
pub(crate) fn expect_corrupt(expected: &str, script: impl AsyncFnOnce(&mut Script)) {
    run_attack(script, async |mut outcome| {
        let SubscriptionError::Corrupt { id, detail } = &outcome.error else { panic!("{}", outcome.error) };
        assert_eq!(id.version, VERSION);
        assert!(detail.contains(expected), "{detail:?} lacks {expected:?}");
        let reason = loop {
            match outcome.script.peer.receive_from_client().await {
                ClientMessage::Credit { .. } => {}
                ClientMessage::Abort { reason, .. } => break reason,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(reason, AbortReason::Corrupt);
        let unsubscribe =
            ClientMessage::Unsubscribe { subscription: outcome.script.subscription, keep_place: false };
        assert_eq!(outcome.script.peer.receive_from_client().await, unsubscribe);
        assert!(outcome.script.peer.connection.is_open());
    });
}

/// Checks that the session ends with `code`, and that the error says what the server did.
pub(crate) fn expect_closed(code: CloseCode, expected: &str, script: impl AsyncFnOnce(&mut Script)) {
    run_attack(script, async |outcome| {
        let SubscriptionError::Disconnected { source, .. } = &outcome.error else {
            panic!("{}", outcome.error)
        };
        assert!(source.to_string().contains(expected), "{source} lacks {expected:?}");
        let (closed_with, text) = outcome.script.peer.wait_for_close().await;
        assert_eq!(closed_with, Some(code), "{text}");
    });
}
