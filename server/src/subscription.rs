//! One subscription: sends one version after the other, as its cursor says, until it ends.

use crate::{
    bases::ClientBase,
    catalogue::Follower,
    cursor::{Cursor, Step},
    lanes::Lanes,
    link_rate::LinkMeter,
    sends::{Outgoing, SendError, Sends, Sent},
    session::Shared,
    stall::StallWatch,
    topic::Retained,
};
use std::{
    convert::Infallible,
    sync::{Arc, atomic::Ordering},
};
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{
    AbortReason, Announce, CodecChoice, CodecId, CodecSet, Credit, EndReason, Epoch, Glob, ManifestDigest,
    Misbehaved, Partial, RangeSet, Selection, SendAction, SendPlan, ServerMessage, SubscriptionId, Version,
};
use tensor_relay_transport::{LaneError, Workers, control};
use tokio::{sync::mpsc, time::Instant};

/// What a client says to one of its subscriptions.
#[derive(Debug)]
pub(crate) enum Word {
    Credit(u32),
    Committed { epoch: Epoch, version: Version, kept: bool },
    Abort(Epoch, Version, AbortReason),
    Acknowledge(Epoch, Version),
    Unsubscribe { keep_place: bool },
}

/// Where a subscription hears its client. The bound is small because a subscription is always listening; a client that
/// talks faster than it is heard waits on its own control stream.
#[derive(Debug)]
pub(crate) struct Inbox(mpsc::Receiver<Word>);

impl Inbox {
    const BOUND: usize = 16;

    pub(crate) fn channel() -> (Self, mpsc::Sender<Word>) {
        let (sender, receiver) = mpsc::channel(Self::BOUND);
        (Self(receiver), sender)
    }

    /// The next word; a session that is gone says good-bye, and may come back.
    async fn next(&mut self) -> Word {
        self.0.recv().await.unwrap_or(Word::Unsubscribe { keep_place: true })
    }
}

/// The server's side of one subscription.
#[derive(Debug)]
pub(crate) struct Subscription {
    pub(crate) id: SubscriptionId,
    pub(crate) codecs: CodecSet,
    /// The codec that the client wants, if it said so.
    pub(crate) codec: Option<CodecId>,
    pub(crate) link: LinkMeter,
    pub(crate) credit: Credit,
    pub(crate) follower: Follower,
    pub(crate) lanes: Arc<Lanes>,
    pub(crate) sender: control::Sender<ServerMessage>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) inbox: Inbox,
    pub(crate) cursor: Cursor,
    pub(crate) wanted: Wanted,
    /// What the client holds a copy of.
    pub(crate) base: ClientBase,
    /// Whether a version under way is given up for a newer one.
    pub(crate) preempt: bool,
    /// `None` when it is to begin nothing any more: nobody waits for it then.
    pub(crate) unfinished: Option<Unfinished>,
}

/// What the client wants of each version, and what it holds already.
#[derive(Debug)]
pub(crate) struct Wanted {
    globs: Vec<Glob>,
    /// The selection from the manifest that came last: manifests rarely change.
    selection: Option<(ManifestDigest, Arc<Selection>)>,
    /// The manifest that the client holds.
    manifest: Option<ManifestDigest>,
    partial: Option<Partial>,
}

impl Wanted {
    pub(crate) fn new(globs: Vec<Glob>, manifest: Option<ManifestDigest>, partial: Option<Partial>) -> Self {
        Self { globs, selection: None, manifest, partial }
    }

    /// What the client wants of `retained`. Many globs held against many tensors take a while, so a worker does it.
    async fn selection(&mut self, retained: &Retained, workers: Workers) -> Arc<Selection> {
        let manifest = retained.payload.manifest();
        match &self.selection {
            Some((digest, selection)) if *digest == manifest.digest() => Arc::clone(selection),
            _ => {
                let (all, globs) = (Arc::clone(manifest), self.globs.clone());
                let selection = match globs.is_empty() {
                    true => Selection::all(all),
                    false => workers.run(move || Selection::new(all, &globs)).await,
                };
                let selection = Arc::new(selection);
                self.selection = Some((manifest.digest(), Arc::clone(&selection)));
                selection
            }
        }
    }

    /// The chunks of `retained` that the client holds. It is asked once: whatever is begun next ends what was begun.
    fn take_held(&mut self, retained: &Retained) -> RangeSet {
        let id = &retained.id;
        let partial = self.partial.take();
        partial
            .filter(|partial| (partial.epoch, partial.version) == (id.epoch, id.version))
            .map_or_else(RangeSet::new, |partial| partial.chunks)
    }

