//! Peers that break the rules of byte streams: the lane ends, and says why to both.

use crate::{
    handshakes::{raw_key, raw_peer, raw_server},
    stage::{STREAMS, Stage, on},
};
use tensor_relay_protocol::{ALPN, CloseCode};
use tensor_relay_transport::{Fingerprint, Lane, LaneError};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

const PING: &[u8] = b"\x06\0\0\0\x08\0\0\0\x01\0\0\0\0\0\0\0";

/// Segments that no client may send, each with what the server says of them.
const TO_SERVERS: &[(&[u8], CloseCode, &str)] = &[
    (b"\x00\0\0\0\0\0\0\0", CloseCode::Malformed, "kind 0"),
    (b"\x08\0\0\0\0\0\0\0", CloseCode::Malformed, "kind 8"),
    (b"\x01\x01\0\0\0\0\0\0", CloseCode::Malformed, "flags 0x01"),
    (b"\x01\0\x01\0\0\0\0\0", CloseCode::Malformed, "reserved bytes are 0x0001"),
    (b"\x01\0\0\0\x01\0\x01\0", CloseCode::Malformed, "65537 bytes"),
    (b"\x02\0\0\0\xff\xff\xff\xff", CloseCode::Malformed, "4294967295 bytes"),
    (b"\x03\0\0\0\x01\0\0\0x", CloseCode::Malformed, "1 bytes"),
    (b"\x05\0\0\0\x03\0\0\0abc", CloseCode::Malformed, "3 bytes"),
    (b"\x06\0\0\0\x07\0\0\0", CloseCode::Malformed, "7 bytes"),
    (b"\x02\x03\0\0\x01\0\0\0x", CloseCode::Misbehaved, "which only a server does"),
    (b"\x03\0\0\0\0\0\0\0", CloseCode::Misbehaved, "which only a server does"),
    (b"\x04\0\0\0\x08\0\0\0\0\0\0\0\0\0\0\0", CloseCode::Misbehaved, "that has not begun"),
    (b"\x01\x02\0\0\0\0\0\0\x01\0\0\0\x01\0\0\0x", CloseCode::Misbehaved, "which it had ended"),
];

/// Segments that no server may send, likewise.
const TO_CLIENTS: &[(&[u8], CloseCode, &str)] = &[
    (b"\x02\0\0\0\x01\0\0\0x", CloseCode::Misbehaved, "that had not begun"),
    (b"\x02\x02\0\0\x01\0\0\0x", CloseCode::Misbehaved, "that had not begun"),
    (b"\x02\x01\0\0\x01\0\0\0x\x02\x01\0\0\x01\0\0\0x", CloseCode::Misbehaved, "in the middle of another"),
    (b"\x03\0\0\0\0\0\0\0", CloseCode::Misbehaved, "where none was open"),
    (b"\x02\x03\0\0\0\0\0\0\x03\0\0\0\0\0\0\0", CloseCode::Misbehaved, "where none was open"),
    (b"\x04\0\0\0\x08\0\0\0\0\0\0\0\0\0\0\0", CloseCode::Misbehaved, "which only a client does"),
];

#[test]
fn a_client_that_breaks_a_rule() {
    on(&STREAMS, async |stage| {
        for (segments, code, why) in TO_SERVERS {
            let accepting = async { stage.listener.accept().await.unwrap().accept().await.unwrap() };
            let (lane, mut peer) = tokio::join!(accepting, raw_peer(stage));
            peer.write_all(&[PING, segments].concat()).await.unwrap();
            peer.flush().await.unwrap();
            refused(&lane, &mut peer, *code, why).await;
        }
        let (server, client) = stage.lane().await;
        assert_eq!((server.ended(), client.ended()), (None, None), "others are served");
    });
}

#[test]
fn a_server_that_breaks_a_rule() {
    on(&STREAMS, async |stage| {
        for (segments, code, why) in TO_CLIENTS {
            let (lane, mut peer) = client_of_raw(stage, 0).await;
            peer.write_all(&[PING, segments].concat()).await.unwrap();
            peer.flush().await.unwrap();
            refused(&lane, &mut peer, *code, why).await;
        }
    });
}

