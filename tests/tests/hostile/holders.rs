//! Holders that lie to a taker (PROTOCOL.md §3.15): the version has every byte, and the origin is told.

use crate::{
    raw::Peer,
    script::{CHUNKS, EPOCH, Script, VERSION},
};
use std::{future::pending, sync::Arc, time::Duration};
use tensor_relay_client::{Config, Membership, PeerState};
use tensor_relay_protocol::{
    Announce, ChunkHeader, ChunkIndex, ClientMessage, CodecId, EncodingEntry, EncodingHasher, Held,
    LaneGrant, PeerAddress, RangeSet, ServerMessage, Site, Source, StreamHeader, Subscribe, SubscriptionId,
    Transport as PeerTransport,
};
use tensor_relay_tests::{
    pair::{Sim, reconnecting, simulate, topic, transport},
    tensors,
};
use tensor_relay_transport::{Identity, Transport};
use tokio::time::{sleep, timeout};

/// An origin of a shared version, which names a holder.
struct Origin(Script);

impl Origin {
    /// Waits until a member has subscribed, announces the version, and names everything.
    async fn start(sim: &Sim) -> Self {
        let (mut peer, first) = Peer::origin(sim).await;
        assert!(matches!(first, ClientMessage::Share(_)), "{first:?}");
        let ClientMessage::Subscribe(subscribe) = peer.receive_from_client().await else { panic!() };
        let mut script = Script::new((peer, subscribe));
        script.announce(Announce { shared: true, ..script.announcement() }).await;
        script.send_manifest(script.manifest.digest(), script.manifest.encoded()).await;
        let (subscription, epoch, version) = (script.subscription, EPOCH, VERSION);
        let entries = (0..CHUNKS).map(|chunk| entry(&script, chunk)).collect();
        let transport = match transport() {
            Transport::Tcp => PeerTransport::Tcp,
            _ => PeerTransport::Quic,
        };
        let holder = Source {
            addresses: vec![PeerAddress { transport, address: sim.other_address() }],
            key: key(sim),
            grant: LaneGrant::new([1; 32]),
            chunks: RangeSet::new(),
            is_near: true,
        };
        for message in [
            ServerMessage::Encodings { subscription, epoch, version, entries },
            ServerMessage::Sources { subscription, epoch, version, sources: vec![holder], is_seeded: true },
        ] {
            script.peer.send_to_client(message).await;
        }
        Self(script)
    }

    /// Waits for a while until the member reports the holder, and sends it the version. Returns whether it did.
    async fn send_after_report(&mut self, sim: &Sim) -> bool {
        let mut is_list_asked = false;
        let report = async {
            loop {
                match self.0.peer.receive_from_client().await {
                    ClientMessage::BadPeer { subscription, epoch, version, key } => {
                        assert_eq!((subscription, epoch, version), (self.0.subscription, EPOCH, VERSION));
                        return key;
                    }
                    ClientMessage::Request { hashes, .. } => is_list_asked |= hashes,
                    _ => {}
                }
            }
        };
        let reported = timeout(Duration::from_secs(5), report).await;
        assert!(reported.is_err() || reported == Ok(key(sim)), "{reported:?}");
        for chunk in 0..CHUNKS {
            self.0.send_valid_chunk(chunk).await;
        }
        assert!(is_list_asked, "the holder has announced the version");
        let (subscription, epoch, version) = (self.0.subscription, EPOCH, VERSION);
        let hashes = (0..CHUNKS).map(|chunk| self.0.header(chunk).hash).collect();
        let list = ServerMessage::Hashes { subscription, epoch, version, first: 0, hashes };
        self.0.peer.send_to_client(list).await;
        self.0.send_complete(self.0.digest()).await;
        self.0.wait_for_committed().await;
        reported.is_ok()
    }
}

/// The key of the holder.
fn key(sim: &Sim) -> [u8; 32] {
    sim.identity().fingerprint().0
}

