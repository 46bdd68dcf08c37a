//! Tests of the streams of chunks.

use super::{begin, subscriber};
use crate::{
    Mode,
    subscriber::{
        fixtures::{header, request, verified},
        *,
    },
};

#[test]
fn a_stream_is_received_from_its_header_to_its_end() {
    let mut subscriber = subscriber(request(Mode::Latest, 4));
    begin(&mut subscriber);
    let streams = [StreamToken(5), StreamToken(6)];
    let received = |subscriber: &Subscriber| streams.map(|stream| subscriber.is_receiving_chunk(stream));
    assert_eq!(received(&subscriber), [false, false]);
    for (chunk, stream) in (0..).zip(streams) {
        subscriber.handle_chunk(header(1, chunk), stream).unwrap();
    }
    assert_eq!(received(&subscriber), [true, true]);
    subscriber.handle_verified(streams[0], verified(0));
    assert_eq!(received(&subscriber), [false, true]);
    subscriber.handle_lost(streams[1]);
    assert_eq!(received(&subscriber), [false, false]);
}

fn actions(subscriber: &mut Subscriber) -> Vec<Action> {
    std::iter::from_fn(|| subscriber.poll()).collect()
}

/// PROTOCOL.md §6.8: a chunk that was requested again may arrive twice.
#[test]
fn a_second_stream_of_a_verified_chunk_is_discarded() {
    let mut subscriber = subscriber(request(Mode::Latest, 4));
    begin(&mut subscriber);
    subscriber.handle_retired(fixtures::SUBSCRIPTION);
    let _ = actions(&mut subscriber);
    subscriber.handle_chunk(header(1, 0), StreamToken(1)).unwrap();
    subscriber.handle_verified(StreamToken(1), verified(0));
    let _ = actions(&mut subscriber);
    subscriber.handle_chunk(header(1, 0), StreamToken(2)).unwrap();
    let discarded = actions(&mut subscriber);
    assert!(matches!(discarded[..], [Action::Discard(StreamToken(2))]), "{discarded:?}");
}

/// A chunk that was under way when others were requested is not requested after it has arrived.
#[test]
fn what_arrived_since_the_loss_is_not_requested() {
    let mut subscriber = subscriber(request(Mode::Latest, 1));
    begin(&mut subscriber);
    subscriber.handle_retired(fixtures::SUBSCRIPTION);
    let requested = |actions: Vec<Action>| {
        let chunks = actions.into_iter().filter_map(|action| match action {
            Action::Send(ClientMessage::Request { chunks, .. }) => Some(chunks),
            _ => None,
        });
        chunks.collect::<Vec<_>>()
    };
    assert_eq!(requested(actions(&mut subscriber)), [RangeSet::from_range(0..1)]);
    for chunk in [1, 0] {
        let stream = StreamToken(chunk.into());
        subscriber.handle_chunk(header(1, chunk), stream).unwrap();
        subscriber.handle_verified(stream, verified(chunk));
        assert_eq!(requested(actions(&mut subscriber)), [], "chunk {chunk}");
    }
}
