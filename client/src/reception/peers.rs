//! A reception's part in the swarm of its version (PROTOCOL.md §3.15).

use super::{Context, Reception};
use crate::{
    ReceiptSources,
    other_servers::{Link, UsablePeer},
};
use tensor_relay_protocol::{
    ClientMessage, EncodingEntry, Epoch, Held, ProtocolViolation, SubscriptionId, Version, VersionId,
};
use tokio::time::Instant;

impl Reception {
    /// Handles `Encodings`.
    pub(crate) fn handle_encodings(
        &mut self,
        version: (Epoch, Version),
        entries: &[EncodingEntry],
    ) -> Result<(), ProtocolViolation> {
        self.machine.handle_encodings(version, entries)?;
        let current = self.machine.current_version().map(|id| (id.epoch, id.version));
        self.forwarding.handle_encodings(version, entries, current == Some(version));
        self.held.note_change();
        Ok(())
    }

    /// Tells the machine the time, by which it measures how fast peers are.
    pub(super) fn note_time(&mut self) {
        if self.machine.is_shared() {
            self.machine.set_time(Instant::now().into_std());
        }
    }

    /// Asks each peer that is connected and named for the current version, unless it was asked already.
    pub(crate) fn ask_peers(&mut self, context: &mut Context<'_, '_>) {
        if !self.machine.wants_peers() {
            return;
        }
        for UsablePeer { link, index, key, grant } in context.links.others.peers_of(context.id) {
            if self.machine.wants_peers() && !context.sources.is_asked(context.id, link) {
                let source = context.links.others.take_number(index);
                context.sources.insert(source, context.id, link);
                self.machine.ask_peer(source, key, grant);
            }
        }
    }

    /// Before chunks are ordered of a peer, lets as many bytes of it arrive unread. No more: a hostile one could fill this
    /// client's memory with what it was not asked for.
    pub(super) fn allow_ordered(&self, message: &ClientMessage, context: &mut Context<'_, '_>) {
        let ClientMessage::Request { subscription, .. } = message else { return };
        if let Some(Link::Other(index)) = context.sources.link(*subscription)
            && let Some(chunk_bytes) = self.chunk_bytes()
        {
            let chunks = self.machine.outstanding_of(*subscription);
            let bytes = u64::from(chunks) * u64::from(chunk_bytes);
            context.links.others.allow_unread_of_peer(index, context.id, bytes);
        }
    }

    /// Uses a peer that lied no more, and tells the origin, if it is connected.
    pub(super) fn bar(&self, peer: SubscriptionId, context: &mut Context<'_, '_>) {
        if let Some(Link::Other(index)) = context.sources.link(peer)
            && let Some(key) = context.links.others.bar_peer(index)
            && let Some(&VersionId { epoch, version, .. }) = self.machine.current_version()
        {
            let subscription = context.id;
            context
                .outbox
                .push_back(ClientMessage::BadPeer { subscription, epoch, version, key });
        }
    }

    /// Records that a chunk of the current version came from the peer with this key.
    pub(crate) fn note_giver(&mut self, key: [u8; 32]) {
        self.givers.insert(key);
    }

    /// When the next report to the origin is due; `None` if none will be.
    pub(crate) fn held_due_at(&self, now: Instant) -> Option<Instant> {
        self.held.due_at(now)
    }

    /// The report to the origin that is due, of the subscription's number `id`: what is offered to others or, by a member
    /// that only takes, what has arrived, so that the origin need not push it.
    pub(crate) fn report_held(&mut self, id: SubscriptionId, now: Instant) -> Option<Held> {
        let Self { held, machine, forwarding, .. } = self;
        held.take(id, now, |version| match forwarding.is_active() {
            true => forwarding.offered(version),
            false => machine.held().unwrap_or_default(),
        })
    }

    /// Handles the commit: what is offered is reported at once, and as long as it is. A member that only takes has said
    /// everything with `Committed`.
    pub(super) fn finish_held(&mut self) {
        match self.forwarding.is_active() {
            true => self.held.hasten(),
            false => self.held.end(),
        }
    }

    /// From whom the bytes of the current version came.
    pub(super) fn sources(&self, wire_bytes: u64) -> ReceiptSources {
        let (server_bytes, peer_bytes) = self.counters.bytes_of_others();
        ReceiptSources {
            origin_bytes: wire_bytes.saturating_sub(server_bytes + peer_bytes),
            server_bytes,
            peer_bytes,
            peers: self.givers.len() as u32,
        }
    }
}
