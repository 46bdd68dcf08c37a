//! Messages and fields of features that the receiver did not offer (PROTOCOL.md §3.11). Each ends the session with a
//! text that names the feature.

use crate::{
    raw::{Peer, hello, subscribe},
    script::{EPOCH, Script, VERSION, expect_closed},
};
use std::time::Duration;
use tensor_relay_protocol::{
    Announce, ClientMessage, CloseCode, Cuts, Dtype, EndReason, Feature, FeatureSet, Glob, Held, Hello,
    LaneGrant, LaneId, Order, ProbeBytes, ProbeHeader, RangeSet, ServerMessage, Share, Site, StreamHeader,
    Subscribe, SubscriptionId, TensorSpec,
};
use tensor_relay_tests::{
    pair::{client_config, eventually, publish, server_config, simulate, topic},
    tensors,
};

fn expected_text(feature: &str) -> String {
    format!("needs the feature \"{feature}\", which this end did not offer")
}

/// Goal: a server refuses features that it did not offer, and names them. Method: each message and field of such a
/// feature, from a client after `Welcome`.
#[test]
fn clients_that_use_unoffered_features_are_refused() {
    let ClientMessage::Subscribe(wanted) = subscribe(1, 4) else { panic!("it subscribes") };
    let order = Order::Layers(vec![Glob::new("a.**").unwrap()]);
    let (subscription, none) = (SubscriptionId(1), RangeSet::new());
    let held = Held { subscription, epoch: EPOCH, version: VERSION, added: none.clone(), withdrawn: none };
    let grant = Some(LaneGrant::new([1; 32]));
    for (message, feature) in [
        (ClientMessage::Subscribe(Subscribe { order, ..wanted.clone() }), "order"),
        (ClientMessage::Subscribe(Subscribe { grant, ..wanted }), "peers"),
        (ClientMessage::Share(Share { addresses: vec![], key: None, site: Site::default() }), "peers"),
        (ClientMessage::Held(held), "peers"),
        (ClientMessage::Check { session: 1, nonce: [1; 32] }, "peers"),
    ] {
        simulate(1, async |sim| {
            let _server = sim.server(server_config());
            let mut peer = Peer::welcomed_client(&sim, 2).await;
            peer.send_to_server(message).await;
            let (code, text) = peer.wait_for_close().await;
            assert_eq!(code, Some(CloseCode::ProtocolViolation));
            assert!(text.contains(&expected_text(feature)), "{text}");
        });
    }
}

/// Goal: a client refuses features that it did not offer, and names them. Method: each message and field of a feature,
/// and a probe's bytes, from a server to a subscribed client.
#[test]
fn servers_that_use_unoffered_features_are_refused() {
    type Attack = fn(&Script) -> ServerMessage;
    let attacks: [(Attack, &str); 5] = [
        (
            |script| ServerMessage::Sources {
                subscription: script.subscription,
                epoch: EPOCH,
                version: VERSION,
                sources: vec![],
                is_seeded: false,
            },
            "peers",
        ),
        (
            |script| ServerMessage::Encodings {
                subscription: script.subscription,
                epoch: EPOCH,
                version: VERSION,
                entries: vec![],
            },
            "peers",
        ),
        (
            |script| ServerMessage::Revoke {
                subscription: script.subscription,
                taker: [1; 32],
                restored: false,
            },
            "peers",
        ),
        (|_| ServerMessage::Checked { proof: [1; 32] }, "peers"),
        (|script| ServerMessage::Announce(Announce { shared: true, ..script.announcement() }), "peers"),
    ];
    for (message, feature) in attacks {
        expect_refused(feature, async |script| script.peer.send_to_client(message(script)).await);
    }
    expect_refused("probe", async |script| {
        let header = StreamHeader::Probe(ProbeHeader { probe: 1, bytes: 4 });
        script.peer.send_stream(&[&header.encode(), &[0; 4]]).await;
    });
}

/// Goal: a server sends `Drain` once, before it closes, to clients that offered the feature, and to no others.
/// Method: shut down a server with a client of each kind.
#[test]
fn drain_is_sent_once_to_clients_that_support_it() {
    for features in [FeatureSet::OF_CLIENT, FeatureSet::default()] {
        simulate(1, async |sim| {
            let server = sim.server(server_config());
            let mut peer = Peer::client(&sim, 2).await;
            peer.send_to_server(ClientMessage::Hello(Hello { features, ..hello() })).await;
            assert!(matches!(peer.receive_from_server().await, ServerMessage::Welcome(_)));
            let receiving = async {
                if features.contains(Feature::Drain) {
                    let drain = peer.receive_from_server().await;
                    assert!(matches!(drain, ServerMessage::Drain { .. }), "{drain:?}");
                }
                let (code, _) = peer.wait_for_close().await;
                assert_eq!(code, Some(CloseCode::ShuttingDown));
                peer.assert_received_nothing().await;
            };
            tokio::join!(server.shutdown(Duration::from_secs(5)), receiving);
        });
    }
}