    /// Whether the client holds a part of another version than `retained`.
    fn has_part_of_another(&self, retained: &Retained) -> bool {
        let id = &retained.id;
        let part = self.partial.as_ref();
        part.is_some_and(|part| (part.epoch, part.version) != (id.epoch, id.version))
    }

    fn needs_manifest(&self, retained: &Retained) -> bool {
        self.manifest != Some(retained.payload.manifest().digest())
    }

    fn handle_committed(&mut self, retained: &Retained) {
        self.manifest = Some(retained.payload.manifest().digest());
    }

    /// The manifest of a version that was given up may have been cut off with it.
    fn handle_given_up(&mut self) {
        self.manifest = None;
    }
}

/// Why a subscription ended.
#[derive(Debug)]
enum Ended {
    /// The client is gone. It may come back for its place.
    Gone,
    /// The client wanted it.
    ByClient,
    /// For a reason that the client is told.
    Told(EndReason),
    /// The client broke a rule; the session ends with it.
    Misbehaved(Misbehaved),
}

impl From<LaneError> for Ended {
    fn from(_: LaneError) -> Self {
        Self::Gone
    }
}

impl From<Misbehaved> for Ended {
    fn from(error: Misbehaved) -> Self {
        Self::Misbehaved(error)
    }
}

impl Subscription {
    /// Runs until the subscription ends; an error is the client's.
    pub(crate) async fn run(mut self) -> Result<(), Misbehaved> {
        let Err(ended) = self.send_versions().await;
        if !matches!(ended, Ended::Gone) {
            self.cursor.give_place_up();
            self.base.let_go();
        }
        match ended {
            Ended::Gone | Ended::ByClient => Ok(()),
            Ended::Misbehaved(error) => Err(error),
            Ended::Told(reason) => {
                self.note_end(reason);
                let _ = self.sender.send(ServerMessage::End { subscription: self.id, reason }).await;
                Ok(())
            }
        }
    }

    fn note_end(&self, reason: EndReason) {
        if reason == EndReason::Evicted {
            self.shared.counters.evicted.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(subscription = %self.id, "A subscriber took no byte within the deadline and was evicted.");
        }
    }

    async fn send_versions(&mut self) -> Result<Infallible, Ended> {
        loop {
            let (retained, skipped) = self.next_version().await?;
            let _counted = Counted::begin(&self.shared);
            self.send_version(&retained, skipped).await?;
        }
    }

    /// Waits for a version that the client is to have next. While the server drains, there is one in topics that ended
    /// alone: what they have left is bounded, and their subscribers should hear that it was all.
    async fn next_version(&mut self) -> Result<(Arc<Retained>, u64), Ended> {
        let mut draining = self.shared.draining.subscribe();
        loop {
            if *draining.borrow_and_update() && self.follower.topic().ended().is_none() {
                self.unfinished = None;
            } else {
                match self.cursor.next(self.follower.look()) {
                    Step::Send { retained, skipped } => return Ok((retained, skipped)),
                    Step::End(reason) => return Err(Ended::Told(reason)),
                    Step::Wait => {}
                }
            }
            tokio::select! {
                () = self.follower.changed() => {}
                _ = draining.changed() => {} // What is shared holds the sender.
                word = self.inbox.next() => self.handle_idle_word(word)?,
            }
        }
    }

    /// What a client may say while nothing is being sent to it.
    fn handle_idle_word(&mut self, word: Word) -> Result<(), Ended> {
        match word {
            Word::Credit(chunks) => Ok(self.credit.grant(chunks)?),
            // A word about the version before, which the other end gave up at the same time as this one did.
            Word::Abort(..) | Word::Committed { .. } => Ok(()),
            Word::Acknowledge(epoch, version) => {
                self.cursor.handle_acknowledged(epoch, version);
                Ok(())
            }
            Word::Unsubscribe { keep_place } => Err(ended_by_client(keep_place)),
        }
    }

