//! Receiving into buffers of the user, and publishing lent tensors.

use crate::{OUTAGE_DURATION, slow_path};
use bytes::Bytes;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{convert::Infallible, ops::Range, pin::pin, sync::Arc, time::Duration};
use tensor_relay_client::{
    BufferError, Buffers, Client, FillCause, FillError, Filled, Request, Start, Subscription,
    SubscriptionError, Version,
};
use tensor_relay_device::HostSource;
use tensor_relay_protocol::{ChunkHash, TensorName, TensorSpec};
use tensor_relay_server::{Borrowed, Publication, Publisher, Server, TopicOptions};
use tensor_relay_tests::{
    pair::{Sim, client_config, eventually, reconnecting, retaining, seeds, server_config, simulate, topic},
    tensors::{self, noise, smooth},
};
use tokio::time::sleep;

const BYTES: u64 = 2 << 20;

/// The deadline for a version to be committed or released: longer than the idle timeout of client and server.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(15);

type Memory = Buffers<Vec<u8>>;

async fn publish(
    server: &Server,
    publisher: &mut Publisher,
    version: u64,
    specs: &[TensorSpec],
) -> Publication {
    let staged = tensors::stage(server, specs.to_vec(), version);
    publisher.publish(staged, tensors::metadata(version)).await.unwrap()
}

async fn subscribe(
    sim: &Sim,
    config: tensor_relay_client::Config,
    request: Request,
) -> (Client, Subscription) {
    let client = sim.client(1, config).await.unwrap();
    let subscription = client.subscribe_to(request).await.unwrap();
    client.list().await.unwrap();
    (client, subscription)
}

/// A buffer for each tensor, filled with bytes that no version has.
fn memory(specs: &[TensorSpec]) -> Memory {
    let buffer = |spec: &TensorSpec| (spec.name.clone(), vec![0xa5; bytes_of(spec) as usize]);
    specs.iter().map(buffer).collect()
}

fn bytes_of(spec: &TensorSpec) -> u64 {
    spec.shape.byte_len(spec.dtype).unwrap()
}

fn content(name: &TensorName, version: u64, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    tensors::write_content(name.as_str(), version, &mut out);
    out
}

/// Whether all buffers have the content of `version`.
fn holds(buffers: &Memory, version: u64) -> bool {
    buffers
        .iter()
        .all(|(name, buffer)| *buffer == content(name, version, buffer.len()))
}

fn addresses(buffers: &Memory) -> Vec<*const u8> {
    buffers.iter().map(|(_, buffer)| buffer.as_ptr()).collect()
}

/// Receives into `buffers`, and runs `action` as soon as a part of the version has arrived.
async fn fill_while(
    subscription: &mut Subscription,
    buffers: Memory,
    version: u64,
    action: impl AsyncFnOnce(),
) -> Result<Filled<Vec<u8>>, FillError<Vec<u8>>> {
    let progress = subscription.progress_reader();
    let begun = || progress().version == version && progress().verified_bytes > 0;
    let (filled, ()) = tokio::join!(subscription.next_into(buffers), async {
        eventually("the transfer runs", begun).await;
        action().await;
    });
    filled
}

/// Goal: tensors of any kind arrive in the user's own memory, version after version, in both modes, without memory for
/// a second version. Method: random tensors, the same buffers thirty times, and a budget of half a version.
#[test]
fn versions_arrive_in_the_users_memory() {
    for seed in seeds(10) {
        simulate(seed, async |sim| {
            let specs = tensors::random(&mut ChaCha8Rng::seed_from_u64(seed), BYTES);
            let server = sim.server(server_config());
            let mut publisher = server.publisher(topic("t")).unwrap();
            let request = match seed % 2 {
                0 => Request::latest(topic("t")),
                _ => Request::every(topic("t")).window(1),
            };
            let config = tensor_relay_client::Config { memory_bytes: 1 << 20, ..client_config() };
            let (_client, mut subscription) = subscribe(&sim, config, request).await;
            let mut buffers = memory(&specs);
            let before = addresses(&buffers);
            for version in 1..=30 {
                // In mode `latest` the buffers are passed before the version is sent.
                let publishing = publish(&server, &mut publisher, version, &specs);
                let (filled, _) = tokio::join!(subscription.next_into(buffers), async {
                    sleep(Duration::from_millis(10)).await;
                    publishing.await
                });
                let filled = filled.unwrap();
                assert_eq!(
                    (filled.version().id().version, filled.version().skipped()),
                    (Version(version), 0)
                );
                assert!(!filled.was_copied() && filled.gap().is_none());
                assert_eq!(filled.version().metadata(), tensors::metadata(version));
                assert!(holds(filled.buffers(), version), "version {version}");
                buffers = filled.into_buffers();
                assert_eq!(addresses(&buffers), before);
            }
        });
    }
}

