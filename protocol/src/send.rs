//! The sender's side of one version on one subscription: what to send next (PROTOCOL.md §6.3).

use crate::{ChunkIndex, Credit, RangeSet};
use std::iter::Peekable;

/// What a [`SendPlan`] wants done now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendAction {
    /// Send the manifest, ahead of every chunk.
    Manifest,
    /// Send this chunk; its credit is spent. Report the end with [`SendPlan::handle_sent`].
    Chunk(ChunkIndex),
    /// Say that all chunks are on their way.
    Complete,
}

/// Decides in which order a version is sent, and when it may be called complete.
///
/// Pure: it waits for nothing and sends nothing. The driver polls it until it returns `None`, does what it says, and
/// tells it what happened.
#[derive(Debug)]
pub struct SendPlan {
    waiting: Peekable<<RangeSet as IntoIterator>::IntoIter>,
    in_flight: u32,
    manifest: bool,
    complete: bool,
}

impl SendPlan {
    /// Plans to send the chunks `wanted`, those that the receiver selected and does not hold; `manifest` tells whether
    /// it still needs the manifest.
    pub fn new(wanted: RangeSet, manifest: bool) -> Self {
        Self { waiting: wanted.into_iter().peekable(), in_flight: 0, manifest, complete: false }
    }

    /// The next thing to do, spending `credit` for a chunk; `None` until something changes.
    pub fn poll(&mut self, credit: &mut Credit) -> Option<SendAction> {
        if self.manifest {
            self.manifest = false;
            return Some(SendAction::Manifest);
        }
        if self.waiting.peek().is_some() {
            return if credit.spend() { self.begin_chunk() } else { None };
        }
        if self.in_flight == 0 && !self.complete {
            self.complete = true;
            return Some(SendAction::Complete);
        }
        None
    }

    /// Takes the news that one chunk was handed to the network whole.
    pub fn handle_sent(&mut self) {
        self.in_flight -= 1;
    }

    /// How many chunks are being sent.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Whether everything was sent, so that only the receiver's word is missing.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    fn begin_chunk(&mut self) -> Option<SendAction> {
        let chunk = ChunkIndex(self.waiting.next()?);
        self.in_flight += 1;
        Some(SendAction::Chunk(chunk))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_manifest_goes_first_and_costs_no_credit() {
        let mut credit = Credit::new(0).unwrap();
        let mut plan = SendPlan::new(RangeSet::from_range(0..1), true);
        assert_eq!(plan.poll(&mut credit), Some(SendAction::Manifest));
        assert_eq!(plan.poll(&mut credit), None);
        credit.grant(1).unwrap();
        assert_eq!(plan.poll(&mut credit), Some(SendAction::Chunk(ChunkIndex(0))));
        assert_eq!(plan.poll(&mut credit), None, "not complete while a chunk is on its way");
        plan.handle_sent();
        assert_eq!(plan.poll(&mut credit), Some(SendAction::Complete));
        assert_eq!(plan.poll(&mut credit), None);
    }

    #[test]
    fn an_empty_version_is_complete_at_once() {
        let mut credit = Credit::new(0).unwrap();
        assert_eq!(SendPlan::new(RangeSet::new(), false).poll(&mut credit), Some(SendAction::Complete));
    }

    proptest! {
        /// Any wanted chunks, any order of grants and finished sends: every wanted chunk once, in order, never beyond
        /// credit, then `Complete` once.
        #[test]
        fn every_wanted_chunk_once(
            wanted in prop::collection::btree_set(0u32..80, 0..50),
            steps in prop::collection::vec(prop::option::of(1u32..5), 0..300),
        ) {
            let mut credit = Credit::new(0).unwrap();
            let mut plan = SendPlan::new(wanted.iter().map(|n| *n..n + 1).collect(), false);
            let (mut granted, mut sent, mut completes) = (0, vec![], 0);
            for step in steps.into_iter().chain(std::iter::repeat_n(Some(4), 20)).chain(std::iter::repeat_n(None, 60)) {
                match step {
                    Some(chunks) => { credit.grant(chunks).unwrap(); granted += chunks; }
                    None if plan.in_flight() > 0 => plan.handle_sent(),
                    None => {}
                }
                while let Some(action) = plan.poll(&mut credit) {
                    match action {
                        SendAction::Chunk(chunk) => sent.push(chunk.0),
                        SendAction::Complete => { prop_assert_eq!(plan.in_flight(), 0); completes += 1; }
                        SendAction::Manifest => prop_assert!(false, "not asked for"),
                    }
                }
                prop_assert!(sent.len() <= granted as usize);
            }
            prop_assert_eq!(sent, Vec::from_iter(wanted));
            prop_assert_eq!(completes, 1);
        }
    }
}
