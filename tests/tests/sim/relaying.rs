//! Relays: servers whose versions come from a subscription (PROTOCOL.md §3.20).

use crate::slow_path;
use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tensor_relay_client::{
    Client, Config, EndReason, PathError, ReaderName, RelayId, Relaying, Request, Snapshot, Subscription,
    SubscriptionError, Version,
};
use tensor_relay_protocol::{Epoch, Glob, Grant, Ticket, Verbs};
use tensor_relay_server::{Access, Listener, Publisher, Relay, RelayOptions, Server, TopicOptions, WhenFull};
use tensor_relay_tests::{
    pair::{
        SERVER_PORT, Sim, client_config, eventually, publish, reconnecting, retaining, rules, server_config,
        simulate, token, token_with, topic, transport,
    },
    simnet::Host,
    tensors,
};
use tensor_relay_transport::forwarding::Forward;
use tokio::{task::JoinHandle, time::timeout};

const EPOCH: Epoch = Epoch(3);

/// Thirty-two chunks.
const BYTES: u64 = 2 << 20;

/// A relay on a host of its own.
struct Relayer {
    number: u8,
    server: Server,
    relay: Relay,
    client: Arc<Client>,
}

impl Relayer {
    /// Starts the relay with this number, whose origin is the server of `ticket`.
    async fn start(sim: &Sim, number: u8, ticket: &Ticket, topics: TopicOptions, every: bool) -> Self {
        let server = Server::start(listener(sim, number), Access::new(rules()), server_config());
        let relay = server.relay(RelayOptions { id: id(number), topics, every });
        let client = Arc::new(connect(sim, number, ticket, &relay).await);
        Self { number, server, relay, client }
    }

    /// Receives the versions of `request`, as a relay does, until the subscription ends; returns why.
    fn follow(&self, request: Request) -> JoinHandle<SubscriptionError> {
        follow(&self.client, &self.relay, request)
    }

    fn ticket(&self, sim: &Sim) -> Ticket {
        ticket(sim, self.number)
    }
}

fn id(number: u8) -> RelayId {
    RelayId([number; 16])
}

fn host(sim: &Sim, number: u8) -> Host {
    sim.net.host(Ipv4Addr::new(10, 0, 2, number))
}

fn address(number: u8) -> SocketAddr {
    (Ipv4Addr::new(10, 0, 2, number), SERVER_PORT).into()
}

fn listener(sim: &Sim, number: u8) -> Listener {
    let (host, tuning) = (Arc::new(host(sim, number)), sim.tuning.clone());
    Listener::bind_on(host, transport(), address(number), &sim.identity(), tuning).unwrap()
}

fn ticket(sim: &Sim, number: u8) -> Ticket {
    let key = sim.identity().fingerprint().0;
    Ticket::new(vec![address(number).to_string()], vec![key], None)
        .unwrap()
        .with_token(token())
}

/// The receiving half of the relay with this number.
async fn connect(sim: &Sim, number: u8, ticket: &Ticket, relay: &Relay) -> Client {
    connect_with(sim, number, ticket, relay.forward(None)).await
}

/// The same, which offers its versions there.
async fn connect_with(sim: &Sim, number: u8, ticket: &Ticket, forward: Arc<dyn Forward>) -> Client {
    let connector = tensor_relay_client::Connector::over(Arc::new(host(sim, number)), sim.tuning.clone());
    let relaying = Relaying { id: id(number), forward };
    let config = Config {
        device: None, // A relay receives into host memory.
        reconnect_timeout: Duration::from_secs(3_600),
        topic_timeout: Duration::from_secs(3_600),
        relay: Some(relaying),
        ..client_config()
    };
    Client::connect_with(&connector.with_transport(transport()), ticket, config)
        .await
        .unwrap()
}

fn follow(client: &Arc<Client>, relay: &Relay, request: Request) -> JoinHandle<SubscriptionError> {
    let (client, relay) = (Arc::clone(client), relay.clone());
    tokio::spawn(async move {
        let mut subscription = client.subscribe_to(request).await.unwrap();
        loop {
            match subscription.next().await {
                Ok(snapshot) => relay.offered(&snapshot.id().topic).await,
                Err(error) if error.is_final() => return error,
                Err(_) => {}
            }
        }
    })
}

fn latest() -> Request {
    Request::latest(topic("t"))
}

fn every() -> Request {
    Request::every(topic("t"))
}

/// A consumer of the server that `ticket` names.
async fn consumer(sim: &Sim, number: u8, ticket: &Ticket) -> Client {
    Client::connect_with(&sim.connector(number), ticket, reconnecting())
        .await
        .unwrap()
}

