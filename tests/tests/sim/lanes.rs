//! Sessions of several lanes: chunks use them all, and a lane that is lost costs nothing but time.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{
    net::{IpAddr, Ipv4Addr},
    pin::pin,
    time::Duration,
};
use tensor_relay_client::{Client, Config, Lanes, Subscription, Version};
use tensor_relay_protocol::{CodecId, Epoch};
use tensor_relay_server::{Server, TopicOptions};
use tensor_relay_tests::{
    pair::{
        CHUNK_BYTES, Sim, client_config, eventually, publish, reconnecting, seeds, server_config, simulate,
        topic, transport,
    },
    simnet::{Host, Path},
    tensors,
};
use tensor_relay_transport::Transport;
use tokio::time::{sleep, timeout};

const BYTES: u64 = 4 << 20;

/// The address of network card `card` of the client with this number: lane `card` begins there.
fn card(number: u8, card: u8) -> IpAddr {
    Ipv4Addr::new(10, card, 1, number).into()
}

fn several(number: u8, lanes: u8, config: Config) -> Config {
    let lane_addresses = (0..lanes).map(|at| card(number, at)).collect();
    Config { lanes: Lanes::Fixed(lanes.into()), lane_addresses, ..config }
}

/// The host behind one lane, which can be cut off alone.
fn lane_host(sim: &Sim, number: u8, lane: u8) -> Host {
    sim.net.host(card(number, lane))
}

fn cut(sim: &Sim, number: u8, lane: u8) {
    sim.net.partition(&sim.server_host(), &lane_host(sim, number, lane));
}

fn mend(sim: &Sim, number: u8, lane: u8) {
    sim.net.repair(&sim.server_host(), &lane_host(sim, number, lane));
}

/// A path on which a version takes long enough to be caught in the middle.
fn slow_path(sim: &Sim) {
    let delay = Duration::from_millis(20);
    sim.net.set_path(Path { delay: delay..=delay, ..Path::default() });
}

async fn following(sim: &Sim, number: u8, config: Config, lanes: usize) -> (Client, Subscription) {
    let client = sim.client(number, config).await.unwrap();
    eventually("all lanes have joined", || client.lanes().len() == lanes).await;
    let subscription = client.subscribe(&topic("t")).await.unwrap();
    client.list().await.unwrap();
    (client, subscription)
}

async fn comes_to(subscription: &Subscription, bytes: u64) {
    eventually("the transfer runs", || subscription.progress().verified_bytes >= bytes).await;
}

/// What each lane of `client` received.
fn received(client: &Client) -> Vec<u64> {
    client.lanes().iter().map(|lane| lane.received_bytes).collect()
}

/// Goal: what several lanes bring is what was published, and each of them brings a share.
/// Method: one, two and four lanes, raw and encoded, whole and with a selection that came before.
#[test]
fn every_lane_carries_a_share() {
    for (seed, lanes) in [(1, 1), (2, 2), (3, 4)] {
        for codec in [CodecId::Raw, CodecId::Zstd] {
            simulate(seed, async |sim| {
                let server =
                    sim.server(tensor_relay_server::Config { codec: codec.into(), ..server_config() });
                slow_path(&sim);
                let mut publisher = server.publisher(topic("t")).unwrap();
                let (client, mut subscription) =
                    following(&sim, 1, several(1, lanes, client_config()), lanes.into()).await;
                let before = received(&client);
                for version in 1..=3 {
                    publish(&server, &mut publisher, version, BYTES).await;
                    tensors::check(&subscription.next().await.unwrap());
                }
                let shares: Vec<u64> =
                    received(&client).iter().zip(before).map(|(now, then)| now - then).collect();
                assert_eq!(shares.len(), usize::from(lanes));
                let fair = 3 * BYTES / u64::from(lanes);
                assert!(shares.iter().all(|share| (fair / 2..fair * 2).contains(share)), "{shares:?}");
                assert_eq!(server.stats().sessions, 1, "lanes are no sessions");
            });
        }
    }
}

