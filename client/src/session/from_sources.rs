//! Handling of what further sources of a version send.

use super::Session;
use crate::{
    error::SessionError,
    other_servers::{Link, Links},
    source_table::Owner,
};
use tensor_relay_protocol::{ClientMessage, ProtocolViolation, ServerMessage, SubscriptionId};

impl Session {
    /// Whom a message of a server is for.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when a server that is not the origin sends a message that was not asked for.
    pub(super) fn owner_of_message(
        &self,
        message: &ServerMessage,
        link: Link,
    ) -> Result<Owner, ProtocolViolation> {
        match (subscription(message), message) {
            (Some(subscription), _) => self.owner(subscription, link),
            _ if link == Link::Origin => Ok(Owner::User),
            // Its subscriptions end before it closes the connection.
            (_, ServerMessage::Drain { .. }) => Ok(Owner::Nobody),
            _ => {
                let (found, expected) = ("a message about topics", "an answer to a request for chunks");
                Err(ProtocolViolation::OutOfTurn { found, expected })
            }
        }
    }

    /// Whom a message or a stream about a subscription is for, which came over `link`.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when the subscription is not one to the server at `link`.
    pub(super) fn owner(&self, subscription: SubscriptionId, link: Link) -> Result<Owner, ProtocolViolation> {
        let is_user = self.receptions.contains_key(&subscription);
        self.sources.owner(subscription, link, self.next_id, is_user)
    }

    /// Handles a message of a further source.
    pub(super) fn handle_source_message(
        &mut self,
        (source, id): (SubscriptionId, SubscriptionId),
        message: ServerMessage,
        links: &mut Links<'_>,
    ) -> Result<(), SessionError> {
        let Some(reception) = self.receptions.get_mut(&id) else { return Ok(()) };
        match message {
            ServerMessage::Announce(announce) => reception.handle_source_announce(announce)?,
            ServerMessage::Hashes { epoch, version, first, hashes, .. } => {
                reception.machine.handle_hashes(source, (epoch, version), first, &hashes)?;
            }
            ServerMessage::Held(held) => reception.machine.handle_held(source, &held)?,
            ServerMessage::Waiting { .. } => reception.machine.handle_source_waiting(source),
            ServerMessage::Abort { .. } => reception.machine.leave_source(source),
            ServerMessage::End { .. } => {
                reception.machine.handle_source_ended(source);
                match reception.machine.is_receiving_of(source) {
                    true => self.sources.leave(source),
                    false => self.sources.remove(source), // It may have the version later.
                }
            }
            _ => {} // `Complete`: the list of hashes says what is complete.
        }
        self.act(id, links)
    }

    /// Ends the subscriptions to further sources whose user's subscription has ended.
    pub(super) fn leave_orphans(&mut self, links: &mut Links<'_>) {
        links.others.forget_peers(|reception| !self.receptions.contains_key(&reception));
        if self.sources.is_empty() {
            return;
        }
        let orphans = self.sources.take_orphans(|reception| !self.receptions.contains_key(&reception));
        for (subscription, link) in orphans {
            let leave = ClientMessage::Unsubscribe { subscription, keep_place: false };
            match link {
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
        for (source, reception) in self.sources.used(link) {
            if let Some(reception) = self.receptions.get_mut(&reception) {
                reception.machine.handle_retired(source);
            }
        }
    }
}

/// The subscription that a message is about; `None` for a message of the session.
pub(super) fn subscription(message: &ServerMessage) -> Option<SubscriptionId> {
    match message {
        ServerMessage::Announce(announce) => Some(announce.subscription),
        ServerMessage::Held(held) => Some(held.subscription),
        ServerMessage::Complete { subscription, .. }
        | ServerMessage::Hashes { subscription, .. }
        | ServerMessage::Waiting { subscription, .. }
        | ServerMessage::Sources { subscription, .. }
        | ServerMessage::Encodings { subscription, .. }
        | ServerMessage::Revoke { subscription, .. }
        | ServerMessage::Abort { subscription, .. }
        | ServerMessage::End { subscription, .. } => Some(*subscription),
        _ => None,
    }
}