/// Goal: in mode `every` with a window of one, nothing is received while the user holds the buffers, and nothing is
/// lost. Method: all versions are published before any is requested.
#[test]
fn versions_waiting_at_the_server_are_not_copied() {
    simulate(1, async |sim| {
        let specs = [noise("a", BYTES), noise("b", 1000)];
        let server = sim.server(server_config());
        let options = TopicOptions {
            keep: tensor_relay_server::Keep { versions: 8, bytes: u64::MAX },
            ..TopicOptions::default()
        };
        let mut publisher = server.publisher_with(topic("t"), None, options).unwrap();
        let (_client, mut subscription) =
            subscribe(&sim, client_config(), Request::every(topic("t")).window(1)).await;
        for version in 1..=6 {
            publish(&server, &mut publisher, version, &specs).await;
        }
        let mut buffers = memory(&specs);
        for version in 1..=6 {
            sleep(Duration::from_secs(60)).await;
            let filled = subscription.next_into(buffers).await.unwrap();
            assert_eq!(filled.version().id().version, Version(version));
            assert_eq!(filled.was_copied(), version == 1, "the first version is sent before it is requested");
            assert!(filled.gap().is_none() && holds(filled.buffers(), version));
            buffers = filled.into_buffers();
        }
    });
}

/// Goal: the copy of a snapshot survives a later failure, and a refused copy changes nothing. Method: copy with wrong
/// names and sizes, then with the right ones; lose the connection during the next version.
#[test]
fn a_failure_leaves_copied_memory_unchanged() {
    simulate(2, async |sim| {
        let specs = [noise("a", BYTES), noise("b", 1000)];
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = server.publisher(topic("t")).unwrap();
        let (_client, mut subscription) = subscribe(&sim, client_config(), Request::latest(topic("t"))).await;
        publish(&server, &mut publisher, 1, &specs).await;
        let snapshot = tensors::on_host(&subscription.next().await.unwrap());
        let (mut a, mut b) = (vec![0; BYTES as usize], vec![0; 1000]);
        let short = &mut [0; 999][..];
        let refused = snapshot.copy_into(&mut [("a", &mut a), ("b", short)]).unwrap_err();
        let wrong = BufferError::WrongSize { name: "b".into(), expected_bytes: 1000, given_bytes: 999 };
        assert_eq!(refused, wrong);
        let refused = snapshot.copy_into(&mut [("a", &mut a), ("c", &mut b)]).unwrap_err();
        assert_eq!(refused, BufferError::NoSuchTensor { name: "c".into() });
        assert!(a.iter().all(|byte| *byte == 0), "a refused copy writes nothing");
        snapshot.copy_into(&mut [("b", &mut b), ("a", &mut a)]).unwrap();

        publish(&server, &mut publisher, 2, &specs).await;
        eventually("the transfer runs", || subscription.progress().verified_bytes > 0).await;
        sim.cut(1);
        assert!(matches!(subscription.next().await, Err(SubscriptionError::Disconnected { .. })));
        assert_eq!((a, b), (content(&specs[0].name, 1, BYTES as usize), content(&specs[1].name, 1, 1000)));
    });
}