/// Goal: a lane that dies in the middle of a version costs neither the version nor the session, and comes back.
/// Method: cut one or two of four lanes at a random place for longer than the idle timeout, and publish on.
#[test]
fn a_lane_that_dies() {
    for seed in seeds(6) {
        simulate(seed, async |sim| {
            let mut dice = ChaCha8Rng::seed_from_u64(seed);
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = server.publisher(topic("t")).unwrap();
            let (client, mut subscription) = following(&sim, 1, several(1, 4, client_config()), 4).await;
            publish(&server, &mut publisher, 1, BYTES).await;
            comes_to(&subscription, dice.random_range(1..BYTES / 2)).await;
            let dead: Vec<u8> = if dice.random_bool(0.5) { vec![1] } else { vec![2, 3] };
            dead.iter().for_each(|lane| cut(&sim, 1, *lane));
            let snapshot = subscription.next().await.unwrap();
            tensors::check(&snapshot);
            assert_eq!((snapshot.receipt().resumed, client.reconnects()), (0, 0));
            // Not more than what was on its way on the dead lanes came twice.
            let lost = dead.len() as u64 * 8 * u64::from(CHUNK_BYTES);
            assert!(snapshot.receipt().wire_bytes <= BYTES + lost, "{:?}", snapshot.receipt());
            sleep(Duration::from_secs(5)).await; // Of the idle timeout.
            eventually("the dead lanes are known", || client.lanes().len() == 4 - dead.len()).await;
            publish(&server, &mut publisher, 2, BYTES).await;
            tensors::check(&subscription.next().await.unwrap());

            dead.iter().for_each(|lane| mend(&sim, 1, *lane));
            for _ in 0..3 {
                sleep(Duration::from_secs(5)).await; // The server's idle timeout, and the longest wait of the client's.
            }
            eventually("the lanes are back", || client.lanes().len() == 4).await;
            publish(&server, &mut publisher, 3, BYTES).await;
            let snapshot = subscription.next().await.unwrap();
            tensors::check(&snapshot);
            assert_eq!((snapshot.skipped(), server.stats().sessions), (0, 1));
        });
    }
}

/// Goal: what a lane that stands still took with it comes over the others long before it counts as dead.
/// Method: cut one of two lanes for four seconds, in the middle of a version, and look when that is whole.
#[test]
fn a_lane_that_stands_still() {
    for seed in seeds(4) {
        simulate(seed, async |sim| {
            let mut dice = ChaCha8Rng::seed_from_u64(seed);
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = server.publisher(topic("t")).unwrap();
            let (client, mut subscription) = following(&sim, 1, several(1, 2, client_config()), 2).await;
            publish(&server, &mut publisher, 1, BYTES).await;
            comes_to(&subscription, dice.random_range(1..BYTES / 2)).await;
            cut(&sim, 1, 1);
            let began = sim.elapsed();
            let snapshot = subscription.next().await.unwrap();
            tensors::check(&snapshot);
            let took = sim.elapsed() - began;
            let most_ms = match transport() {
                Transport::Tcp => 12_000, // Only the idle timeout tells, since acknowledgements are the system's.
                _ => 3_500,
            };
            assert!(took < Duration::from_millis(most_ms), "{took:?}");
            sleep(Duration::from_secs(4).saturating_sub(took)).await;
            mend(&sim, 1, 1);
            sleep(Duration::from_secs(9)).await; // Its idle timeout, and the longest wait before another one is joined.
            eventually("a lane has joined in its place", || client.lanes().len() == 2).await;
            for version in 2..=4 {
                publish(&server, &mut publisher, version, BYTES).await;
                tensors::check(&subscription.next().await.unwrap());
            }
            assert_eq!((client.reconnects(), server.stats().sessions), (0, 1));
        });
    }
}

/// Goal: a lane whose `Joined` never comes costs no session, though the server uses the lane: what it sent there comes again.
/// Method: cut the second lane at each moment of its joining, while versions are published.
#[test]
fn a_lane_that_is_cut_off_while_it_joins() {
    for millis in (0..160).step_by(10) {
        simulate(millis, async |sim| {
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = server.publisher(topic("t")).unwrap();
            let client = sim.client(1, several(1, 2, client_config())).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            sleep(Duration::from_millis(millis)).await;
            cut(&sim, 1, 1);
            for version in 1..=2 {
                publish(&server, &mut publisher, version, 1 << 20).await;
                let snapshot = subscription.next().await.unwrap();
                tensors::check(&snapshot);
                assert_eq!((snapshot.id().version, snapshot.skipped()), (Version(version), 0));
            }
            mend(&sim, 1, 1);
            sleep(Duration::from_secs(9)).await; // The longest idle timeout, before the lane is tried again.
            eventually("the lane has joined", || client.lanes().len() == 2).await;
            publish(&server, &mut publisher, 3, 1 << 20).await;
            tensors::check(&subscription.next().await.unwrap());
            assert_eq!((client.reconnects(), server.stats().sessions), (0, 1));
        });
    }
}

