//! Unit tests of what a reception decides for itself: when its subscription is over, and what its user is told.

use super::*;
use crate::snapshot_queue::Found;
use tensor_relay_device::HostMemory;
use tensor_relay_protocol::{
    CodecSet, Limits, Manifest, ManifestDigest, RelayPath, Shape, TensorName, TensorSpec,
};
use tensor_relay_transport::Workers;

const ID: SubscriptionId = SubscriptionId(1);

fn topic() -> Topic {
    Topic::new("t").unwrap()
}

fn id(version: u64) -> VersionId {
    VersionId { topic: topic(), epoch: Epoch(1), version: Version(version) }
}

#[expect(clippy::disallowed_methods, reason = "nobody sends into it")]
fn reception(request: &Request) -> Reception {
    let subscribe = request.message(ID, 4, [0; 16]);
    let machine =
        Subscriber::new(subscribe, CodecSet::all(), Duration::from_secs(60), Instant::now().into_std());
    let memory = HostMemory::on_demand(1 << 20);
    let (base, commands) = (Base::new(None, Workers::Inline), mpsc::unbounded_channel().0);
    Reception::new(request, machine, base, memory.demand(), commands)
}

fn exactly(version: u64) -> Request {
    Request::exactly(topic(), None, Version(version))
}

fn announce(version: u64) -> Announce {
    Announce {
        subscription: ID,
        id: id(version),
        manifest: ManifestDigest([1; 32]),
        skipped: 0,
        metadata: vec![],
        may_be_base: false,
        afresh: false,
        lost_place: None,
        lending: None,
        shared: false,
        relays: RelayPath::default(),
    }
}

/// What the user is told at the end.
fn told(reception: &Reception) -> String {
    match reception.queue.take(true) {
        Found::Ended(error) => error.to_string(),
        found => panic!("the subscription has not ended: {found:?}"),
    }
}

#[test]
fn only_the_wanted_version_is_received() {
    let mut wanted = reception(&exactly(3));
    wanted.subscribe();
    wanted.handle_announce(announce(3), None).unwrap();
    assert!(!wanted.is_over() && wanted.machine.current_version() == Some(&id(3)));
    let mut other = reception(&exactly(3));
    other.subscribe();
    other.handle_announce(announce(4), None).unwrap();
    assert!(other.is_over() && other.machine.current_version().is_none());
    assert!(told(&other).contains("version 3 of t is not kept: "), "{}", told(&other));
    let mut newest = reception(&Request::newest(topic()));
    newest.subscribe();
    newest.handle_announce(announce(4), None).unwrap();
    assert!(!newest.is_over());
}

#[test]
fn the_user_is_told_why_a_version_does_not_come() {
    let mut replaced = reception(&exactly(3));
    replaced.handle_end(EndReason::NotFound);
    assert!(told(&replaced).contains("replaced or withdrawn, or is not published yet"));
    let mut given_up = reception(&exactly(3));
    given_up.release(id(3), Released::ByServer(AbortReason::Corrupt));
    given_up.handle_end(EndReason::Done);
    assert!(told(&given_up).contains("the server aborted its transfer: "));
    for (request, reason) in [
        (exactly(3), EndReason::Done),
        (exactly(3), EndReason::Withdrawn),
        (Request::latest(topic()), EndReason::NotFound),
    ] {
        let mut ended = reception(&request);
        ended.handle_end(reason);
        let expected = SubscriptionError::Ended { topic: topic(), reason };
        assert_eq!(told(&ended), expected.to_string());
    }
}

/// The rate of small, quick versions says nothing.
#[tokio::test(start_paused = true)]
async fn only_large_or_slow_versions_are_measured() {
    for (bytes, is_bulky) in [(BULKY_BYTES - 256, false), (BULKY_BYTES, true)] {
        let shape = Shape::new(&[bytes]).unwrap();
        let spec = TensorSpec::new(TensorName::new("w").unwrap(), Dtype::U8, shape);
        let manifest = Manifest::layout(vec![spec], vec![], 1 << 20, &Limits::default()).unwrap();
        let mut receiving = reception(&Request::latest(topic()));
        receiving.subscribe();
        receiving
            .handle_announce(Announce { manifest: manifest.digest(), ..announce(1) }, None)
            .unwrap();
        assert!(receiving.bulky_bytes().is_none(), "its manifest has not arrived");
        receiving.machine.handle_manifest_header().unwrap();
        receiving.machine.handle_manifest(manifest).unwrap();
        assert_eq!(receiving.bulky_bytes().is_some(), is_bulky);
        tokio::time::advance(BULKY_DURATION).await;
        assert!(receiving.bulky_bytes().is_some(), "it is slow");
        receiving.machine.give_up(AbortReason::Stalled);
        assert!(receiving.bulky_bytes().is_none());
    }
}

#[test]
fn an_abort_by_the_server_is_remembered() {
    let mut given_up = reception(&Request::latest(topic()));
    given_up.release(id(1), Released::ByServer(AbortReason::Superseded));
    assert_eq!(given_up.queue.given_up().map(|(id, _)| id), Some(id(1)));
    let mut by_client = reception(&Request::latest(topic()));
    by_client.release(id(1), Released::ByClient);
    assert_eq!(by_client.queue.given_up(), None);
}
