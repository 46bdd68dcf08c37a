//! Mode `every` as a whole: random readers that restart, on random networks, and what each of them sees.

use crate::every::{EPOCH, every, name, open};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::Duration;
use tensor_relay_client::{
    Client, ClientError, ConnectError, EndReason, ReaderName, Start, Subscription, SubscriptionError, Version,
};
use tensor_relay_server::{TopicOptions, WhenFull};
use tensor_relay_tests::{
    pair::{Sim, keeping, publish, reconnecting, seeds, server_config, simulate},
    simnet::Path,
    tensors,
};
use tokio::{task::JoinSet, time::sleep};

/// Goal: a reader misses nothing, sees nothing twice and nothing out of order, whatever the network, the other readers
/// and its own restarts do, as long as the publisher waits for it.
/// Method: three readers with random windows, sleeps and restarts; random partitions and paths; a publisher that blocks.
#[test]
fn nothing_is_missed_while_the_publisher_waits() {
    for seed in seeds(150) {
        simulate(seed, async |sim| follow_everything(sim, WhenFull::Block).await);
    }
}

/// Goal: as above, but a reader that the publisher could not wait for is told, and so is what it missed.
/// Method: as above, with short waits for readers, and places that are not kept long.
#[test]
fn what_is_missed_is_told() {
    for seed in seeds(150) {
        simulate(10_000 + seed, async |sim| follow_everything(sim, WhenFull::Evict).await);
    }
}

async fn follow_everything(sim: Sim, when_full: WhenFull) {
    let mut dice = ChaCha8Rng::seed_from_u64(!sim.seed);
    let block = when_full == WhenFull::Block;
    let server = sim.server(tensor_relay_server::Config {
        chunk_bytes: 16 << 10,
        reader_linger: Duration::from_secs(if block { 3_600 } else { dice.random_range(0..40) }),
        ..server_config()
    });
    let options = TopicOptions {
        when_full,
        publish_timeout: Duration::from_millis(dice.random_range(100..20_000)),
        ..keeping(dice.random_range(1..=6))
    };
    let mut publisher = open(&server, options);
    let fastest = Duration::from_millis(dice.random_range(1..20));
    let loss = [0.0, 0.01, 0.03][dice.random_range(0..3)];
    let jitter = Duration::from_millis(dice.random_range(0..10));
    sim.net
        .set_path(Path { delay: fastest..=fastest + jitter, loss, ..Path::default() });

    let versions = dice.random_range(8..25);
    let mut readers = JoinSet::new();
    for number in 1..=3 {
        let client = connect(&sim, number).await;
        let reader = Reader {
            name: name(&format!("reader-{number}")),
            client,
            window: dice.random_range(1..5),
            slowness_ms: [5, 200, 3_000][dice.random_range(0..3)],
            restarts: [0.0, 0.1, 0.3][dice.random_range(0..3)],
            block,
            dice: ChaCha8Rng::from_rng(&mut dice),
            connector: sim.connector(number),
            ticket: sim.ticket(),
        };
        let subscription = reader.subscribe(Start::Oldest).await;
        reader.client.list().await.unwrap(); // The server has heard of it.
        readers.spawn(reader.run(subscription, versions));
    }

    let mut chaos = ChaCha8Rng::from_rng(&mut dice);
    let publishing = async {
        for version in 1..=versions {
            let bytes = dice.random_range(1..100_000);
            publish(&server, &mut publisher, version, bytes).await;
            sleep(Duration::from_millis(dice.random_range(0..800))).await;
        }
    };
    let breaking = async {
        loop {
            sleep(Duration::from_millis(chaos.random_range(0..8_000))).await;
            let number = chaos.random_range(1..=3);
            sim.cut(number);
            sleep(Duration::from_millis(chaos.random_range(0..20_000))).await;
            sim.mend(number);
        }
    };
    tokio::select! {
        () = publishing => {}
        () = breaking => {}
    }
    (1..=3).for_each(|number| sim.mend(number));
    publisher.end();
    let mut losses = 0;
    while let Some(lost) = readers.join_next().await {
        losses += lost.unwrap();
    }
    let evicted = server.stats().evicted;
    assert!(!block || losses == 0 && evicted == 0, "{losses} losses, {evicted} evicted");
}

/// A flipped coin in a handshake may end it; a client tries again.
async fn connect(sim: &Sim, number: u8) -> Client {
    connect_with(&sim.connector(number), &sim.ticket()).await
}

