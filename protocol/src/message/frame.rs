//! Messages on the control stream: a length of four bytes, little-endian, then the protobuf (PROTOCOL.md §3.1).

use super::{ClientMessage, METADATA_MAX_BYTES, ServerMessage, wire};
use crate::{MessageError, RELAYS_MAX, TopicEntry};
use prost::Message;

/// The largest control message, in bytes. Larger data is sent on data streams.
pub const FRAME_MAX_BYTES: usize = 64 << 10;

/// An upper bound of the encoding of one [`TopicEntry`]: a name of 255 bytes, five numbers, relays, and
/// their tags.
const TOPIC_ENTRY_MAX_BYTES: usize = 320 + RELAYS_MAX * 18;

const _: () =
    assert!(METADATA_MAX_BYTES * 2 <= FRAME_MAX_BYTES, "an Announce with full metadata fits a frame");

/// Encodes a client's message with its length in front.
pub fn encode_client(message: ClientMessage) -> Vec<u8> {
    frame(&wire::FromClient::from(message))
}

/// Encodes a server's message with its length in front.
pub fn encode_server(message: ServerMessage) -> Vec<u8> {
    frame(&wire::FromServer::from(message))
}

/// Encodes a message with its length in front.
pub(crate) fn frame(message: &impl Message) -> Vec<u8> {
    let bytes = message.encoded_len();
    let mut out = Vec::with_capacity(4 + bytes);
    out.extend_from_slice(&(bytes as u32).to_le_bytes());
    message.encode_raw(&mut out);
    out
}

/// Decodes the length in front of a message.
///
/// # Errors
/// [`MessageError::TooLarge`] beyond [`FRAME_MAX_BYTES`], so that the peer cannot make this end allocate more.
pub fn decode_frame_length(prefix: [u8; 4]) -> Result<usize, MessageError> {
    match u32::from_le_bytes(prefix) as usize {
        bytes if bytes > FRAME_MAX_BYTES => {
            Err(MessageError::TooLarge { what: "control message", bytes, max: FRAME_MAX_BYTES })
        }
        bytes => Ok(bytes),
    }
}

