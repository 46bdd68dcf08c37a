//! Handling of the user's commands.

use super::Session;
use crate::{
    Request,
    base::Base,
    command::{Command, Opened, SubscriptionHandle},
    reception::Reception,
};
use std::sync::Arc;
use tensor_relay_protocol::{ClientMessage, Subscriber, SubscriptionId};
use tokio::{sync::oneshot, time::Instant};

impl Session {
    /// Handles a command, with or without a connection: messages are queued in the outbox. Returns the subscription
    /// that has pending actions.
    pub(super) fn handle_command(&mut self, command: Command) -> Option<SubscriptionId> {
        match command {
            Command::Subscribe(request, reply) => return Some(self.subscribe(*request, reply)),
            Command::Unsubscribe { id, keep_place } => {
                if self.receptions.remove(&id).is_some() {
                    self.outbox
                        .push_back(ClientMessage::Unsubscribe { subscription: id, keep_place });
                }
            }
            Command::Acknowledge(id, epoch, version) => {
                self.receptions.get_mut(&id)?.machine.acknowledge(epoch, version);
                return Some(id);
            }
            Command::LendBuffers(id, lent) => self.receptions.get_mut(&id)?.handle_lent(lent),
            Command::Watch(glob, reply) => {
                self.outbox.extend(self.watches.begin(glob, reply, &self.commands));
            }
            Command::Unwatch(watch) => self.outbox.extend(self.watches.end(watch)),
            Command::List(reply) => {
                self.lists.push_back((reply, vec![]));
                self.outbox.push_back(ClientMessage::List);
            }
            Command::Probe(bytes, reply) if self.is_connected => {
                self.outbox.extend(self.probing.begin(bytes, reply));
            }
            Command::Probe(..) => {} // Its caller reports why there is no connection.
            Command::Close => self.close(),
        }
        None
    }

    /// Unsubscribes the readers that do not keep their places; the session ends when these messages are sent.
    fn close(&mut self) {
        let leaving = self.receptions.iter().filter(|(_, reception)| !reception.keeps_place());
        self.outbox.extend(
            leaving.map(|(id, _)| ClientMessage::Unsubscribe { subscription: *id, keep_place: false }),
        );
        self.is_closing = true;
    }

    fn subscribe(&mut self, request: Request, reply: oneshot::Sender<Opened>) -> SubscriptionId {
        let id = SubscriptionId(self.next_id);
        self.next_id += 1;
        let subscribe = request.message(id, self.credit);
        let (stall_timeout, now) = (self.config.stall_timeout, Instant::now().into_std());
        let machine = Subscriber::new(subscribe, self.config.codecs, stall_timeout, now);
        let base = Base::new(self.bases.clone(), self.config.workers);
        let mut reception = Reception::new(&request, machine, base, self.allocators.memory.memory.demand());
        let opened = Opened {
            handle: SubscriptionHandle {
                id,
                keep_place: request.keep_place,
                commands: self.commands.clone(),
            },
            queue: Arc::clone(&reception.queue),
            counters: Arc::clone(&reception.counters),
            holding: Arc::clone(&reception.holding),
        };
        if self.is_connected {
            reception.subscribe();
        }
        self.receptions.insert(id, reception);
        // If the user is gone, dropping the handle unsubscribes.
        let _ = reply.send(opened);
        id
    }
}
