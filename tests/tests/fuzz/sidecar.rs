//! Goal: any bytes on a producer's socket decode to a valid message or to an error.
//!
//! Method: random messages of every kind are mutated as by a hostile process, and decoded as a message of either peer.
//! A decoded message must be equal after it is encoded and decoded again.

use crate::mutation::mutate;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ops::Range;
use tensor_relay_protocol::{
    Epoch, MessageError, Topic, Version,
    sidecar::{
        CudaDevice, Hello, IpcHandle, Lend, Memory, MemoryKind, ProducerMessage, Progress, PublicationId,
        Publish, Refusal, ServerMessage, Welcome, encode_producer, encode_server,
    },
};

/// The number of mutated messages, which take a second in a debug build.
const CASES: u64 = 20_000;

#[test]
fn sidecar_messages_survive_any_bytes() {
    let (mut decoded, mut refused) = (0u64, 0u64);
    for case in 0..CASES {
        let mut rng = ChaCha8Rng::seed_from_u64(case);
        let mut bytes = random_frame(&mut rng);
        let donor = random_frame(&mut rng);
        mutate(&mut rng, &mut bytes, &donor);
        let body = bytes.get(4..).unwrap_or_default();
        match (
            check(body, ProducerMessage::decode, encode_producer),
            check(body, ServerMessage::decode, encode_server),
        ) {
            (false, false) => refused += 1,
            _ => decoded += 1,
        }
    }
    assert!(decoded > 0 && refused > 0, "both outcomes occur: {decoded} decoded, {refused} refused");
}

/// Whether `bytes` decode to a message; if so, checks that it survives encoding and decoding.
fn check<M: Clone + PartialEq + std::fmt::Debug>(
    bytes: &[u8],
    decode: impl Fn(&[u8]) -> Result<M, MessageError>,
    encode: impl Fn(M) -> Vec<u8>,
) -> bool {
    let Ok(message) = decode(bytes) else { return false };
    assert_eq!(decode(&encode(message.clone())[4..]), Ok(message));
    true
}

fn random_frame(rng: &mut impl Rng) -> Vec<u8> {
    let publication = PublicationId(rng.random());
    let topic = Topic::new(["policy", "kv/req-17"][rng.random_range(0..2)]).expect("a topic");
    let text: String = "warum ".repeat(rng.random_range(0..9));
    let device = CudaDevice(rng.random());
    let memory = match rng.random_range(0..3) {
        0 => Memory::Memfd { offset: rng.random() },
        1 => Memory::CudaIpc { device, handle: Box::new(IpcHandle([9; 64])), offset: rng.random() },
        _ => Memory::CudaFd { device, buffer_bytes: rng.random(), offset: rng.random() },
    };
    let range: Range<u64> = rng.random_range(0..1 << 40)..rng.random_range(1 << 40..1 << 41);
    match rng.random_range(0..12) {
        0 => encode_producer(ProducerMessage::Hello(Hello {
            revision_min: 1,
            revision_max: 2,
            agent: text.into(),
        })),
        1 => encode_producer(ProducerMessage::Manifest(text.into())),
        2..4 => encode_producer(ProducerMessage::Lend(Lend { range, memory })),
        4 => {
            let metadata = vec![(text.clone(), text.clone()); rng.random_range(0..3)];
            encode_producer(ProducerMessage::Publish(Publish {
                publication,
                topic,
                metadata,
                reason: text.into(),
            }))
        }
        5 => encode_producer(ProducerMessage::Withdraw(publication)),
        6 => encode_producer(ProducerMessage::End { request: publication, topic, withdraw: rng.random() }),
        7 => encode_server(ServerMessage::Welcome(Welcome {
            revision: 1,
            agent: text.into(),
            chunk_bytes: rng.random(),
            memories: MemoryKind::ALL.to_vec(),
        })),
        8 => {
            let (epoch, version) = (Epoch(rng.random()), Version(rng.random()));
            encode_server(ServerMessage::Published { publication, epoch, version })
        }
        9 => {
            encode_server(ServerMessage::Refused { publication, reason: Refusal::NoRoom, text: text.into() })
        }
        10 => encode_server(ServerMessage::Progress(Progress {
            publication,
            committed: rng.random(),
            loaded: 1,
            left_retention: rng.random(),
            is_released: rng.random(),
        })),
        _ => encode_server(ServerMessage::Close { text: text.into() }),
    }
}
