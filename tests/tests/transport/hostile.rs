//! Peers that violate the protocol of byte streams (PROTOCOL.md §10.7): the lane ends, and both ends get the reason.

use crate::{
    fixture::{BYTE_STREAMS, Fixture, run_on},
    handshakes::{raw_key, raw_peer, raw_server},
};
use tensor_relay_protocol::{ALPN, CloseCode};
use tensor_relay_transport::{Fingerprint, Lane, LaneError};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// A segment with a ping.
const PING: &[u8] = b"\x06\0\0\0\x08\0\0\0\x01\0\0\0\0\0\0\0";

/// The answer to [`PING`].
const PONG: [u8; 16] = *b"\x07\0\0\0\x08\0\0\0\x01\0\0\0\0\0\0\0";

/// Segments that no client may send, with the close code and text of the server.
pub(crate) const INVALID_CLIENT_SEGMENTS: &[(&[u8], CloseCode, &str)] = &[
    (b"\x00\0\0\0\0\0\0\0", CloseCode::Malformed, "kind 0"),
    (b"\x08\0\0\0\0\0\0\0", CloseCode::Malformed, "kind 8"),
    (b"\x01\x01\0\0\0\0\0\0", CloseCode::Malformed, "flags 0x01"),
    (b"\x01\0\x01\0\0\0\0\0", CloseCode::Malformed, "reserved bytes are 0x0001"),
    (b"\x01\0\0\0\x01\0\x01\0", CloseCode::Malformed, "65537 bytes"),
    (b"\x02\0\0\0\xff\xff\xff\xff", CloseCode::Malformed, "4294967295 bytes"),
    (b"\x03\0\0\0\x01\0\0\0x", CloseCode::Malformed, "1 bytes"),
    (b"\x05\0\0\0\x03\0\0\0abc", CloseCode::Malformed, "3 bytes"),
    (b"\x06\0\0\0\x07\0\0\0", CloseCode::Malformed, "7 bytes"),
    (b"\x02\x03\0\0\x01\0\0\0x", CloseCode::ProtocolViolation, "which only a server does"),
    (b"\x03\0\0\0\0\0\0\0", CloseCode::ProtocolViolation, "which only a server does"),
    (b"\x04\0\0\0\x08\0\0\0\0\0\0\0\0\0\0\0", CloseCode::ProtocolViolation, "that has not begun"),
    (b"\x01\x02\0\0\0\0\0\0\x01\0\0\0\x01\0\0\0x", CloseCode::ProtocolViolation, "which it had ended"),
];

/// Segments that no server may send, with the close code and text of the client.
pub(crate) const INVALID_SERVER_SEGMENTS: &[(&[u8], CloseCode, &str)] = &[
    (b"\x02\0\0\0\x01\0\0\0x", CloseCode::ProtocolViolation, "that had not begun"),
    (b"\x02\x02\0\0\x01\0\0\0x", CloseCode::ProtocolViolation, "that had not begun"),
    (
        b"\x02\x01\0\0\x01\0\0\0x\x02\x01\0\0\x01\0\0\0x",
        CloseCode::ProtocolViolation,
        "in the middle of another",
    ),
    (b"\x03\0\0\0\0\0\0\0", CloseCode::ProtocolViolation, "where none was open"),
    (b"\x02\x03\0\0\0\0\0\0\x03\0\0\0\0\0\0\0", CloseCode::ProtocolViolation, "where none was open"),
    (b"\x04\0\0\0\x08\0\0\0\0\0\0\0\0\0\0\0", CloseCode::ProtocolViolation, "which only a client does"),
];

#[test]
fn a_client_that_violates_the_protocol_is_refused() {
    run_on(&BYTE_STREAMS, async |fixture| {
        for (segments, code, text) in INVALID_CLIENT_SEGMENTS {
            let accepting = async { fixture.listener.accept().await.unwrap().accept().await.unwrap() };
            let (lane, mut peer) = tokio::join!(accepting, raw_peer(fixture));
            assert_pong(&mut peer).await;
            peer.write_all(&[PING, segments].concat()).await.unwrap();
            peer.flush().await.unwrap();
            assert_refused(&lane, &mut peer, *code, text).await;
        }
        let (server, client) = fixture.lane().await;
        assert_eq!((server.ended(), client.ended()), (None, None), "another client can still connect");
    });
}

#[test]
fn a_server_that_violates_the_protocol_is_refused() {
    run_on(&BYTE_STREAMS, async |fixture| {
        for (segments, code, text) in INVALID_SERVER_SEGMENTS {
            let (lane, mut peer) = client_of_raw_server(fixture, 0).await;
            assert_pong(&mut peer).await;
            peer.write_all(&[PING, segments].concat()).await.unwrap();
            peer.flush().await.unwrap();
            assert_refused(&lane, &mut peer, *code, text).await;
        }
    });
}

/// Goal: records may end anywhere, also one byte into the next segment. Method: two pings, cut into three records at each
/// pair of places.
#[test]
fn records_may_end_anywhere() {
    run_on(&BYTE_STREAMS, async |fixture| {
        let (lane, mut peer) = client_of_raw_server(fixture, 0).await;
        let pings = [PING, b"\x06\0\0\0\x08\0\0\0\x02\0\0\0\0\0\0\0"].concat();
        for first in 1..pings.len() - 1 {
            for second in first + 1..pings.len() {
                for record in [&pings[..first], &pings[first..second], &pings[second..]] {
                    peer.write_all(record).await.unwrap();
                    peer.flush().await.unwrap();
                }
                assert_eq!(lane.ended(), None, "{first} {second}");
                // A later answer may replace the earlier one.
                while read_pong(&mut peer).await != *b"\x07\0\0\0\x08\0\0\0\x02\0\0\0\0\0\0\0" {}
            }
        }
    });
}

