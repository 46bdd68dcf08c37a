//! One chunk on its way to one subscription: over the lane that is free, and over another one when that fails.

use crate::{
    lanes::Load,
    sends::{Outgoing, SendError, Sent},
};
use std::sync::Arc;
use tensor_relay_protocol::{ChunkHeader, ChunkIndex};
use tensor_relay_transport::{
    Finished, Lane, LaneError,
    egress::{self, Encoded, Stage},
};

/// How often lanes may fail under one chunk before it takes the first one, with which alone it cannot be lost.
const FURTHER_ATTEMPTS_MAX: u8 = 4;

/// A chunk that is ready for the wire.
#[derive(Debug)]
pub(crate) struct Delivery {
    outgoing: Outgoing,
    chunk: ChunkIndex,
    encoded: Encoded,
    /// How often it was begun before.
    attempt: u8,
    /// Whether it was counted as sent: once, however often it is sent again.
    is_counted: bool,
}

/// A chunk that was written whole and has not arrived: a further lane may take it with it. Dropped, it is given up.
#[derive(Debug)]
pub(crate) struct Unsettled {
    delivery: Delivery,
    load: Load,
    stream: OnItsWay,
}

/// A stream that was written whole. Dropped before it has arrived, it is reset: nobody waits for the rest of it, which
/// would take the way of what comes after.
#[derive(Debug)]
struct OnItsWay(Option<Finished>);

impl OnItsWay {
    /// Waits until the other end has it all. Cancel safe.
    async fn arrived(&mut self) -> Result<(), LaneError> {
        if let Some(stream) = &self.0 {
            stream.arrived().await?;
            self.0 = None;
        }
        Ok(())
    }

    /// Leaves it to its lane, to arrive or to be lost with that.
    fn leave(mut self) {
        self.0 = None;
    }
}

impl Drop for OnItsWay {
    fn drop(&mut self) {
        if let Some(stream) = self.0.take() {
            stream.give_up();
        }
    }
}

/// How one attempt ended.
enum Attempt {
    /// It was written whole.
    Written(Load, OnItsWay),
    /// The receiver does not want it.
    Stopped,
    /// The lane is gone or silent: another one has to take it.
    LaneLost,
}

impl Delivery {
    pub(crate) fn new(outgoing: Outgoing, chunk: ChunkIndex, encoded: Encoded) -> Self {
        Self { outgoing, chunk, encoded, attempt: 0, is_counted: false }
    }

    /// Writes the chunk to one lane after the other, until one took it whole.
    ///
    /// In a session of one lane that is all: what is lost with that, is lost with the session. Among several, the chunk has
    /// to be [settled](Unsettled::settle).
    pub(crate) async fn send(mut self) -> Result<Sent, SendError> {
        let shared = Arc::clone(&self.outgoing.shared);
        let link = self.outgoing.link.clone();
        let _sending = (shared.encoder.stages().begin(Stage::Send), link.begin());
        loop {
            match self.attempt().await? {
                Attempt::Written(load, stream) => {
                    self.count();
                    if !load.is_among_several() {
                        stream.leave();
                        return Ok(Sent::Chunk(None));
                    }
                    return Ok(Sent::Chunk(Some(Box::new(Unsettled { delivery: self, load, stream }))));
                }
                // Of a chunk that was begun before, the receiver has all already; it still counts as sent.
                Attempt::Stopped if self.attempt > 0 => {
                    self.count();
                    return Ok(Sent::Chunk(None));
                }
                Attempt::Stopped => return Ok(Sent::GivenUp),
                Attempt::LaneLost => self.begin_again(),
            }
        }
    }

    async fn attempt(&self) -> Result<Attempt, SendError> {
        let (lanes, bytes) = (&self.outgoing.lanes, self.encoded.bytes.len() as u64);
        let load = match self.attempt < FURTHER_ATTEMPTS_MAX {
            true => lanes.assign(bytes),
            false => lanes.assign_first(bytes),
        };
        let member = load.member();
        let written = match member.is_first() {
            true => self.write(&member.lane).await,
            false => {
                let (writing, lane) = (self.clone_for_lane(), member.lane.clone());
                tokio::select! {
                    written = member.lane.run(async move { writing.write(&lane).await }) => written.and_then(|w| w),
                    () = member.given_up() => return Ok(Attempt::LaneLost),
                }
            }
        };
        match (written, member.is_first()) {
            (Ok(stream), _) => Ok(Attempt::Written(load, stream)),
            (Err(LaneError::StreamGivenUp), _) => Ok(Attempt::Stopped),
            (Err(error), true) => Err(SendError::Lane(error)),
            (Err(_), false) => Ok(Attempt::LaneLost),
        }
    }

    /// The same attempt, for a task on the lane's thread.
    fn clone_for_lane(&self) -> Self {
        let Self { outgoing, chunk, encoded, attempt, is_counted } = self;
        let (outgoing, encoded) = (outgoing.clone(), encoded.clone());
        Self { outgoing, chunk: *chunk, encoded, attempt: *attempt, is_counted: *is_counted }
    }

    async fn write(&self, lane: &Lane) -> Result<OnItsWay, LaneError> {
        let note = |bytes| {
            self.outgoing.progress.note(bytes);
            self.outgoing.link.note(bytes);
        };
        let written = egress::send_chunk(lane, self.header(), &self.encoded, &note).await;
        written.map(|stream| OnItsWay(Some(stream)))
    }

    fn header(&self) -> ChunkHeader {
        let Outgoing { subscription, retained, base, .. } = &self.outgoing;
        let base = base.as_ref().filter(|_| self.encoded.codec.needs_base());
        let (range, _) = retained.payload.manifest().chunk(self.chunk);
        ChunkHeader {
            subscription: *subscription,
            epoch: retained.id.epoch,
            version: retained.id.version,
            chunk: self.chunk,
            codec: self.encoded.codec,
            raw_bytes: (range.end - range.start) as u32,
            encoded_bytes: self.encoded.bytes.len() as u32,
            hash: self.encoded.hash,
            base: base.map(|base| base.version),
            attempt: self.attempt,
        }
    }

    /// Counts the chunk as sent.
    fn count(&mut self) {
        if !std::mem::replace(&mut self.is_counted, true) {
            self.outgoing.count(self.chunk, &self.encoded);
        }
    }

    /// Counts another attempt. Never more than [`FURTHER_ATTEMPTS_MAX`]: the last one goes over the first lane.
    fn begin_again(&mut self) {
        tracing::info!(subscription = %self.outgoing.subscription, chunk = %self.chunk, "A chunk goes over another lane.");
        self.attempt = self.attempt.saturating_add(1);
    }
}

impl Unsettled {
    /// Waits until the chunk has arrived, and sends it over another lane when its own is lost before.
    pub(crate) async fn settle(self: Box<Self>) -> Result<(), SendError> {
        let mut next = Some(self);
        while let Some(unsettled) = next.take() {
            let Self { mut delivery, load, mut stream } = *unsettled;
            let arrived = tokio::select! {
                arrived = stream.arrived() => arrived,
                () = load.member().given_up() => Err(LaneError::StreamGivenUp),
            };
            let is_first = load.member().is_first();
            drop((stream, load));
            if let Err(error) = arrived {
                if is_first {
                    return Err(SendError::Lane(error));
                }
                delivery.begin_again();
                if let Sent::Chunk(again) = delivery.send().await? {
                    next = again;
                }
            }
        }
        Ok(())
    }
}
