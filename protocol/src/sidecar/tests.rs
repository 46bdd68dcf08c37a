//! Tests of sidecar messages: round trips, golden bytes, invalid messages and arbitrary bytes.

use super::*;
use crate::{Epoch, FRAME_MAX_BYTES, Topic, Version, decode_frame_length};
use proptest::prelude::*;
use prost::Message;

fn every_producer_message() -> Vec<ProducerMessage> {
    let (topic, device) = (Topic::new("policy/a").unwrap(), CudaDevice([7; 16]));
    let handle = Box::new(IpcHandle([5; 64]));
    let lend = |memory| ProducerMessage::Lend(Lend { range: 512..4608, memory });
    vec![
        ProducerMessage::Hello(Hello { revision_min: 1, revision_max: 2, agent: "test/1".into() }),
        ProducerMessage::Manifest(bytes::Bytes::from_static(b"\x08\x01")),
        lend(Memory::Memfd { offset: 8192 }),
        lend(Memory::CudaIpc { device, handle, offset: 256 }),
        lend(Memory::CudaFd { device, buffer_bytes: 2 << 20, offset: 256 }),
        ProducerMessage::Publish(Publish {
            publication: PublicationId(3),
            topic: topic.clone(),
            metadata: vec![("step".into(), "1200".into())],
            reason: "why".into(),
        }),
        ProducerMessage::Withdraw(PublicationId(3)),
        ProducerMessage::End { request: PublicationId(4), topic, withdraw: true },
    ]
}

fn every_server_message() -> Vec<ServerMessage> {
    let publication = PublicationId(3);
    vec![
        ServerMessage::Welcome(Welcome {
            revision: 1,
            agent: "test/1".into(),
            chunk_bytes: 4 << 20,
            memories: vec![MemoryKind::Memfd, MemoryKind::CudaFd],
        }),
        ServerMessage::Published { publication, epoch: Epoch(9), version: Version(8) },
        ServerMessage::Refused { publication, reason: Refusal::UnfitMemory, text: "not sealed".into() },
        ServerMessage::Progress(Progress {
            publication,
            committed: 2,
            loaded: 1,
            left_retention: true,
            is_released: true,
        }),
        ServerMessage::Ended { request: PublicationId(4) },
        ServerMessage::Close { text: "why".into() },
    ]
}

#[test]
fn decoding_reverses_encoding() {
    for message in every_producer_message() {
        let frame = encode_producer(message.clone());
        assert_eq!(decode_frame_length(frame[..4].try_into().unwrap()), Ok(frame.len() - 4));
        assert_eq!(ProducerMessage::decode(&frame[4..]), Ok(message));
    }
    for message in every_server_message() {
        assert_eq!(ServerMessage::decode(&encode_server(message.clone())[4..]), Ok(message));
    }
}

/// SIDECAR.md §14, golden bytes of revision 1.
#[test]
fn golden_messages() {
    let hex = |bytes: Vec<u8>| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let producer: Vec<_> = every_producer_message().into_iter().map(encode_producer).map(hex).collect();
    let golden = include_str!("../../vectors/sidecar-producer-messages.hex");
    assert_eq!(producer, golden.lines().collect::<Vec<_>>());
    let server: Vec<_> = every_server_message().into_iter().map(encode_server).map(hex).collect();
    let golden = include_str!("../../vectors/sidecar-server-messages.hex");
    assert_eq!(server, golden.lines().collect::<Vec<_>>());
}

#[test]
fn invalid_messages_are_refused() {
    let decode = |kind| ProducerMessage::decode(&wire::FromProducer { kind: Some(kind) }.encode_to_vec());
    let publish = wire::Publish { topic: "../etc".into(), ..wire::Publish::default() };
    let refused = decode(wire::ProducerKind::Publish(publish));
    assert!(matches!(refused, Err(MessageError::Name(_))), "{refused:?}");
    let memory = || Some(wire::Memory::Memfd(wire::Memfd { offset: 0 }));
    for (start, bytes) in [(0, 0), (u64::MAX, 1), (1, u64::MAX)] {
        let lend = wire::Lend { start, bytes, memory: memory() };
        let refused = decode(wire::ProducerKind::Lend(lend));
        assert!(matches!(refused, Err(MessageError::Malformed(_))), "{refused:?}");
    }
    for (device, handle) in [(vec![0; 15], vec![0; 64]), (vec![0; 16], vec![0; 65])] {
        let memory = Some(wire::Memory::CudaIpc(wire::CudaIpc { device, handle, offset: 0 }));
        let refused = decode(wire::ProducerKind::Lend(wire::Lend { start: 0, bytes: 1, memory }));
        assert!(matches!(refused, Err(MessageError::WrongLength { .. })), "{refused:?}");
    }
    let part = wire::ManifestPart { part: vec![0; MANIFEST_PART_MAX_BYTES + 1] };
    let refused = decode(wire::ProducerKind::Manifest(part));
    assert!(matches!(refused, Err(MessageError::TooLarge { .. })), "{refused:?}");
    let reason = "x".repeat(Text::MAX_BYTES + 1);
    let publish = wire::Publish { topic: "t".into(), reason, ..wire::Publish::default() };
    let refused = decode(wire::ProducerKind::Publish(publish));
    assert!(matches!(refused, Err(MessageError::TooLarge { what: "reason", .. })), "{refused:?}");
    assert_eq!(ProducerMessage::decode(&[]), Err(MessageError::MissingField("kind")));
}

#[test]
fn the_largest_messages_fit_a_frame() {
    let part = ProducerMessage::Manifest(vec![0; MANIFEST_PART_MAX_BYTES].into());
    assert!(encode_producer(part).len() <= FRAME_MAX_BYTES + 4);
    let long = "ä".repeat(Text::MAX_BYTES);
    let cut = Text::from(format!("x{long}"));
    assert!(cut.len() < Text::MAX_BYTES && cut.ends_with('ä'), "no character is split");
    assert!(ServerMessage::decode(&encode_server(ServerMessage::Close { text: cut })[4..]).is_ok());
}

#[test]
fn unknown_kinds_of_memory_are_ignored() {
    let welcome = wire::Welcome { memories: vec![99, 1], ..wire::Welcome::default() };
    let kind = Some(wire::ServerKind::Welcome(welcome));
    let Ok(ServerMessage::Welcome(welcome)) =
        ServerMessage::decode(&wire::ToProducer { kind }.encode_to_vec())
    else {
        panic!("not a welcome")
    };
    assert_eq!(welcome.memories, [MemoryKind::Memfd]);
}

proptest! {
    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = ProducerMessage::decode(&bytes);
        let _ = ServerMessage::decode(&bytes);
    }

    /// One changed byte: an error, or a valid message that round-trips.
    #[test]
    fn a_changed_byte_is_survived(which in 0usize..14, at: prop::sample::Index, value: u8) {
        let mut frame = match which {
            0..8 => encode_producer(every_producer_message().swap_remove(which)),
            _ => encode_server(every_server_message().swap_remove(which - 8)),
        };
        let at = at.index(frame.len());
        frame[at] = value;
        if let Ok(message) = ProducerMessage::decode(&frame[4..]) {
            prop_assert_eq!(ProducerMessage::decode(&encode_producer(message.clone())[4..]), Ok(message));
        }
        if let Ok(message) = ServerMessage::decode(&frame[4..]) {
            prop_assert_eq!(ServerMessage::decode(&encode_server(message.clone())[4..]), Ok(message));
        }
    }
}