/// Goal: a client that did not offer `layout2` receives no version with tensors in pieces, and is told so (§3.14).
/// Method: publish one to a client of each kind, with `describe` too.
#[test]
fn tensors_in_pieces_are_sent_to_clients_that_support_them() {
    for (features, describe) in
        [(FeatureSet::OF_CLIENT, false), (FeatureSet::default(), false), (FeatureSet::default(), true)]
    {
        simulate(1, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = server.publisher(topic("t")).unwrap();
            let spec = tensors::shaped("w", Dtype::U8, &[4, 4]);
            let in_pieces = TensorSpec { cuts: Cuts::equal(1, 4, 2), ..spec };
            let staged = tensors::stage(&server, vec![in_pieces], 1);
            publisher.publish(staged, tensors::metadata(1)).await.unwrap();
            let mut peer = Peer::client(&sim, 2).await;
            peer.send_to_server(ClientMessage::Hello(Hello { features, ..hello() })).await;
            assert!(matches!(peer.receive_from_server().await, ServerMessage::Welcome(_)));
            let latest = Subscribe::latest(SubscriptionId(1), topic("t"), 4);
            peer.send_to_server(ClientMessage::Subscribe(Subscribe { describe, ..latest }))
                .await;
            let answer = peer.receive_from_server().await;
            match features.contains(Feature::Layout2) {
                true => assert!(matches!(answer, ServerMessage::Announce(_)), "{answer:?}"),
                false => {
                    let (subscription, reason) = (SubscriptionId(1), EndReason::NotSupported);
                    assert_eq!(answer, ServerMessage::End { subscription, reason });
                    tokio::join!(server.shutdown(Duration::from_secs(5)), async {
                        peer.wait_for_close().await;
                        peer.assert_received_nothing().await;
                    });
                }
            }
        });
    }
}

/// Goal: a client accepts only one `Drain`. Method: a server that sends it twice.
#[test]
fn a_second_drain_is_refused() {
    expect_closed(CloseCode::ProtocolViolation, "a second Drain", async |script| {
        for alternatives in [vec!["10.0.0.6:4747".into()], vec![]] {
            script.peer.send_to_client(ServerMessage::Drain { alternatives }).await;
        }
    });
}

fn expect_refused(feature: &str, attack: impl AsyncFnOnce(&mut Script)) {
    expect_closed(CloseCode::ProtocolViolation, &expected_text(feature), attack);
}

/// Goal: a client cannot make a server send two probes at a time. Method: request two probes without reading, with
/// different numbers and with the same number.
#[test]
fn a_second_probe_is_refused() {
    for second in [2, 1] {
        simulate(1, async |sim| {
            let server = sim.server(server_config());
            let mut peer = Peer::welcomed_client(&sim, 2).await;
            for probe in [1, second] {
                let bytes = ProbeBytes::new(ProbeBytes::MAX).unwrap();
                peer.send_to_server(ClientMessage::Probe { probe, lane: LaneId(0), bytes })
                    .await;
            }
            let (code, text) = peer.wait_for_close().await;
            assert_eq!(code, Some(CloseCode::ProtocolViolation));
            assert!(text.contains("a second Probe"), "{text}");
            eventually("the session has ended", || server.stats().sessions == 0).await;
        });
    }
}

/// Goal: clients that request a probe on a missing lane, or do not read the probe, do not affect others. Method: five
/// clients that do not read, one that names a missing lane, and one that receives a version meanwhile.
#[test]
fn unread_probes_do_not_affect_others() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let mut probing = vec![];
        for (number, lane) in [(2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 5)] {
            let mut peer = Peer::welcomed_client(&sim, number).await;
            let bytes = ProbeBytes::new(ProbeBytes::MAX).unwrap();
            peer.send_to_server(ClientMessage::Probe { probe: 1, lane: LaneId(lane), bytes })
                .await;
            probing.push(peer);
        }
        publish(&server, &mut publisher, 1, 100_000).await;
        let client = sim.client(1, client_config()).await.unwrap();
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        let received = tokio::time::timeout(Duration::from_secs(5), subscription.next()).await;
        assert_eq!(received.expect("the version is sent immediately").unwrap().id().version.0, 1);
        client.close().await;
    });
}