/// Goal: empty segments are not free.
/// Method: begin and end more empty streams than the reserve can count.
#[test]
fn a_server_that_opens_streams_without_end() {
    on(&STREAMS, async |stage| {
        let (lane, mut peer) = client_of_raw(stage, 0).await;
        let flood = b"\x02\x03\0\0\0\0\0\0".repeat(10_000);
        peer.write_all(&flood).await.unwrap();
        peer.flush().await.unwrap();
        refused(&lane, &mut peer, CloseCode::Misbehaved, "more than it had credit for").await;
    });
}

/// Goal: a server that sends what no server of this protocol sends after the handshake is refused.
#[test]
fn a_server_that_sends_tickets() {
    on(&STREAMS, async |stage| {
        let (lane, mut peer) = client_of_raw(stage, 2).await;
        let error = lane.closed().await;
        assert!(error.to_string().contains("TLS message of type 4"), "{error}");
        let told = peer.read_to_end(&mut vec![]).await.unwrap_err().to_string();
        assert!(told.contains("UnexpectedMessage"), "{told}");
    });
}

/// Goal: a lane that ends without a close is lost, and says how: TLS ended, the stream ended, or what came is no TLS, which
/// the other end is told with an alert.
#[test]
fn a_peer_that_ends_or_breaks_tls() {
    let forged: &[u8] = &[&b"\x17\x03\x03\0\x20"[..], &[0x5a; 32]].concat();
    let cases = [
        (None, "it ended TLS and not the lane", None),
        (Some(&b""[..]), "it ended without a close", None),
        (Some(&b"GET / HTTP/1.1\r\n\r\n"[..]), "TLS record of type 71", Some("UnexpectedMessage")),
        (Some(&b"\x17\x03\x03\xff\xff"[..]), "65535 bytes", Some("RecordOverflow")),
        (Some(forged), "cannot be decrypted", Some("BadRecordMac")),
    ];
    on(&STREAMS, async |stage| {
        for (raw, why, alert) in cases {
            let accepting = async { stage.listener.accept().await.unwrap().accept().await.unwrap() };
            let (lane, mut peer) = tokio::join!(accepting, raw_peer(stage));
            match raw {
                None => peer.shutdown().await.unwrap(),
                Some(b"") => peer.get_mut().0.shutdown().await.unwrap(),
                Some(raw) => {
                    peer.get_mut().0.write_all(raw).await.unwrap();
                    peer.get_mut().0.flush().await.unwrap();
                }
            }
            let error = lane.closed().await;
            assert!(error.to_string().contains(why), "{error}");
            assert_eq!(matches!(error, LaneError::ConnectionLost { .. }), alert.is_none(), "{error}");
            if let Some(alert) = alert {
                let told = peer.read_to_end(&mut vec![]).await.unwrap_err().to_string();
                assert!(told.contains(alert), "{told}");
            }
        }
    });
}

async fn client_of_raw(stage: &Stage, tickets: usize) -> (Lane, impl AsyncRead + AsyncWrite + Unpin + use<>) {
    let (port, accepting) = raw_server(stage, vec![ALPN.to_vec()], tickets);
    let hosts = [std::net::SocketAddr::new(stage.address.ip(), port).to_string()];
    let keys = [Fingerprint(raw_key())];
    let (lane, peer) = tokio::join!(stage.connector.connect(&hosts, &keys), accepting);
    (lane.unwrap(), peer.unwrap())
}

/// The lane ended for `why`, its peer heard it, and the ping before was answered.
async fn refused(lane: &Lane, peer: &mut (impl AsyncRead + Unpin), code: CloseCode, why: &str) {
    let error = lane.closed().await;
    let LaneError::Protocol { detail, .. } = &error else { panic!("{error}") };
    assert!(detail.contains(why), "{detail}");
    let mut said = vec![];
    peer.read_to_end(&mut said).await.unwrap();
    let close = [
        &[5, 0, 0, 0],
        &(4 + detail.len() as u32).to_le_bytes()[..],
        &code.code().to_le_bytes(),
        detail.as_bytes(),
    ];
    assert!(said.ends_with(&close.concat()), "{}", String::from_utf8_lossy(&said));
}
