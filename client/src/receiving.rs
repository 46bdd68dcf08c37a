//! One subscription as the session sees it: what was announced, what arrived early, what is being received.
//!
//! Announcements, manifests and chunks come on streams of their own and may overtake one another. This type puts them
//! back into order and decides; it never waits and never touches the network.

use crate::{
    Request, Snapshot, SubscriptionError,
    arrivals::{Arrivals, Ready},
    base::Base,
    buffers::Lent,
    delivery::Delivery,
    error::TransferError,
    history::History,
    holding::Holding,
    landing::{Ground, Landing},
    progress::Counters,
    stall::Stall,
    transfer::Transfer,
};
use std::{sync::Arc, time::Duration};
use tensor_relay_device::Demand;
use tensor_relay_protocol::{
    AbortReason, Announce, ChunkHeader, ChunkIndex, Epoch, Manifest, Misbehaved, Mode, Partial, Selection,
    Subscribe, SubscriptionId, Topic, Verified, Version, VersionDigest, VersionId,
};
use tensor_relay_transport::{DataIn, LaneError};
use tokio::{task::AbortHandle, time::Instant};

/// From which size on a version takes long enough for its rate to be measured.
const BULKY_BYTES: u64 = 64 << 20;

/// The state of one subscription. It outlives connections.
#[derive(Debug)]
pub(crate) struct Receiving {
    request: Request,
    pub(crate) delivery: Arc<Delivery>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) holding: Arc<Holding>,
    /// What is wanted of the manifest that came last; the server sends it again only when another is needed.
    selection: Option<Arc<Selection>>,
    /// Buffers of the user's that the next version to begin goes into.
    lent: Option<Lent>,
    /// Whether a manifest is on its way. There is never a second, so hostile ones cannot pile up.
    manifest_arriving: bool,
    /// How often a manifest may still be out of place, because one end gave a version up on this connection: the stream
    /// of its manifest may outlive that word, and the server sends the next version's though it may be known, so that
    /// one may come after its version has begun, or even ended. It is only used for what would be misbehaviour.
    stale_manifests: u32,
    phase: Phase,
    /// The copy that versions may be coded against.
    pub(crate) base: Base,
    /// Keeps the memory of snapshots that were dropped for the next ones.
    #[expect(dead_code, reason = "it is only dropped")]
    demand: Demand,
    /// The version that this end gave up last on this connection, and stayed subscribed.
    given_up: Option<(Epoch, Version)>,
    arrivals: Arrivals,
    pub(crate) history: History,
    /// Counts the versions that were begun, on each connection anew. What a chunk comes to counts only for the one it
    /// was begun for, whatever epochs and versions a server makes up.
    generation: u64,
    stall: Stall,
}

#[derive(Debug)]
enum Phase {
    /// Nothing is announced.
    Idle,
    /// A version is announced and its manifest is missing.
    Announced { announce: Announce, began: Instant, complete: Option<VersionDigest> },
    /// Chunks are arriving.
    Running(Transfer, VersionId),
    /// The connection is gone; what came of the version waits to be continued.
    Detached(Transfer, VersionId),
}

/// What became of a version, or why it cannot go on.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The server broke a rule: the session ends.
    Misbehaved(Misbehaved),
    /// This version is lost: the subscription ends.
    Transfer(VersionId, Box<TransferError>),
}

impl Drop for Receiving {
    /// However a subscription ends, its user hears of it: usually with a better reason, which came before.
    fn drop(&mut self) {
        self.end(SubscriptionError::disconnected(self.topic(), &Arc::new(LaneError::ClosedHere.into())));
    }
}

impl Failure {
    pub(crate) fn transfer(id: &VersionId, error: TransferError) -> Self {
        Self::Transfer(id.clone(), Box::new(error))
    }
}

impl From<Misbehaved> for Failure {
    fn from(error: Misbehaved) -> Self {
        Self::Misbehaved(error)
    }
}

