//! A message of each kind, with all its fields.

use super::super::super::*;
use crate::{
    ChunkHash, ChunkIndex, CodecId, CodecSet, EncodingEntry, EncodingHash, Epoch, Glob, ManifestDigest,
    RangeSet, ReaderName, Topic, TopicEntry, Version, VersionDigest, VersionId,
    sidecar::{CudaDevice, IpcHandle},
};

pub(super) fn topic(name: &str) -> Topic {
    Topic::new(name).unwrap()
}

fn id() -> VersionId {
    VersionId { topic: topic("kv/req-17"), epoch: Epoch(0x0102), version: Version(3) }
}

pub(super) fn peer(address: &str) -> PeerAddress {
    PeerAddress { transport: Transport::Tcp, address: address.parse().unwrap() }
}

pub(super) fn relays() -> RelayPath {
    let path = RelayPath::default().through(RelayId([7; 16])).unwrap();
    path.through(RelayId([9; 16])).unwrap()
}

fn held() -> Held {
    Held {
        subscription: SubscriptionId(5),
        epoch: Epoch(9),
        version: Version(8),
        added: RangeSet::from_ranges([0..7, 9..10]).unwrap(),
        withdrawn: RangeSet::from_range(7..9),
    }
}

pub(super) fn every_client_message() -> Vec<ClientMessage> {
    let subscription = SubscriptionId(5);
    let (epoch, version) = (Epoch(9), Version(8));
    vec![
        ClientMessage::Hello(Hello {
            revision_min: 1,
            revision_max: 2,
            agent: "test/1".into(),
            codecs: CodecSet::from_codes(&[0, 1]),
            token: Some(crate::Token::new("secret").unwrap()),
            features: FeatureSet::from_codes(&[1, 4]),
        }),
        ClientMessage::Subscribe(Subscribe {
            mode: Mode::Every,
            have: Some(Have { epoch, version, digest: VersionDigest([4; 32]) }),
            selection: vec![Glob::new("model.**").unwrap(), Glob::new("*.bias").unwrap()],
            start: Start::Exactly(Some(epoch), version),
            window: 3,
            reader: Some(ReaderName::new("indexer-3").unwrap()),
            preempt: true,
            partial: Some(Partial {
                epoch,
                version: version.next(),
                chunks: RangeSet::from_ranges([0..7, 9..10].into_iter()).unwrap(),
                digest: VersionDigest([5; 32]),
            }),
            manifest: Some(ManifestDigest([6; 32])),
            base: Some(Have { epoch, version, digest: VersionDigest([4; 32]) }),
            codec: Some(CodecId::Zstd),
            once: true,
            describe: true,
            order: Order::Layers(vec![Glob::new("model.layers.0.**").unwrap()]),
            ..Subscribe::latest(subscription, topic("policy"), 4)
        }),
        ClientMessage::Credit { subscription, chunks: 3 },
        ClientMessage::Committed { subscription, epoch, version, kept: true },
        ClientMessage::Abort { subscription, epoch, version, reason: AbortReason::Corrupt },
        ClientMessage::Unsubscribe { subscription, keep_place: true },
        ClientMessage::List,
        ClientMessage::Join {
            session: 7,
            lane: LaneId(2),
            grant: LaneGrant::new([3; 32]),
            instance: InstanceId([2; 16]),
        },
        ClientMessage::Acknowledge { subscription, epoch, version },
        ClientMessage::Watch { watch: WatchId(2), glob: Glob::new("kv/*").unwrap() },
        ClientMessage::Unwatch(WatchId(2)),
        ClientMessage::Request {
            subscription,
            epoch,
            version,
            chunks: RangeSet::from_ranges([0..7, 9..10].into_iter()).unwrap(),
            hashes: true,
            again: true,
        },
        ClientMessage::Retire(LaneId(2)),
        ClientMessage::Probe { probe: 3, lane: LaneId(2), bytes: ProbeBytes::new(1 << 20).unwrap() },
        ClientMessage::Loaded { subscription, epoch, version, digest: VersionDigest([4; 32]) },
        ClientMessage::Share(Share {
            addresses: vec![peer("[::]:4848")],
            key: Some([7; 32]),
            site: Site::new("rack-7").unwrap(),
        }),
        ClientMessage::Held(held()),
        ClientMessage::Check { session: 7, nonce: [9; 32] },
        ClientMessage::Decline { subscription, epoch, version },
        ClientMessage::BadPeer { subscription, epoch, version, key: [7; 32] },
        ClientMessage::Subscribe(Subscribe {
            consumer: Consumer::Named([7; 16]),
            within: RangeSet::from_range(2..9),
            ..Subscribe::latest(subscription, topic("policy"), 4)
        }),
        ClientMessage::Subscribe(Subscribe {
            consumer: Consumer::Nobody,
            memory: true,
            gpu: Some(Box::new(WantedGpu { device: CudaDevice([5; 16]), in_place: true })),
            grant: Some(LaneGrant::new([3; 32])),
            ..Subscribe::latest(subscription, topic("policy"), 4)
        }),
        ClientMessage::Subscribe(Subscribe {
            boxes: vec![TensorBox {
                tensors: Glob::new("**.weight").unwrap(),
                slices: vec![
                    Slice { dimension: 0, indices: Indices::Part { part: 1, parts: 8 } },
                    Slice { dimension: 1, indices: Indices::Range { start: 64, length: 32 } },
                ],
            }],
            ..Subscribe::latest(subscription, topic("policy"), 4)
        }),
    ]
}

