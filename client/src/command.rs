//! Commands from the user's handles to the session.

use crate::{
    Request, buffers::Lent, holding::HoldCounter, probing::ProbeReply, progress::Counters,
    snapshot_queue::SnapshotQueue,
};
use std::sync::Arc;
use tensor_relay_protocol::{
    Epoch, Glob, ProbeBytes, SubscriptionId, Topic, TopicEntry, Version, VersionDigest, WatchId,
};
use tokio::sync::{mpsc, oneshot};

/// A command of the user. The session handles it with or without a connection.
#[derive(Debug)]
pub(crate) enum Command {
    Subscribe(Box<Request>, oneshot::Sender<Opened>),
    Unsubscribe {
        id: SubscriptionId,
        keep_place: bool,
    },
    Acknowledge(SubscriptionId, Epoch, Version),
    /// Reports that the user has loaded a version.
    Loaded {
        subscription: SubscriptionId,
        epoch: Epoch,
        version: Version,
        digest: VersionDigest,
    },
    /// Lends buffers for the next version.
    LendBuffers(SubscriptionId, Lent),
    /// Takes lent buffers back, also during a transfer into them, which begins again in other memory. After the answer,
    /// no further chunk is received into them.
    TakeBackBuffers(SubscriptionId, oneshot::Sender<()>),
    /// Starts a watch; the answer is `None` at the maximum number of watches.
    Watch(Glob, oneshot::Sender<Option<Watching>>),
    Unwatch(WatchId),
    List(oneshot::Sender<Vec<TopicEntry>>),
    Probe(ProbeBytes, ProbeReply),
    Close,
}

/// State that a user's subscription shares with the session.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) handle: SubscriptionHandle,
    pub(crate) queue: Arc<SnapshotQueue>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) holding: Arc<HoldCounter>,
}

/// A subscription of the session, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct SubscriptionHandle {
    pub(crate) id: SubscriptionId,
    /// Whether the server keeps the place of a named reader when this is dropped.
    pub(crate) keep_place: bool,
    pub(crate) commands: mpsc::UnboundedSender<Command>,
}

impl SubscriptionHandle {
    pub(crate) fn unsubscribe(&self) {
        let _ = self
            .commands
            .send(Command::Unsubscribe { id: self.id, keep_place: self.keep_place });
    }
}

impl Drop for SubscriptionHandle {
    fn drop(&mut self) {
        self.unsubscribe();
    }
}

/// A watch of the session, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Watching {
    pub(crate) id: WatchId,
    pub(crate) found: mpsc::UnboundedReceiver<Topic>,
    pub(crate) commands: mpsc::UnboundedSender<Command>,
}

impl Drop for Watching {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Unwatch(self.id));
    }
}
