//! Handling of the servers' messages.

use super::{Session, from_peers::check_of_peer, from_sources::subscription};
use crate::{
    error::SessionError,
    other_servers::{Link, Links},
    server_memory::ServerMemory,
    source_table::Owner,
};
use tensor_relay_protocol::{EndReason, ProtocolViolation, ServerMessage, TopicEntry};

/// The maximum number of topics in one answer to `List`. A server that sends more is broken or hostile.
const TOPICS_MAX: usize = 1 << 20;

impl Session {
    pub(super) fn handle_message(
        &mut self,
        message: ServerMessage,
        link: Link,
        links: &mut Links<'_>,
    ) -> Result<(), SessionError> {
        message.check_features(self.config.features())?;
        if link.is_peer() {
            check_of_peer(&message)?;
        }
        if let ServerMessage::Retired(lane) = message {
            let Some(connection) = links.get(link) else { return Ok(()) };
            connection.lanes().handle_retired(lane)?;
            self.handle_retired(link);
            return self.act_all(links);
        }
        // Also of an announcement that is not wanted any more: the server holds its memory until this end is closed.
        let memory = links
            .get(link)
            .and_then(|connection| ServerMemory::receive(connection.control(), &message));
        match self.owner_of_message(&message, link)? {
            Owner::User => self.handle_origin_message(message, memory, links),
            Owner::Source { source, reception } => {
                self.handle_source_message((source, reception), message, links)
            }
            Owner::Nobody => Ok(()),
        }
    }

    /// Handles a message of the origin.
    fn handle_origin_message(
        &mut self,
        message: ServerMessage,
        memory: Option<ServerMemory>,
        links: &mut Links<'_>,
    ) -> Result<(), SessionError> {
        let Some(id) = subscription(&message) else { return self.handle_session_message(message) };
        if let ServerMessage::Revoke { taker, restored, .. } = message {
            self.handle_revoke(id, taker, restored);
            return Ok(());
        }
        let Some(reception) = self.receptions.get_mut(&id) else { return Ok(()) }; // The origin may not know its end yet.
        match message {
            ServerMessage::Announce(announce) => reception.handle_announce(announce, memory)?,
            ServerMessage::Complete { epoch, version, digest, .. } => {
                reception.machine.handle_complete((epoch, version), digest)?;
            }
            ServerMessage::Waiting { epoch, version, .. } => reception.handle_waiting(epoch, version)?,
            ServerMessage::Abort { epoch, version, reason, .. } => {
                reception.machine.handle_abort((epoch, version), reason)?;
            }
            ServerMessage::Hashes { epoch, version, first, hashes, .. } => {
                reception.machine.handle_hashes(id, (epoch, version), first, &hashes)?;
            }
            ServerMessage::Sources { epoch, version, sources, is_seeded, .. } => {
                reception.machine.handle_sources((epoch, version), sources, is_seeded)?;
            }
            ServerMessage::Encodings { epoch, version, entries, .. } => {
                reception.handle_encodings((epoch, version), &entries)?;
            }
            ServerMessage::Held(held) => reception.machine.handle_held(id, &held)?,
            ServerMessage::End { reason, .. } => {
                if matches!(reason, EndReason::Withdrawn | EndReason::Expired) {
                    self.watches.handle_topic_ended(reception.topic());
                }
                reception.handle_end(reason);
                self.receptions.remove(&id);
            }
            _ => {} // No other message is about a subscription.
        }
        self.act(id, links)
    }

    /// Handles a message of the origin about the session.
    fn handle_session_message(&mut self, message: ServerMessage) -> Result<(), SessionError> {
        match message {
            ServerMessage::Topics { topics, more } => self.handle_topics(topics, more),
            ServerMessage::Found { watch, topics } => Ok(self.watches.handle_found(watch, topics)?),
            ServerMessage::Drain { alternatives } => self.handle_drain(&alternatives),
            _ => {
                Err(ProtocolViolation::OutOfTurn { found: "Welcome or Joined", expected: "an answer" }.into())
            }
        }
    }

    /// Further versions are received on the next connection, once the server has closed this one. That is logged as a
    /// warning if anything needs it; the drain itself belongs to every ordinary end.
    fn handle_drain(&mut self, alternatives: &[String]) -> Result<(), SessionError> {
        if std::mem::replace(&mut self.is_draining, true) {
            return Err(ProtocolViolation::OutOfTurn {
                found: "a second Drain",
                expected: "one in a session",
            }
            .into());
        }
        tracing::info!(
            ?alternatives,
            "The server is shutting down: it finishes the transfers in progress and starts no others."
        );
        Ok(())
    }

    fn handle_topics(&mut self, topics: Vec<TopicEntry>, more: bool) -> Result<(), SessionError> {
        let unrequested =
            ProtocolViolation::OutOfTurn { found: "Topics", expected: "no answer without a request" };
        let (_, received) = self.lists.front_mut().ok_or(unrequested)?;
        received.extend(topics);
        if received.len() > TOPICS_MAX {
            return Err(ProtocolViolation::TooManyTopics(TOPICS_MAX).into());
        }
        if more {
            return Ok(());
        }
        if let Some((reply, received)) = self.lists.pop_front() {
            let _ = reply.send(received);
        }
        Ok(())
    }
}