pub(super) fn every_server_message() -> Vec<ServerMessage> {
    let subscription = SubscriptionId(5);
    let (epoch, version) = (Epoch(9), Version(8));
    vec![
        ServerMessage::Welcome(Welcome {
            revision: 1,
            agent: "test/1".into(),
            session: 7,
            subscriptions_max: 64,
            lanes: Some(LaneOffer { lanes_max: 16, grant: LaneGrant::new([3; 32]) }),
            instance: InstanceId([2; 16]),
            lane_addresses: vec![
                LaneAddress { transport: Transport::Quic, address: None },
                LaneAddress { transport: Transport::Tcp, address: Some("10.0.0.5:4747".into()) },
            ],
            features: FeatureSet::from_codes(&[2, 3]),
        }),
        ServerMessage::Announce(Announce {
            subscription,
            id: id(),
            manifest: ManifestDigest([6; 32]),
            skipped: 2,
            metadata: vec![("step".into(), "1200".into())],
            may_be_base: true,
            afresh: true,
            shared: true,
            lost_place: None,
            lending: Some(Box::new(Lending::Chunks(NotLent::Full))),
            relays: RelayPath::default(),
        }),
        ServerMessage::Complete { subscription, epoch, version, digest: VersionDigest([4; 32]) },
        ServerMessage::Abort { subscription, epoch, version, reason: AbortReason::Stalled },
        ServerMessage::End { subscription, reason: EndReason::TopicEnded },
        ServerMessage::Topics {
            topics: vec![TopicEntry {
                id: id(),
                tensors: 1,
                payload_bytes: 2,
                subscribers: 3,
                relays: RelayPath::default(),
            }],
            more: true,
        },
        ServerMessage::Drain { alternatives: vec!["10.0.0.6:4747".into()] },
        ServerMessage::Found { watch: WatchId(2), topics: vec![topic("kv/req-17")] },
        ServerMessage::Joined,
        ServerMessage::Retired(LaneId(2)),
        ServerMessage::Sources {
            subscription,
            epoch,
            version,
            sources: vec![Source {
                addresses: vec![peer("10.0.0.7:4747")],
                key: [7; 32],
                grant: LaneGrant::new([3; 32]),
                chunks: RangeSet::from_range(2..9),
                is_near: true,
            }],
            is_seeded: true,
        },
        ServerMessage::Hashes {
            subscription,
            epoch,
            version,
            first: 7,
            hashes: vec![ChunkHash([8; 16]), ChunkHash([9; 16])],
        },
        ServerMessage::Waiting { subscription, epoch, version },
        ServerMessage::Held(held()),
        ServerMessage::Revoke { subscription, taker: [7; 32], restored: true },
        ServerMessage::Checked { proof: [8; 32] },
        ServerMessage::Encodings {
            subscription,
            epoch,
            version,
            entries: vec![
                EncodingEntry {
                    chunk: ChunkIndex(7),
                    codec: CodecId::Sparse,
                    base: Some(Version(7)),
                    hash: EncodingHash([5; 32]),
                },
                EncodingEntry {
                    chunk: ChunkIndex(u32::MAX),
                    codec: CodecId::Raw,
                    base: None,
                    hash: EncodingHash([6; 32]),
                },
            ],
        },
        ServerMessage::Announce(Announce {
            subscription,
            id: id(),
            manifest: ManifestDigest([6; 32]),
            skipped: 0,
            metadata: vec![],
            may_be_base: false,
            afresh: false,
            shared: false,
            lost_place: Some(Place { epoch, version }),
            lending: Some(Box::new(Lending::Memory(Lent {
                inode: 12,
                offset_bytes: 4096,
                digest: VersionDigest([4; 32]),
                why_not_gpu: Some(NotLent::NoGpuMemory),
            }))),
            relays: RelayPath::default(),
        }),
        ServerMessage::Announce(Announce {
            subscription,
            id: id(),
            manifest: ManifestDigest([6; 32]),
            skipped: 0,
            metadata: vec![],
            may_be_base: false,
            afresh: false,
            shared: false,
            lost_place: None,
            lending: Some(Box::new(Lending::Gpu(LentOnGpu {
                inode: 12,
                gpu: CudaDevice([5; 16]),
                buffer_bytes: 1 << 21,
                handle: Some(IpcHandle([6; 64])),
                digest: VersionDigest([4; 32]),
                in_place: true,
            }))),
            relays: RelayPath::default(),
        }),
        ServerMessage::Announce(Announce {
            subscription,
            id: id(),
            manifest: ManifestDigest([6; 32]),
            skipped: 0,
            metadata: vec![],
            may_be_base: false,
            afresh: false,
            shared: false,
            lost_place: None,
            lending: None,
            relays: relays(),
        }),
        ServerMessage::Topics {
            topics: vec![TopicEntry {
                id: id(),
                tensors: 1,
                payload_bytes: 2,
                subscribers: 3,
                relays: relays(),
            }],
            more: false,
        },
    ]
}
