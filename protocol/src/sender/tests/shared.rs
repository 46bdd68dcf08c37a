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
    topic.held = Some(Arc::new(RangeSet::new()));
    let mut sender = sender(&topic, &subscribe(2));
    assert!(chunks(&mut sender, &topic, 2).is_empty(), "what is pushed waits");
    topic.held = Some(Arc::new(RangeSet::from_range(1..2)));
    assert_eq!(chunks(&mut sender, &topic, 2), [1]);
    assert_eq!(tell(&mut sender, request(VERSION, RangeSet::from_range(0..2))), Ok(true));
    assert!(chunks(&mut sender, &topic, 2).is_empty(), "what is requested is passed over");
    topic.held = None;
    assert!(chunks(&mut sender, &topic, 2).is_empty(), "for good");
    assert_eq!(tell(&mut sender, request(VERSION, RangeSet::from_range(0..1))), Ok(true));
    assert_eq!(chunks(&mut sender, &topic, 2), [0]);
}