impl ServerMessage {
    /// Splits the answer to `List` into messages that each fit a frame.
    pub fn topics(entries: Vec<TopicEntry>) -> Vec<Self> {
        const PER_MESSAGE: usize = FRAME_MAX_BYTES / TOPIC_ENTRY_MAX_BYTES;
        let parts = entries.len().div_ceil(PER_MESSAGE).max(1);
        let mut entries = entries.into_iter();
        (1..=parts)
            .map(|part| Self::Topics {
                topics: entries.by_ref().take(PER_MESSAGE).collect(),
                more: part < parts,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::*;
    use super::*;
    use crate::{
        ChunkHash, ChunkIndex, CodecId, CodecSet, EncodingEntry, EncodingHash, Epoch, Glob, ManifestDigest,
        RangeSet, ReaderName, Topic, Version, VersionDigest, VersionId,
        sidecar::{CudaDevice, IpcHandle},
    };
    use proptest::prelude::*;

    fn topic(name: &str) -> Topic {
        Topic::new(name).unwrap()
    }

    fn id() -> VersionId {
        VersionId { topic: topic("kv/req-17"), epoch: Epoch(0x0102), version: Version(3) }
    }

    fn peer(address: &str) -> PeerAddress {
        PeerAddress { transport: Transport::Tcp, address: address.parse().unwrap() }
    }

    fn relays() -> RelayPath {
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

    pub(crate) fn every_client_message() -> Vec<ClientMessage> {
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

    pub(crate) fn every_server_message() -> Vec<ServerMessage> {
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

    #[test]
    fn decoding_reverses_encoding() {
        for message in every_client_message() {
            let frame = encode_client(message.clone());
            assert_eq!(decode_frame_length(frame[..4].try_into().unwrap()), Ok(frame.len() - 4));
            assert_eq!(ClientMessage::decode(&frame[4..]), Ok(message));
        }
        for message in every_server_message() {
            let frame = encode_server(message.clone());
            assert_eq!(ServerMessage::decode(&frame[4..]), Ok(message));
        }
    }

    /// PROTOCOL.md §3, golden bytes of revision 1.
    #[test]
    fn golden_messages() {
        let client: Vec<String> =
            every_client_message().into_iter().map(|m| hex(&encode_client(m))).collect();
        assert_eq!(client, include_str!("../../vectors/client-messages.hex").lines().collect::<Vec<_>>());
        let server: Vec<String> =
            every_server_message().into_iter().map(|m| hex(&encode_server(m))).collect();
        assert_eq!(server, include_str!("../../vectors/server-messages.hex").lines().collect::<Vec<_>>());
    }

    /// A `Welcome` from a server that does not know the fields of further lanes.
    #[test]
    fn a_welcome_without_a_grant_offers_no_further_lanes() {
        let bytes = b"\x0a\x27\x08\x01\x12\x06test/1\x19\x07\0\0\0\0\0\0\0\x20\x40\x3a\x10sixteen of these";
        let ServerMessage::Welcome(welcome) = ServerMessage::decode(bytes).unwrap() else {
            panic!("not a welcome")
        };
        assert_eq!((welcome.session, welcome.lanes), (7, None));
        assert_eq!(encode_server(ServerMessage::Welcome(welcome))[4..], bytes[..]);
    }

    #[test]
    fn oversized_frames_are_refused_before_allocation() {
        assert!(decode_frame_length(u32::MAX.to_le_bytes()).is_err());
        assert!(decode_frame_length((FRAME_MAX_BYTES as u32 + 1).to_le_bytes()).is_err());
        assert_eq!(decode_frame_length((FRAME_MAX_BYTES as u32).to_le_bytes()), Ok(FRAME_MAX_BYTES));
    }

    #[test]
    fn long_lists_are_split_into_frames() {
        let entry = |i: u64| TopicEntry {
            id: VersionId {
                topic: topic(&format!("{}{i:05}", "x".repeat(250))),
                epoch: Epoch(u64::MAX),
                version: Version(u64::MAX),
            },
            tensors: u64::MAX,
            payload_bytes: u64::MAX,
            subscribers: u64::MAX,
            relays: relays(),
        };
        let messages = ServerMessage::topics((0..1000).map(entry).collect());
        assert!(messages.len() > 1);
        for message in messages {
            assert!(encode_server(message).len() <= FRAME_MAX_BYTES + 4);
        }
        assert!(matches!(&ServerMessage::topics(vec![])[..], [ServerMessage::Topics { more: false, .. }]));
    }

    #[test]
    fn invalid_messages_are_refused() {
        let hostile = wire::FromClient {
            kind: Some(wire::ClientKind::Subscribe(wire::Subscribe {
                topic: "../etc/passwd".into(),
                ..wire::Subscribe::default()
            })),
        };
        assert!(matches!(ClientMessage::decode(&hostile.encode_to_vec()), Err(MessageError::Name(_))));
        assert_eq!(ClientMessage::decode(&[]), Err(MessageError::MissingField("kind")));
        for grant in [vec![], vec![1; 31], vec![1; 33]] {
            let join =
                wire::Join { lane_grant: grant.clone(), instance: vec![2; 16], ..wire::Join::default() };
            let wrong_length =
                Err(MessageError::WrongLength { field: "lane_grant", expected: 32, found: grant.len() });
            assert_eq!(from_client(wire::ClientKind::Join(join)), wrong_length);
            let welcome = wire::Welcome { lane_grant: Some(grant), ..bare_welcome() };
            assert_eq!(from_server(wire::ServerKind::Welcome(welcome)).map(|_| ()), wrong_length.map(|_| ()));
        }
        let short = wire::FromServer { kind: Some(wire::ServerKind::Complete(wire::Complete::default())) };
        assert!(matches!(
            ServerMessage::decode(&short.encode_to_vec()),
            Err(MessageError::WrongLength { .. })
        ));
    }

    fn bare_welcome() -> wire::Welcome {
        wire::Welcome { instance: vec![2; 16], ..wire::Welcome::default() }
    }

    fn from_client(kind: wire::ClientKind) -> Result<ClientMessage, MessageError> {
        ClientMessage::decode(&wire::FromClient { kind: Some(kind) }.encode_to_vec())
    }

    fn from_server(kind: wire::ServerKind) -> Result<ServerMessage, MessageError> {
        ServerMessage::decode(&wire::FromServer { kind: Some(kind) }.encode_to_vec())
    }

    /// PROTOCOL.md §3.3: `have`, `base` and `partial` need a digest of 32 bytes.
    #[test]
    fn held_versions_need_a_digest() {
        let subscribe = || wire::Subscribe { topic: "t".into(), mode: 1, ..wire::Subscribe::default() };
        for digest in [vec![], vec![1; 31], vec![1; 33]] {
            let have = || Some(wire::Have { epoch: 1, version: 1, digest: digest.clone() });
            let partial = wire::Partial { epoch: 1, version: 1, chunks: vec![], digest: digest.clone() };
            let expected = MessageError::WrongLength { field: "digest", expected: 32, found: digest.len() };
            for subscribe in [
                wire::Subscribe { have: have(), ..subscribe() },
                wire::Subscribe { base: have(), ..subscribe() },
                wire::Subscribe { partial: Some(partial), ..subscribe() },
            ] {
                assert_eq!(from_client(wire::ClientKind::Subscribe(subscribe)), Err(expected.clone()));
            }
        }
    }

    /// PROTOCOL.md §3.3: a consumer is named by 16 bytes, and nobody by none.
    #[test]
    fn a_consumer_has_sixteen_bytes() {
        for found in [1, 15, 17] {
            let subscribe = wire::Subscribe {
                topic: "t".into(),
                mode: 1,
                consumer: Some(vec![7; found]),
                ..wire::Subscribe::default()
            };
            let expected = MessageError::WrongLength { field: "consumer", expected: 16, found };
            assert_eq!(from_client(wire::ClientKind::Subscribe(subscribe)), Err(expected));
        }
    }

    #[test]
    fn long_lists_and_invalid_addresses_are_refused() {
        let too_many = |what, found, max| Err::<(), _>(MessageError::TooMany { what, found, max });
        let address = |text: String| wire::LaneAddress { transport: 1, address: text };
        let lanes = |lane_addresses| {
            from_server(wire::ServerKind::Welcome(wire::Welcome { lane_addresses, ..bare_welcome() }))
                .map(|_| ())
        };
        assert_eq!(lanes(vec![address("h:1".into()); ADDRESSES_MAX]), Ok(()));
        assert_eq!(lanes(vec![address("h:1".into()); ADDRESSES_MAX + 1]), too_many("lane_addresses", 17, 16));
        assert_eq!(lanes(vec![address(format!("{}:65535", "h".repeat(255)))]), Ok(()));
        for wrong in [
            "h".into(),
            "h:0".into(),
            "h:65536".into(),
            "[::1:1".into(),
            format!("{}:65535", "h".repeat(256)),
        ] {
            assert!(matches!(lanes(vec![address(wrong)]), Err(MessageError::Malformed(_))));
        }

        let hashes = |bytes| {
            from_server(wire::ServerKind::Hashes(wire::Hashes {
                hashes: vec![0; bytes],
                ..Default::default()
            }))
            .map(|_| ())
        };
        assert_eq!(hashes(HASHES_MAX * 16), Ok(()));
        assert_eq!(hashes(HASHES_MAX * 16 + 1), too_many("hashes", HASHES_MAX + 1, HASHES_MAX));
        assert!(matches!(hashes(17), Err(MessageError::WrongLength { .. })));

        let drain =
            |alternatives| from_server(wire::ServerKind::Drain(wire::Drain { alternatives })).map(|_| ());
        assert_eq!(drain(vec!["h:1".into(); 17]), too_many("alternatives", 17, 16));
        assert!(
            matches!(drain(vec!["".into()]), Err(MessageError::Malformed(_))),
            "an alternative needs an address"
        );

        let probe = |bytes| from_client(wire::ClientKind::Probe(wire::Probe { bytes, ..Default::default() }));
        assert!(probe(ProbeBytes::MAX).is_ok() && probe(ProbeBytes::MAX + 1).is_err());
    }

    /// PROTOCOL.md §3.15: peers are named by addresses, not by names, and a message is bounded.
    #[test]
    fn invalid_messages_about_peers_are_refused() {
        let address = |text: &str| wire::LaneAddress { transport: 1, address: text.into() };
        let share_at = |addresses, key, site| {
            from_client(wire::ClientKind::Share(wire::Share { addresses, key, site })).map(|_| ())
        };
        let share = |addresses, key| share_at(addresses, key, String::new());
        let key = || Some(vec![1; 32]);
        assert_eq!(share(vec![address("10.0.0.5:4848"); PEER_ADDRESSES_MAX], key()), Ok(()));
        assert!(share(vec![address("10.0.0.5:4848"); PEER_ADDRESSES_MAX + 1], key()).is_err());
        for wrong in ["localhost:4848", "10.0.0.5", "10.0.0.5:0", "[fe80::1%1]:4848", ""] {
            assert!(share(vec![address(wrong)], key()).is_err(), "{wrong}");
        }
        assert_eq!(share(vec![], None), Ok(()));
        assert_eq!(share(vec![address("10.0.0.5:4848")], None), Err(MessageError::MissingField("key")));
        assert!(share(vec![], Some(vec![1; 31])).is_err());
        assert_eq!(share_at(vec![], key(), "x".repeat(Site::MAX_BYTES)), Ok(()));
        for wrong in [&"x".repeat(Site::MAX_BYTES + 1), "two words", "a\u{1b}[2J", "ü"] {
            assert!(share_at(vec![], key(), wrong.into()).is_err(), "{wrong:?}");
        }

        let source = wire::Source {
            addresses: vec![address("10.0.0.5:4848")],
            key: vec![1; 32],
            grant: vec![2; 32],
            chunks: vec![],
            is_near: true,
        };
        let sources = |sources| {
            let sources = wire::Sources { sources, ..wire::Sources::default() };
            from_server(wire::ServerKind::Sources(sources))
        };
        assert!(sources(vec![source.clone(); SOURCES_MAX]).is_ok());
        assert!(sources(vec![source.clone(); SOURCES_MAX + 1]).is_err());
        let range = |start| wire::ChunkRange { start, end: start + 1 };
        for wrong in [
            wire::Source { key: vec![1; 31], ..source.clone() },
            wire::Source { grant: vec![2; 33], ..source.clone() },
            wire::Source { addresses: vec![], ..source.clone() },
            wire::Source { chunks: (0..17).map(|i| range(2 * i)).collect(), ..source.clone() },
        ] {
            assert!(sources(vec![wrong]).is_err());
        }
        let unknown = wire::LaneAddress { transport: 3, address: "10.0.0.5:4848".into() };
        let ServerMessage::Sources { sources: known, .. } =
            sources(vec![wire::Source { addresses: vec![unknown], ..source.clone() }, source]).unwrap()
        else {
            panic!("not sources")
        };
        assert_eq!(known.len(), 1, "a source without a known transport is ignored");

        let held = |added, withdrawn| {
            let held = wire::Held { added, withdrawn, ..wire::Held::default() };
            from_client(wire::ClientKind::Held(held))
        };
        assert!(held(vec![range(1)], vec![range(3)]).is_ok());
        assert!(held(vec![range(1)], vec![range(1)]).is_err());
    }

    /// PROTOCOL.md §3.15 (11); §3.3 (20).
    #[test]
    fn invalid_encodings_and_grants_are_refused() {
        let encodings = |entries: Vec<u8>| {
            from_server(wire::ServerKind::Encodings(wire::Encodings { entries, ..Default::default() }))
        };
        let count = |entries| match encodings(entries) {
            Ok(ServerMessage::Encodings { entries, .. }) => entries.len(),
            other => panic!("{other:?}"),
        };
        assert_eq!(count(vec![0; 48 * ENCODINGS_MAX]), ENCODINGS_MAX);
        for wrong in [vec![0; 48 * (ENCODINGS_MAX + 1)], vec![0; 47], vec![0; 49]] {
            assert!(encodings(wrong).is_err());
        }
        for (at, expected) in [(4, Some(0)), (5, None), (7, None), (8, Some(1)), (16, Some(1))] {
            let mut entry = vec![0; 48];
            entry[at] = 255;
            assert_eq!(encodings(entry.clone()).ok().map(|_| count(entry)), expected, "byte {at}");
        }
        for length in [0, 31, 33] {
            let subscribe = wire::Subscribe {
                topic: "t".into(),
                mode: 1,
                grant: Some(vec![1; length]),
                ..wire::Subscribe::default()
            };
            let expected = MessageError::WrongLength { field: "grant", expected: 32, found: length };
            assert_eq!(from_client(wire::ClientKind::Subscribe(subscribe)), Err(expected));
        }
    }

    /// PROTOCOL.md §5.5.
    #[test]
    fn invalid_boxes_are_refused() {
        let slice =
            |dimension, start, length, part, parts| wire::Slice { dimension, start, length, part, parts };
        let boxes = |boxes| {
            let subscribe =
                wire::Subscribe { topic: "t".into(), mode: 1, boxes, ..wire::Subscribe::default() };
            from_client(wire::ClientKind::Subscribe(subscribe)).map(|_| ())
        };
        let sliced = |slices| vec![wire::TensorBox { tensors: "a".into(), slices }];
        assert_eq!(boxes(sliced(vec![slice(0, 5, 0, 0, 0), slice(15, 0, 0, 7, 8)])), Ok(()));
        for wrong in [slice(16, 0, 1, 0, 0), slice(0, 0, 0, 8, 8), slice(0, 1, 0, 0, 8), slice(0, 0, 1, 0, 8)]
        {
            assert!(boxes(sliced(vec![wrong.clone()])).is_err(), "{wrong:?}");
        }
        let twice = slice(1, 0, 1, 0, 0);
        assert!(boxes(sliced(vec![twice.clone(), twice])).is_err(), "a dimension is cut once");
        let many = |count, name: &str| vec![wire::TensorBox { tensors: name.into(), slices: vec![] }; count];
        assert_eq!(boxes(many(BOXES_MAX, "a")), Ok(()));
        assert!(boxes(many(BOXES_MAX + 1, "a")).is_err());
        assert!(boxes(many(BOXES_MAX, &"a".repeat(33))).is_err(), "their globs are too long together");
    }

    /// A later build may name transports that this build does not know.
    #[test]
    fn unknown_transports_are_ignored() {
        let tcp = wire::LaneAddress { transport: 2, address: String::new() };
        let lane_addresses = vec![wire::LaneAddress { transport: 3, address: "h:1".into() }, tcp];
        let welcome = wire::Welcome { lane_addresses, ..bare_welcome() };
        let Ok(ServerMessage::Welcome(welcome)) = from_server(wire::ServerKind::Welcome(welcome)) else {
            panic!("not a welcome")
        };
        assert_eq!(welcome.lane_addresses, [LaneAddress { transport: Transport::Tcp, address: None }]);
    }

    #[test]
    fn the_longest_lists_fit_a_frame() {
        let hashes = ServerMessage::Hashes {
            subscription: SubscriptionId(u32::MAX),
            epoch: Epoch(u64::MAX),
            version: Version(u64::MAX),
            first: u32::MAX,
            hashes: vec![ChunkHash([9; 16]); HASHES_MAX],
        };
        let longest = format!("[{}:255.255.255.255]:65535", ["ffff"; 6].join(":"));
        let ranges = (0..SOURCE_RANGES_MAX as u32)
            .map(|i| u32::MAX - 2 * i - 1..u32::MAX - 2 * i)
            .rev();
        let source = Source {
            addresses: vec![peer(&longest); PEER_ADDRESSES_MAX],
            key: [7; 32],
            grant: LaneGrant::new([3; 32]),
            chunks: RangeSet::from_ranges(ranges).unwrap(),
            is_near: true,
        };
        let sources = ServerMessage::Sources {
            subscription: SubscriptionId(u32::MAX),
            epoch: Epoch(u64::MAX),
            version: Version(u64::MAX),
            sources: vec![source; SOURCES_MAX],
            is_seeded: true,
        };
        let entry = EncodingEntry {
            chunk: ChunkIndex(u32::MAX),
            codec: CodecId::Sparse,
            base: Some(Version(u64::MAX)),
            hash: EncodingHash([255; 32]),
        };
        let encodings = ServerMessage::Encodings {
            subscription: SubscriptionId(u32::MAX),
            epoch: Epoch(u64::MAX),
            version: Version(u64::MAX),
            entries: vec![entry; ENCODINGS_MAX],
        };
        for message in [hashes, sources, encodings] {
            assert!(encode_server(message).len() <= FRAME_MAX_BYTES + 4);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = ClientMessage::decode(&bytes);
            let _ = ServerMessage::decode(&bytes);
        }

        #[test]
        fn a_changed_byte_is_survived(which: prop::sample::Index, at: prop::sample::Index, value: u8) {
            let client = every_client_message().into_iter().map(encode_client);
            let mut frames: Vec<_> = client.chain(every_server_message().into_iter().map(encode_server)).collect();
            let mut frame = frames.swap_remove(which.index(frames.len()));
            let at = at.index(frame.len());
            frame[at] = value;
            let _ = ClientMessage::decode(&frame[4..]);
            let _ = ServerMessage::decode(&frame[4..]);
        }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }
}
