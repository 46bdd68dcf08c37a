//! The chunks of the current version, as their streams begin and end (PROTOCOL.md §6.5, §6.8).

use super::{Action, Phase, StreamToken, Subscriber, arrivals::WaitingStream, key, requests::Order};
use crate::{ChunkHeader, ChunkIndex, ClientMessage, ProtocolViolation, SubscriptionId, Verified};

impl Subscriber {
    /// Handles the header of a chunk on `stream`. The chunk is received now, waits for its announcement, its
    /// manifest or the version's memory, or is discarded if its version has ended.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when the chunk breaks a rule of PROTOCOL.md §6.5, or is pushed and exceeds the credit.
    pub fn handle_chunk(
        &mut self,
        header: ChunkHeader,
        stream: StreamToken,
    ) -> Result<(), ProtocolViolation> {
        if !self.codecs.contains(header.codec) && !self.requests.is_peer(header.subscription) {
            return Err(ProtocolViolation::CodecNotOffered(header.codec.name()));
        }
        if self.history.is_past((header.epoch, header.version)) {
            self.actions.push_back(Action::Discard(stream));
            return Ok(());
        }
        let (chunk, source) = (header.chunk, header.subscription);
        if self.requests.is_peer(source) {
            return self.handle_peer_chunk(header, stream);
        }
        if source != self.options.subscription && self.is_shared() {
            self.actions.push_back(Action::Discard(stream)); // It was left.
            return Ok(());
        }
        if source != self.options.subscription && !self.requests.has_source(source) {
            // Credit is the origin's; other servers send what was requested of them.
            return Err(ProtocolViolation::UnknownSubscription(source));
        }
        let is_ordered = self.requests.handle_header(source, chunk);
        // Once chunks are requested, one may come twice: on a lane that was retired, and on request.
        let is_running = matches!(self.phase, Phase::Running(_));
        let is_pushed = !is_ordered && !self.requests.is_pushing_ended();
        let spent = if is_pushed { self.arrivals.spend() } else { Ok(()) };
        match self.requests.shared_mut().filter(|_| is_running) {
            Some(shared) => {
                shared.handle_origin_header(chunk);
                match spent {
                    Ok(()) if is_pushed => self.arrivals.note_pushed(stream),
                    Err(error) if !shared.excuse_repeated() => return Err(error),
                    _ => {}
                }
            }
            None => spent?,
        }
        let early = WaitingStream { stream, header };
        if !is_running {
            self.arrivals.push_early(early);
            return Ok(());
        }
        let begun = self.begin_chunk(early);
        if let (true, true, Phase::Running(incoming)) = (begun.is_err(), is_ordered, &self.phase) {
            self.requests.handle_lost(chunk, &incoming.assembly); // Its source is closed; others send it.
        }
        begun
    }

    /// Starts to receive a chunk of the current version.
    pub(super) fn begin_chunk(
        &mut self,
        WaitingStream { stream, header }: WaitingStream,
    ) -> Result<(), ProtocolViolation> {
        let Phase::Running(incoming) = &mut self.phase else { return Ok(()) };
        if !incoming.is((header.epoch, header.version)) {
            return Err(ProtocolViolation::WrongVersion { epoch: header.epoch, version: header.version });
        }
        if incoming.assembly.is_listed_otherwise(header.chunk, header.hash) {
            self.actions.push_back(Action::Discard(stream));
            let is_missing = incoming.assembly.is_missing(header.chunk);
            self.handle_other_hash(header.chunk, header.subscription, is_missing);
            return Ok(());
        }
        let is_of_peer = header.subscription != self.options.subscription;
        let shared = self.requests.shared().filter(|_| is_of_peer);
        let encoding = shared.and_then(|shared| shared.hash_of(header.chunk));
        if shared.is_some() && encoding.is_none() {
            // The origin's word on it has become uncertain since it was ordered.
            self.discard(WaitingStream { stream, header });
            self.put_back(header.chunk);
            return Ok(());
        }
        let range = match incoming.assembly.handle_header(&header) {
            // It was requested again, although it had not been lost, or not yet.
            Err(ProtocolViolation::DuplicateChunk(chunk)) if !self.requests.is_only_pushed() => {
                let is_verified = incoming.assembly.is_verified(chunk);
                let spare = || WaitingStream { stream, header };
                // What the origin sent once cannot be requested of it again: its stream is kept rather than a peer's.
                if !is_verified
                    && !is_of_peer
                    && self.requests.shared().is_some()
                    && let Some(displaced) = self.arrivals.take_spare(chunk)
                {
                    self.discard(displaced);
                }
                if is_verified || self.arrivals.push_spare(spare()).is_some() {
                    self.discard(spare());
                }
                return Ok(());
            }
            range => range?,
        };
        let (_, dtype) = incoming.assembly.manifest().chunk(header.chunk);
        self.arrivals.begin(stream, &header);
        self.actions
            .push_back(Action::Receive { stream, header, range, dtype, encoding });
        Ok(())
    }

