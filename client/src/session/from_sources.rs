//! Handling of what further sources of a version send.

use super::Session;
use crate::{error::SessionError, reception::SourceOf, sources::{Link, Links, is_to_source}};
use tensor_relay_protocol::{ClientMessage, ProtocolViolation, ServerMessage, SubscriptionId};

impl Session {
    /// The further source that a message is from; `None` if it is for the handling of the origin's messages.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when a server that is not the origin sends a message that was not asked for.
    pub(super) fn source_of_message(
        &self,
        message: &ServerMessage,
        link: Link,
    ) -> Result<Option<SubscriptionId>, ProtocolViolation> {
        let subscription = match message {
            ServerMessage::Announce(announce) => announce.subscription,
            ServerMessage::Complete { subscription, .. }
            | ServerMessage::Waiting { subscription, .. }
            | ServerMessage::Abort { subscription, .. }
            | ServerMessage::End { subscription, .. } => *subscription,
            _ if link == Link::Origin => return Ok(None),
            // Its subscriptions end before it closes the connection.
            ServerMessage::Drain { .. } => return Ok(Some(SubscriptionId(0))),
            _ => {
                let (found, expected) = ("a message about topics", "an answer to a request for chunks");
                return Err(ProtocolViolation::OutOfTurn { found, expected });
            }
        };
        match link == Link::Origin && !is_to_source(subscription) {
            true => Ok(None),
            false => Ok(Some(subscription)),
        }
    }

    /// Handles a message of a further source. One that is not used any more is ignored.
    pub(super) fn handle_source_message(
        &mut self,
        source: SubscriptionId,
        message: ServerMessage,
        links: &mut Links<'_>,
    ) -> Result<(), SessionError> {
        let is_last = matches!(message, ServerMessage::End { .. });
        let of = if is_last { self.source_of.remove(&source) } else { self.source_of.get(&source).copied() };
        let Some(SourceOf { reception: id, .. }) = of else { return Ok(()) };
        let Some(reception) = self.receptions.get_mut(&id) else { return Ok(()) };
        match message {
            ServerMessage::Announce(announce) => reception.handle_source_announce(announce)?,
            ServerMessage::Waiting { .. } => reception.machine.handle_source_waiting(source),
            ServerMessage::Abort { .. } => reception.machine.leave_source(source),
            ServerMessage::End { .. } => reception.machine.handle_source_ended(source),
            _ => {} // `Complete`: the list of hashes says what is complete.
        }
        self.act(id, links)
    }

    /// The user's subscription that what arrived under this number on `link` belongs to; `None` if a server uses a number
    /// of another one, or of a subscription that has ended.
    pub(super) fn owner(&self, number: SubscriptionId, link: Link) -> Option<SubscriptionId> {
        match self.source_of.get(&number) {
            Some(of) => (of.link == link).then_some(of.reception),
            None => (link == Link::Origin && !is_to_source(number)).then_some(number),
        }
    }

    /// Ends the subscriptions to further sources whose user's subscription has ended.
    pub(super) fn leave_orphans(&mut self, links: &mut Links<'_>) {
        if self.source_of.is_empty() {
            return;
        }
        let is_orphan = |of: &SourceOf| !self.receptions.contains_key(&of.reception);
        let orphans: Vec<_> = self.source_of.extract_if(|_, of| is_orphan(of)).collect();
        for (subscription, of) in orphans {
            let leave = ClientMessage::Unsubscribe { subscription, keep_place: false };
            match of.link {
                Link::Origin => self.outbox.push_back(leave),
                Link::Other(index) => links.send_to_other(index, leave),
            }
        }
    }

    /// Handles the retirement of a lane of a connection for all subscriptions on it.
    pub(super) fn handle_retired(&mut self, link: Link) {
        if link == Link::Origin {
            for (id, reception) in &mut self.receptions {
                reception.machine.handle_retired(*id);
            }
        }
        for (source, of) in self.source_of.iter().filter(|(_, of)| of.link == link) {
            if let Some(reception) = self.receptions.get_mut(&of.reception) {
                reception.machine.handle_retired(*source);
            }
        }
    }
}
