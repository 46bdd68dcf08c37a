//! Slow subscribers, too much credit and full memory: the subscriber concerned gets an error, and no other is affected.

use std::time::Duration;
use tensor_relay_client::{SubscriptionError, Version};
use tensor_relay_protocol::{
    ClientMessage, CloseCode, CodecSet, EndReason, FeatureSet, Hello, ServerMessage, Subscribe,
    SubscriptionId,
};
use tensor_relay_server::Fingerprint;
use tensor_relay_tests::{
    pair::{Sim, client_config, eventually, publish, server_config, simulate, token, topic, transport},
    tensors,
};
use tensor_relay_transport::{
    Lane, LaneError, Transport,
    control::{self, ControlError},
};
use tokio::time::sleep;

/// Goal: a subscriber that reads no chunks does not slow others. It is evicted after the stall timeout and gets the
/// reason, and the memory of its version is released.
/// Method: measure a good subscriber alone, and beside a subscriber that reads only its control stream.
#[test]
fn a_subscriber_that_never_reads_slows_no_other() {
    let alone = simulate(1, async |sim| time_to_receive(sim, false).await);
    let beside = simulate(1, async |sim| time_to_receive(sim, true).await);
    assert!(beside < alone + alone / 20, "{alone:?} alone, {beside:?} beside one that reads nothing");
}

/// The time in which a good subscriber receives a version, alone or beside a subscriber that never reads.
async fn time_to_receive(sim: Sim, with_slow: bool) -> Duration {
    const BYTES: u64 = 4 << 20;
    let server =
        sim.server(tensor_relay_server::Config { stall_timeout: Duration::from_secs(5), ..server_config() });
    let mut publisher = server.publisher(topic("t")).unwrap();
    let client = sim.client(1, client_config()).await.unwrap();
    let mut subscription = client.subscribe(&topic("t")).await.unwrap();
    let slow = if with_slow { Some(NeverReads::subscribe(&sim, 8).await) } else { None };

    publish(&server, &mut publisher, 1, BYTES).await;
    let published = sim.elapsed();
    tensors::check(&subscription.next().await.unwrap());
    let took = sim.elapsed() - published;
    publish(&server, &mut publisher, 2, BYTES).await;
    tensors::check(&subscription.next().await.unwrap());

    if let Some(mut slow) = slow {
        assert_eq!(server.stats().staged_bytes, 2 * BYTES, "one version is stuck");
        assert_eq!(slow.end_reason().await, EndReason::Evicted);
        let stalled = sim.elapsed() - published;
        assert!(stalled > Duration::from_secs(5) && stalled < Duration::from_secs(11), "{stalled:?}");
        assert_eq!((server.stats().evicted, server.stats().sessions), (1, 2));
        eventually("the stuck version is released", || server.stats().staged_bytes == BYTES).await;
    }
    took
}

/// A client that subscribes and accepts no data stream. Its QUIC connection stays alive.
struct NeverReads {
    _lane: Lane,
    _sender: control::Sender<ClientMessage>,
    receiver: control::Receiver<ServerMessage>,
}

impl NeverReads {
    async fn subscribe(sim: &Sim, credit: u32) -> Self {
        let (ticket, timeout) = (sim.ticket(), Duration::from_secs(10));
        let keys: Vec<_> = ticket.keys().iter().copied().map(Fingerprint).collect();
        let lane = sim.connector(2).connect(ticket.addresses(), &keys).await.unwrap();
        let (sender, receiver) = control::open(&lane, timeout).await.unwrap();
        let hello = Hello {
            revision_min: 1,
            revision_max: 1,
            agent: "never reads".into(),
            codecs: CodecSet::all(),
            token: Some(token()),
            features: FeatureSet::default(),
        };
        let subscribe = Subscribe::latest(SubscriptionId(1), topic("t"), credit);
        sender.send(ClientMessage::Hello(hello)).await.unwrap();
        sender.send(ClientMessage::Subscribe(subscribe)).await.unwrap();
        Self { _lane: lane, _sender: sender, receiver }
    }

    async fn end_reason(&mut self) -> EndReason {
        loop {
            if let ServerMessage::End { reason, .. } = self.receiver.next().await.unwrap() {
                return reason;
            }
        }
    }
}