/// Goal: the limit of unread data also bounds the number of empty streams. Method: begin and end more empty streams
/// than the reserve allows.
#[test]
fn empty_streams_count_against_the_credit() {
    run_on(&BYTE_STREAMS, async |fixture| {
        let (lane, mut peer) = client_of_raw_server(fixture, 0).await;
        let flood = b"\x02\x03\0\0\0\0\0\0".repeat(10_000);
        peer.write_all(&flood).await.unwrap();
        peer.flush().await.unwrap();
        assert_refused(&lane, &mut peer, CloseCode::ProtocolViolation, "more than it had credit for").await;
    });
}

/// Goal: a TLS session ticket after the handshake, which this protocol does not use, ends the lane.
#[test]
fn a_server_that_sends_session_tickets_is_refused() {
    run_on(&BYTE_STREAMS, async |fixture| {
        let (lane, mut peer) = client_of_raw_server(fixture, 2).await;
        let error = lane.closed().await;
        assert!(error.to_string().contains("TLS message of type 4"), "{error}");
        let alert = peer.read_to_end(&mut vec![]).await.unwrap_err().to_string();
        assert!(alert.contains("UnexpectedMessage"), "{alert}");
    });
}

/// Goal: a lane that ends without a close reports how it ended: TLS ended, the stream ended, or the peer sent invalid
/// TLS, for which it receives an alert.
#[test]
fn an_end_without_a_close_reports_its_cause() {
    let forged: &[u8] = &[&b"\x17\x03\x03\0\x20"[..], &[0x5a; 32]].concat();
    let cases = [
        (None, "it ended TLS and not the lane", None),
        (Some(&b""[..]), "it ended without a close", None),
        (Some(&b"GET / HTTP/1.1\r\n\r\n"[..]), "TLS record of type 71", Some("UnexpectedMessage")),
        (Some(&b"\x17\x03\x03\xff\xff"[..]), "65535 bytes", Some("RecordOverflow")),
        (Some(forged), "cannot be decrypted", Some("BadRecordMac")),
    ];
    run_on(&BYTE_STREAMS, async |fixture| {
        for (raw, expected, alert) in cases {
            let accepting = async { fixture.listener.accept().await.unwrap().accept().await.unwrap() };
            let (lane, mut peer) = tokio::join!(accepting, raw_peer(fixture));
            match raw {
                None => peer.shutdown().await.unwrap(),
                Some(b"") => peer.get_mut().0.shutdown().await.unwrap(),
                Some(raw) => {
                    peer.get_mut().0.write_all(raw).await.unwrap();
                    peer.get_mut().0.flush().await.unwrap();
                }
            }
            let error = lane.closed().await;
            assert!(error.to_string().contains(expected), "{error}");
            assert_eq!(matches!(error, LaneError::ConnectionLost { .. }), alert.is_none(), "{error}");
            if let Some(alert) = alert {
                let received = peer.read_to_end(&mut vec![]).await.unwrap_err().to_string();
                assert!(received.contains(alert), "{received}");
            }
        }
    });
}

/// Connects a client to a raw server that sends `tickets` session tickets; returns the lane and the server's stream.
async fn client_of_raw_server(
    fixture: &Fixture,
    tickets: usize,
) -> (Lane, impl AsyncRead + AsyncWrite + Unpin + use<>) {
    let (port, accepting) = raw_server(fixture, vec![ALPN.to_vec()], tickets);
    let hosts = [std::net::SocketAddr::new(fixture.address.ip(), port).to_string()];
    let keys = [Fingerprint(raw_key())];
    let (lane, peer) = tokio::join!(fixture.connector.connect(&hosts, &keys), accepting);
    (lane.unwrap(), peer.unwrap())
}

/// Sends a ping, and checks that the peer answers with its number. The peer may send pings before that.
pub(crate) async fn assert_pong(peer: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    peer.write_all(PING).await.unwrap();
    peer.flush().await.unwrap();
    assert_eq!(read_pong(peer).await, PONG);
}

/// The peer's next answer to a ping.
async fn read_pong(peer: &mut (impl AsyncRead + Unpin)) -> [u8; PONG.len()] {
    let mut segment = [0; PONG.len()];
    while segment[0] != PONG[0] {
        peer.read_exact(&mut segment).await.unwrap();
        assert!([PING[0], PONG[0]].contains(&segment[0]), "{segment:?}");
    }
    segment
}

/// Checks that the lane ended with an error that contains `text`, and that the peer received that error in a close with
/// `code`.
pub(crate) async fn assert_refused(
    lane: &Lane,
    peer: &mut (impl AsyncRead + Unpin),
    code: CloseCode,
    text: &str,
) {
    let error = lane.closed().await;
    let LaneError::Protocol { detail, .. } = &error else { panic!("{error}") };
    assert!(detail.contains(text), "{detail}");
    let mut received = vec![];
    peer.read_to_end(&mut received).await.unwrap();
    let close = [
        &[5, 0, 0, 0],
        &(4 + detail.len() as u32).to_le_bytes()[..],
        &code.code().to_le_bytes(),
        detail.as_bytes(),
    ];
    assert!(received.ends_with(&close.concat()), "{}", String::from_utf8_lossy(&received));
}
