//! [`Host`]: what a [`Delivery`](super::Delivery) needs of the program that offers versions.

use crate::egress::{Arrival, EncodingLog, Payload, ReceivedChunks};
use std::{fmt::Debug, os::fd::OwnedFd, sync::Arc};
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{
    AbortReason, CodecChoice, EndReason, Ended, Epoch, Lending, Metadata, NotLent, Published, RelayPath,
    Selection, ServerMessage, SubscriptionMessage, Version, VersionDigest, Versions, WantedGpu,
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

    /// Whether `digest` is the number that stands for that of its content, which a client was told.
    fn is_stood_for_by(&self, digest: VersionDigest) -> bool;

    /// When its transfers are aborted, once it left retention.
    fn abort_at(&self) -> watch::Receiver<Option<Instant>>;

    /// The relays that it came through.
    fn relays(&self) -> &RelayPath {
        RelayPath::none()
    }

    /// Its progress, if it is sent on while it is being received.
    fn arrival(&self) -> Option<&Arc<Arrival>> {
        None
    }

    /// Its chunks as they were received, if that is how they are sent. Its payload is never read then.
    fn received(&self) -> Option<&Arc<ReceivedChunks>> {
        None
    }
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

/// Memory of a version for one client.
#[derive(Debug)]
pub struct Loan {
    /// What the client is told.
    pub lending: Lending,
    /// The descriptor of the memory, if it has one, and what else the client holds as long as it maps that.
    pub descriptors: Vec<OwnedFd>,
}

/// The program that offers versions, as one subscription sees it: the facts of a topic, what arrives for the
/// subscription, and what follows from its course beyond the sending. Each call returns at once, except
/// [`next_input`](Self::next_input) and [`lend`](Self::lend).
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

    /// Handles what the client selects of the version that began, and the base that its chunks may be encoded against.
    /// Returns the encodings that its members pass on to each other, if the version was announced as `shared`.
    fn handle_selected(
        &mut self,
        version: &Arc<Self::Version>,
        selection: &Selection,
        base: Option<Version>,
        shared: bool,
    ) -> Option<Arc<EncodingLog>>;

    /// Lends the client the memory of a version, of which it selects `selection`: on the GPU that it named, if the
    /// version lies there and the client declined none. May wait for the GPU, with a deadline; meanwhile the
    /// subscription handles no input.
    ///
    /// # Errors
    /// [`NotLent`] is what the client is told: it receives chunks.
    fn lend(
        &mut self,
        version: &Arc<Self::Version>,
        selection: &Selection,
        gpu: Option<Result<WantedGpu, NotLent>>,
    ) -> impl Future<Output = Result<Loan, NotLent>> + Send;

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
    /// A message for the client about the version under way, or one before it.
    Tell(Box<ServerMessage>),
    /// The version under way makes progress elsewhere: the client receives it from its peers.
    Progress,
    /// The host drains: only ended topics and mode `every` start transfers.
    Draining,
    /// The host ends the subscription.
    End(EndReason),
    /// The session has ended; the client may reconnect.
    SessionEnded,
}