    /// Sends one version and waits for the client's last word on it: `Committed` or `Abort`.
    async fn send_version(&mut self, retained: &Arc<Retained>, skipped: u64) -> Result<(), Ended> {
        if self.wanted.has_part_of_another(retained) {
            self.base.let_go(); // It was of the rest of that one.
        }
        self.announce(retained, skipped).await?;
        let selection = self.wanted.selection(retained, self.shared.config.workers).await;
        let held = self.wanted.take_held(retained);
        let chunks = selection.chunks().difference(&held);
        let mut plan = SendPlan::new(chunks, self.wanted.needs_manifest(retained));
        let mut watch = StallWatch::new(self.shared.config.stall_timeout);
        let mut sends = Sends::new(self.outgoing(retained, selection, &watch));
        let mut cut_at = retained.cut_at.subscribe();
        let mut given_up = false;
        loop {
            while !given_up && sends.len() < self.chunks_in_flight() {
                match plan.poll(&mut self.credit) {
                    Some(SendAction::Manifest) => sends.begin_manifest(),
                    Some(SendAction::Chunk(chunk)) => sends.begin_chunk(chunk),
                    Some(SendAction::Complete) => sends.begin_complete(),
                    None => break,
                }
            }
            let lost = tokio::select! {
                word = self.inbox.next() => {
                    // What says nothing of this version moves nothing; and a version that was given up needs one word.
                    let moves = !given_up && !matches!(word, Word::Credit(0) | Word::Acknowledge(..));
                    watch.progress().note(u64::from(moves));
                    if self.handle_word(word, retained, plan.is_complete())? {
                        return Ok(());
                    }
                    None
                }
                Some(sent) = sends.next() => match sent {
                    Ok(Sent::Chunk(_)) => {
                        plan.handle_sent();
                        None
                    }
                    // The client's word on a version that was given up is on the way.
                    Ok(Sent::Manifest | Sent::Complete | Sent::GivenUp) => None,
                    Err(SendError::Lane(error)) => return Err(error.into()),
                    Err(SendError::Source(_)) if given_up => None, // It was told with the first.
                    Err(SendError::Source(error)) => {
                        self.handle_source_lost(retained, &error);
                        Some(AbortReason::SourceLost)
                    }
                },
                () = self.follower.changed() => self.handle_change(retained)?,
                () = passed(&mut cut_at), if !given_up => Some(AbortReason::Withdrawn),
                () = watch.stalled() => return Err(Ended::Told(EndReason::Evicted)),
            };
            if let Some(reason) = lost.filter(|_| !given_up) {
                given_up = true;
                sends.give_up();
                self.give_up(retained, reason).await?;
            }
        }
    }

    /// A version that nobody can have any more must hold no reader up, and nobody should begin it. One that might be read
    /// later stays for others; this subscriber is not tried with again, or it could go on for ever.
    fn handle_source_lost(&self, retained: &Retained, error: &SourceError) {
        let version = &retained.id;
        if error.is_final() {
            tracing::error!(%version, %error, "A version cannot be read any more. It is taken back, and its subscribers are told.");
            self.follower.topic().lose(version);
        } else {
            tracing::error!(subscription = %self.id, %version, %error, "A version could not be read. Its subscriber is told, and gets the next one.");
        }
    }

    /// Looks at a change of the topic while a version is under way; returns why that is to be given up, if it is so.
    fn handle_change(&mut self, retained: &Retained) -> Result<Option<AbortReason>, Ended> {
        let newest = self.follower.look().newest();
        if let Some(reason) = self.cursor.lost_place() {
            return Err(Ended::Told(reason));
        }
        let newer = newest.is_some_and(|(_, newest)| newest.id != retained.id);
        Ok((self.preempt && newer).then_some(AbortReason::Superseded))
    }

    /// Each lane is kept as busy as one alone.
    fn chunks_in_flight(&self) -> usize {
        self.shared.config.chunks_in_flight * self.lanes.usable()
    }

    /// Whether chunks may travel as deltas: the client can decode them, and nobody wants another codec.
    fn takes_deltas(&self) -> bool {
        let is_wanted = match self.codec() {
            CodecChoice::Auto => true,
            CodecChoice::Fixed(codec) => codec.needs_base(),
        };
        is_wanted && self.codecs.iter().any(CodecId::needs_base)
    }

    fn outgoing(
        &mut self,
        retained: &Arc<Retained>,
        selection: Arc<Selection>,
        watch: &StallWatch,
    ) -> Outgoing {
        let base = match self.takes_deltas() {
            true => self.base.begin(self.follower.topic(), retained),
            false => None,
        };
        Outgoing {
            base,
            subscription: self.id,
            retained: Arc::clone(retained),
            selection,
            codec: self.codec(),
            codecs: self.codecs,
            link: self.link.clone(),
            tally: Arc::clone(self.follower.topic().tally()),
            lanes: Arc::clone(&self.lanes),
            sender: self.sender.clone(),
            shared: Arc::clone(&self.shared),
            progress: watch.progress().clone(),
        }
    }

