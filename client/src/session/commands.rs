//! Handling of the user's commands.

use super::Session;
use crate::{
    Membership, Request,
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
                let id = self.renumbered.remove(&id).unwrap_or(id);
                if self.receptions.remove(&id).is_some() {
                    self.outbox
                        .push_back(ClientMessage::Unsubscribe { subscription: id, keep_place });
                }
            }
            Command::Acknowledge(id, epoch, version) => {
                let id = self.current_number(id);
                self.receptions.get_mut(&id)?.machine.acknowledge(epoch, version);
                return Some(id);
            }
            Command::Loaded { subscription, epoch, version, digest } => {
                let loaded = ClientMessage::Loaded { subscription, epoch, version, digest };
                if let Some(reception) = self.receptions.get_mut(&self.current_number(subscription)) {
                    reception.set_loaded(loaded.clone());
                }
                self.outbox.push_back(loaded);
            }
            Command::LendBuffers(id, lent) => {
                self.receptions.get_mut(&self.current_number(id))?.handle_lent(lent);
            }
            Command::TakeBackBuffers(id, done) => {
                let begun_again = self.take_back_buffers(id);
                let _ = done.send(()); // Dropped by a caller that does not wait.
                return begun_again;
            }
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

    /// The number of a subscription on this connection, which the user's handle knows by its first number.
    fn current_number(&self, first: SubscriptionId) -> SubscriptionId {
        self.renumbered.get(&first).copied().unwrap_or(first)
    }

    /// Takes back the buffers of the subscription that was opened as `first`. If a version is being received into them,
    /// the subscription is renewed under another number, so that late chunks of the first transfer are told apart.
    /// Returns that number.
    fn take_back_buffers(&mut self, first: SubscriptionId) -> Option<SubscriptionId> {
        let id = self.current_number(first);
        let reception = self.receptions.get_mut(&id)?;
        reception.drop_unused_buffers();
        if !reception.is_in_lent_buffers() {
            return None;
        }
        let mut reception = self.receptions.remove(&id)?;
        self.outbox
            .push_back(ClientMessage::Unsubscribe { subscription: id, keep_place: true });
        let next = self.take_number();
        reception.leave_buffers(next, self.allowance.credit());
        if self.is_connected {
            reception.subscribe();
        }
        self.receptions.insert(next, reception);
        self.renumbered.insert(first, next);
        Some(next)
    }

    fn take_number(&mut self) -> SubscriptionId {
        let id = SubscriptionId(self.next_id);
        self.next_id += 1;
        id
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
        let id = self.take_number();
        let subscribe = request.message(id, self.allowance.credit(), self.config.consumer);
        let (stall_timeout, now) = (self.config.stall_timeout, Instant::now().into_std());
        let mut machine = Subscriber::new(subscribe, self.config.codecs, stall_timeout, now);
        machine.set_further_allowance(self.allowance.further());
        if let Some(sharing) = &self.config.sharing {
            machine.set_seed(sharing.seed() ^ u64::from(id.0));
        }
        if request.may_lack_boxes {
            machine.allow_missing_boxes();
        }
        if let Some((manifest, _)) = &request.part {
            machine.set_manifest(Arc::clone(manifest));
        }
        let base = Base::new(self.bases.clone(), self.config.workers);
        let (lease, commands) = (self.allocators.memory.memory.demand(), self.commands.clone());
        let mut reception = Reception::new(&request, machine, base, lease, commands);
        match (&self.config.relay, &self.config.sharing) {
            (Some(relay), _) => reception.relay(relay),
            (None, Some(Membership { forward: Some(forward), .. })) => reception.forward(forward),
            (None, _) => {}
        }
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