/// Goal: a failure during a transfer reports that the buffers are torn, and by which version; a failure before the
/// transfer reports that they are not. Method: cut the network during a transfer, or before one.
#[test]
fn a_failure_reports_whether_the_buffers_are_torn() {
    for torn in [true, false] {
        simulate(3, async |sim| {
            let specs = [noise("a", BYTES), noise("b", 1000)];
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = server.publisher(topic("t")).unwrap();
            let (_client, mut subscription) =
                subscribe(&sim, client_config(), Request::latest(topic("t"))).await;
            publish(&server, &mut publisher, 1, &specs).await;
            let filled = subscription.next_into(memory(&specs)).await.unwrap();
            let (id, buffers) = (filled.version().id().clone(), filled.into_buffers());
            let before = addresses(&buffers);
            let error = if torn {
                publish(&server, &mut publisher, 2, &specs).await;
                fill_while(&mut subscription, buffers, 2, async || sim.cut(1))
                    .await
                    .unwrap_err()
            } else {
                sim.cut(1);
                subscription.next_into(buffers).await.unwrap_err()
            };
            assert!(error.is_final() && matches!(error.cause, FillCause::Subscription(_)), "{error}");
            let torn_by = error.torn.as_ref().map(|id| id.version);
            assert_eq!(torn_by, torn.then_some(Version(2)), "{error}");
            assert_eq!(error.to_string().contains("torn"), torn);
            assert_eq!((holds(&error.buffers, 1), addresses(&error.buffers)), (!torn, before));
            let again = subscription.next_into(error.buffers).await.unwrap_err();
            assert!(again.torn.is_none() && again.is_final(), "{again}, after {id}");
        });
    }
}

/// Goal: bytes that do not match their hash are never reported as a version, although they may be in the buffers.
/// Method: a source whose last chunk differs from its hash.
#[test]
fn a_damaged_version_is_reported() {
    simulate(4, async |sim| {
        let specs = [noise("a", BYTES)];
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let (_client, mut subscription) = subscribe(&sim, client_config(), Request::latest(topic("t"))).await;
        let damaged = Borrowed::from_hashed_source::<Infallible>(
            &server.staging(),
            specs.to_vec(),
            vec![],
            |manifest| {
                let bytes = content(&specs[0].name, 1, BYTES as usize);
                let hash =
                    |range: Range<u64>| ChunkHash::of(&bytes[range.start as usize..range.end as usize]);
                let mut hashes: Vec<_> = manifest.chunking().iter().map(|(_, range)| hash(range)).collect();
                hashes.last_mut().unwrap().0[7] ^= 1;
                Ok((Arc::new(HostSource::new(bytes.into())), hashes))
            },
        );
        let (error, _) = tokio::join!(subscription.next_into(memory(&specs)), async {
            sleep(Duration::from_millis(10)).await;
            publisher.publish(damaged.unwrap(), tensors::metadata(1)).await.unwrap()
        });
        let error = error.unwrap_err();
        let FillCause::Subscription(SubscriptionError::Corrupt { id, .. }) = &error.cause else {
            panic!("{error}")
        };
        assert_eq!((id.version, error.torn.as_ref()), (Version(1), Some(id)));
        assert_eq!((error.buffers.len(), server.stats().committed), (1, 0));
    });
}

/// Goal: a version is continued in the same buffers after a reconnect. Method: cut the network during a transfer for
/// longer than the idle timeout.
#[test]
fn a_resumed_version_is_not_torn() {
    for seed in seeds(5) {
        simulate(seed, async |sim| {
            let specs = [noise("a", BYTES), smooth("b", 100_000), noise("c", 1)];
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = server.publisher(topic("t")).unwrap();
            let (_client, mut subscription) =
                subscribe(&sim, reconnecting(), Request::latest(topic("t"))).await;
            let filled =
                fill_while_publishing(&sim, &server, &mut publisher, &mut subscription, &specs).await;
            assert_eq!((filled.version().receipt().resumed, filled.was_copied()), (1, false));
            assert!(
                filled.version().receipt().wire_bytes < BYTES + BYTES / 4,
                "{:?}",
                filled.version().receipt()
            );
            assert!(holds(filled.buffers(), 1));
        });
    }
}

async fn fill_while_publishing(
    sim: &Sim,
    server: &Server,
    publisher: &mut Publisher,
    subscription: &mut Subscription,
    specs: &[TensorSpec],
) -> Filled<Vec<u8>> {
    let progress = subscription.progress_reader();
    let (filled, ()) = tokio::join!(subscription.next_into(memory(specs)), async {
        sleep(Duration::from_millis(100)).await;
        publish(server, publisher, 1, specs).await;
        eventually("the transfer runs", || progress().verified_bytes > BYTES / 2).await;
        sim.cut(1);
        sleep(OUTAGE_DURATION).await;
        sim.mend(1);
    });
    filled.unwrap()
}

