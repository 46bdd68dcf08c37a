//! [`Marks`]: what an origin knows of the chunks of one member.

use tensor_relay_protocol::RangeSet;

/// This server sends it, or has sent it.
const SENT: u8 = 1;
/// The member can send it.
const HELD: u8 = 2;
/// The member could send it at some time.
const EVER_HELD: u8 = 4;

/// What an origin knows of each chunk of one member, in one byte: members say much, and their words must not take more.
#[derive(Debug)]
pub(super) struct Marks {
    by_chunk: Box<[u8]>,
    held: u32,
}

/// What it means that a member holds a chunk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct News {
    /// Whether it had not held it before.
    pub(super) is_first: bool,
    /// Whether others sent it, as far as this server knows.
    pub(super) is_from_peer: bool,
}

impl Marks {
    /// Nothing is known of so many chunks.
    pub(super) fn of(chunks: u32) -> Self {
        Self { by_chunk: vec![0; chunks as usize].into(), held: 0 }
    }

    pub(super) fn handle_sent(&mut self, chunk: u32) {
        if let Some(marks) = self.by_chunk.get_mut(chunk as usize) {
            *marks |= SENT;
        }
    }

    pub(super) fn handle_held(&mut self, chunk: u32) -> News {
        let Some(marks) = self.by_chunk.get_mut(chunk as usize) else { return News::default() };
        let is_first = *marks & EVER_HELD == 0;
        let is_from_peer = is_first && *marks & SENT == 0;
        self.held += u32::from(*marks & HELD == 0);
        *marks |= HELD | EVER_HELD;
        News { is_first, is_from_peer }
    }

    pub(super) fn handle_withdrawn(&mut self, chunk: u32) {
        if let Some(marks) = self.by_chunk.get_mut(chunk as usize) {
            self.held -= u32::from(*marks & HELD != 0);
            *marks &= !HELD;
        }
    }

    /// The number of chunks that it can send.
    pub(super) fn held(&self) -> u32 {
        self.held
    }

    /// The chunks that it can send, and those that it is sent.
    pub(super) fn held_or_sent(&self) -> RangeSet {
        let marked = (0..).zip(&self.by_chunk).filter(|(_, marks)| **marks & (HELD | SENT) != 0);
        marked.map(|(chunk, _)| chunk..chunk + 1).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_origin_did_not_send_came_from_peers_once() {
        let mut marks = Marks::of(4);
        marks.handle_sent(0);
        assert_eq!(marks.handle_held(0), News { is_first: true, is_from_peer: false });
        assert_eq!(marks.handle_held(2), News { is_first: true, is_from_peer: true });
        assert_eq!(marks.held(), 2);
        marks.handle_withdrawn(2);
        assert_eq!(marks.held_or_sent(), RangeSet::from_range(0..1));
        assert_eq!(marks.handle_held(2), News::default(), "a member that repeats itself makes no progress");
        assert_eq!((marks.handle_held(4), marks.held()), (News::default(), 2), "there is no such chunk");
        marks.handle_held(2);
        marks.handle_withdrawn(3);
        assert_eq!(marks.held(), 2, "each counts once");
        marks.handle_sent(4);
        marks.handle_withdrawn(4);
    }
}
