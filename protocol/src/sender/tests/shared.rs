//! Shared versions, of which the topic picks what is pushed; and versions that are not here as a whole.

use super::messages::{VERSION, actions, chunks, request, sender, subscribe, tell, topic};
use crate::*;
use std::sync::Arc;

#[test]
fn the_topic_picks_what_is_pushed() {
    let mut topic = topic();
    topic.picked = Some(Pick::Wait);
    let mut sender = sender(&topic, &subscribe(2));
    let begun = actions(&mut sender, &topic, 1);
    assert!(
        matches!(&begun[..], [SenderAction::Announce(it), SenderAction::Send(SendAction::Manifest)] if it.shared)
    );
    topic.picked = Some(Pick::Chunk(ChunkIndex(1)));
    assert_eq!(chunks(&mut sender, &topic, 1), [1]);
    topic.picked = Some(Pick::InOrder);
    assert_eq!(chunks(&mut sender, &topic, 1), [0]);
}

#[test]
fn a_request_does_not_end_the_pushing_of_a_shared_version() {
    let mut topic = topic();
    topic.picked = Some(Pick::Wait);
    let mut sender = sender(&topic, &subscribe(1));
    assert!(chunks(&mut sender, &topic, 1).is_empty());
    assert_eq!(tell(&mut sender, request(VERSION, RangeSet::from_range(1..2))), Ok(true));
    assert_eq!(chunks(&mut sender, &topic, 2), [1], "without credit");
    topic.picked = Some(Pick::InOrder);
    assert_eq!(chunks(&mut sender, &topic, 2), [0], "with the credit that is left");
    for chunk in 0..2 {
        sender.handle_sent(SendAction::Chunk(ChunkIndex(chunk), LaneId(2)));
    }
    assert_eq!(actions(&mut sender, &topic, 2), [SenderAction::Send(SendAction::Complete)]);
}

#[test]
fn what_is_not_held_is_not_sent() {
    let mut topic = topic();
    topic.here = Here::Only(Arc::new(RangeSet::new()));
    let mut sender = sender(&topic, &subscribe(2));
    assert!(chunks(&mut sender, &topic, 2).is_empty(), "what is pushed waits");
    topic.here = Here::Only(Arc::new(RangeSet::from_range(1..2)));
    assert_eq!(chunks(&mut sender, &topic, 2), [1]);
    assert_eq!(tell(&mut sender, request(VERSION, RangeSet::from_range(0..2))), Ok(true));
    assert!(chunks(&mut sender, &topic, 2).is_empty(), "what is requested is passed over");
    topic.here = Here::All;
    assert!(chunks(&mut sender, &topic, 2).is_empty(), "for good");
    assert_eq!(tell(&mut sender, request(VERSION, RangeSet::from_range(0..1))), Ok(true));
    assert_eq!(chunks(&mut sender, &topic, 2), [0]);
}

/// Goal: of a version that is being received, what is here is sent, what was pushed or requested waits for the rest, and
/// nothing says that the version is complete before it is committed here.
#[test]
fn a_version_that_arrives_is_sent_as_it_comes() {
    let here = |chunks| Here::SoFar(Arc::new(RangeSet::from_range(chunks)));
    for requests in [false, true] {
        let mut topic = topic();
        topic.here = here(0..0);
        let mut sender = sender(&topic, &subscribe(2));
        assert!(chunks(&mut sender, &topic, 2).is_empty());
        if requests {
            assert_eq!(tell(&mut sender, request(VERSION, RangeSet::from_range(0..2))), Ok(true));
        }
        topic.here = here(1..2);
        assert_eq!(chunks(&mut sender, &topic, 2), [1]);
        topic.here = here(0..2);
        assert_eq!(chunks(&mut sender, &topic, 2), [0], "it was not passed over");
        for chunk in [1, 0] {
            sender.handle_sent(SendAction::Chunk(ChunkIndex(chunk), LaneId(2)));
        }
        assert_eq!(actions(&mut sender, &topic, 2), [], "it may still prove damaged");
        topic.here = Here::All;
        assert_eq!(actions(&mut sender, &topic, 2), [SenderAction::Send(SendAction::Complete)]);
    }
}
