//! [`SharedVersion`]: the members of one version, and what they are told of each other.

use super::{
    Grants, Seat, Sharer,
    marks::Marks,
    signals::Signals,
    status::{MemberStatus, SwarmCounters},
};
use crate::{retained::Retained, topic::TopicState};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Weak},
    time::Duration,
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{
    ChunkIndex, Epoch, Manifest, Pick, RangeSet, SOURCE_RANGES_MAX, Source, SubscriptionId, Topic, Version,
    swarm::{Joining, MemberId, Swarm},
};
use tensor_relay_transport::{Fingerprint, Peer, egress::EncodingLog};
use tokio::time::Instant;

/// The interval at which a version looks after members that wait, e.g. because a chunk is stuck at a slow one.
const TICK: Duration = Duration::from_millis(100);

/// The same, while nobody waits.
const QUIET_TICK: Duration = Duration::from_secs(1);

/// The most chunks of one request that count as requested: as many as are queued for one subscription.
const REQUESTED_MAX: u32 = 4_096;

/// The members of one version that share it: what each has, whom it was named, and the encodings that they pass on. Ends
/// with the version.
#[derive(Debug)]
pub(crate) struct SharedVersion {
    topic: Topic,
    key: (Epoch, Version),
    manifest: Arc<Manifest>,
    encodings: Arc<EncodingLog>,
    published: Instant,
    counters: Arc<SwarmCounters>,
    grants: Arc<Grants>,
    state: Lock<State>,
}

#[derive(Debug)]
struct State {
    swarm: Swarm,
    next: u64,
    members: BTreeMap<MemberId, Member>,
    /// Those that wait until it is known whether they serve.
    undecided: BTreeSet<MemberId>,
}

/// One member.
#[derive(Debug)]
struct Member {
    sharer: Arc<Sharer>,
    signals: Arc<Signals>,
    selected: RangeSet,
    /// What is known of each chunk.
    marks: Marks,
    /// Whether nothing more is pushed to it, as its subscription was told to look.
    is_seeded: bool,
    /// The holders that were named to it, by key.
    named: BTreeMap<[u8; 32], Named>,
    /// Whether it cannot be sent deltas.
    lacks_base: bool,
    has_committed: bool,
}

/// A holder that was named to a member, which may have left since.
#[derive(Debug)]
struct Named {
    member: MemberId,
    principal: Arc<str>,
    peer: Peer,
}

impl SharedVersion {
    /// The members of a version that is on offer, of which there are none yet. Call on the server's runtime.
    pub(super) fn begin(topic: &TopicState, version: &Retained) -> Arc<Self> {
        let manifest = Arc::clone(version.payload.manifest());
        let chunks = manifest.chunking().count();
        let key = (version.id.epoch, version.id.version);
        let state = State {
            swarm: Swarm::new(chunks, rand::random()),
            next: 0,
            members: BTreeMap::new(),
            undecided: BTreeSet::new(),
        };
        let shared = Arc::new(Self {
            topic: topic.name().clone(),
            key,
            manifest,
            encodings: Arc::new(EncodingLog::new(chunks)),
            published: topic.published_at_of(key).unwrap_or_else(Instant::now),
            counters: Arc::clone(topic.swarm()),
            grants: Arc::clone(topic.grants()),
            state: Lock::new(state),
        });
        tokio::spawn(look_after(Arc::downgrade(&shared)));
        shared
    }

    /// Adds a subscription of `sharer`, which is told by these signals and holds `base` if that is known.
    pub(super) fn join(
        self: &Arc<Self>,
        sharer: &Arc<Sharer>,
        (subscription, signals): (SubscriptionId, Arc<Signals>),
        selected: RangeSet,
        base: Option<Version>,
    ) -> Arc<Seat> {
        signals.begin_version();
        self.grants.handle_joined(sharer);
        let member = Member {
            sharer: Arc::clone(sharer),
            signals: Arc::clone(&signals),
            selected,
            marks: Marks::of(self.manifest.chunking().count()),
            is_seeded: false,
            named: BTreeMap::new(),
            lacks_base: base.is_none(),
            has_committed: false,
        };
        let joining = member.joining(false); // Before the lock: it costs as much as there are chunks.
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let joining = Joining { serves: sharer.nameable().is_some(), ..joining };
        let id = MemberId(state.next);
        state.next += 1;
        state.members.insert(id, member);
        state.swarm.join(id, joining, Instant::now().into_std());
        self.counters.handle_joined(self.key);
        state.wake();
        drop(guard);
        let seat =
            Arc::new(Seat::new(Arc::clone(self), id, subscription, signals, Arc::clone(sharer.pace())));
        sharer.take_seat(subscription, &seat);
        seat
    }