    /// How chunks are encoded: as the client wants, or the topic, or the server, whoever says something first. What the
    /// client cannot decode travels raw.
    fn codec(&self) -> CodecChoice {
        let by_client = self.codec.map(CodecChoice::Fixed);
        let choice = by_client.or_else(|| self.follower.topic().codec());
        match choice.unwrap_or(self.shared.config.codec) {
            CodecChoice::Fixed(codec) if !self.codecs.contains(codec) => CodecChoice::Fixed(CodecId::Raw),
            choice => choice,
        }
    }

    async fn announce(&self, retained: &Retained, skipped: u64) -> Result<(), LaneError> {
        let announce = Announce {
            subscription: self.id,
            id: retained.id.clone(),
            manifest: retained.payload.manifest().digest(),
            skipped,
            metadata: retained.metadata.clone(),
            may_be_base: retained.base.may_be && self.takes_deltas(),
        };
        self.sender.send(ServerMessage::Announce(announce)).await
    }

    /// Tells the client that a version will not be sent to its end. Its own `Abort` is the answer, and the last word.
    async fn give_up(&self, retained: &Retained, reason: AbortReason) -> Result<(), LaneError> {
        let (epoch, version) = (retained.id.epoch, retained.id.version);
        self.sender
            .send(ServerMessage::Abort { subscription: self.id, epoch, version, reason })
            .await
    }

    /// Takes a word during a transfer; returns whether it was the last one on this version.
    fn handle_word(&mut self, word: Word, retained: &Retained, complete: bool) -> Result<bool, Ended> {
        let id = &retained.id;
        match word {
            Word::Credit(chunks) => {
                self.credit.grant(chunks)?;
                Ok(false)
            }
            Word::Acknowledge(epoch, version) => {
                self.cursor.handle_acknowledged(epoch, version);
                Ok(false)
            }
            Word::Unsubscribe { keep_place } => Err(ended_by_client(keep_place)),
            Word::Committed { epoch, version, .. } | Word::Abort(epoch, version, _)
                if (epoch, version) != (id.epoch, id.version) =>
            {
                Err(Misbehaved::WrongVersion { epoch, version }.into())
            }
            Word::Committed { .. } if !complete => {
                Err(Misbehaved::OutOfTurn { found: "Committed", expected: "Complete to be sent first" }
                    .into())
            }
            Word::Committed { kept, .. } => {
                self.shared.counters.committed.fetch_add(1, Ordering::Relaxed);
                retained.committed.send_modify(|count| *count += 1);
                self.cursor.handle_committed(retained);
                self.wanted.handle_committed(retained);
                self.base.handle_committed(kept);
                Ok(true)
            }
            Word::Abort(_, _, reason) => {
                tracing::warn!(subscription = %self.id, version = %id, "A subscriber gave a version up: {reason}.");
                // Some chunks may have been cut before their headers left, so neither end can say what their credit has
                // become: both forget it, and the client grants anew.
                self.credit = Credit::default();
                self.cursor.handle_given_up(retained);
                self.wanted.handle_given_up();
                self.base.let_go();
                Ok(true)
            }
        }
    }
}

fn ended_by_client(keep_place: bool) -> Ended {
    if keep_place { Ended::Gone } else { Ended::ByClient }
}

/// Returns at the moment that `at` names, once it names one. Cancel safe.
async fn passed(at: &mut tokio::sync::watch::Receiver<Option<Instant>>) {
    let named = at.wait_for(Option::is_some).await.ok().and_then(|at| *at);
    match named {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Counts a transfer for as long as it lives.
struct Counted(Arc<Shared>);

impl Counted {
    fn begin(shared: &Arc<Shared>) -> Self {
        shared.transfers.send_modify(|count| *count += 1);
        Self(Arc::clone(shared))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.transfers.send_modify(|count| *count -= 1);
    }
}

/// Lets a shutdown wait for a subscription for as long as this lives.
#[derive(Debug)]
pub(crate) struct Unfinished(Arc<Shared>);

impl Unfinished {
    pub(crate) fn begin(shared: &Arc<Shared>) -> Self {
        shared.unfinished.send_modify(|count| *count += 1);
        Self(Arc::clone(shared))
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.0.unfinished.send_modify(|count| *count -= 1);
    }
}