/// Goal: with the first lane the session is lost, and resumed with all its lanes; what came over any stays.
/// Method: cut every lane, or the first one alone, in the middle of a version for longer than the idle timeout.
#[test]
fn the_first_lane_is_the_session() {
    for seed in seeds(4) {
        simulate(seed, async |sim| {
            let mut dice = ChaCha8Rng::seed_from_u64(seed);
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = server
                .publisher_with(topic("t"), Some(Epoch(1)), TopicOptions::default())
                .unwrap();
            let (client, mut subscription) = following(&sim, 1, several(1, 3, reconnecting()), 3).await;
            publish(&server, &mut publisher, 1, BYTES).await;
            comes_to(&subscription, dice.random_range(1..BYTES / 2)).await;
            let lost = if dice.random_bool(0.5) { 0..1 } else { 0..3 };
            lost.clone().for_each(|lane| cut(&sim, 1, lane));
            sleep(Duration::from_secs(15)).await;
            lost.for_each(|lane| mend(&sim, 1, lane));
            let snapshot = subscription.next().await.unwrap();
            tensors::check(&snapshot);
            assert_eq!((snapshot.receipt().resumed, client.reconnects()), (1, 1));
            assert!(
                snapshot.receipt().wire_bytes <= BYTES + 3 * 8 * u64::from(CHUNK_BYTES),
                "{:?}",
                snapshot.receipt()
            );
            eventually("all lanes are back", || client.lanes().len() == 3).await;
            publish(&server, &mut publisher, 2, BYTES).await;
            tensors::check(&subscription.next().await.unwrap());
            eventually("one session is left", || server.stats().sessions == 1).await;
        });
    }
}

/// Goal: lanes of one session never mix with those of another, and a chunk is encoded once for all lanes of all.
/// Method: two subscribers with three and two lanes, of which one loses a lane, and a third with one.
#[test]
fn several_sessions_of_several_lanes() {
    for seed in seeds(4) {
        simulate(seed, async |sim| {
            let config = tensor_relay_server::Config { codec: CodecId::Zstd.into(), ..server_config() };
            let server = sim.server(config);
            slow_path(&sim);
            let mut publisher = server.publisher(topic("t")).unwrap();
            let mut all = vec![];
            for (number, lanes) in [(1, 3), (2, 2), (3, 1)] {
                all.push(
                    following(&sim, number, several(number, lanes, client_config()), lanes.into()).await,
                );
            }
            publish_smooth(&server, &mut publisher, 1).await;
            comes_to(&all[0].1, BYTES / 8).await;
            cut(&sim, 1, 2);
            for (_, subscription) in &mut all {
                tensors::check(&subscription.next().await.unwrap());
            }
            let encoder = server.stats().encoder;
            assert_eq!(encoder.encoded, BYTES / u64::from(CHUNK_BYTES), "each chunk once: {encoder:?}");
            assert_eq!(all[1].0.lanes().len(), 2);
            eventually("no transfer is left", || server.stats().transfers == 0).await;
        });
    }
}

async fn publish_smooth(server: &Server, publisher: &mut tensor_relay_server::Publisher, version: u64) {
    let staged = tensors::stage(server, vec![tensors::smooth("s", BYTES)], version);
    publisher.publish(staged, tensors::metadata(version)).await.unwrap();
}

/// Goal: a server that allows fewer lanes, or one alone, is served with those.
/// Method: ask for four where two and one are allowed.
#[test]
fn as_many_as_the_server_allows() {
    for (lanes_max, found) in [(2, 2), (1, 1)] {
        simulate(1, async |sim| {
            let server = sim.server(tensor_relay_server::Config { lanes_max, ..server_config() });
            let mut publisher = server.publisher(topic("t")).unwrap();
            publish(&server, &mut publisher, 1, BYTES).await;
            let (client, mut subscription) = following(&sim, 1, several(1, 4, client_config()), found).await;
            sleep(Duration::from_secs(20)).await;
            let snapshot = subscription.next().await.unwrap();
            tensors::check(&snapshot);
            assert_eq!((snapshot.id().version, client.lanes().len()), (Version(1), found));
        });
    }
}