/// Goal: a client whose credit exceeds its transport window loses its session, and its version's memory is released.
/// Method: credit for 4 MiB with a smaller window; read no chunk.
#[test]
fn a_client_with_excess_credit_loses_its_session() {
    simulate(5, async |sim| {
        let server = sim
            .server(tensor_relay_server::Config { stall_timeout: Duration::from_secs(5), ..server_config() });
        let mut publisher = server.publisher(topic("t")).unwrap();
        let mut blocked = NeverReads::subscribe(&sim, 64).await;
        publish(&server, &mut publisher, 1, 4 << 20).await;
        let ended = loop {
            if let Err(error) = blocked.receiver.next().await {
                break error;
            }
        };
        match ended {
            ControlError::Lane(LaneError::ClosedByPeer { code, .. }) => {
                assert_eq!(code, Some(CloseCode::TimedOut));
            }
            // A byte stream has no such window: the client's lane detects that it has received too much.
            ControlError::Lane(LaneError::Protocol { .. }) if transport() == Transport::Tcp => {}
            ended => panic!("{ended}"),
        }
        assert!(sim.elapsed() < Duration::from_secs(22), "{:?}", sim.elapsed());
        publish(&server, &mut publisher, 2, 1 << 20).await;
        eventually("the blocked session has ended", || server.stats().sessions == 0).await;
        eventually("version 1 is released", || server.stats().staged_bytes == 1 << 20).await;
    });
}

/// Goal: a version that does not fit the client's budget is an error with both sizes, for that subscription only.
/// Method: two MiB with a budget of one; the same session then receives smaller versions.
#[test]
fn a_version_over_the_budget_is_an_error() {
    simulate(2, async |sim| {
        let server = sim.server(server_config());
        let mut big = server.publisher(topic("big")).unwrap();
        let mut small = server.publisher(topic("small")).unwrap();
        publish(&server, &mut big, 1, 2 << 20).await;
        publish(&server, &mut small, 1, 1 << 19).await;
        let config = tensor_relay_client::Config { memory_bytes: 1 << 20, device: None, ..client_config() };
        let client = sim.client(1, config).await.unwrap();
        let mut subscription = client.subscribe(&topic("big")).await.unwrap();
        let error = subscription.next().await.unwrap_err();
        let SubscriptionError::OverBudget { id, detail } = &error else { panic!("{error}") };
        assert_eq!((id.topic.as_str(), id.version), ("big", Version(1)));
        assert!(detail.contains("2097152") && detail.contains("1048576"), "{detail}");
        for version in 1..=3 {
            let mut subscription = client.subscribe(&topic("small")).await.unwrap();
            let snapshot = subscription.next().await.unwrap();
            assert_eq!(snapshot.id().version, Version(version));
            tensors::check(&snapshot);
            publish(&server, &mut small, version + 1, 1 << 19).await;
        }
        assert_eq!(server.stats().sessions, 1);
    });
}

/// Goal: memory of dropped snapshots is reused, so that a budget of two versions suffices for any number.
/// Method: twenty versions, of which the user holds one at a time.
#[test]
fn a_budget_of_two_versions_suffices() {
    simulate(3, async |sim| {
        let server = sim.server(tensor_relay_server::Config { staged_bytes: 2 << 20, ..server_config() });
        let mut publisher = server.publisher(topic("t")).unwrap();
        let config = tensor_relay_client::Config { memory_bytes: 2 << 20, ..client_config() };
        let client = sim.client(1, config).await.unwrap();
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        let mut held = None;
        for version in 1..=20 {
            publish(&server, &mut publisher, version, 1 << 20).await;
            let snapshot = subscription.next().await.unwrap();
            tensors::check(&snapshot);
            held.replace(snapshot);
            eventually("the version is committed", || server.stats().committed == version).await;
        }
    });
}

/// Goal: a user who takes no snapshot for a while does not delay the publisher, and gets the newest one with the number
/// of skipped versions.
/// Method: publish six versions while the user sleeps.
#[test]
fn an_idle_user_gets_the_newest_version() {
    simulate(4, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let client = sim.client(1, client_config()).await.unwrap();
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        client.list().await.unwrap();
        for version in 1..=6 {
            publish(&server, &mut publisher, version, 1 << 19).await;
            sleep(Duration::from_secs(60)).await;
        }
        let snapshot = subscription.next().await.unwrap();
        tensors::check(&snapshot);
        assert_eq!((snapshot.id().version, snapshot.skipped()), (Version(6), 5));
        assert_eq!(server.stats().committed, 6);
    });
}
