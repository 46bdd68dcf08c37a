//! Network faults under byte streams: data that is cut off is an error, never a complete chunk.

use crate::{
    cases::{noise, receive, send},
    fixture::{BYTE_STREAMS, Backend, Fixture, run_on},
};
use std::time::Duration;
use tensor_relay_transport::{LaneError, ingress::ReceiveError};

const LONG_BYTES: u32 = 64 << 20;

/// Goal: a chunk whose connection fails midway is an error, whatever the failure.
/// Method: end or reset the stream, or flip a bit of it, during a long chunk.
#[test]
fn a_chunk_cut_off_midway_is_an_error() {
    let faults: [fn(&Fixture); 3] = [
        |fixture| fixture.faults.eof(),
        |fixture| fixture.faults.reset(),
        |fixture| fixture.faults.flip_bit(),
    ];
    for (number, inject) in faults.into_iter().enumerate() {
        run_on(&BYTE_STREAMS, async |fixture| {
            let (server, client) = fixture.lane().await;
            client.allow_unread(LONG_BYTES.into());
            let (complete, long) = (noise(100_000, 1), noise(LONG_BYTES, 2));
            let sending = async {
                send(&server, 0, &complete).await.unwrap();
                send(&server, 1, &long).await.map(drop)
            };
            let receiving = async {
                assert!(receive(client.accept_data().await.unwrap()).await.unwrap() == complete);
                let stream = client.accept_data().await.unwrap();
                inject(fixture);
                match receive(stream).await {
                    Err(ReceiveError::Lane(error)) => error,
                    other => panic!("{:?}", other.map(|bytes| bytes.len())),
                }
            };
            let (_, error) = tokio::join!(sending, receiving);
            let is_flip = number == 2;
            match &error {
                LaneError::ConnectionLost { peer, .. } if !is_flip => assert_eq!(*peer, client.peer()),
                LaneError::Protocol { detail, .. } if is_flip => {
                    assert!(detail.contains("decrypt"), "{detail}")
                }
                other => panic!("{other}"),
            }
            assert_eq!(
                (client.ended(), client.accept_data().await.err()),
                (Some(error.clone()), Some(error))
            );
            let at_server = server.closed().await;
            assert!(
                matches!(at_server, LaneError::ConnectionLost { .. } | LaneError::Protocol { .. }),
                "{at_server}"
            );
        });
    }
}

/// Goal: both ends detect a reset connection immediately.
#[test]
fn a_reset_ends_the_lane_at_both_ends() {
    run_on(&[Backend::SimulatedStream], async |fixture| {
        let (server, client) = fixture.lane().await;
        let sim = fixture.sim.as_ref().unwrap();
        let began = sim.elapsed();
        sim.net.reset_streams(&sim.server_host(), &sim.client_host(1));
        for lane in [server, client] {
            let error = lane.closed().await;
            assert!(
                matches!(&error, LaneError::ConnectionLost { detail, .. } if detail.contains("reset")),
                "{error}"
            );
        }
        assert!(sim.elapsed() - began < Duration::from_secs(1));
    });
}

/// Goal: a partition shorter than the idle timeout only delays the transfer.
#[test]
fn a_short_partition_only_delays() {
    run_on(&[Backend::SimulatedStream], async |fixture| {
        let (server, client) = fixture.lane().await;
        client.allow_unread(LONG_BYTES.into());
        let sim = fixture.sim.as_ref().unwrap();
        let bytes = noise(LONG_BYTES, 1);
        let partition = async {
            for _ in 0..3 {
                tokio::time::sleep(Duration::from_millis(20)).await;
                sim.cut(1);
                tokio::time::sleep(Duration::from_secs(8)).await;
                sim.mend(1);
            }
        };
        let receiving = async { receive(client.accept_data().await.unwrap()).await };
        let (sent, received, ()) = tokio::join!(send(&server, 0, &bytes), receiving, partition);
        assert!(sent.is_ok() && received.unwrap() == bytes);
        assert!(sim.elapsed() > Duration::from_secs(24));
    });
}

/// Goal: an unread chunk does not block other chunks, up to the limit of unread bytes; beyond it, the lane ends with a
/// reason. Method: leave one stream unread, and receive others meanwhile; then leave more bytes unread than allowed.
#[test]
fn an_unread_stream_does_not_block_others() {
    run_on(&[Backend::SimulatedStream, Backend::Tcp, Backend::Unix], async |fixture| {
        let (server, client) = fixture.lane().await;
        send(&server, 0, &noise(500_000, 1)).await.unwrap();
        let stalled = client.accept_data().await.unwrap();
        for chunk in 1..20 {
            send(&server, chunk, &noise(300_000, chunk)).await.unwrap();
            assert!(receive(client.accept_data().await.unwrap()).await.unwrap() == noise(300_000, chunk));
        }
        // The lane tolerates excess for a short time, because the client may raise the limit late.
        let raising_late = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            client.allow_unread(2 << 20);
        };
        let more = noise(2_000_000, 20);
        let (sent, ()) = tokio::join!(send(&server, 20, &more), raising_late);
        sent.unwrap();
        let unread = client.accept_data().await.unwrap();

        let long = noise(LONG_BYTES, 21);
        let sending = send(&server, 21, &long);
        let (sent, at_client, at_server) = tokio::join!(sending, client.closed(), server.closed());
        let LaneError::Protocol { detail, .. } = at_client else { panic!("{at_client}") };
        assert!(detail.contains("more than it had credit for"), "{detail}");
        let LaneError::ClosedByPeer { text, .. } = &at_server else { panic!("{at_server}") };
        assert_eq!(text, &detail);
        assert_eq!(sent.map(drop), Err(at_server));
        // Chunks that were complete before the lane ended can still be received.
        assert!(receive(stalled).await.unwrap() == noise(500_000, 1));
        assert!(receive(unread).await.unwrap() == more);
    });
}