    /// Removes a member.
    pub(super) fn leave(&self, id: MemberId) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(member) = state.members.remove(&id) else { return };
        state.swarm.leave(id, Instant::now().into_std());
        self.counters.handle_left(self.key, member.has_committed);
        state.wake();
    }

    /// What to push to a member of `wanted`.
    pub(super) fn pick(&self, id: MemberId, wanted: &RangeSet) -> Pick {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let has_others = state.members.len() > 1;
        if has_others && state.members.get(&id).is_some_and(|member| member.sharer.is_being_asked()) {
            state.undecided.insert(id);
            return Pick::Wait;
        }
        let pick = state.swarm.pick(id, wanted, Instant::now().into_std());
        if let (Pick::Chunk(chunk), Some(member)) = (&pick, state.members.get_mut(&id)) {
            member.marks.handle_sent(chunk.0);
        }
        state.wake();
        pick
    }

    /// Handles that so many pushed chunks arrived at a member.
    pub(super) fn handle_arrived(&self, id: MemberId, chunks: u32) {
        let mut state = self.state.lock();
        state.swarm.handle_credited(id, chunks, Instant::now().into_std());
        state.wake();
    }

    /// Handles what a member requests, which it will have from this server.
    pub(super) fn handle_requested(&self, id: MemberId, chunks: &RangeSet) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(member) = state.members.get_mut(&id) else { return };
        let chunks = chunks.intersection(&member.selected);
        for chunk in chunks.iter().take(REQUESTED_MAX as usize) {
            member.marks.handle_sent(chunk);
            state.swarm.handle_sent(id, ChunkIndex(chunk));
        }
        state.wake();
    }

    /// Handles what a member can, or can no longer, send, of what it selects.
    pub(super) fn handle_held(&self, id: MemberId, added: &RangeSet, withdrawn: &RangeSet) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(member) = state.members.get_mut(&id) else { return };
        let [added, withdrawn] = [added, withdrawn].map(|chunks| member.selected.intersection(chunks));
        withdrawn.iter().for_each(|chunk| member.marks.handle_withdrawn(chunk));
        let (mut is_progress, mut from_peers_bytes) = (false, 0);
        for chunk in added.iter() {
            let news = member.marks.handle_held(chunk);
            is_progress |= news.is_first;
            if news.is_from_peer {
                from_peers_bytes += chunk_bytes(&self.manifest, chunk);
            }
        }
        self.counters.handle_from_peers(from_peers_bytes);
        if is_progress {
            member.signals.raise(|raised| raised.has_progress = true);
        }
        state.swarm.handle_held(id, &added, &withdrawn, Instant::now().into_std());
        state.wake();
    }

    /// Handles that a member was sent another encoding by a peer, as it says: the peer is named to it no more. One that was
    /// not named to it is passed over.
    pub(super) fn handle_bad_peer(&self, id: MemberId, peer: [u8; 32]) {
        let state = self.state.lock();
        let Some(member) = state.members.get(&id) else { return };
        let Some(named) = member.named.get(&peer).filter(|_| member.sharer.distrust(peer)) else { return };
        tracing::warn!(
            topic = %self.topic, version = self.key.1.0,
            reported_by = %member.sharer.peer(), reporting_principal = %member.sharer.principal(),
            peer = %named.peer, principal = %named.principal, key = %Fingerprint(peer),
            "A client reports that a peer sent it other bytes than this server vouches for. Either of them is broken or \
             lies. The peer is named to this client no more; if several clients report it, revoke its ticket."
        );
        member.signals.raise(|raised| raised.are_sources_changed = true);
    }

    /// Handles that peers may, or may no longer, be told of a member's port.
    pub(super) fn handle_addresses_changed(&self, id: MemberId) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(member) = state.members.get(&id) else { return };
        let (serves, now) = (member.sharer.nameable().is_some(), Instant::now().into_std());
        match state.swarm.serves(id) == serves {
            // Those that keep it as a neighbour, at another address.
            true => {
                for other in state.members.values().filter(|other| other.is_told_of(id)) {
                    other.signals.raise(|raised| raised.are_sources_changed = true);
                }
            }
            false => {
                let joining = member.joining(serves);
                state.swarm.leave(id, now);
                state.swarm.join(id, joining, now);
            }
        }
        state.wake();
    }

    /// Handles a member's commit.
    pub(super) fn handle_committed(&self, id: MemberId) {
        let mut state = self.state.lock();
        if let Some(member) = state.members.get_mut(&id).filter(|member| !member.has_committed) {
            member.has_committed = true;
            self.counters.handle_committed(self.key, self.published.elapsed());
        }
        state.swarm.handle_committed(id, Instant::now().into_std());
        state.wake();
    }

    /// Whether nothing more is pushed to a member.
    pub(super) fn is_seeded(&self, id: MemberId) -> bool {
        self.state.lock().swarm.is_seeded(id)
    }

    /// The sources of a member, each with a grant; and whether nothing more is pushed to it.
    pub(super) fn sources(&self, id: MemberId) -> (Vec<Source>, bool) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let is_seeded = state.swarm.is_seeded(id);
        let Some(taker) = state.members.get(&id).and_then(|member| member.sharer.key()) else {
            return (vec![], is_seeded);
        };
        let Some(member) = state.members.get(&id) else { return (vec![], is_seeded) };
        let (mut sources, mut named) = (vec![], BTreeMap::new());
        for neighbour in state.swarm.neighbours(id) {
            let Some(holder) = state.members.get(neighbour) else { continue };
            let Some((key, addresses)) = holder.sharer.nameable() else { continue };
            // A client that reconnected may be a member twice for some seconds.
            if key == taker || named.contains_key(&key) || !member.sharer.trusts(&key) {
                continue;
            }
            let principal = Arc::clone(holder.sharer.principal());
            named.insert(key, Named { member: *neighbour, principal, peer: holder.sharer.peer() });
            sources.push(Source {
                addresses: addresses.to_vec(),
                key,
                grant: holder.sharer.secret().grant(&self.topic, self.key, &taker),
                chunks: state.swarm.held(*neighbour, SOURCE_RANGES_MAX),
                is_near: state.swarm.are_near(id, *neighbour),
            });
        }
        sources.sort_by_key(|source| !source.is_near);
        let member = state.members.get_mut(&id).filter(|_| !named.is_empty());
        let sharer = member.map(|member| {
            member.named.extend(named);
            Arc::clone(&member.sharer)
        });
        drop(guard); // To ask for a right takes longer than the others should wait.
        if !sharer.is_some_and(|sharer| self.grants.handle_named(taker, &sharer)) {
            sources.clear();
        }
        (sources, is_seeded)
    }

    /// The encodings that the members pass on to each other.
    pub(super) fn encodings(&self) -> &Arc<EncodingLog> {
        &self.encodings
    }

    /// The number of its chunks.
    pub(super) fn chunks(&self) -> u32 {
        self.manifest.chunking().count()
    }

    /// Its epoch and number.
    pub(super) fn key(&self) -> (Epoch, Version) {
        self.key
    }

    /// The status of at most `max` members.
    pub(crate) fn members(&self, max: usize) -> Vec<MemberStatus> {
        let state = self.state.lock();
        let peer_of = |id: &MemberId| state.members.get(id).map(|member| member.sharer.peer());
        let status = |(id, member): (&MemberId, &Member)| MemberStatus {
            peer: member.sharer.peer(),
            site: member.sharer.site(),
            serves: member.sharer.nameable().is_some(),
            held_chunks: member.marks.held(),
            selected_chunks: member.selected.len(),
            has_committed: member.has_committed,
            sources: state.swarm.neighbours(*id).iter().filter_map(peer_of).collect(),
        };
        state.members.iter().take(max).map(status).collect()
    }

    /// Lets members go on that waited for time to pass. Returns whether there are some that have not committed.
    fn tick(&self) -> bool {
        let mut state = self.state.lock();
        state.swarm.handle_time(Instant::now().into_std());
        state.wake();
        state.members.values().any(|member| !member.has_committed)
    }
}