/// Goal: a version that arrived before its buffers is copied to them; if they do not fit, it waits for others. Method:
/// buffers that are too small, of an unknown name, and then the right ones.
#[test]
fn a_version_waits_for_buffers_that_fit() {
    simulate(6, async |sim| {
        let specs = [noise("a", BYTES), noise("b", 1000)];
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let (_client, mut subscription) = subscribe(&sim, client_config(), Request::latest(topic("t"))).await;
        publish(&server, &mut publisher, 1, &specs).await;
        for wrong in [noise("b", 999), noise("c", 1000)] {
            let wrong = [noise("a", BYTES), wrong];
            let error = subscription.next_into(memory(&wrong)).await.unwrap_err();
            assert!(matches!(error.cause, FillCause::Buffers(_)) && !error.is_final(), "{error}");
            assert!(error.torn.is_none() && error.buffers == memory(&wrong), "{error}");
        }
        let filled = subscription.next_into(memory(&specs)).await.unwrap();
        assert!(filled.was_copied() && holds(filled.buffers(), 1));
    });
}

/// Goal: a cancelled call loses its buffers, but no version. Method: cancel the call before the version arrives, and
/// during its transfer; then request a snapshot.
#[test]
fn a_cancelled_call_loses_no_version() {
    for during_transfer in [false, true] {
        simulate(7, async |sim| {
            let specs = [noise("a", BYTES), noise("b", 1000)];
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = server.publisher(topic("t")).unwrap();
            let (_client, mut subscription) =
                subscribe(&sim, client_config(), Request::every(topic("t")).window(1)).await;
            let progress = subscription.progress_reader();
            {
                let mut fill = pin!(subscription.next_into(memory(&specs)));
                assert!(tokio::time::timeout(Duration::from_millis(100), &mut fill).await.is_err());
                if during_transfer {
                    publish(&server, &mut publisher, 1, &specs).await;
                    let begun = eventually("the transfer runs", || progress().verified_bytes > 0);
                    tokio::select! {
                        filled = &mut fill => panic!("the call ends before it is cancelled: {filled:?}"),
                        () = begun => {}
                    }
                }
            }
            if !during_transfer {
                publish(&server, &mut publisher, 1, &specs).await;
            }
            let snapshot = subscription.next().await.unwrap();
            tensors::check(&snapshot);
            assert_eq!(tensors::on_host(&snapshot).tensors().count(), 2);
        });
    }
}

/// Goal: a call that is stopped during a transfer returns its buffers when nothing writes to them, says that they are
/// torn, and loses no version: the next call has it, whole, and the server counts one commit.
/// Method: stop the call during the transfer, with and without a connection, in each mode and from each start; the next
/// call passes the same buffers.
#[test]
fn a_stopped_call_returns_its_buffers_and_loses_no_version() {
    let requests = [
        Request::latest(topic("t")),
        Request::latest(topic("t")).from(Start::Next),
        Request::every(topic("t")).window(1),
        Request::every(topic("t")).from(Start::Next),
    ];
    for (request, is_cut) in requests
        .into_iter()
        .flat_map(|request| [(request.clone(), false), (request, true)])
    {
        simulate(7, async |sim| {
            let specs = [noise("a", BYTES), noise("b", 1000)];
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = server.publisher(topic("t")).unwrap();
            let (_client, mut subscription) = subscribe(&sim, reconnecting(), request).await;
            let progress = subscription.progress_reader();
            let stop = async {
                sleep(Duration::from_millis(100)).await;
                publish(&server, &mut publisher, 1, &specs).await;
                eventually("the transfer runs", || progress().verified_bytes > 0).await;
                if is_cut {
                    sim.cut(1);
                    sleep(OUTAGE_DURATION).await;
                }
            };
            let error = subscription.next_into_until(memory(&specs), stop).await.unwrap_err();
            assert!(matches!(error.cause, FillCause::Stopped) && !error.is_final(), "{error}");
            assert_eq!(error.torn.as_ref().map(|id| id.version), Some(Version(1)));
            assert_eq!((error.buffers.len(), error.withheld.len()), (2, 0));
            assert!(!holds(&error.buffers, 1) && error.buffers != memory(&specs));
            sim.mend(1);
            let filled = subscription.next_into(error.buffers).await.unwrap();
            assert_eq!((filled.version().id().version, filled.version().skipped()), (Version(1), 0));
            assert!(filled.gap().is_none() && holds(filled.buffers(), 1));
            let (filled, _) = tokio::join!(subscription.next_into(filled.into_buffers()), async {
                sleep(Duration::from_millis(100)).await;
                publish(&server, &mut publisher, 2, &specs).await
            });
            let filled = filled.unwrap();
            assert!(
                filled.version().id().version == Version(2)
                    && !filled.was_copied()
                    && holds(filled.buffers(), 2)
            );
            eventually("both are committed", || server.stats().committed >= 2).await;
            assert_eq!(server.stats().committed, 2, "each once");
        });
    }
}

