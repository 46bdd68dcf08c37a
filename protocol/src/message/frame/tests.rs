mod every_message;
mod refusals;

use super::super::*;
use super::*;
use crate::{
    ChunkHash, ChunkIndex, CodecId, EncodingEntry, EncodingHash, Epoch, RangeSet, Version, VersionId,
};
use every_message::{every_client_message, every_server_message, peer, relays, topic};
use proptest::prelude::*;

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
    let client: Vec<String> = every_client_message().into_iter().map(|m| hex(&encode_client(m))).collect();
    assert_eq!(client, include_str!("../../../vectors/client-messages.hex").lines().collect::<Vec<_>>());
    let server: Vec<String> = every_server_message().into_iter().map(|m| hex(&encode_server(m))).collect();
    assert_eq!(server, include_str!("../../../vectors/server-messages.hex").lines().collect::<Vec<_>>());
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