async fn next(subscription: &mut Subscription) -> Snapshot {
    let snapshot = timeout(Duration::from_secs(60), subscription.next()).await.unwrap().unwrap();
    tensors::check(&snapshot);
    snapshot
}

/// Waits until a part of `version` has arrived.
async fn under_way(subscription: &Subscription, version: u64) {
    let is_under_way = || {
        let progress = subscription.progress();
        progress.version == version && progress.verified_bytes > BYTES / 8
    };
    eventually("the version is under way", is_under_way).await;
}

async fn publish_at(server: &Server, publisher: &mut Publisher, version: u64) {
    publish(server, publisher, version, BYTES).await;
}

/// Goal: a version passes through two relays while it arrives, under the origin's epoch and number, and every byte of it is
/// right. Method: each hop alone takes several round trips; the second relay's consumer has the version long before two more
/// transfers could have taken place.
#[test]
fn a_chain_passes_versions_on_while_they_arrive() {
    simulate(1, async |sim| {
        slow_path(&sim);
        let origin = sim.server(server_config());
        let mut publisher = origin.publisher_with(topic("t"), Some(EPOCH), retaining(1)).unwrap();
        let first = Relayer::start(&sim, 1, &sim.ticket(), retaining(1), false).await;
        let second = Relayer::start(&sim, 2, &first.ticket(&sim), retaining(1), false).await;
        let (_first, _second) = (first.follow(latest()), second.follow(latest()));
        let direct = sim.client(1, reconnecting()).await.unwrap();
        let relayed = consumer(&sim, 2, &second.ticket(&sim)).await;
        let (mut direct, mut relayed) =
            (direct.subscribe(&topic("t")).await.unwrap(), relayed.subscribe(&topic("t")).await.unwrap());
        for version in 1..=3 {
            let began = sim.elapsed();
            publish_at(&origin, &mut publisher, version).await;
            next(&mut direct).await;
            let one_hop = sim.elapsed() - began;
            let snapshot = next(&mut relayed).await;
            let three_hops = sim.elapsed() - began;
            assert_eq!((snapshot.id().epoch, snapshot.id().version), (EPOCH, Version(version)));
            assert_eq!(snapshot.relays().relays(), [id(1), id(2)]);
            assert!(three_hops < one_hop * 2, "{version}: {one_hop:?} {three_hops:?}");
        }
    });
}

/// Goal: a relay encodes nothing that its clients can take as it came: neither compressed chunks nor deltas. Method: counts
/// of its encoder, while weights that compress are relayed, and then versions that differ little.
#[test]
fn a_relay_encodes_nothing_again() {
    simulate(1, async |sim| {
        let origin = sim.server(server_config());
        let mut publisher = origin.publisher_with(topic("t"), Some(EPOCH), retaining(1)).unwrap();
        let relayer = Relayer::start(&sim, 1, &sim.ticket(), retaining(1), false).await;
        let _following = relayer.follow(latest());
        let client = consumer(&sim, 1, &relayer.ticket(&sim)).await;
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        for version in 1..=6 {
            let specs = vec![tensors::weights("weights", BYTES / 4), tensors::steady("steady", BYTES)];
            let staged = tensors::stage(&origin, specs, version);
            publisher.publish(staged, tensors::metadata(version)).await.unwrap();
            next(&mut subscription).await;
        }
        let (at_origin, at_relay) = (origin.stats().encoder, relayer.server.stats().encoder);
        assert!(at_origin.compared > 0, "{at_origin:?}");
        assert_eq!((at_relay.encoded, at_relay.compared), (0, 0), "{at_relay:?}");
        let (sent, passed_on) = (origin.stats().codecs, relayer.server.stats().codecs);
        assert!(sent.deltas().chunks > 0, "{sent:?}");
        assert_eq!(passed_on.deltas().chunks, sent.deltas().chunks, "{passed_on:?}");
        let copied = at_relay.host_copied_bytes;
        assert!(copied <= 7 * BYTES * 2, "chunks are copied out at most once, to be sent: {copied}");
    });
}