/// Goal: a session whose number of lanes is sought begins with one, has twice as many as long as a large version comes
/// faster so, and no more than it may; and a small version gets none.
/// Method: a long way, on which the chunks on their way bound the rate of each lane; two megabytes, then 64.
#[test]
fn lanes_are_added_while_that_pays() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = server.publisher(topic("t")).unwrap();
        let config = Config { lanes: Lanes::UpTo(4), ..several(1, 4, client_config()) };
        let (client, mut subscription) = following(&sim, 1, config, 1).await;
        publish(&server, &mut publisher, 1, 2 << 20).await;
        tensors::check(&subscription.next().await.unwrap());
        assert_eq!(client.lanes().len(), 1);

        publish(&server, &mut publisher, 2, 64 << 20).await;
        let mut next = pin!(subscription.next());
        let mut counts = vec![1];
        let snapshot = loop {
            if let Ok(snapshot) = timeout(Duration::from_millis(50), &mut next).await {
                break snapshot.unwrap();
            }
            let lanes = client.lanes().len();
            if counts.last() != Some(&lanes) {
                counts.push(lanes);
            }
        };
        tensors::check(&snapshot);
        // Those that are wanted together join one after the other.
        assert_eq!(counts.iter().copied().max(), Some(4), "{counts:?}");
        assert!(counts.is_sorted() && counts.contains(&2), "{counts:?}");
        assert!(received(&client).into_iter().all(|bytes| bytes > 8 << 20), "{:?}", received(&client));
    });
}

/// Goal: a client that leaves, and a server that ends, take all their lanes with them at once.
/// Method: close a client with three lanes; shut a server down under another one.
#[test]
fn all_lanes_end_together() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        publish(&server, &mut publisher, 1, BYTES).await;
        let (client, mut subscription) = following(&sim, 1, several(1, 3, client_config()), 3).await;
        tensors::check(&subscription.next().await.unwrap());
        client.close().await;
        eventually("the session is gone", || server.stats().sessions == 0).await;

        let (_client, mut subscription) = following(&sim, 2, several(2, 3, client_config()), 3).await;
        tensors::check(&subscription.next().await.unwrap());
        let began = sim.elapsed();
        assert!(server.shutdown(Duration::from_secs(5)).await);
        assert!(sim.elapsed() - began < Duration::from_secs(3), "{:?}", sim.elapsed() - began);
        subscription.next().await.unwrap_err();
    });
}

/// Goal: on bad networks too, nothing is torn, missing or twice.
/// Method: loss, reordering and duplication, while random lanes come and go, in mode `latest` with every version awaited.
#[test]
fn random_lanes_on_bad_networks() {
    for seed in seeds(6) {
        simulate(seed, async |sim| {
            let mut dice = ChaCha8Rng::seed_from_u64(seed);
            let server = sim.server(server_config());
            let mut publisher = server.publisher(topic("t")).unwrap();
            let lanes = dice.random_range(2..=4);
            let (client, mut subscription) =
                following(&sim, 1, several(1, lanes, client_config()), lanes.into()).await;
            let millis = |range| Duration::from_millis(range);
            let delay = millis(dice.random_range(1..5))..=millis(dice.random_range(5..30));
            let (loss, duplication) = (dice.random_range(0.0..0.02), dice.random_range(0.0..0.05));
            sim.net.set_path(Path { delay, loss, duplication, ..Path::default() });
            for version in 1..=6 {
                let lane = dice.random_range(1..lanes);
                let is_cut = dice.random_bool(0.6);
                if is_cut {
                    cut(&sim, 1, lane);
                }
                publish(&server, &mut publisher, version, dice.random_range(1..BYTES / 2)).await;
                let snapshot = subscription.next().await.unwrap();
                tensors::check(&snapshot);
                assert_eq!((snapshot.id().version, snapshot.skipped()), (Version(version), 0));
                if dice.random_bool(0.5) {
                    sleep(Duration::from_millis(dice.random_range(0..15_000))).await;
                }
                mend(&sim, 1, lane);
            }
            assert_eq!(client.reconnects(), 0);
        });
    }
}
