//! Tests of requests for one version, and of descriptions.

use super::{
    fixtures::{announce, codecs, header, id, manifest, now, request, verified},
    *,
};
use crate::Mode;

mod again;
mod lent;
mod peers;
mod sources;
mod streams;

fn subscriber(request: Subscribe) -> Subscriber {
    Subscriber::new(request, codecs(), Duration::from_secs(30), now())
}

/// Begins version 1, and returns its selection.
fn begin(subscriber: &mut Subscriber) -> Arc<Selection> {
    subscriber.subscribe(None);
    begin_of(subscriber, 2);
    subscriber.selection().cloned().unwrap()
}

/// Begins version 1, of this many chunks.
fn begin_of(subscriber: &mut Subscriber, chunks: u32) {
    subscriber.handle_announce(announce(1, &manifest(chunks)), now(), 0).unwrap();
    subscriber.handle_manifest(Manifest::clone(&manifest(chunks))).unwrap();
    subscriber.handle_placed(None).unwrap();
}

/// PROTOCOL.md §3.12 (3), with a selection that has no effect; and (1).
#[test]
fn a_description_is_committed_without_chunks_and_then_it_is_done() {
    let within = RangeSet::from_range(0..1);
    for once in [true, false] {
        let wanted = Subscribe { once, describe: true, within: within.clone(), ..request(Mode::Latest, 0) };
        let mut subscriber = subscriber(wanted);
        let selection = begin(&mut subscriber);
        assert!(selection.chunks().is_empty() && selection.tensors().is_empty());
        let digest = VersionDigest::of(manifest(2).digest(), []);
        subscriber.handle_complete((fixtures::EPOCH, Version(1)), digest).unwrap();
        assert!(!subscriber.is_done());
        assert!(std::iter::from_fn(|| subscriber.poll()).any(|action| matches!(action, Action::Commit(_))));
        subscriber.handle_committed(false);
        assert_eq!(subscriber.is_done(), once);
    }
}

/// PROTOCOL.md §3.12 (6): the same request, with what was verified.
#[test]
fn one_version_is_requested_again_after_a_lost_connection() {
    let start = Start::Exactly(None, Version(1));
    let wanted = Subscribe { once: true, start, ..request(Mode::Every, 4) };
    let mut subscriber = subscriber(wanted);
    begin(&mut subscriber);
    let stream = StreamToken(1);
    subscriber.handle_chunk(header(1, 0), stream).unwrap();
    subscriber.handle_verified(stream, verified(0));
    subscriber.handle_detached(4);
    subscriber.subscribe(None);
    let Some(Action::Send(ClientMessage::Subscribe(again))) = subscriber.poll() else {
        panic!("it subscribes")
    };
    let partial = again.partial.expect("a chunk is verified");
    assert_eq!((again.once, again.start, again.have), (true, start, None));
    assert_eq!((partial.version, partial.chunks), (id(1).version, RangeSet::from_range(0..1)));
}

/// PROTOCOL.md §3.12 (8).
#[test]
fn only_a_request_for_one_version_by_its_number_names_the_only_version() {
    let only = |once, start| subscriber(Subscribe { once, start, ..request(Mode::Every, 4) }).only_version();
    let (epoch, version) = (Some(fixtures::EPOCH), Version(3));
    for start in [Start::At(epoch, version), Start::Exactly(epoch, version)] {
        assert_eq!((only(true, start), only(false, start)), (Some((epoch, version)), None));
    }
    assert_eq!([Start::Newest, Start::Next, Start::Oldest].map(|start| only(true, start)), [None; 3]);
}