async fn connect_with(
    connector: &tensor_relay_client::Connector,
    ticket: &tensor_relay_client::Ticket,
) -> Client {
    for _ in 0..20 {
        match Client::connect_with(connector, ticket, reconnecting()).await {
            Ok(client) => return client,
            Err(ClientError::Connect(
                ConnectError::Lane(_) | ConnectError::Unreachable { .. } | ConnectError::NoTcp { .. },
            )) => {}
            Err(ClientError::NoWelcome { .. } | ClientError::Lane(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
    panic!("twenty attempts failed");
}

/// One reader, with all its restarts.
struct Reader {
    name: ReaderName,
    client: Client,
    window: u32,
    slowness_ms: u64,
    /// How likely it is to restart after a version.
    restarts: f64,
    /// Whether the publisher waits for it, so that it misses nothing.
    block: bool,
    dice: ChaCha8Rng,
    connector: tensor_relay_client::Connector,
    ticket: tensor_relay_client::Ticket,
}

/// Where a reader is, and what may come next.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Expect {
    /// Exactly this version, or a gap that says so.
    Exactly(u64),
    /// This version or an earlier one, because its last acknowledgement may have been lost with a connection.
    AtMost(u64),
    /// It was evicted and says nothing of where it was, so anything may come.
    Anything,
}

impl Reader {
    async fn subscribe(&self, start: Start) -> Subscription {
        let request = every().window(self.window).reader(self.name.clone()).from(start);
        self.client.subscribe_to(request).await.unwrap()
    }

    /// Follows until the topic ends; returns how often something was missed.
    async fn run(mut self, mut subscription: Subscription, versions: u64) -> u64 {
        // Who has got nothing yet has nothing to miss: after an eviction it begins at the oldest that is left.
        let first = if self.block { Expect::Exactly(1) } else { Expect::Anything };
        let (mut last, mut expect, mut losses) = (0, first, 0);
        loop {
            match subscription.next().await {
                Ok(snapshot) => {
                    tensors::check(&snapshot);
                    assert_eq!((snapshot.skipped(), snapshot.is_new_epoch()), (0, false));
                    let found = snapshot.id().version.0;
                    match expect {
                        Expect::Exactly(version) => assert_eq!(found, version, "{}", self.name),
                        Expect::AtMost(version) => {
                            assert!(found <= version, "{found} > {version}, {}", self.name);
                        }
                        Expect::Anything => {}
                    }
                    (last, expect) = (found, Expect::Exactly(found + 1));
                }
                Err(SubscriptionError::Gap(gap)) => {
                    assert!(!self.block, "{gap}");
                    let after = gap.after.as_ref().unwrap().version.0;
                    let Expect::Exactly(version) = expect else { panic!("{gap} after {expect:?}") };
                    assert_eq!(after + 1, version, "{gap}");
                    assert!(gap.found.version.0 > version && gap.missing() > Some(0), "{gap}");
                    expect = Expect::Exactly(gap.found.version.0);
                    losses += 1;
                    continue;
                }
                Err(SubscriptionError::Ended { reason: EndReason::TooSlow, .. }) => {
                    assert!(!self.block, "nobody is too slow for a publisher that waits");
                    losses += 1;
                    (subscription, expect) = self.resubscribe(last, losses).await;
                    continue;
                }
                Err(SubscriptionError::Ended { reason: EndReason::TopicEnded, .. }) => {
                    assert!(
                        expect == Expect::Exactly(versions + 1) || losses > 0,
                        "{expect:?} of {versions}"
                    );
                    return losses;
                }
                Err(error) => panic!("{error}"),
            }
            sleep(Duration::from_millis(self.dice.random_range(0..self.slowness_ms))).await;
            if last < versions && self.dice.random_bool(self.restarts) {
                let acknowledged = self.dice.random_bool(0.5);
                if acknowledged {
                    subscription.acknowledge();
                }
                drop(subscription);
                if self.dice.random_bool(0.3) {
                    // The whole program starts anew. Its connection may be gone already.
                    self.client.close().await;
                    self.client = connect_with(&self.connector, &self.ticket).await;
                }
                sleep(Duration::from_millis(self.dice.random_range(0..2_000))).await;
                (subscription, expect) = self.resubscribe(last, losses + u64::from(!self.block)).await;
            }
        }
    }

    async fn resubscribe(&mut self, last: u64, losses: u64) -> (Subscription, Expect) {
        if last > 0 && self.dice.random_bool(0.5) {
            let start = Start::At(Some(EPOCH), Version(last + 1));
            return (self.subscribe(start).await, Expect::Exactly(last + 1));
        }
        // Without a word the place decides; one that was lost begins at the oldest that is left.
        let expect = if losses > 0 { Expect::Anything } else { Expect::AtMost(last + 1) };
        (self.subscribe(Start::Oldest).await, expect)
    }
}