impl Member {
    /// What the policy is told of it.
    fn joining(&self, serves: bool) -> Joining {
        let held = match self.has_committed {
            true => self.selected.clone(),
            false => self.marks.held_or_sent(),
        };
        let selected = if self.has_committed { RangeSet::new() } else { self.selected.clone() };
        Joining { selected, held, serves, lacks_base: self.lacks_base, site: self.sharer.site() }
    }

    /// Whether a holder was named to it.
    fn is_told_of(&self, holder: MemberId) -> bool {
        self.named.values().any(|named| named.member == holder)
    }
}

impl State {
    /// Raises the signals of members for which something has been decided.
    fn wake(&mut self) {
        let members = &self.members;
        let decided = self
            .undecided
            .extract_if(.., |id| members.get(id).is_none_or(|member| !member.sharer.is_being_asked()));
        for id in decided {
            if let Some(member) = members.get(&id) {
                member.signals.raise(|raised| raised.is_woken = true);
            }
        }
        for id in self.swarm.take_woken() {
            if let Some(member) = self.members.get(&id) {
                member.signals.raise(|raised| raised.is_woken = true);
            }
        }
        // A member that is to look at its sources, but not yet, is not woken again, except for the last of them.
        for id in self.swarm.take_changed() {
            let Some(member) = self.members.get_mut(&id) else { continue };
            let is_seeded = self.swarm.is_seeded(id);
            let was_seeded = std::mem::replace(&mut member.is_seeded, is_seeded);
            let is_marked = member.signals.with(|raised| raised.are_sources_changed);
            if !is_marked || is_seeded && !was_seeded {
                member.signals.raise(|raised| raised.are_sources_changed = true);
            }
        }
    }
}

fn chunk_bytes(manifest: &Manifest, chunk: u32) -> u64 {
    let (range, _) = manifest.chunk(ChunkIndex(chunk));
    range.end - range.start
}

/// Looks after a version until it ends.
async fn look_after(version: Weak<SharedVersion>) {
    let mut tick = TICK;
    loop {
        tokio::time::sleep(tick).await;
        let Some(version) = version.upgrade() else { return };
        tick = if version.tick() { TICK } else { QUIET_TICK };
    }
}
