//! Handling of what further sources of a version send.

use super::{Owner, Session};
use crate::{
    error::SessionError,
    reception::SourceOf,
    sources::{Link, Links, is_to_source},
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
        let of = self.source_of.get(&subscription);
        if of.is_none() && is_to_source(subscription) {
            return Ok(Owner::Nobody); // It has ended, which the source may not know yet.
        }
        let is_issued = of.is_some() || (1..self.next_id).contains(&subscription.0);
        let owner = Owner::of(subscription, link, of, self.receptions.contains_key(&subscription));
        owner
            .filter(|_| is_issued)
            .ok_or(ProtocolViolation::UnknownSubscription(subscription))
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
            ServerMessage::Waiting { .. } => reception.machine.handle_source_waiting(source),
            ServerMessage::Abort { .. } => reception.machine.leave_source(source),
            ServerMessage::End { .. } => {
                reception.machine.handle_source_ended(source);
                match (reception.machine.is_receiving_of(source), self.source_of.get_mut(&source)) {
                    (true, Some(of)) => of.is_left = true,
                    _ => drop(self.source_of.remove(&source)), // It may have the version later.
                }
            }
            _ => {} // `Complete`: the list of hashes says what is complete.
        }
        self.act(id, links)
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
        for (source, of) in self.source_of.iter().filter(|(_, of)| of.link == link && !of.is_left) {
            if let Some(reception) = self.receptions.get_mut(&of.reception) {
                reception.machine.handle_retired(*source);
            }
        }
    }
}

/// The subscription that a message is about; `None` for a message of the session.
fn subscription(message: &ServerMessage) -> Option<SubscriptionId> {
    match message {
        ServerMessage::Announce(announce) => Some(announce.subscription),
        ServerMessage::Complete { subscription, .. }
        | ServerMessage::Hashes { subscription, .. }
        | ServerMessage::Waiting { subscription, .. }
        | ServerMessage::Abort { subscription, .. }
        | ServerMessage::End { subscription, .. } => Some(*subscription),
        _ => None,
    }
}
