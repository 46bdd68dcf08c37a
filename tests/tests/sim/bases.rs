//! The bases that a server retains for deltas, and when it drops them.

use crate::{
    deltas::{
        BYTES, assert_deltas, assert_no_deltas, establish_base, follow, next, open, publish, publish_of,
    },
    slow_path,
};
use bytes::Bytes;
use std::time::Duration;
use tensor_relay_client::{Client, Subscription};
use tensor_relay_protocol::{CodecId, Epoch};
use tensor_relay_server::{BaseStats, Borrowed, CodecChoice, Publisher, Server, TopicOptions};
use tensor_relay_tests::{
    pair::{Sim, client_config, eventually, reconnecting, retaining, server_config, simulate, topic},
    tensors,
};
use tokio::time::sleep;

/// A version in lent memory, with no similarity to other versions.
fn lent(server: &Server, version: u64) -> Borrowed {
    let mut content = vec![0; BYTES as usize];
    tensors::write_content("noise", version, &mut content);
    let tensors = vec![(tensors::noise("noise", BYTES), Bytes::from(content))];
    Borrowed::from_tensors(&server.staging(), tensors, vec![]).unwrap()
}

/// Goal: lent memory is released even while deltas against its version are being sent. Method: a subscriber holds
/// version 2 and stalls during version 3; version 2 is replaced or withdrawn.
#[test]
fn lent_memory_is_released_while_deltas_are_sent() {
    for is_replaced in [true, false] {
        simulate(1, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = open(&server, retaining(2));
            let (_client, mut subscription) = follow(&sim, 1, client_config()).await;
            publisher.publish(lent(&server, 1), tensors::metadata(1)).await.unwrap();
            next(&mut subscription, 1).await;
            let base = publisher.publish(lent(&server, 2), tensors::metadata(2)).await.unwrap();
            next(&mut subscription, 2).await;
            eventually("the server has the commit", || server.stats().committed == 2).await;
            let _third = publisher.publish(lent(&server, 3), tensors::metadata(3)).await.unwrap();
            eventually("chunks are compared", || server.stats().encoder.compared > 0).await;
            sim.cut(1);
            sleep(Duration::from_secs(1)).await;
            assert!(server.stats().encoder.compared < 16, "not all chunks have been compared");
            assert!(!base.is_released(), "version 2 is retained");
            match is_replaced {
                true => drop(publisher.publish(lent(&server, 4), tensors::metadata(4)).await.unwrap()),
                false => base.withdraw(),
            }
            assert!(base.released(Duration::from_millis(100)).await);
        });
    }
}

/// Goal: with a forced codec, bases are retained only if the codec needs them. Method: a codec that needs bases and two
/// that do not, forced by the topic, over five versions that differ little.
#[test]
fn bases_are_retained_only_for_a_codec_that_needs_them() {
    for (codec, needs_bases) in [(CodecId::Raw, false), (CodecId::Zstd, false), (CodecId::Sparse, true)] {
        simulate(2, async |sim| {
            let server = sim.server(server_config());
            let options = TopicOptions { codec: Some(CodecChoice::Fixed(codec)), ..TopicOptions::default() };
            let mut publisher = open(&server, options);
            let (client, mut subscription) = follow(&sim, 1, client_config()).await;
            for version in 1..=4 {
                publish(&server, &mut publisher, version).await;
                let receipt = next(&mut subscription, version).await;
                assert_eq!(
                    receipt.codecs.deltas().chunks > 0,
                    needs_bases && version > 2,
                    "{codec:?}: {receipt:?}"
                );
                eventually("the server has the commit", || server.stats().committed == version).await;
                assert_eq!(client.base_bytes() > 0, needs_bases && version > 1, "{codec:?}");
            }
            assert_eq!(server.stats().encoder.compared > 0, needs_bases);
            sim.cut(1);
            publish(&server, &mut publisher, 5).await;
            assert_eq!(server.stats().bases.versions, u64::from(needs_bases));
        });
    }
}

/// Goal: dissimilar versions are not retained as bases, except for an occasional attempt. Method: a subscriber follows;
/// comparisons are counted.
#[test]
fn dissimilar_versions_are_not_retained_as_bases() {
    simulate(3, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, TopicOptions::default());
        let (client, mut subscription) = follow(&sim, 1, client_config()).await;
        let (mut compared, mut held) = (Vec::new(), Vec::new());
        for version in 1..=15 {
            let before = server.stats().encoder.compared;
            publish_of(&server, &mut publisher, version, vec![tensors::noise("weights", BYTES)]).await;
            next(&mut subscription, version).await;
            eventually("the server has the commit", || server.stats().committed == version).await;
            if server.stats().encoder.compared > before {
                compared.push(version);
            }
            if client.base_bytes() > 0 {
                held.push(version);
            }
        }
        assert_eq!(
            compared,
            [3, 4, 5, 14, 15],
            "after a few comparisons in vain there are none for eight versions, then two more"
        );
        assert_eq!(held, [2, 3, 4, 13, 14], "the client drops its copy during a pause");
    });
}

