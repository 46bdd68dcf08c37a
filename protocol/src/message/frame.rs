//! Messages on the control stream: a length of four bytes, little-endian, then the protobuf (PROTOCOL.md §3.1).

use super::{ClientMessage, METADATA_MAX_BYTES, ServerMessage, wire};
use crate::{MessageError, TopicEntry};
use prost::Message;

/// The largest control message, in bytes. Everything larger travels on a stream of its own.
pub const FRAME_MAX_BYTES: usize = 64 << 10;

/// The largest encoding of one [`TopicEntry`]: a name of 255 bytes, five numbers and their tags.
const TOPIC_ENTRY_MAX_BYTES: usize = 320;

const _: () =
    assert!(METADATA_MAX_BYTES * 2 <= FRAME_MAX_BYTES, "an Announce with full metadata fits a frame");

/// Writes a client's message with its length in front.
pub fn encode_client(message: ClientMessage) -> Vec<u8> {
    frame(&wire::FromClient::from(message))
}

/// Writes a server's message with its length in front.
pub fn encode_server(message: ServerMessage) -> Vec<u8> {
    frame(&wire::FromServer::from(message))
}

/// Writes a message with its length in front.
pub(crate) fn frame(message: &impl Message) -> Vec<u8> {
    let bytes = message.encoded_len();
    let mut out = Vec::with_capacity(4 + bytes);
    out.extend_from_slice(&(bytes as u32).to_le_bytes());
    message.encode_raw(&mut out);
    out
}

/// Reads the length in front of a message.
///
/// # Errors
/// [`MessageError::TooLarge`] beyond [`FRAME_MAX_BYTES`]: the peer cannot make this end allocate more.
pub fn decode_frame_length(prefix: [u8; 4]) -> Result<usize, MessageError> {
    match u32::from_le_bytes(prefix) as usize {
        bytes if bytes > FRAME_MAX_BYTES => {
            Err(MessageError::TooLarge { what: "control message", bytes, max: FRAME_MAX_BYTES })
        }
        bytes => Ok(bytes),
    }
}

impl ClientMessage {
    /// Reads a message from the bytes that follow its length.
    ///
    /// # Errors
    /// [`MessageError`] when the bytes are no message of a client, or one that breaks a rule.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        wire::FromClient::decode(bytes).map_err(MessageError::malformed)?.try_into()
    }
}

