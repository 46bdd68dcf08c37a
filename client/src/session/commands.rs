//! What a user wants of a session, with a connection and without.

use super::Session;
use crate::{
    Request, Subscription, TopicWatch, base::Base, buffers::Lent, error::SessionError, link::Link,
    receiving::Receiving, subscription::Patience,
};
use std::sync::Arc;
use tensor_relay_protocol::{ClientMessage, Epoch, Glob, SubscriptionId, TopicEntry, Version, WatchId};
use tokio::sync::oneshot;

/// What a user wants.
#[derive(Debug)]
pub(crate) enum Command {
    Subscribe(Box<Request>, oneshot::Sender<Subscription>),
    Unsubscribe {
        id: SubscriptionId,
        keep_place: bool,
    },
    Acknowledge(SubscriptionId, Epoch, Version),
    /// Buffers for the next version, or the word that they are not given any more.
    Give(SubscriptionId, Option<Lent>),
    Watch(Glob, oneshot::Sender<Option<TopicWatch>>),
    Unwatch(WatchId),
    List(oneshot::Sender<Vec<TopicEntry>>),
    Close,
}

impl Session {
    pub(super) fn handle_command(&mut self, command: Command, link: &Link) -> Result<(), SessionError> {
        match command {
            Command::Subscribe(request, reply) => {
                let id = self.subscribe(*request, reply);
                self.allow_unread(link);
                let subscribe = self.receivings.get_mut(&id).map(|receiving| receiving.subscribe(id));
                self.outbox.extend(subscribe.map(ClientMessage::Subscribe));
            }
            Command::Unsubscribe { id, keep_place } => {
                if self.receivings.remove(&id).is_some() {
                    self.outbox
                        .push_back(ClientMessage::Unsubscribe { subscription: id, keep_place });
                }
            }
            Command::Acknowledge(subscription, epoch, version) => {
                if let Some(receiving) = self.receivings.get_mut(&subscription) {
                    receiving.history.handle_acknowledged(epoch, version);
                    self.outbox
                        .push_back(ClientMessage::Acknowledge { subscription, epoch, version });
                }
            }
            Command::Give(id, lent) => self.give(id, lent),
            Command::Watch(glob, reply) => {
                self.outbox.extend(self.watches.begin(glob, reply, &self.commands));
            }
            Command::Unwatch(watch) => {
                self.outbox.extend(self.watches.end(watch));
            }
            Command::List(reply) => {
                self.lists.push_back((reply, vec![]));
                self.outbox.push_back(ClientMessage::List);
            }
            Command::Close => self.close(),
        }
        Ok(())
    }

    /// Says which readers will not come back; the session ends when that is on its way.
    fn close(&mut self) {
        let leaving = self.receivings.iter().filter(|(_, receiving)| !receiving.keeps_place());
        let leaving: Vec<_> = leaving.map(|(id, _)| *id).collect();
        for subscription in leaving {
            self.outbox
                .push_back(ClientMessage::Unsubscribe { subscription, keep_place: false });
        }
        self.closing = true;
    }

    /// Takes a command while there is no connection: what it asks for is asked for with the next one.
    pub(crate) fn handle_command_between_links(&mut self, command: Command) -> Result<(), SessionError> {
        match command {
            Command::Subscribe(request, reply) => {
                self.subscribe(*request, reply);
            }
            Command::Unsubscribe { id, .. } => {
                self.receivings.remove(&id);
            }
            Command::Acknowledge(id, epoch, version) => {
                if let Some(receiving) = self.receivings.get_mut(&id) {
                    receiving.history.handle_acknowledged(epoch, version);
                }
            }
            Command::Give(id, lent) => self.give(id, lent),
            Command::Watch(glob, reply) => {
                self.watches.begin(glob, reply, &self.commands);
            }
            Command::Unwatch(watch) => {
                self.watches.end(watch);
            }
            Command::List(reply) => self.lists.push_back((reply, vec![])),
            Command::Close => return Err(SessionError::ClosedHere),
        }
        Ok(())
    }

    fn subscribe(&mut self, request: Request, reply: oneshot::Sender<Subscription>) -> SubscriptionId {
        let id = SubscriptionId(self.next_id);
        self.next_id += 1;
        let base = Base::new(self.bases.clone(), self.config.workers);
        let demand = self.ground.memory.demand();
        let stall_timeout = self.config.stall_timeout;
        let receiving = Receiving::new(request.clone(), self.credit, stall_timeout, base, demand);
        let patience = Patience {
            topic_timeout: self.config.topic_timeout,
            held_max: self.config.versions_held_max,
            hold_timeout: self.config.hold_timeout,
        };
        let subscription = Subscription {
            id,
            mode: request.mode,
            keep_place: request.keep_place,
            topic: request.topic,
            delivery: Arc::clone(&receiving.delivery),
            counters: Arc::clone(&receiving.counters),
            holding: Arc::clone(&receiving.holding),
            commands: self.commands.clone(),
            patience,
            taken: None,
            held_back_since: None,
        };
        self.receivings.insert(id, receiving);
        // A user who went away meanwhile drops the handle, which unsubscribes.
        let _ = reply.send(subscription);
        id
    }

    fn give(&mut self, id: SubscriptionId, lent: Option<Lent>) {
        if let Some(receiving) = self.receivings.get_mut(&id) {
            receiving.handle_given(lent);
        }
    }
}
