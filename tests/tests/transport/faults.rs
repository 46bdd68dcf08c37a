//! What only byte streams can suffer: whatever is cut is lost, and never looks whole.

use crate::{
    cases::{noise, receive, send},
    stage::{STREAMS, Stage, Under, on},
};
use std::time::Duration;
use tensor_relay_transport::{LaneError, ingress::ReceiveError};

const LONG_BYTES: u32 = 64 << 20;

/// Goal: a chunk whose connection is cut in the middle is lost, whatever the cut looks like.
/// Method: end or reset the stream, or flip a bit of it, while a long chunk comes.
#[test]
fn what_is_cut_in_the_middle_is_lost() {
    let cuts: [fn(&Stage); 3] =
        [|stage| stage.faults.end(), |stage| stage.faults.reset(), |stage| stage.faults.flip()];
    for (number, cut) in cuts.into_iter().enumerate() {
        on(&STREAMS, async |stage| {
            let (server, client) = stage.lane().await;
            client.allow_unread(LONG_BYTES.into());
            let (whole, long) = (noise(100_000, 1), noise(LONG_BYTES, 2));
            let sending = async {
                send(&server, 0, &whole).await.unwrap();
                send(&server, 1, &long).await.map(drop)
            };
            let receiving = async {
                assert!(receive(client.accept_data().await.unwrap()).await.unwrap() == whole);
                let stream = client.accept_data().await.unwrap();
                cut(stage);
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

/// Goal: a network that resets connections is seen by both ends at once.
#[test]
fn a_reset_ends_both_ends() {
    on(&[Under::SimulatedStream], async |stage| {
        let (server, client) = stage.lane().await;
        let sim = stage.sim.as_ref().unwrap();
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

/// Goal: a partition that ends within the idle timeout costs time alone.
#[test]
fn a_short_partition_costs_nothing() {
    on(&[Under::SimulatedStream], async |stage| {
        let (server, client) = stage.lane().await;
        client.allow_unread(LONG_BYTES.into());
        let sim = stage.sim.as_ref().unwrap();
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

/// Goal: a chunk that nobody takes stops no other one, up to what may be unread; beyond that the lane ends and says why.
/// Method: leave one stream unread, receive others beside it, and then leave more unread than the reserve of a megabyte.
#[test]
fn a_stalled_receiver_stops_nobody_else() {
    on(&STREAMS, async |stage| {
        let (server, client) = stage.lane().await;
        send(&server, 0, &noise(500_000, 1)).await.unwrap();
        let stalled = client.accept_data().await.unwrap();
        for chunk in 1..20 {
            send(&server, chunk, &noise(300_000, chunk)).await.unwrap();
            assert!(receive(client.accept_data().await.unwrap()).await.unwrap() == noise(300_000, chunk));
        }
        // A moment over the bound is no offence: it may be that this end has not said yet that it allows more.
        let late = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            client.allow_unread(2 << 20);
        };
        let more = noise(2_000_000, 20);
        let (sent, ()) = tokio::join!(send(&server, 20, &more), late);
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
        // What was whole before the lane ended is whole.
        assert!(receive(stalled).await.unwrap() == noise(500_000, 1));
        assert!(receive(unread).await.unwrap() == more);
    });
}
