//! The script of a good server, which attacks modify, and checks of the client's reaction.

use crate::raw::Peer;
use std::ops::Range;
use tensor_relay_client::{SubscriptionError, Version};
use tensor_relay_protocol::{
    AbortReason, Announce, Blame, ChunkHash, ChunkHeader, ChunkIndex, ClientMessage, CloseCode, CodecId,
    Epoch, Limits, Manifest, ManifestDigest, ManifestHeader, ServerMessage, StreamHeader, Subscribe,
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

/// The messages of a good server: a version of three chunks. Attacks modify parts of it.
pub(crate) struct Script {
    pub(crate) peer: Peer,
    pub(crate) subscription: SubscriptionId,
    pub(crate) manifest: Manifest,
    pub(crate) payload: Vec<u8>,
}

impl Script {
    /// Waits for the client to subscribe.
    pub(crate) async fn begin(sim: &Sim) -> Self {
        Self::with(Peer::server(sim).await)
    }

    /// The script of a server whose client has subscribed.
    pub(crate) fn with((peer, subscribe): (Peer, Subscribe)) -> Self {
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

    /// Closes the connection, and waits for the client to reconnect and subscribe; returns its request.
    pub(crate) async fn again(self) -> (Self, Subscribe) {
        let (peer, subscribe) = self.peer.again().await;
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
            part: None,
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
        self.peer.say_to_client(ServerMessage::Announce(announce)).await;
    }

    pub(crate) async fn manifest(&self, digest: ManifestDigest, encoded: &[u8]) {
        self.manifest_over(&self.peer, digest, encoded).await;
    }

    pub(crate) async fn manifest_over(&self, lane: &Peer, digest: ManifestDigest, encoded: &[u8]) {
        let header = ManifestHeader { subscription: self.subscription, bytes: encoded.len() as u32, digest };
        lane.stream(&[&StreamHeader::Manifest(header).encode(), encoded]).await;
    }

    pub(crate) async fn chunk(&self, header: ChunkHeader, encoded: &[u8]) {
        self.peer.stream(&[&StreamHeader::Chunk(header).encode(), encoded]).await;
    }

    pub(crate) async fn good_chunk(&self, chunk: u32) {
        self.chunk(self.header(chunk), self.raw(chunk)).await;
    }

    pub(crate) async fn good_beginning(&mut self) {
        self.announce(self.announcement()).await;
        self.manifest(self.manifest.digest(), self.manifest.encoded()).await;
    }

    pub(crate) async fn complete(&mut self, digest: VersionDigest) {
        self.peer
            .say_to_client(ServerMessage::Complete {
                subscription: self.subscription,
                epoch: EPOCH,
                version: VERSION,
                digest,
            })
            .await;
    }

    /// Waits for the client's `Committed`.
    pub(crate) async fn committed(&mut self) {
        loop {
            if let ClientMessage::Committed { version, .. } = self.peer.hear_client().await {
                return assert_eq!(version, VERSION);
            }
        }
    }

    /// Sends the version as a good server does.
    pub(crate) async fn good_version(&mut self) {
        self.good_beginning().await;
        for chunk in 0..CHUNKS {
            self.good_chunk(chunk).await;
        }
        self.complete(self.digest()).await;
    }
}

/// The result of an attack: the client's error, and the server side of the connection.
pub(crate) struct Found {
    pub(crate) error: SubscriptionError,
    pub(crate) script: Script,
}

/// Runs `attack` on a client that wants "t" and must deliver nothing.
pub(crate) fn attack(attack: impl AsyncFnOnce(&mut Script), check: impl AsyncFnOnce(Found)) {
    simulate(1, async |sim| {
        let user = async {
            let client = sim.client(1, client_config()).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            let error = subscription.next().await.map(|snapshot| snapshot.id().clone()).unwrap_err();
            let again = subscription.next().await.unwrap_err();
            assert_eq!(again.to_string(), error.to_string(), "an end is final");
            (client, error)
        };
        let server = async {
            let mut script = Script::begin(&sim).await;
            attack(&mut script).await;
            script
        };
        let ((_client, error), script) = tokio::join!(user, server);
        check(Found { error, script }).await;
    });
}

/// Checks that the client aborts the version as corrupt, and that the session continues.
pub(crate) fn expect_corrupt(word: &str, script: impl AsyncFnOnce(&mut Script)) {
    attack(script, async |mut found| {
        let SubscriptionError::Corrupt { id, detail } = &found.error else { panic!("{}", found.error) };
        assert_eq!(id.version, VERSION);
        assert!(detail.contains(word), "{detail:?} says nothing of {word:?}");
        let reason = loop {
            match found.script.peer.hear_client().await {
                ClientMessage::Credit { .. } => {}
                ClientMessage::Abort { reason, .. } => break reason,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(reason, AbortReason::Corrupt);
        let good_bye =
            ClientMessage::Unsubscribe { subscription: found.script.subscription, keep_place: false };
        assert_eq!(found.script.peer.hear_client().await, good_bye);
        assert_eq!(found.script.peer.connection.close_reason(), None);
    });
}

/// Checks that the session ends with `code`, and that the error blames the server.
pub(crate) fn expect_closed(code: CloseCode, word: &str, script: impl AsyncFnOnce(&mut Script)) {
    attack(script, async |found| {
        let SubscriptionError::Disconnected { source, .. } = &found.error else { panic!("{}", found.error) };
        assert_eq!(source.blame(), Blame::Peer);
        assert!(source.to_string().contains(word), "{source} says nothing of {word:?}");
        let (told, text) = found.script.peer.closed_because().await;
        assert_eq!(told, Some(code), "{text}");
    });
}
