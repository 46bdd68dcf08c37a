//! [`Links`]: the network of a simulation. Each node has a link up, which its transfers share equally, and a link down,
//! which they fill one after the other. Time is in microseconds.

use crate::swarm::random::Random;
use std::collections::VecDeque;

/// The number of a node.
pub(super) type Node = usize;

/// A chunk is sent in so many pieces, which take turns with those of other chunks.
const PIECES: u32 = 4;

/// A chunk on its way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Transfer {
    pub(super) from: Node,
    pub(super) to: Node,
    pub(super) chunk: u32,
    pub(super) is_pushed: bool,
    pieces: u32,
    /// The pieces that it sends before the next transfer's turn.
    turn: u32,
}

/// What happened when a piece left.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) transfer: Transfer,
    /// Whether it is the first piece of the chunk.
    pub(super) is_first: bool,
    /// When the chunk is whole at the other end, if this is its last piece.
    pub(super) whole_at: Option<u64>,
    /// When the next piece leaves this node, if any is left.
    pub(super) next_at: Option<u64>,
}

#[derive(Debug)]
struct Link {
    /// The time that one chunk takes.
    chunk_us: u64,
    queue: VecDeque<Transfer>,
    free_at: u64,
    /// The chunks that left.
    sent: u32,
}

#[derive(Debug)]
pub(super) struct Links {
    nodes: Vec<Link>,
    delay_us: u64,
    /// Whether congestion favours some transfers, as that of TCP does: up to the whole chunk is sent before others' turns.
    is_unfair: bool,
}

/// The time for which congestion favours the same transfers.
const FAVOURED_FOR_US: u64 = 3_000_000;

impl Links {
    pub(super) fn new(chunk_us: impl IntoIterator<Item = u64>, delay_us: u64, is_unfair: bool) -> Self {
        let link = |chunk_us| Link { chunk_us, queue: VecDeque::new(), free_at: 0, sent: 0 };
        Self { nodes: chunk_us.into_iter().map(link).collect(), delay_us, is_unfair }
    }

    /// Begins to send a chunk. Returns when its first piece has left, if the link was idle.
    pub(super) fn send(
        &mut self,
        now: u64,
        from: Node,
        to: Node,
        chunk: u32,
        is_pushed: bool,
    ) -> Option<u64> {
        let link = &mut self.nodes[from];
        link.queue
            .push_back(Transfer { from, to, chunk, is_pushed, pieces: PIECES, turn: 0 });
        (link.queue.len() == 1).then(|| now + link.chunk_us / u64::from(PIECES))
    }

    /// Ends the sending of a piece; `None` if the node left.
    pub(super) fn handle_left(&mut self, now: u64, from: Node) -> Option<Left> {
        let delay = self.delay_us;
        let mut transfer = self.nodes[from].queue.pop_front()?;
        let is_first = transfer.pieces == PIECES;
        let turn = self.turn(from, transfer.to, now);
        transfer.pieces -= 1;
        let down = &mut self.nodes[transfer.to];
        down.free_at = down.free_at.max(now + delay) + down.chunk_us / u64::from(PIECES);
        let whole_at = (transfer.pieces == 0).then_some(down.free_at);
        let link = &mut self.nodes[from];
        match whole_at {
            Some(_) => link.sent += 1,
            None if transfer.turn > 0 => {
                transfer.turn -= 1;
                link.queue.push_front(transfer);
            }
            None => {
                transfer.turn = turn - 1;
                link.queue.push_back(transfer);
            }
        }
        let next_at = (!link.queue.is_empty()).then(|| now + link.chunk_us / u64::from(PIECES));
        Some(Left { transfer, is_first, whole_at, next_at })
    }

    /// The pieces in a row of a transfer: 1, 2 or 4.
    fn turn(&self, from: Node, to: Node, now: u64) -> u32 {
        let pair = (from as u64) << 40 | (to as u64) << 20 | (now / FAVOURED_FOR_US);
        1 << (u32::from(self.is_unfair) * Random::new(pair).below(3) as u32)
    }

    /// Removes a node's transfers, and those to it except the one whose piece is leaving.
    pub(super) fn remove(&mut self, gone: Node) {
        self.nodes[gone].queue.clear();
        for link in &mut self.nodes {
            let mut place = 0;
            link.queue.retain(|transfer| {
                place += 1;
                place == 1 || transfer.to != gone
            });
        }
    }

    /// The number of chunks that a node has sent.
    pub(super) fn sent(&self, from: Node) -> u32 {
        self.nodes[from].sent
    }
}
