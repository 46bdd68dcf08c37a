//! The chunks of one subscription that are arriving, or wait to: what credit they cost, and which of several attempts at
//! one counts.

use crate::transfer::{Place, Transfer};
use std::collections::HashMap;
use tensor_relay_protocol::{Arrival, ChunkHeader, ChunkIndex, Misbehaved, VersionId};
use tensor_relay_transport::DataIn;
use tokio::{sync::oneshot, task::AbortHandle};

/// The chunks on their way to one subscription. A chunk costs one credit from its first header until it is verified, over
/// however many lanes it is tried.
#[derive(Debug)]
pub(crate) struct Arrivals {
    /// Chunks whose version or manifest is not known yet, of each the latest attempt. Credit bounds them.
    early: Vec<(ChunkHeader, DataIn)>,
    /// How many more chunks the server may begin.
    credit: u32,
    /// What receives chunks of the version under way. It ends with that, so that nothing holds its memory longer.
    tasks: Vec<AbortOnDrop>,
    /// How to end the reception of a chunk that came over a further lane, and may come again over another one.
    cuts: HashMap<ChunkIndex, oneshot::Sender<()>>,
    /// Later attempts at chunks whose earlier ones are being ended.
    instead: HashMap<ChunkIndex, (ChunkHeader, DataIn)>,
}

/// A chunk that may be received now.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) header: ChunkHeader,
    pub(crate) stream: DataIn,
    pub(crate) place: Place,
    pub(crate) generation: u64,
    pub(crate) cut: Cut,
}

/// A task that ends when this is dropped.
#[derive(Debug)]
struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Hears when the reception of a chunk is to end, if bytes of it are still missing.
#[derive(Debug)]
pub(crate) struct Cut(Option<oneshot::Receiver<()>>);

impl Cut {
    /// Returns when it is to end. Never for what cannot come again.
    pub(crate) async fn made(self) {
        match self.0 {
            Some(cut) => drop(cut.await),
            None => std::future::pending().await,
        }
    }
}

impl Arrivals {
    pub(crate) fn new(credit: u32) -> Self {
        Self { early: vec![], credit, tasks: vec![], cuts: HashMap::new(), instead: HashMap::new() }
    }

    /// How many more chunks the server may begin.
    pub(crate) fn credit(&self) -> u32 {
        self.credit
    }

    pub(crate) fn grant(&mut self, chunks: u32) {
        self.credit += chunks;
    }

    /// Keeps a chunk that came before its version or manifest. A later attempt takes the place of an earlier one.
    pub(crate) fn handle_early(&mut self, header: ChunkHeader, stream: DataIn) -> Result<(), Misbehaved> {
        let key = |header: &ChunkHeader| (header.epoch, header.version, header.chunk);
        match self.early.iter_mut().find(|(other, _)| key(other) == key(&header)) {
            Some(earlier) if earlier.0.attempt < header.attempt => *earlier = (header, stream),
            Some(later) if later.0.attempt > header.attempt => {}
            _ => {
                self.spend()?;
                self.early.push((header, stream));
            }
        }
        Ok(())
    }

    /// The chunks that came early; they have cost their credit.
    pub(crate) fn take_early(&mut self) -> Vec<(ChunkHeader, DataIn)> {
        self.credit += self.early.len() as u32;
        std::mem::take(&mut self.early)
    }

    /// Takes a chunk of the version under way; returns it if it may be received now.
    pub(crate) fn handle_header(
        &mut self,
        (header, stream): (ChunkHeader, DataIn),
        transfer: &mut Transfer,
        id: &VersionId,
        generation: u64,
    ) -> Result<Option<Ready>, Misbehaved> {
        if (header.epoch, header.version) != (id.epoch, id.version) {
            return Err(Misbehaved::WrongVersion { epoch: header.epoch, version: header.version });
        }
        match transfer.handle_header(&header)? {
            Arrival::Begin(range) => {
                self.spend()?;
                let place = transfer.place(header.chunk, range);
                Ok(Some(self.ready((header, stream), place, generation)))
            }
            Arrival::Instead(_) => {
                self.instead.insert(header.chunk, (header, stream));
                self.cuts.remove(&header.chunk);
                Ok(None)
            }
            Arrival::Late => Ok(None),
        }
    }

    /// Takes the task that receives a chunk of the version under way.
    pub(crate) fn handle_begun(&mut self, task: AbortHandle) {
        if self.tasks.len() == self.tasks.capacity() {
            self.tasks.retain(|task| !task.0.is_finished()); // What has ended need not be ended.
        }
        self.tasks.push(AbortOnDrop(task));
    }

    /// Takes the news that a chunk is verified: its credit is free again.
    pub(crate) fn handle_verified(&mut self, chunk: ChunkIndex) {
        self.cuts.remove(&chunk);
        self.instead.remove(&chunk);
        self.credit += 1;
    }

    /// Takes the news that a chunk was lost with its stream. A later attempt that waits may be received now; without one the
    /// chunk is missing again, and its credit free.
    pub(crate) fn handle_lost(
        &mut self,
        chunk: ChunkIndex,
        transfer: &mut Transfer,
        generation: u64,
    ) -> Option<Ready> {
        self.cuts.remove(&chunk);
        let later = self.instead.remove(&chunk);
        let place = later.as_ref().and_then(|_| transfer.place_of(chunk));
        match (later, place) {
            (Some(later), Some(place)) => Some(self.ready(later, place, generation)),
            _ => {
                transfer.handle_lost(chunk);
                self.credit += 1;
                None
            }
        }
    }

    /// Ends everything that belongs to the version under way.
    pub(crate) fn end_version(&mut self) {
        self.tasks.clear();
        self.cuts.clear();
        self.instead.clear();
    }

    /// Forgets everything; the server has `credit` from now on.
    pub(crate) fn forget(&mut self, credit: u32) {
        self.end_version();
        self.early.clear();
        self.credit = credit;
    }

    fn ready(&mut self, (header, stream): (ChunkHeader, DataIn), place: Place, generation: u64) -> Ready {
        let cut = match stream.lane().number() {
            0 => Cut(None), // What comes over the first lane comes once: that lane is the session.
            _ => {
                let (cut, made) = oneshot::channel();
                self.cuts.insert(header.chunk, cut);
                Cut(Some(made))
            }
        };
        Ready { header, stream, place, generation, cut }
    }

    fn spend(&mut self) -> Result<(), Misbehaved> {
        self.credit = self.credit.checked_sub(1).ok_or(Misbehaved::OverCredit)?;
        Ok(())
    }
}
