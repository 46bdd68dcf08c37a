//! Handling of what concerns the swarms of shared versions (PROTOCOL.md §3.15).

use super::Session;
use crate::{error::SessionError, other_servers::Links, reception::Context};
use tensor_relay_protocol::{ClientMessage, ProtocolViolation, ServerMessage, SubscriptionId};
use tokio::time::Instant;

impl Session {
    /// Asks a peer that was connected for the versions for which it is named.
    pub(super) fn ask_peers(&mut self, links: &mut Links<'_>) -> Result<(), SessionError> {
        for (id, reception) in &mut self.receptions {
            let mut context = Context {
                id: *id,
                links,
                allocators: &self.allocators,
                ingress: &self.ingress,
                outbox: &mut self.outbox,
                sources: &mut self.sources,
            };
            reception.ask_peers(&mut context);
        }
        self.act_all(links)
    }

    /// Handles the end of a peer's right to take versions of a topic from this client, or its return.
    pub(super) fn handle_revoke(&self, id: SubscriptionId, taker: [u8; 32], restored: bool) {
        let forward = self.config.sharing.as_ref().and_then(|sharing| sharing.forward.as_ref());
        if let (Some(forward), Some(reception)) = (forward, self.receptions.get(&id)) {
            forward.revoke(reception.topic(), taker, restored);
        }
    }

    /// When the next report of held chunks to the origin is due; `None` if none will be.
    pub(super) fn held_due_at(&self) -> Option<Instant> {
        self.config.sharing.as_ref()?;
        let now = Instant::now();
        let due = self.receptions.values().filter_map(|reception| reception.held_due_at(now));
        due.min()
    }

    /// Tells the origin which chunks are held, where a report is due.
    pub(super) fn report_held(&mut self, now: Instant) {
        let reports = self.receptions.iter_mut();
        let due = reports.filter_map(|(id, reception)| reception.report_held(*id, now));
        self.outbox.extend(due.map(ClientMessage::Held));
    }
}

/// Checks that a peer speaks of nothing but what it was asked for: it is no origin.
///
/// # Errors
/// [`ProtocolViolation`] for any other message.
pub(super) fn check_of_peer(message: &ServerMessage) -> Result<(), ProtocolViolation> {
    match message {
        ServerMessage::Announce(_)
        | ServerMessage::Held(_)
        | ServerMessage::Complete { .. }
        | ServerMessage::Waiting { .. }
        | ServerMessage::Abort { .. }
        | ServerMessage::End { .. }
        | ServerMessage::Retired(_)
        | ServerMessage::Drain { .. } => Ok(()),
        _ => {
            let (found, expected) = ("a message that is not about its chunks", "the answer of a peer");
            Err(ProtocolViolation::OutOfTurn { found, expected })
        }
    }
}