/// Goal: a lost subscriber finds its base again, although another subscriber of that version has moved on. Method: two
/// subscribers hold a version; one is cut off, the other gets the next version, then the first reconnects.
#[test]
fn a_lost_subscriber_keeps_its_base() {
    simulate(4, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, TopicOptions::default());
        let (_lost, mut lost) = follow(&sim, 1, reconnecting()).await;
        let (_other, mut other) = follow(&sim, 2, client_config()).await;
        for version in 1..=2 {
            publish(&server, &mut publisher, version).await;
            next(&mut lost, version).await;
            next(&mut other, version).await;
        }
        eventually("the server has the commit", || server.stats().committed == 4).await;
        sim.cut(1);
        sleep(Duration::from_secs(10)).await; // The idle timeout.
        eventually("the first subscriber is lost", || server.stats().sessions == 1).await;
        publish(&server, &mut publisher, 3).await;
        assert_deltas(next(&mut other, 3).await);
        eventually("the server has the commit", || server.stats().committed == 5).await;
        assert_eq!(server.stats().bases.versions, 1, "version 2 is retained as a base");
        sim.mend(1);
        assert_deltas(next(&mut lost, 3).await);
        eventually("the base is dropped", || server.stats().bases.versions == 0).await;
    });
}

/// Goal: neither an abandoned partial version nor its base is used further: the next version is sent whole. Method: cut
/// the network during deltas, and replace the version before the network is repaired.
#[test]
fn an_abandoned_version_ends_the_base() {
    simulate(7, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, TopicOptions::default());
        slow_path(&sim);
        let (_client, mut subscription) = follow(&sim, 1, reconnecting()).await;
        establish_base(&server, &mut publisher, &mut subscription).await;
        publish(&server, &mut publisher, 3).await;
        eventually("a part is verified", || {
            let progress = subscription.progress();
            progress.version == 3 && progress.verified_bytes > 0
        })
        .await;
        sim.cut(1);
        publish(&server, &mut publisher, 4).await;
        sleep(Duration::from_secs(15)).await;
        let compared = server.stats().encoder.compared;
        sim.mend(1);
        assert_no_deltas(next(&mut subscription, 4).await);
        assert_eq!(server.stats().encoder.compared, compared, "no chunk was compared");
        publish(&server, &mut publisher, 5).await;
        assert_deltas(next(&mut subscription, 5).await);
    });
}

/// Goal: a withdrawn version is not retained as a base, even if it has already left retention. Method: a subscriber
/// holds version 2, which is withdrawn before or after it is replaced.
#[test]
fn a_withdrawn_version_is_not_retained_as_a_base() {
    for has_left in [true, false] {
        simulate(5, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = open(&server, TopicOptions::default());
            let (_client, mut subscription) = follow(&sim, 1, reconnecting()).await;
            publish(&server, &mut publisher, 1).await;
            next(&mut subscription, 1).await;
            let base = publish(&server, &mut publisher, 2).await;
            next(&mut subscription, 2).await;
            eventually("the server has the commit", || server.stats().committed == 2).await;
            sim.cut(1);
            if has_left {
                publish(&server, &mut publisher, 3).await;
                assert_eq!(server.stats().bases.versions, 1);
            }
            base.withdraw();
            assert_eq!(server.stats().bases, BaseStats::default());
            if !has_left {
                publish(&server, &mut publisher, 3).await;
            }
            sleep(Duration::from_secs(10)).await; // The idle timeout.
            eventually("the subscriber is lost", || server.stats().sessions == 0).await;
            sim.mend(1);
            assert_no_deltas(next(&mut subscription, 3).await);
        });
    }
}

/// Publishes two versions to a subscriber, and cuts it off once the server has its second commit.
async fn lose_with_version_2(
    sim: &Sim,
    server: &Server,
    publisher: &mut Publisher,
) -> (Client, Subscription) {
    let (client, mut subscription) = follow(sim, 1, client_config()).await;
    establish_base(server, publisher, &mut subscription).await;
    eventually("the server has the commit", || server.stats().committed == 2).await;
    sim.cut(1);
    (client, subscription)
}

/// Goal: no bases of an ended epoch are retained. Method: a disconnected subscriber holds version 2; the first version
/// of another epoch follows, directly or after version 3.
#[test]
fn bases_of_an_ended_epoch_are_not_retained() {
    for last in 2..=3 {
        simulate(6, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = open(&server, TopicOptions::default());
            let _lost = lose_with_version_2(&sim, &server, &mut publisher).await;
            for version in 3..=last {
                publish(&server, &mut publisher, version).await;
            }
            assert_eq!(server.stats().bases.versions, last - 2);
            drop(publisher);
            let options = TopicOptions::default();
            let mut publisher = server.publisher_with(topic("t"), Some(Epoch(6)), options).unwrap();
            publish(&server, &mut publisher, 1).await;
            assert_eq!(server.stats().bases, BaseStats::default());
        });
    }
}

/// Goal: no base is retained whose manifest differs from that of the published version: it would be useless. Method: a
/// lost subscriber holds a version; the next one has the same size, or another.
#[test]
fn bases_with_another_manifest_are_not_retained() {
    for (bytes, retained) in [(BYTES, 1), (BYTES / 2, 0)] {
        simulate(7, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = open(&server, TopicOptions::default());
            let _lost = lose_with_version_2(&sim, &server, &mut publisher).await;
            sleep(Duration::from_secs(10)).await; // The idle timeout.
            eventually("the subscriber is lost", || server.stats().sessions == 0).await;
            publish_of(&server, &mut publisher, 3, vec![tensors::steady("weights", bytes)]).await;
            assert_eq!(server.stats().bases.versions, retained);
        });
    }
}