/// Goal: calls that are stopped at any time lose no version of mode `every`, and never have an old version in buffers
/// that they report as unchanged or whole. Method: calls of random durations during thirty publications.
#[test]
fn calls_stopped_at_any_time_lose_no_version() {
    for seed in seeds(10) {
        simulate(seed, async |sim| {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let specs = [noise("a", BYTES / 8), noise("b", 1000)];
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = server.publisher(topic("t")).unwrap();
            let request = Request::every(topic("t")).window(1);
            let (_client, mut subscription) = subscribe(&sim, client_config(), request).await;
            let publish_all = async {
                for version in 1..=30 {
                    publish(&server, &mut publisher, version, &specs).await;
                }
            };
            let receive_all = async {
                let (mut buffers, mut received) = (memory(&specs), 0);
                while received < 30 {
                    let before = buffers.clone();
                    let stop = sleep(Duration::from_millis(random.random_range(0..400)));
                    match subscription.next_into_until(buffers, stop).await {
                        Ok(filled) => {
                            received += 1;
                            assert_eq!(
                                (filled.version().id().version, filled.gap()),
                                (Version(received), None)
                            );
                            assert!(holds(filled.buffers(), received));
                            buffers = filled.into_buffers();
                        }
                        Err(error) => {
                            assert!(matches!(error.cause, FillCause::Stopped), "{error}");
                            assert!(error.torn.is_some() || error.buffers == before);
                            buffers = error.buffers;
                        }
                    }
                }
            };
            tokio::join!(publish_all, receive_all);
            eventually("all are committed", || server.stats().committed >= 30).await;
            assert_eq!(server.stats().committed, 30, "each once");
        });
    }
}

/// Goal: nothing follows a final error, not even the gap before a discarded version. Method: a version with a gap before
/// it is refused and discarded, and the topic ends.
#[test]
fn the_end_is_final_even_after_a_gap() {
    simulate(7, async |sim| {
        let specs = [noise("a", 1000)];
        let server = sim.server(server_config());
        let mut publisher = server.publisher_with(topic("t"), None, retaining(1)).unwrap();
        for version in 1..=2 {
            publish(&server, &mut publisher, version, &specs).await;
        }
        let request = Request::every(topic("t")).from(Start::At(None, Version(1)));
        let (_client, mut subscription) = subscribe(&sim, client_config(), request).await;
        let refused = subscription.next_into(memory(&[noise("a", 999)])).await.unwrap_err().refused;
        subscription.discard(&refused.expect("the buffers do not fit"));
        publisher.end();
        let error = subscription.next_into(memory(&specs)).await.unwrap_err();
        assert!(error.is_final(), "{error}");
        let error = subscription.next().await.unwrap_err();
        assert!(matches!(error, SubscriptionError::Ended { .. }), "{error}");
    });
}

/// Goal: with buffers for some tensors, and a selection of these, few other bytes are received. Method: a buffer for
/// one of three tensors, with and without a selection.
#[test]
fn a_selection_of_the_buffers_tensors_saves_bytes() {
    for selected in [true, false] {
        simulate(8, async |sim| {
            let specs = [noise("a*", 500_000), noise("ab", 200_000), noise("b", BYTES)];
            let server = sim.server(server_config());
            let mut publisher = server.publisher(topic("t")).unwrap();
            let buffers = memory(&specs[..1]);
            let request = Request::latest(topic("t"));
            let request = if selected { request.select(buffers.selection()) } else { request };
            let (_client, mut subscription) = subscribe(&sim, client_config(), request).await;
            let (filled, _) = tokio::join!(subscription.next_into(buffers), async {
                sleep(Duration::from_millis(10)).await;
                publish(&server, &mut publisher, 1, &specs).await
            });
            let filled = filled.unwrap();
            assert!(holds(filled.buffers(), 1) && !filled.was_copied());
            assert_eq!(
                filled.version().receipt().wire_bytes < 800_000,
                selected,
                "{:?}",
                filled.version().receipt()
            );
        });
    }
}