impl Receiving {
    pub(crate) fn new(
        request: Request,
        credit: u32,
        stall_timeout: Duration,
        base: Base,
        demand: Demand,
    ) -> Self {
        Self {
            delivery: Arc::new(Delivery::new(request.mode)),
            history: History::of(&request),
            request,
            counters: Arc::default(),
            holding: Arc::default(),
            selection: None,
            lent: None,
            manifest_arriving: false,
            stale_manifests: 0,
            phase: Phase::Idle,
            base,
            demand,
            given_up: None,
            arrivals: Arrivals::new(credit),
            generation: 0,
            stall: Stall::new(stall_timeout),
        }
    }

    pub(crate) fn topic(&self) -> &Topic {
        &self.request.topic
    }

    /// Whether a named reader may come back for its place.
    pub(crate) fn keeps_place(&self) -> bool {
        self.request.keep_place
    }

    /// The size of chunks that the present manifest leads to.
    pub(crate) fn chunk_bytes(&self) -> Option<u32> {
        self.selection.as_ref().map(|selection| selection.manifest().chunk_bytes())
    }

    /// What to ask for on a new connection.
    pub(crate) fn subscribe(&mut self, subscription: SubscriptionId) -> Subscribe {
        self.delivery.set_asked(Some(Instant::now()));
        let Request { topic, mode, start, selection, window, reader, preempt, codec, .. } =
            self.request.clone();
        let partial = match &self.phase {
            Phase::Detached(transfer, id) => {
                Some(Partial { epoch: id.epoch, version: id.version, chunks: transfer.held() })
            }
            _ => None,
        };
        Subscribe {
            mode,
            have: self.history.have(),
            selection,
            start,
            window,
            reader: (mode == Mode::Every).then_some(reader),
            preempt,
            base: self.base.tell(partial.as_ref().map(|partial| &partial.chunks)),
            partial,
            manifest: self.selection.as_ref().map(|selection| selection.manifest().digest()),
            codec,
            ..Subscribe::latest(subscription, topic, self.arrivals.credit())
        }
    }

    /// Takes buffers that the user lends for the next version, or the word that it wants the last ones back. They go back
    /// where the next version that it will get is here or on its way already.
    pub(crate) fn handle_given(&mut self, lent: Option<Lent>) {
        let is_next = matches!(self.phase, Phase::Idle | Phase::Announced { .. }) && self.delivery.is_empty();
        self.lent = lent.filter(|_| is_next);
    }

