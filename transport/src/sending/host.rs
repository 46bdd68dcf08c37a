//! [`Host`]: what a [`Delivery`](super::Delivery) needs of the program that offers versions.

use crate::egress::Payload;
use std::{fmt::Debug, sync::Arc};
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{
    AbortReason, CodecChoice, EndReason, Ended, Epoch, Metadata, Published, SubscriptionMessage, Version,
    VersionDigest, Versions,
};
use tokio::{sync::watch, time::Instant};

/// A version that is offered: a host's own type.
pub trait Offered: Published + Debug + Send + Sync {
    /// Its payload.
    fn payload(&self) -> &Payload;

    /// What its publisher says about it.
    fn metadata(&self) -> &Metadata;

    /// Whether later versions may be encoded against it.
    fn may_be_base(&self) -> bool;

    /// Records the digest of what a client selects of it, which the client is told.
    fn note_digest(&self, digest: VersionDigest);

    /// When its transfers are aborted, once it left retention.
    fn abort_at(&self) -> watch::Receiver<Option<Instant>>;
}

/// The version that a client holds, against which chunks may be encoded. Its host may release it at any time.
pub trait DeltaBase: Debug + Send + Sync {
    /// Its number, in the epoch of the version that is sent.
    fn version(&self) -> Version;

    /// The version, while it may be read. Hold the result for one comparison only.
    fn upgrade(&self) -> Option<Arc<dyn Offered>>;

    /// Records that a chunk of `bytes` was compared with it, and whether it is sent as a delta.
    fn note(&self, bytes: u64, is_delta: bool);
}

/// The program that offers versions, as one subscription sees it: the facts of a topic, what arrives for the
/// subscription, and what follows from its course beyond the sending. Each call returns at once, except
/// [`next_input`](Self::next_input).
pub trait Host: Send {
    /// A version that it offers.
    type Version: Offered + 'static;
    /// The topic, with the client's place in it.
    type Topic: Versions<Version = Arc<Self::Version>> + Sync;

    /// The topic.
    fn topic(&self) -> &Self::Topic;

    /// The codec for a client that asks for none.
    fn codec(&self) -> CodecChoice;

    /// Waits for the next input. Cancel safe.
    fn next_input(&mut self) -> impl Future<Output = Input> + Send;

    /// Records the reader's acknowledgement of this version and all before it.
    fn acknowledge(&mut self, epoch: Epoch, version: Version);

    /// Handles the beginning of a version, before which the client missed `skipped` ones. Returns the base for its
    /// chunks, if the client accepts deltas and holds one.
    fn begin(
        &mut self,
        version: &Arc<Self::Version>,
        skipped: u64,
        accepts_deltas: bool,
    ) -> Option<Box<dyn DeltaBase>>;

    /// Releases the client's base: it has none, or will not use it.
    fn release_base(&mut self);

    /// Handles the client's commit of a version; `kept` is whether it keeps a copy as a base.
    fn handle_committed(&mut self, version: &Self::Version, kept: bool);

    /// Handles the end of a version without a commit.
    fn handle_aborted(&mut self, reason: AbortReason);

    /// Handles a version that can never be read again, which is given up for all its subscriptions.
    fn handle_unreadable(&mut self, version: &Self::Version, error: &SourceError);

    /// Handles the end of the subscription; `None` if its connection was lost.
    fn handle_ended(&mut self, ended: Option<Ended>);
}

/// An input of a subscription.
#[derive(Debug, PartialEq, Eq)]
pub enum Input {
    /// A message of the client.
    Message(SubscriptionMessage),
    /// The topic changed.
    Changed,
    /// The host drains: only ended topics and mode `every` start transfers.
    Draining,
    /// The host ends the subscription.
    End(EndReason),
    /// The session has ended; the client may reconnect.
    SessionEnded,
}