/// Goal: after the server withdraws a version during its transfer, the next one arrives in the same buffers. Method: a
/// release timeout of zero; withdraw the version, and publish another.
#[test]
fn the_version_after_a_withdrawn_one_fills_the_same_buffers() {
    simulate(9, async |sim| {
        let specs = [noise("a", BYTES), noise("b", 1000)];
        let server = sim.server(server_config());
        slow_path(&sim);
        let options = TopicOptions { release_timeout: Some(Duration::ZERO), ..TopicOptions::default() };
        let mut publisher = server.publisher_with(topic("t"), None, options).unwrap();
        let (_client, mut subscription) = subscribe(&sim, client_config(), Request::latest(topic("t"))).await;
        let progress = subscription.progress_reader();
        let (filled, ()) = tokio::join!(subscription.next_into(memory(&specs)), async {
            sleep(Duration::from_millis(100)).await;
            let publication = publish(&server, &mut publisher, 1, &specs).await;
            eventually("the transfer runs", || progress().verified_bytes > 0).await;
            publication.withdraw();
            publish(&server, &mut publisher, 2, &specs).await;
        });
        let filled = filled.unwrap();
        assert_eq!(filled.version().id().version, Version(2));
        assert!(holds(filled.buffers(), 2));
    });
}

/// The tensors `a` and `b` of `version` and an alias of `a`, lent from the producer's memory.
fn lent(server: &Server, version: u64) -> Borrowed {
    let tensor = |spec: TensorSpec| {
        let bytes = content(&spec.name, version, bytes_of(&spec) as usize);
        (spec, Bytes::from(bytes))
    };
    let tied = TensorSpec { alias_of: Some(0), ..noise("tied", BYTES) };
    let mut tensors = vec![tensor(noise("a", BYTES)), tensor(noise("b", 1000))];
    tensors.push((tied, Bytes::new()));
    Borrowed::from_tensors(&server.staging(), tensors, vec![]).unwrap()
}

/// Goal: lent tensors arrive intact, and are released when they are delivered, and replaced or withdrawn; not before.
/// Method: two versions, of which the second is withdrawn; the server has no memory for either.
#[test]
fn lent_tensors_are_released_after_delivery() {
    simulate(10, async |sim| {
        let server = sim.server(tensor_relay_server::Config { staged_bytes: 0, ..server_config() });
        let mut publisher = server.publisher(topic("t")).unwrap();
        let (_client, mut subscription) = subscribe(&sim, client_config(), Request::latest(topic("t"))).await;
        let mut first = publisher.publish(lent(&server, 1), tensors::metadata(1)).await.unwrap();
        tensors::check(&subscription.next().await.unwrap());
        assert!(first.committed(1, RELEASE_TIMEOUT).await);
        assert!(!first.released(RELEASE_TIMEOUT).await, "the newest version may still be requested");
        let second = publisher.publish(lent(&server, 2), tensors::metadata(2)).await.unwrap();
        assert!(first.released(RELEASE_TIMEOUT).await && first.is_released());
        tensors::check(&subscription.next().await.unwrap());
        assert!(!second.released(RELEASE_TIMEOUT).await);
        second.withdraw();
        assert!(second.released(RELEASE_TIMEOUT).await);
    });
}

/// Goal: a lent version that is being sent is held no longer than the release timeout. Method: a reader whose network
/// is cut during a version that is then replaced.
#[test]
fn a_slow_reader_holds_lent_tensors_until_the_release_timeout() {
    simulate(11, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let options =
            TopicOptions { release_timeout: Some(Duration::from_secs(4)), ..TopicOptions::default() };
        let mut publisher = server.publisher_with(topic("t"), None, options).unwrap();
        let (_client, subscription) = subscribe(&sim, client_config(), Request::latest(topic("t"))).await;
        let first = publisher.publish(lent(&server, 1), tensors::metadata(1)).await.unwrap();
        eventually("the transfer runs", || subscription.progress().verified_bytes > 0).await;
        sim.cut(1);
        publisher.publish(lent(&server, 2), tensors::metadata(2)).await.unwrap();
        assert!(!first.released(Duration::from_secs(3)).await);
        assert!(first.released(RELEASE_TIMEOUT).await);
    });
}