    /// Drops a stream that is not needed.
    pub(super) fn discard(&mut self, WaitingStream { stream, header }: WaitingStream) {
        self.actions.push_back(Action::Discard(stream));
        if let Some(shared) = self.requests.shared_mut() {
            shared.handle_failed(header.subscription, header.chunk);
        }
        self.refund(stream);
    }

    /// Handles a verified chunk, whose bytes are in the version's memory. Grants its credit again.
    pub fn handle_verified(&mut self, stream: StreamToken, verified: Verified) {
        let is_pushed = self.requests.is_only_pushed();
        let Some((chunk, source)) = self.arrivals.end(stream, is_pushed) else { return };
        self.requests.note_progress(source);
        if let Some(shared) = self.requests.shared_mut() {
            shared.note_arrival();
            shared.handle_delivered(source, chunk);
        }
        self.refund(stream);
        if let Some(spare) = self.arrivals.take_spare(chunk) {
            self.discard(spare);
        }
        let Phase::Running(incoming) = &mut self.phase else { return };
        debug_assert_eq!(chunk, verified.chunk(), "a stream carries the chunk that its header names");
        incoming.assembly.handle_verified(verified);
        if is_pushed {
            self.send(ClientMessage::Credit { subscription: self.options.subscription, chunks: 1 });
        } else {
            self.note_source(&verified, source);
        }
        self.finish_if_complete();
    }

    /// Handles the early end of a stream, because its lane was lost or the server gave the version up. The caller must
    /// have stopped writing the chunk. A stream whose chunk is not being received is ignored.
    pub fn handle_lost(&mut self, stream: StreamToken) {
        let is_pushed = self.requests.is_only_pushed();
        let Some((chunk, source)) = self.arrivals.end(stream, is_pushed) else { return };
        self.requests.note_progress(source);
        if let Some(shared) = self.requests.shared_mut() {
            shared.note_arrival();
            shared.handle_failed(source, chunk);
        }
        self.refund(stream);
        self.lose_chunk(chunk);
        if self.requests.shared_mut().is_some_and(|shared| shared.note_lost(source)) {
            self.shun(source);
            self.actions.push_back(Action::CloseSource(source));
        }
    }

    /// Handles the early end of a chunk's stream: a second stream takes its place, or the chunk is missing again.
    pub(super) fn lose_chunk(&mut self, chunk: ChunkIndex) {
        if let Phase::Running(incoming) = &mut self.phase {
            incoming.assembly.handle_lost(chunk);
        }
        if let Some(spare) = self.arrivals.take_spare(chunk) {
            let begun = self.begin_chunk(spare);
            debug_assert_eq!(begun, Ok(()), "its header was accepted but for its twin");
        }
        if let Phase::Running(incoming) = &self.phase {
            self.requests.handle_lost(chunk, &incoming.assembly);
        }
    }

    /// Handles `Retired`: a source begins no more chunks on one of its lanes, and chunks may have been lost with it.
    /// From then on this end requests what it lacks of the current version.
    pub fn handle_retired(&mut self, source: SubscriptionId) {
        if self.current_version().is_some() {
            self.requests.handle_retired(source, self.options.subscription);
        }
    }

    /// Requests missing chunks, unless the server pushes them.
    pub(super) fn request_missing(&mut self) {
        if self.requests.shared().is_some() && self.is_lent() {
            return; // A request would decline the memory.
        }
        let Phase::Running(incoming) = &mut self.phase else { return };
        let (origin, assembly) = (self.options.subscription, &incoming.assembly);
        let has_several = self.requests.sources() > 1;
        let allowance = self.allowance + if has_several { self.further_allowance } else { 0 };
        let Some(order) = self.requests.next(origin, assembly, &self.arrivals, allowance) else { return };
        let Order { source: subscription, chunks, hashes, again } = order;
        if hashes {
            incoming.assembly.begin_list();
        }
        let (epoch, version) = key(incoming.id());
        self.send(ClientMessage::Request { subscription, epoch, version, chunks, hashes, again });
    }
}
