//! QUIC Initial packets with forged source addresses. Each is valid except for one connection id, so that the handshake
//! fails only after the server's work, and leaves no open connection.

use crate::raw::{client_tls, is_skipped_over_tcp};
use quinn::{
    AsyncUdpSocket,
    udp::{RecvMeta, Transmit},
};
use rustls::{
    Side,
    crypto::{CryptoProvider, aws_lc_rs},
    quic::{ClientConnection, Connection, DirectionalKeys, Version},
};
use std::{future::poll_fn, io::IoSliceMut, net::Ipv4Addr, sync::Arc, time::Duration};
use tensor_relay_server::TopicOptions;
use tensor_relay_tests::{
    pair::{Sim, client_config, publish, server_config, simulate, topic},
    tensors,
};
use tensor_relay_transport::Network;
use tokio::time::{sleep, timeout};

/// The rounds of the flood, one every 20 ms.
const ROUNDS: u64 = 150;

/// The number of packets in a round.
const PACKETS_PER_ROUND: u64 = 20;

/// The maximum number of packets answered by a handshake: the server's burst, and a margin for timing.
const HANDSHAKES_MAX: usize = 150;

/// Goal: a server answers a flood of forged Initial packets with Retry instead of handshakes; clients with genuine
/// addresses connect meanwhile. After the flood, no client needs a Retry. Method: packets whose source connection id
/// differs from the one in the handshake; a good client during the flood.
#[test]
fn a_flood_of_initials_is_answered_with_retry() {
    if is_skipped_over_tcp("these are packets of QUIC") {
        return;
    }
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher_with(topic("t"), None, TopicOptions::default()).unwrap();
        publish(&server, &mut publisher, 1, 100_000).await;
        let hello = client_hello();
        let mut forgers: Vec<Forger> =
            (0..PACKETS_PER_ROUND).map(|number| Forger::new(&sim, number)).collect();
        for round in 0..ROUNDS {
            for (forger, number) in forgers.iter().zip(round * PACKETS_PER_ROUND..) {
                forger.send(&sim, &initial_packet(number, &hello)).await;
            }
            sleep(Duration::from_millis(20)).await;
            if round == ROUNDS / 2 {
                let client = sim.client(1, client_config()).await.unwrap();
                tensors::check(&client.subscribe(&topic("t")).await.unwrap().next().await.unwrap());
            }
        }
        let mut answers = vec![];
        for forger in &mut forgers {
            answers.append(&mut forger.answers().await);
        }
        let retries = answers.iter().filter(|answer| **answer == Answer::Retry).count();
        // The server's simulated socket is sometimes full, and quinn does not resend packets outside a connection.
        let min = (ROUNDS * PACKETS_PER_ROUND * 9 / 10) as usize;
        assert!(answers.len() > min, "{} answers", answers.len());
        let handshakes = answers.len() - retries;
        assert!((1..=HANDSHAKES_MAX).contains(&handshakes), "{handshakes} of {}", answers.len());

        sleep(Duration::from_secs(2)).await;
        for number in 0..10 {
            forgers[0].send(&sim, &initial_packet(u64::MAX - number, &hello)).await;
        }
        let answers = forgers[0].answers().await;
        assert!(answers.len() > 5 && !answers.contains(&Answer::Retry), "{answers:?}");
    });
}

/// A server's answer to an Initial packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Retry,
    /// A handshake packet, or the close of a failed handshake.
    Handshake,
}

/// A socket with a forged source address.
struct Forger(Arc<dyn AsyncUdpSocket>);

impl Forger {
    fn new(sim: &Sim, number: u64) -> Self {
        let host = sim.client_host(10 + u8::try_from(number).unwrap());
        Self(host.bind((Ipv4Addr::UNSPECIFIED, 0).into(), &sim.tuning).unwrap())
    }

    async fn send(&self, sim: &Sim, packet: &[u8]) {
        let destination = sim.server_address();
        let transmit =
            Transmit { destination, ecn: None, contents: packet, segment_size: None, src_ip: None };
        while self.0.try_send(&transmit).is_err() {
            sleep(Duration::from_millis(1)).await; // The simulated socket is sometimes full.
        }
    }

    /// All answers, until none arrives for a second.
    async fn answers(&self) -> Vec<Answer> {
        let (mut answers, mut bytes, mut meta) = (vec![], [0; 2048], [RecvMeta::default()]);
        loop {
            let received = poll_fn(|cx| self.0.poll_recv(cx, &mut [IoSliceMut::new(&mut bytes)], &mut meta));
            match timeout(Duration::from_secs(1), received).await {
                Ok(received) => assert_eq!(received.unwrap(), 1),
                Err(_) => return answers,
            }
            answers.push(if bytes[0] & 0x30 == 0x30 { Answer::Retry } else { Answer::Handshake });
        }
    }
}

/// A ClientHello that fits one packet, with connection id 1 in its transport parameters.
fn client_hello() -> Vec<u8> {
    let provider =
        CryptoProvider { kx_groups: vec![aws_lc_rs::kx_group::X25519], ..aws_lc_rs::default_provider() };
    let initial_source_connection_id = [&[0x0f, 8][..], &1u64.to_be_bytes()].concat();
    let name = "tensor-relay".try_into().unwrap();
    let client =
        ClientConnection::new(client_tls(provider).into(), Version::V1, name, initial_source_connection_id);
    let mut hello = vec![];
    Connection::from(client.unwrap()).write_hs(&mut hello);
    hello
}

/// An Initial packet (RFC 9000 §17.2.2) from connection id 2 to `number`, of the minimum size (§14.1).
fn initial_packet(number: u64, hello: &[u8]) -> Vec<u8> {
    const PACKET_BYTES: usize = 1200;
    const NUMBER_BYTES: usize = 4;
    const TAG_BYTES: usize = 16;
    let (destination, source) = (number.to_be_bytes(), 2u64.to_be_bytes());
    let mut header = [&[0xc3, 0, 0, 0, 1, 8][..], &destination, &[8], &source, &[0]].concat();
    let length = PACKET_BYTES - header.len() - 2;
    header.extend(two_byte_varint(length));
    header.extend([0; NUMBER_BYTES]);
    let mut payload = [&[0x06, 0][..], &two_byte_varint(hello.len()), hello].concat();
    assert!(payload.len() + NUMBER_BYTES + TAG_BYTES <= length, "{} bytes do not fit", hello.len());
    payload.resize(length - NUMBER_BYTES - TAG_BYTES, 0);
    let DirectionalKeys { packet: cipher, header: mask, .. } = initial_keys(&destination);
    let tag = cipher.encrypt_in_place(0, &header, &mut payload).unwrap();
    let (first, rest) = header.split_first_mut().unwrap();
    let packet_number = rest.last_chunk_mut::<NUMBER_BYTES>().unwrap();
    mask.encrypt_in_place(&payload[..mask.sample_len()], first, packet_number)
        .unwrap();
    [&header[..], &payload, tag.as_ref()].concat()
}

fn two_byte_varint(number: usize) -> [u8; 2] {
    (0x4000 | u16::try_from(number).unwrap()).to_be_bytes()
}

fn initial_keys(destination: &[u8]) -> DirectionalKeys {
    let suite = aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256.tls13().unwrap();
    suite.quic_suite().unwrap().keys(destination, Side::Client, Version::V1).local
}