/// Goal: in mode `every`, a relay is one reader at its origin, whatever the number of its own, and nothing is lost, however
/// slow they are. Method: two readers of a relay that blocks, one of them slow; the origin keeps two versions.
#[test]
fn every_version_passes_through_a_relay() {
    simulate(1, async |sim| {
        let origin = sim.server(server_config());
        let blocking = |versions| TopicOptions { when_full: WhenFull::Block, ..retaining(versions) };
        let mut publisher = origin.publisher_with(topic("t"), Some(EPOCH), blocking(2)).unwrap();
        let relayer = Relayer::start(&sim, 1, &sim.ticket(), blocking(2), true).await;
        let _following = relayer.follow(every().reader(ReaderName::new("relay").unwrap()));
        let client = consumer(&sim, 1, &relayer.ticket(&sim)).await;
        let (mut quick, mut slow) =
            (client.subscribe_to(every()).await.unwrap(), client.subscribe_to(every()).await.unwrap());
        client.list().await.unwrap();
        let publishing = async {
            for version in 1..=12 {
                publish_at(&origin, &mut publisher, version).await;
            }
        };
        let reading = async {
            for version in 1..=12 {
                assert_eq!(next(&mut quick).await.id().version, Version(version));
            }
        };
        let dawdling = async {
            for version in 1..=12 {
                tokio::time::sleep(Duration::from_secs(3)).await;
                assert_eq!(next(&mut slow).await.id().version, Version(version));
            }
        };
        tokio::join!(publishing, reading, dawdling);
        assert!(sim.elapsed() > Duration::from_secs(20), "the publisher waited for the slow reader");
        assert_eq!((origin.stats().committed, origin.stats().evicted), (12, 0), "one reader");
    });
}

/// Goal: a lost origin ends nothing: what is here is served on, also to new clients, a version under way waits, and goes on
/// when the origin returns. Method: the path to the origin is cut in the middle of a version.
#[test]
fn a_lost_origin_is_survived() {
    simulate(1, async |sim| {
        slow_path(&sim);
        let origin = sim.server(server_config());
        let mut publisher = origin.publisher_with(topic("t"), Some(EPOCH), retaining(1)).unwrap();
        let relayer = Relayer::start(&sim, 1, &sim.ticket(), retaining(1), false).await;
        let _following = relayer.follow(latest());
        let client = consumer(&sim, 1, &relayer.ticket(&sim)).await;
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        publish_at(&origin, &mut publisher, 1).await;
        assert_eq!(next(&mut subscription).await.id().version, Version(1));
        publish_at(&origin, &mut publisher, 2).await;
        under_way(&subscription, 2).await;
        sim.net.partition(&sim.server_host(), &host(&sim, 1));
        tokio::time::sleep(Duration::from_secs(60)).await;
        let late = consumer(&sim, 2, &relayer.ticket(&sim)).await;
        let listed = late.list().await.unwrap();
        assert_eq!(listed[0].id.version, Version(1), "the last whole version");
        assert_eq!(relayer.server.status_reader().read().unwrap().topics[0].newest.version, Version(1));
        let mut late = late.subscribe(&topic("t")).await.unwrap();
        assert_eq!(next(&mut late).await.id().version, Version(1));
        assert_eq!(relayer.server.stats().evicted, 0);
        sim.net.repair(&sim.server_host(), &host(&sim, 1));
        assert_eq!(next(&mut subscription).await.id().version, Version(2));
        assert_eq!(next(&mut late).await.id().version, Version(2));
        let resumed = subscription.progress();
        assert_eq!(resumed.version, 2);
    });
}