    /// The connection is gone: forgets what belonged to it, keeps what is verified. `credit` is what the next server
    /// session begins with.
    pub(crate) fn handle_detached(&mut self, credit: u32) {
        self.delivery.set_asked(None);
        self.arrivals.forget(credit);
        (self.manifest_arriving, self.stale_manifests) = (false, 0);
        self.given_up = None;
        self.history.handle_detached();
        self.phase = match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Running(mut transfer, id) | Phase::Detached(mut transfer, id) => {
                transfer.handle_detached();
                Phase::Detached(transfer, id)
            }
            Phase::Idle | Phase::Announced { .. } => Phase::Idle,
        };
    }

    /// Takes the beginning of a version.
    pub(crate) fn handle_announce(
        &mut self,
        announce: Announce,
        ground: &Ground,
    ) -> Result<Vec<Ready>, Failure> {
        if !matches!(self.phase, Phase::Idle | Phase::Detached(..)) {
            return Err(Misbehaved::OutOfTurn {
                found: "Announce",
                expected: "the end of the version before",
            }
            .into());
        }
        let id = &announce.id;
        if id.topic != self.request.topic {
            return Err(
                Misbehaved::OutOfTurn { found: "another topic", expected: "the one subscribed to" }.into()
            );
        }
        self.history.check_announced(id)?;
        self.delivery.announce();
        let began = Instant::now();
        self.stall.begin(began, self.counters.moved_bytes());
        if let Phase::Detached(transfer, of) = std::mem::replace(&mut self.phase, Phase::Idle) {
            if of == announce.id {
                return self.resume(transfer, &announce);
            }
            tracing::warn!(given_up = %of, next = %announce.id, "What came of a version is thrown away: the server has another one.");
            self.base.handle_given_up(); // A part of it is of that version.
        }
        self.counters.begin(announce.id.version.0);
        self.phase = Phase::Announced { announce, began, complete: None };
        self.begin_if_possible(ground)
    }

    /// Goes on with a version of which a part came over another connection.
    fn resume(&mut self, mut transfer: Transfer, announce: &Announce) -> Result<Vec<Ready>, Failure> {
        if transfer.announce().manifest != announce.manifest {
            return Err(Misbehaved::WrongManifest.into());
        }
        tracing::info!(version = %announce.id, "A version goes on where it was.");
        transfer.handle_resumed();
        transfer.set_base(self.base.resume(announce));
        self.generation += 1;
        self.run(transfer, announce.id.clone())
    }

    /// Takes the news that a manifest begins to arrive.
    pub(crate) fn handle_manifest_header(&mut self, subscription: SubscriptionId) -> Result<(), Misbehaved> {
        let second = std::mem::replace(&mut self.manifest_arriving, true);
        match second && !self.pass_stale_manifest() {
            true => Err(Misbehaved::TwoManifests(subscription)),
            false => Ok(()),
        }
    }

    /// Whether a manifest is late because a version was given up, as far as that can be told.
    fn pass_stale_manifest(&mut self) -> bool {
        let stale = self.stale_manifests > 0;
        self.stale_manifests = self.stale_manifests.saturating_sub(1);
        stale
    }

    /// Takes the news that a manifest was cut off with the version that it belonged to.
    pub(crate) fn handle_manifest_lost(&mut self) {
        self.manifest_arriving = false;
    }

    /// Takes a manifest, which may come before its announcement. One that is known already is passed over.
    pub(crate) fn handle_manifest(
        &mut self,
        manifest: Manifest,
        ground: &Ground,
    ) -> Result<Vec<Ready>, Failure> {
        self.manifest_arriving = false;
        let expected = match &self.phase {
            Phase::Running(transfer, _) if transfer.manifest() == &manifest => return Ok(vec![]),
            Phase::Running(..) => Err(Misbehaved::OutOfTurn { found: "a manifest", expected: "chunks" }),
            Phase::Announced { announce, .. } if announce.manifest != manifest.digest() => {
                Err(Misbehaved::WrongManifest)
            }
            Phase::Idle | Phase::Detached(..) | Phase::Announced { .. } => Ok(()),
        };
        match expected {
            Err(_) if self.pass_stale_manifest() => return Ok(vec![]),
            expected => expected?,
        }
        self.selection = Some(Arc::new(Selection::new(Arc::new(manifest), &self.request.selection)));
        self.begin_if_possible(ground)
    }

    /// Takes a chunk whose header was read: it may be received now, or waits for what overtook it, or is one of a
    /// version that this end gave up.
    pub(crate) fn handle_header(
        &mut self,
        header: ChunkHeader,
        stream: DataIn,
    ) -> Result<Option<Ready>, Misbehaved> {
        if self.history.is_past((header.epoch, header.version)) {
            return Ok(None);
        }
        match &mut self.phase {
            Phase::Running(transfer, id) => {
                self.arrivals.handle_header((header, stream), transfer, id, self.generation)
            }
            Phase::Idle | Phase::Detached(..) | Phase::Announced { .. } => {
                self.arrivals.handle_early(header, stream)?;
                Ok(None)
            }
        }
    }

    /// Takes the task that receives a chunk of the version under way.
    pub(crate) fn handle_begun(&mut self, chunk: AbortHandle) {
        self.arrivals.handle_begun(chunk);
    }

    /// Takes the news that the server was granted `chunks` more.
    pub(crate) fn handle_granted(&mut self, chunks: u32) {
        self.arrivals.grant(chunks);
    }

    /// Takes the news that a chunk was lost with its stream or lane; returns a later attempt at it that may be received
    /// now.
    pub(crate) fn handle_lost(&mut self, generation: u64, chunk: ChunkIndex) -> Option<Ready> {
        match &mut self.phase {
            Phase::Running(transfer, _) if generation == self.generation => {
                self.arrivals.handle_lost(chunk, transfer, generation)
            }
            _ => None,
        }
    }

    /// Whether what was begun as `generation` is still under way.
    pub(crate) fn is_under_way(&self, generation: u64) -> bool {
        matches!(self.phase, Phase::Running(..)) && generation == self.generation
    }

    /// Takes a verified chunk; returns whether credit for it is to be given back.
    pub(crate) fn handle_verified(&mut self, generation: u64, verified: Verified) -> bool {
        match &mut self.phase {
            Phase::Running(transfer, _) if generation == self.generation => {
                self.arrivals.handle_verified(verified.chunk());
                transfer.handle_verified(verified);
                true
            }
            _ => false,
        }
    }

    /// Takes the server's word that every chunk is on its way.
    pub(crate) fn handle_complete(
        &mut self,
        of: (Epoch, Version),
        digest: VersionDigest,
    ) -> Result<(), Misbehaved> {
        let (epoch, version) = of;
        match &mut self.phase {
            Phase::Running(transfer, id) if (id.epoch, id.version) == of => transfer.handle_complete(digest),
            Phase::Announced { announce, complete, .. } if (announce.id.epoch, announce.id.version) == of => {
                *complete = Some(digest);
            }
            _ => return Err(Misbehaved::WrongVersion { epoch, version }),
        }
        Ok(())
    }

    /// The snapshot, once the version is whole, and whether a copy of it is kept as a base.
    pub(crate) fn poll(&mut self) -> Result<Option<(Snapshot, bool)>, Failure> {
        let Phase::Running(transfer, id) = &self.phase else {
            return Ok(None);
        };
        let Some(outcome) = transfer.poll() else {
            return Ok(None);
        };
        let id = id.clone();
        self.end_version(&id);
        let mut snapshot = outcome.map_err(|error| Failure::transfer(&id, error))?;
        // Told now and not when it was announced: it may be announced again after a lost connection, or be given up.
        if let Some(gap) = self.history.gap_before(&id) {
            self.delivery.put_gap(gap);
        }
        snapshot.new_epoch = self.history.handle_committed(id);
        Ok(Some((snapshot, self.base.handle_committed())))
    }

    /// Gives up the version `of` because the server does; returns false when it is not under way. Both ends forget what
    /// credit was left, and this one has `credit` to give anew.
    pub(crate) fn handle_abort(&mut self, of: (Epoch, Version), reason: AbortReason, credit: u32) -> bool {
        match self.id() {
            Some(id) if (id.epoch, id.version) == of => {
                self.forget(&id, credit);
                if !self.history.has_committed() {
                    self.delivery.handle_given_up(id, reason);
                }
                true
            }
            _ => false,
        }
    }

    /// Gives up the version under way because this end cannot take it. Both ends forget what credit was left, and this one
    /// has `credit` to give anew.
    pub(crate) fn give_up(&mut self, id: &VersionId, credit: u32) {
        self.given_up = Some((id.epoch, id.version));
        self.forget(id, credit);
    }

    /// Whether this version was given up here: what the server says of it now crossed this end's last word.
    pub(crate) fn has_given_up(&self, version: (Epoch, Version)) -> bool {
        self.given_up == Some(version)
    }

    /// Where the version under way lands.
    pub(crate) fn landing(&self) -> Option<&Landing> {
        match &self.phase {
            Phase::Running(transfer, _) => Some(transfer.landing()),
            _ => None,
        }
    }

    /// Whether this version was the last one that ended: what the server says of it now crossed this end's last word.
    pub(crate) fn has_ended(&self, version: (Epoch, Version)) -> bool {
        self.history.is_last(version)
    }

    /// The version under way.
    pub(crate) fn id(&self) -> Option<VersionId> {
        match &self.phase {
            Phase::Idle | Phase::Detached(..) => None,
            Phase::Announced { announce, .. } => Some(announce.id.clone()),
            Phase::Running(_, id) => Some(id.clone()),
        }
    }

    /// Whether a version is under way that is large enough to find out how many lanes are worth it.
    pub(crate) fn is_bulky(&self) -> bool {
        let bytes = self.selection.as_ref().map_or(0, |selection| selection.payload_bytes());
        matches!(self.phase, Phase::Running(..)) && bytes >= BULKY_BYTES
    }

    /// When to call [`handle_look`](Self::handle_look).
    pub(crate) fn look_at(&self) -> Option<Instant> {
        let is_busy = matches!(self.phase, Phase::Announced { .. } | Phase::Running(..));
        is_busy.then_some(self.stall.look_at())
    }

    /// Looks whether anything moved since the last look; fails when nothing did.
    pub(crate) fn handle_look(&mut self, now: Instant) -> Result<(), Failure> {
        match self.id() {
            Some(id) if self.stall.handle_look(now, self.counters.moved_bytes()) => {
                // The device that is to take it is to blame, or whoever sends it.
                let device = self.landing().and_then(Landing::waits_for);
                Err(Failure::transfer(&id, TransferError::stalled(self.stall.timeout_ms(), device)))
            }
            _ => Ok(()),
        }
    }

    /// Tells the user that nothing more will come.
    pub(crate) fn end(&self, error: SubscriptionError) {
        self.delivery.end(error);
    }

    /// Begins to receive once both the announcement and its manifest are here, with the chunks that came before them.
    fn begin_if_possible(&mut self, ground: &Ground) -> Result<Vec<Ready>, Failure> {
        let Phase::Announced { announce, began, complete } = &self.phase else {
            return Ok(vec![]);
        };
        let known = self.selection.as_ref();
        let known = known.filter(|selection| selection.manifest().digest() == announce.manifest);
        let Some(selection) = known.map(Arc::clone) else {
            return Ok(vec![]);
        };
        let id = announce.id.clone();
        let counters = Arc::clone(&self.counters);
        let announce = announce.clone();
        let begun = Transfer::begin(announce.clone(), selection, self.lent.take(), ground, counters, *began);
        let mut transfer = begun.map_err(|error| Failure::transfer(&id, error))?;
        transfer.set_base(self.base.begin(&announce, transfer.selection()));
        self.generation += 1;
        if let Some(digest) = complete {
            transfer.handle_complete(*digest);
        }
        self.run(transfer, id)
    }

    /// Receives what came before its time, and then what comes.
    fn run(&mut self, mut transfer: Transfer, id: VersionId) -> Result<Vec<Ready>, Failure> {
        let early = self.arrivals.take_early().into_iter();
        let ready = |chunk| {
            self.arrivals
                .handle_header(chunk, &mut transfer, &id, self.generation)
                .transpose()
        };
        let chunks = early.filter_map(ready).collect::<Result<_, _>>()?;
        self.phase = Phase::Running(transfer, id);
        Ok(chunks)
    }

    /// Ends the version under way, which one end gave up.
    fn forget(&mut self, id: &VersionId, credit: u32) {
        self.stale_manifests += 2; // The header of a late manifest may come, and its end.
        self.end_version(id);
        self.base.handle_given_up();
        self.arrivals.forget(credit);
    }

    fn end_version(&mut self, id: &VersionId) {
        self.history.handle_ended(id);
        self.arrivals.end_version();
        self.phase = Phase::Idle;
    }
}
