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
