//! [`Supply`]: how many members have each chunk, and how many select it.

use super::{
    bits::{Bits, numbers, words},
    range_counts::RangeCounts,
};
use crate::RangeSet;

/// The members of a version that serve, as counts for each chunk. Of many chunks at once, it works on 64 in a step, so that a
/// member that joins or leaves costs little, except for an addition for each chunk that it has.
#[derive(Debug)]
pub(super) struct Supply {
    /// The number of members that have each chunk, or were sent it.
    have: Vec<u32>,
    /// The number of those that select it.
    select: RangeCounts,
    /// The chunks that a member selects, and that none has.
    unsent: Bits,
    /// The chunks that no member selects or has.
    orphans: Bits,
}

impl Supply {
    /// No members, of a version with this many chunks.
    pub(super) fn new(chunks: u32) -> Self {
        Self {
            have: vec![0; chunks as usize],
            select: RangeCounts::new(chunks),
            unsent: Bits::new(chunks),
            orphans: Bits::full(chunks),
        }
    }

    /// The number of chunks.
    pub(super) fn chunks(&self) -> u32 {
        self.have.len() as u32
    }

    /// The chunks that a member selects, and that none has or was sent.
    pub(super) fn unsent(&self) -> &Bits {
        &self.unsent
    }

    /// The chunks that no member selects, has or was sent.
    pub(super) fn orphans(&self) -> &Bits {
        &self.orphans
    }

    /// Whether a chunk is selected by more members than have it.
    pub(super) fn is_wanted(&self, chunk: u32) -> bool {
        self.select.of(chunk) > self.have[chunk as usize]
    }

    /// Counts a member that selects these chunks.
    pub(super) fn add_selection(&mut self, chunks: &RangeSet) {
        self.select.add(chunks);
        for (word, mask) in words(chunks, self.chunks()) {
            let found = self.orphans.word(word) & mask;
            self.orphans.remove_word(word, found);
            self.unsent.insert_word(word, found);
        }
    }

    /// Counts a member no longer that selects these chunks. Those that no other one selects are to be
    /// [settled](Self::settle).
    pub(super) fn remove_selection(&mut self, chunks: &RangeSet) {
        self.select.remove(chunks);
    }

    /// Counts a member that has these chunks of a word.
    pub(super) fn add_held(&mut self, word: usize, mask: u64) {
        numbers(word, mask).for_each(|chunk| self.have[chunk as usize] += 1);
        self.unsent.remove_word(word, mask);
        self.orphans.remove_word(word, mask);
    }

    /// Counts a member no longer that has these chunks of a word. Those that no member selects are to be
    /// [settled](Self::settle).
    pub(super) fn remove_held(&mut self, word: usize, mask: u64) {
        let mut gone = 0;
        for chunk in numbers(word, mask) {
            let have = &mut self.have[chunk as usize];
            *have -= 1;
            gone |= u64::from(*have == 0) << (chunk % u64::BITS);
        }
        self.unsent.insert_word(word, gone);
    }

    /// Records that no member selects these chunks.
    pub(super) fn settle(&mut self, unselected: &RangeSet) {
        for (word, mask) in words(unselected, self.chunks()) {
            let found = self.unsent.word(word) & mask;
            self.unsent.remove_word(word, found);
            self.orphans.insert_word(word, found);
        }
    }

    /// The numbers of members that select a chunk, and that have it.
    #[cfg(test)]
    pub(super) fn of(&self, chunk: u32) -> (u32, u32) {
        (self.select.of(chunk), self.have[chunk as usize])
    }
}