fn entry(script: &Script, chunk: u32) -> EncodingEntry {
    let mut hasher = EncodingHasher::new(&script.header(chunk));
    hasher.update(script.raw(chunk));
    EncodingEntry { chunk: ChunkIndex(chunk), codec: CodecId::Raw, base: None, hash: hasher.finish() }
}

/// What a holder does that lies.
#[derive(Debug, Clone, Copy)]
enum Lie {
    /// It sends other bytes, and keeps the connection.
    Bytes,
    /// It sends other bytes, and closes the connection after as many turns of others.
    BytesAndClose(u32),
    /// It sends the bytes of another chunk, under another header.
    Header,
}

/// Goal: a holder that lies is not used again, the origin is told, and the version arrives. Method: each lie, in the first
/// chunk that is requested; some close the connection at once, so that its end is known before the chunk is looked at, or
/// its bytes are lost, so that there is nothing to report.
#[test]
fn a_liar_is_barred_and_reported() {
    let closing = (0..24).map(Lie::BytesAndClose);
    let (mut reported, mut unreported) = (0, 0);
    for lie in [Lie::Bytes, Lie::Header].into_iter().chain(closing) {
        simulate(1, async |sim| {
            let identity = Arc::new(Identity::ephemeral().unwrap());
            let sharing =
                Some(Membership { identity, addresses: vec![], site: Site::default(), forward: None });
            let member = async {
                let client = sim.client(1, Config { sharing, ..reconnecting() }).await.unwrap();
                let mut subscription = client.subscribe(&topic("t")).await.unwrap();
                let next = timeout(Duration::from_secs(60), subscription.next()).await;
                tensors::check(&next.expect("the version arrives").unwrap());
                sleep(Duration::from_secs(1)).await;
                client.peers()
            };
            let origin = async { Origin::start(&sim).await.send_after_report(&sim).await };
            let holder = async {
                let mut taker = Peer::holder(&sim).await;
                loop {
                    taker = tell(taker, lie).await.next_taker().await;
                }
            };
            let both = async { tokio::join!(member, origin) };
            let (peers, is_reported) = tokio::select! {
                both = both => both,
                () = holder => unreachable!("it lies to whoever comes"),
            };
            let is_barred = peers.iter().any(|peer| peer.state == PeerState::Barred);
            assert_eq!(is_barred, is_reported, "{lie:?} {peers:?}");
            let may_be_lost = matches!(lie, Lie::BytesAndClose(_));
            assert!(is_reported || may_be_lost, "{lie:?}");
            match is_reported {
                true => reported += 1,
                false => unreported += 1,
            }
        });
    }
    assert!(reported > 2, "{reported} lies are reported, {unreported} are lost with their connections");
}

/// Lies to a taker. Returns the connection once it is closed.
async fn tell((peer, asked): (Peer, Subscribe), lie: Lie) -> Peer {
    let source: SubscriptionId = asked.subscription;
    let mut script = Script::new((peer, asked));
    script.announce(Announce { shared: true, ..script.announcement() }).await;
    let (added, withdrawn) = (RangeSet::from_range(0..CHUNKS), RangeSet::new());
    let held = Held { subscription: source, epoch: EPOCH, version: VERSION, added, withdrawn };
    script.peer.send_to_client(ServerMessage::Held(held)).await;
    let chunk = loop {
        if let ClientMessage::Request { chunks, .. } = script.peer.receive_from_client().await
            && let Some(first) = chunks.iter().next()
        {
            break first;
        }
    };
    let header: ChunkHeader = match lie {
        Lie::Header => ChunkHeader { chunk: ChunkIndex(chunk), ..script.header(chunk + 1) },
        _ => script.header(chunk),
    };
    let mut bytes = script.raw(chunk).to_vec();
    bytes[7] ^= 1;
    let parts: [&[u8]; 2] = [&StreamHeader::Chunk(header).encode(), &bytes];
    script.peer.send_stream(&parts).await;
    if let Lie::BytesAndClose(after) = lie {
        for _ in 0..after {
            tokio::task::yield_now().await;
        }
        script.peer.connection.close(0);
        return script.peer;
    }
    pending().await
}