/// Goal: a version that a relay gave up before it had it whole, and receives again, is offered again. The topic, its
/// last whole version and its subscriptions stay. Method: the relay's subscription ends in the middle of a version and
/// begins again, as after a failover; subscribers in both modes, whose transfers are aborted, and a new one.
#[test]
fn a_version_given_up_and_received_again_withdraws_nothing() {
    simulate(1, async |sim| {
        slow_path(&sim);
        let origin = sim.server(server_config());
        let mut publisher = origin.publisher_with(topic("t"), Some(EPOCH), retaining(1)).unwrap();
        let relayer = Relayer::start(&sim, 1, &sim.ticket(), retaining(1), false).await;
        let following = relayer.follow(latest());
        let client = consumer(&sim, 1, &relayer.ticket(&sim)).await;
        let mut newest = client.subscribe(&topic("t")).await.unwrap();
        let mut each = client.subscribe_to(every()).await.unwrap();
        publish_at(&origin, &mut publisher, 1).await;
        for subscription in [&mut newest, &mut each] {
            assert_eq!(next(subscription).await.id().version, Version(1));
        }
        publish_at(&origin, &mut publisher, 2).await;
        under_way(&newest, 2).await;
        following.abort();
        let _following = relayer.follow(latest());
        let late = consumer(&sim, 2, &relayer.ticket(&sim)).await;
        let mut late = late.subscribe(&topic("t")).await.unwrap();
        while next(&mut late).await.id().version != Version(2) {}
        let publishing = publish_at(&origin, &mut publisher, 3);
        let reading = async { assert_eq!(next(&mut newest).await.id().version, Version(3), "numbers rise") };
        let reading_each = async {
            loop {
                match timeout(Duration::from_secs(60), each.next()).await.unwrap() {
                    Ok(snapshot) if snapshot.id().version == Version(3) => return,
                    Ok(_) | Err(SubscriptionError::Gap(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        };
        tokio::join!(publishing, reading, reading_each);
    });
}

/// Goal: the end of a topic at its origin ends it here, for the same reason, within ten seconds; an origin that withdraws one
/// version withdraws it here.
#[test]
fn the_end_of_a_topic_is_passed_on() {
    simulate(1, async |sim| {
        let origin = sim.server(server_config());
        let relayer = Relayer::start(&sim, 1, &sim.ticket(), retaining(1), false).await;
        let client = consumer(&sim, 1, &relayer.ticket(&sim)).await;
        for reason in [EndReason::Withdrawn, EndReason::TopicEnded] {
            let mut publisher = origin.publisher_with(topic("t"), None, retaining(1)).unwrap();
            let following = relayer.follow(latest());
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            publish_at(&origin, &mut publisher, 1).await;
            next(&mut subscription).await;
            let began = sim.elapsed();
            match reason {
                EndReason::TopicEnded => publisher.end(),
                _ => publisher.withdraw(),
            }
            match subscription.next().await {
                Err(SubscriptionError::Ended { reason: found, .. }) => assert_eq!(found, reason),
                other => panic!("{:?}", other.map(|snapshot| snapshot.id().clone())),
            }
            assert!(sim.elapsed() - began < Duration::from_secs(10));
            following.await.unwrap();
        }
        // As an origin does that revokes the relay's right.
        let mut publisher = origin.publisher_with(topic("u"), None, retaining(1)).unwrap();
        let _following = relayer.follow(Request::latest(topic("u")));
        let mut subscription = client.subscribe(&topic("u")).await.unwrap();
        publish_at(&origin, &mut publisher, 1).await;
        next(&mut subscription).await;
        relayer.relay.end(&topic("u"), EndReason::Forbidden);
        let ended = subscription.next().await.unwrap_err();
        assert!(matches!(ended, SubscriptionError::Ended { reason: EndReason::Forbidden, .. }), "{ended}");
    });
}

/// Goal: a refusal ends a topic only if it may, because the topic may have come from another origin. Method: a second client
/// of the relay, whose ticket does not grant the topic.
#[test]
fn a_refusal_ends_a_topic_only_if_it_may() {
    simulate(1, async |sim| {
        let origin = sim.server(server_config());
        let mut publisher = origin.publisher_with(topic("t"), Some(EPOCH), retaining(1)).unwrap();
        let relayer = Relayer::start(&sim, 1, &sim.ticket(), retaining(1), false).await;
        let _following = relayer.follow(latest());
        publish_at(&origin, &mut publisher, 1).await;
        let status = relayer.server.status_reader();
        eventually("the version has passed", || status.has_version()).await;
        let grant = Grant { topics: Glob::new("u").unwrap(), verbs: Verbs::CONSUME };
        let narrow = sim.bare_ticket().with_token(token_with(2, vec![grant]));
        for may_refuse in [false, true] {
            let forward = relayer.relay.forward_of(None, move |_| may_refuse);
            let client = Arc::new(connect_with(&sim, 1, &narrow, forward).await);
            let refused = follow(&client, &relayer.relay, latest()).await.unwrap();
            let is_refusal = matches!(refused, SubscriptionError::Ended { reason: EndReason::Forbidden, .. });
            assert!(is_refusal, "{refused}");
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(status.has_version(), !may_refuse);
        }
    });
}

/// Goal: relays form no ring. Method: a relay subscribes at a relay of its own; the error names it, and `list` shows the path.
#[test]
fn a_ring_is_refused_by_name() {
    simulate(1, async |sim| {
        let origin = sim.server(server_config());
        let mut publisher = origin.publisher_with(topic("t"), Some(EPOCH), retaining(1)).unwrap();
        let first = Relayer::start(&sim, 1, &sim.ticket(), retaining(1), false).await;
        let second = Relayer::start(&sim, 2, &first.ticket(&sim), retaining(1), false).await;
        let (_first, _second) = (first.follow(latest()), second.follow(latest()));
        publish_at(&origin, &mut publisher, 1).await;
        let back = Arc::new(connect(&sim, 1, &second.ticket(&sim), &first.relay).await);
        let status = second.server.status_reader();
        eventually("the version has passed", || status.has_version()).await;
        let refused = timeout(Duration::from_secs(20), follow(&back, &first.relay, latest())).await;
        let refused = refused.unwrap().unwrap();
        let SubscriptionError::NotRelayed { id: version, reason } = &refused else { panic!("{refused}") };
        assert_eq!((version.version, *reason), (Version(1), PathError::Ring(id(1))));
        assert!(refused.to_string().contains(&id(1).to_string()), "{refused}");
        let listed = back.list().await.unwrap();
        assert_eq!(listed[0].relays.relays(), [id(1), id(2)]);
    });
}