impl ServerMessage {
    /// Reads a message from the bytes that follow its length.
    ///
    /// # Errors
    /// [`MessageError`] when the bytes are no message of a server, or one that breaks a rule.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        wire::FromServer::decode(bytes).map_err(MessageError::malformed)?.try_into()
    }

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
        CodecId, CodecSet, Epoch, Glob, ManifestDigest, RangeSet, ReaderName, Topic, Version, VersionDigest,
        VersionId,
    };
    use proptest::prelude::*;

    fn topic(name: &str) -> Topic {
        Topic::new(name).unwrap()
    }

    fn id() -> VersionId {
        VersionId { topic: topic("kv/req-17"), epoch: Epoch(0x0102), version: Version(3) }
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
                token: Some("secret".into()),
            }),
            ClientMessage::Subscribe(Subscribe {
                mode: Mode::Every,
                have: Some((epoch, version)),
                selection: vec![Glob::new("model.**").unwrap(), Glob::new("*.bias").unwrap()],
                start: Start::At(Some(epoch), version),
                window: 3,
                reader: Some(ReaderName::new("indexer-3").unwrap()),
                preempt: true,
                partial: Some(Partial {
                    epoch,
                    version: version.next(),
                    chunks: RangeSet::from_ranges([0..7, 9..10].into_iter()).unwrap(),
                }),
                manifest: Some(ManifestDigest([6; 32])),
                base: Some((epoch, version)),
                codec: Some(CodecId::Zstd),
                ..Subscribe::latest(subscription, topic("policy"), 4)
            }),
            ClientMessage::Credit { subscription, chunks: 3 },
            ClientMessage::Committed { subscription, epoch, version, kept: true },
            ClientMessage::Abort { subscription, epoch, version, reason: AbortReason::Corrupt },
            ClientMessage::Unsubscribe { subscription, keep_place: true },
            ClientMessage::List,
            ClientMessage::Join { session: 7, grant: LaneGrant::new([3; 32]) },
            ClientMessage::Acknowledge { subscription, epoch, version },
            ClientMessage::Watch { watch: WatchId(2), glob: Glob::new("kv/*").unwrap() },
            ClientMessage::Unwatch(WatchId(2)),
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
            }),
            ServerMessage::Announce(Announce {
                subscription,
                id: id(),
                manifest: ManifestDigest([6; 32]),
                skipped: 2,
                metadata: vec![("step".into(), "1200".into())],
                may_be_base: true,
            }),
            ServerMessage::Complete { subscription, epoch, version, digest: VersionDigest([4; 32]) },
            ServerMessage::Abort { subscription, epoch, version, reason: AbortReason::Stalled },
            ServerMessage::End { subscription, reason: EndReason::TopicEnded },
            ServerMessage::Topics {
                topics: vec![TopicEntry { id: id(), tensors: 1, payload_bytes: 2, subscribers: 3 }],
                more: true,
            },
            ServerMessage::Found { watch: WatchId(2), topics: vec![topic("kv/req-17")] },
            ServerMessage::Joined,
        ]
    }

    #[test]
    fn messages_come_back_as_they_went() {
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

    /// A server that knows nothing of further lanes, as those before them.
    #[test]
    fn a_welcome_without_further_lanes() {
        let bytes = b"\x0a\x15\x08\x01\x12\x06test/1\x19\x07\0\0\0\0\0\0\0\x20\x40";
        let ServerMessage::Welcome(welcome) = ServerMessage::decode(bytes).unwrap() else {
            panic!("it is a welcome")
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
        };
        let messages = ServerMessage::topics((0..1000).map(entry).collect());
        assert!(messages.len() > 1);
        for message in messages {
            assert!(encode_server(message).len() <= FRAME_MAX_BYTES + 4);
        }
        assert!(matches!(&ServerMessage::topics(vec![])[..], [ServerMessage::Topics { more: false, .. }]));
    }

    #[test]
    fn what_a_peer_must_not_say() {
        let hostile = wire::FromClient {
            kind: Some(wire::ClientKind::Subscribe(wire::Subscribe {
                topic: "../etc/passwd".into(),
                ..wire::Subscribe::default()
            })),
        };
        assert!(matches!(ClientMessage::decode(&hostile.encode_to_vec()), Err(MessageError::Name(_))));
        assert_eq!(ClientMessage::decode(&[]), Err(MessageError::MissingField("kind")));
        for grant in [vec![], vec![1; 31], vec![1; 33]] {
            let join = wire::ClientKind::Join(wire::Join { session: 7, lane_grant: grant.clone() });
            let join = wire::FromClient { kind: Some(join) }.encode_to_vec();
            assert!(matches!(ClientMessage::decode(&join), Err(MessageError::WrongLength { .. })));
            let welcome = wire::Welcome { lane_grant: Some(grant), ..wire::Welcome::default() };
            let welcome = wire::FromServer { kind: Some(wire::ServerKind::Welcome(welcome)) }.encode_to_vec();
            assert!(matches!(ServerMessage::decode(&welcome), Err(MessageError::WrongLength { .. })));
        }
        let short = wire::FromServer { kind: Some(wire::ServerKind::Complete(wire::Complete::default())) };
        assert!(matches!(
            ServerMessage::decode(&short.encode_to_vec()),
            Err(MessageError::WrongLength { .. })
        ));
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = ClientMessage::decode(&bytes);
            let _ = ServerMessage::decode(&bytes);
        }

        #[test]
        fn a_changed_byte_is_survived(which in 0usize..19, at: prop::sample::Index, value: u8) {
            let mut frame = match which {
                0..11 => encode_client(every_client_message().swap_remove(which)),
                _ => encode_server(every_server_message().swap_remove(which - 11)),
            };
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
