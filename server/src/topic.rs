//! The state of a topic: its retained versions, publisher and readers.
//!
//! A lock around [`Retention`] and [`Places`], with change signals. A waiter checks the state, awaits the signal, and
//! checks again.

mod options;
mod part_reads;
mod reader;
mod times;

pub use options::{TopicOptions, WhenFull};
pub(crate) use reader::{Reader, ReaderState};

use crate::{
    bases::{self, Bases, DeltaTrial, Hold},
    loads::{Loads, RecentLoads},
    places::Places,
    retained::Retained,
    retention::{Full, Keep, ReaderId, Retention},
    swarm::{Grants, SwarmCounters},
};
use part_reads::PartReads;
use std::{
    sync::{Arc, Weak},
    time::Duration,
};
use tensor_relay_device::{Lock, SourceError};
use tensor_relay_protocol::{CodecChoice, EndReason, Epoch, Seq, Start, Topic, Version};
use tensor_relay_transport::{Tally, sending::Offered};
use times::PublishTimes;
use tokio::{sync::watch, time::Instant};

/// A topic, shared by its publisher, its readers and the catalogue.
#[derive(Debug)]
pub(crate) struct TopicState {
    name: Topic,
    /// The time for which a named reader keeps its place after its connection is lost, and bases stay without
    /// followers.
    linger: Duration,
    /// The bases of all topics, and this topic's number there.
    bases: Arc<Bases>,
    number: u64,
    /// The trial of deltas.
    delta_trial: Arc<Lock<DeltaTrial>>,
    state: Lock<State>,
    /// The chunks sent, to all subscribers.
    tally: Arc<Tally>,
    /// The clients that take its versions from each other.
    swarm: Arc<SwarmCounters>,
    /// The grants by which they do.
    grants: Arc<Grants>,
    /// Signals subscriptions that there may be something to send.
    changed: watch::Sender<()>,
    /// Signals the publisher that there may be room for another version.
    room: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    retention: Retention<Arc<Retained>>,
    places: Places,
    has_publisher: bool,
    /// The publisher's codec choice, if any.
    codec: Option<CodecChoice>,
    publishers_ever: u64,
    ended: Option<EndReason>,
    /// Whether a version became unreadable since the last publish.
    lost: bool,
    followers: u64,
    /// When the last follower left, if there is none.
    last_follower_left: Option<Instant>,
    /// Whether a task waits to release the bases.
    is_release_scheduled: bool,
    published_at: Option<Instant>,
    times: PublishTimes,
    /// The version that is read in parts.
    part_reads: PartReads,
    /// The last published version, whether or not it is retained.
    last: Option<(Epoch, Version)>,
    /// The epoch whose numbers the publisher continues from a record of an earlier process.
    continued: Option<Epoch>,
    /// Why newer content cannot be published, if so.
    problem: Option<String>,
    /// The loads of the last versions.
    loads: RecentLoads,
}

/// A version that was added.
#[derive(Debug)]
pub(crate) struct Pushed {
    pub(crate) seq: Seq,
    /// Whether nothing was retained before.
    pub(crate) is_first: bool,
    pub(crate) version: Weak<Retained>,
    /// Whether there are subscriptions to the topic.
    pub(crate) has_followers: bool,
}

/// Why `publish` has to wait.
#[derive(Debug)]
pub(crate) struct PublishBlockers {
    /// The version that was not added.
    pub(crate) retained: Retained,
    /// The readers that need versions which would have to leave retention.
    pub(crate) readers: Vec<ReaderId>,
    /// When the next waiting place expires.
    pub(crate) recheck_at: Option<Instant>,
}

impl TopicState {
    pub(crate) fn new(name: Topic, linger: Duration, bases: Arc<Bases>) -> Self {
        Self {
            grants: Arc::new(Grants::of(name.clone())),
            name,
            linger,
            number: bases.number_topic(),
            bases,
            delta_trial: Arc::default(),
            state: Lock::default(),
            tally: Arc::default(),
            swarm: Arc::default(),
            changed: watch::Sender::default(),
            room: watch::Sender::default(),
        }
    }

    pub(crate) fn name(&self) -> &Topic {
        &self.name
    }

    /// The counters of sent chunks.
    pub(crate) fn tally(&self) -> &Arc<Tally> {
        &self.tally
    }

    /// The grants of the clients that take its versions from each other.
    pub(crate) fn grants(&self) -> &Arc<Grants> {
        &self.grants
    }

    /// The counters of the clients that take its versions from each other.
    pub(crate) fn swarm(&self) -> &Arc<SwarmCounters> {
        &self.swarm
    }

    /// The trial of deltas.
    pub(crate) fn delta_trial(&self) -> &Arc<Lock<DeltaTrial>> {
        &self.delta_trial
    }

    /// Decides whether the next version may be a base. Call once for each version.
    pub(crate) fn decide_next_base(&self) -> bool {
        self.delta_trial.lock().decide_next_base()
    }

    /// The publisher's codec choice, if any.
    pub(crate) fn codec(&self) -> Option<CodecChoice> {
        self.state.lock().codec
    }

    pub(crate) fn set_codec(&self, codec: Option<CodecChoice>) {
        self.state.lock().codec = codec;
    }

    pub(crate) fn set_problem(&self, problem: Option<String>) {
        self.state.lock().problem = problem;
    }

    /// Subscribes to changes of the versions that can be sent.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Subscribes to the signal that there may be room for another version.
    pub(crate) fn room(&self) -> watch::Receiver<()> {
        self.room.subscribe()
    }

    /// Registers a publisher; returns false if there is one, or if the topic was withdrawn or has expired. Reopens a
    /// topic that its publisher ended.
    pub(crate) fn open(&self) -> bool {
        let mut state = self.state.lock();
        let is_free = !state.has_publisher && matches!(state.ended, None | Some(EndReason::TopicEnded));
        if is_free {
            state.has_publisher = true;
            state.ended = None;
            state.publishers_ever += 1;
        }
        is_free
    }

    /// The number of publishers so far, the current one included.
    pub(crate) fn publishers_ever(&self) -> u64 {
        self.state.lock().publishers_ever
    }

    /// Removes the publisher, so that another may follow. Retained versions stay.
    pub(crate) fn close(&self) {
        self.state.lock().has_publisher = false;
    }

    /// Adds a version, unless readers block it.
    pub(crate) fn push(&self, retained: Retained, keep: Keep) -> Result<Pushed, Box<PublishBlockers>> {
        let now = Instant::now();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        for reader in state.places.expired(now, self.linger) {
            state.give_up(reader);
        }
        state.retention.set_keep(keep);
        let manifest = retained.payload.manifest().digest();
        let bytes = retained.payload.manifest().payload_bytes();
        let (id, is_first) = ((retained.id.epoch, retained.id.version), state.retention.newest().is_none());
        let loads = Arc::clone(&retained.loads);
        let retained = Arc::new(retained);
        let (version, has_followers) = (Arc::downgrade(&retained), state.followers > 0);
        match state.retention.push(retained, bytes) {
            Ok((seq, left)) => {
                let mut gone = vec![];
                if state.last.is_some_and(|(epoch, _)| epoch != id.0) || state.is_abandoned(now, self.linger)
                {
                    gone.push(self.bases.forget(self.number));
                }
                (state.published_at, state.last, state.lost) = (Some(now), Some(id), false);
                state.problem = None;
                state.times.note(id.0, id.1, now);
                state.loads.push(id.0, id.1, loads);
                for retained in &left {
                    retained.leave_retention();
                    state.part_reads.handle_left(retained);
                    state.check_terms(retained);
                    gone.push(self.bases.handle_left_retention(self.number, retained));
                }
                gone.push(self.bases.handle_published(self.number, manifest));
                drop(guard);
                self.changed.send_replace(());
                Ok(Pushed { seq, is_first, version, has_followers })
            }
            Err((retained, Full(readers))) => {
                let recheck_at = state.places.next_expiry(self.linger);
                let retained = Arc::into_inner(retained).expect("nobody else has seen it");
                Err(Box::new(PublishBlockers { retained, readers, recheck_at }))
            }
        }
    }

    /// Whether a retained version will stay when one of `bytes` is added.
    pub(crate) fn will_stay(&self, seq: Seq, keep: Keep, bytes: u64) -> bool {
        let mut state = self.state.lock();
        state.retention.set_keep(keep);
        state.retention.will_stay(seq, bytes)
    }

    /// Evicts readers; returns how many had a place.
    pub(crate) fn evict(&self, readers: &[ReaderId]) -> u64 {
        let evicted = {
            let mut state = self.state.lock();
            readers.iter().filter(|reader| state.give_up(**reader)).count()
        };
        self.changed.send_replace(());
        evicted as u64
    }

    /// Withdraws one version, from retention or from the cached bases.
    pub(crate) fn withdraw(&self, seq: Seq, key: bases::VersionKey) {
        let gone = {
            let mut state = self.state.lock();
            let retained = state.retention.withdraw(seq);
            let left = match &retained {
                Some(retained) => self.reclaim(retained),
                None => self.bases.reclaim(self.number, key),
            };
            (retained, left)
        };
        drop(gone);
        self.changed.send_replace(());
        self.room.send_replace(());
    }

    /// Withdraws a version that its own server gave up. Nothing more of it will come, so its transfers end now.
    pub(crate) fn give_up(&self, (epoch, version): bases::VersionKey) {
        if let Some((seq, retained)) = self.find(epoch, version) {
            self.withdraw(seq, (epoch, version));
            retained.abort_at.send_replace(Some(Instant::now()));
        }
    }

    /// Withdraws a version that can no longer be read, and records why.
    pub(crate) fn handle_unreadable(&self, version: &Retained, error: &SourceError) {
        let error = version.handle_unreadable(error); // Also where nobody listens to the log.
        tracing::error!(
            version = %version.id, error,
            "A version cannot be read any more. It is withdrawn, and its subscribers are informed."
        );
        let key = (version.id.epoch, version.id.version);
        match self.find(version.id.epoch, version.id.version) {
            Some((seq, _)) => {
                self.state.lock().lost = true;
                self.withdraw(seq, key);
            }
            None => drop(self.bases.reclaim(self.number, key)),
        }
    }

    /// Whether a version became unreadable and no other is retained.
    pub(crate) fn is_lost(&self) -> bool {
        let state = self.state.lock();
        state.lost && state.retention.newest().is_none()
    }

    /// Ends the topic. A withdrawn or expired one releases its versions as well.
    pub(crate) fn end(&self, reason: EndReason) {
        let gone = {
            let mut state = self.state.lock();
            state.ended.get_or_insert(reason);
            let taken = if reason == EndReason::TopicEnded { vec![] } else { state.retention.clear() };
            let left: Vec<bases::ReleasedVersions> =
                taken.iter().map(|retained| self.reclaim(retained)).collect();
            (taken, left, state.part_reads.forget(), self.bases.forget(self.number))
        };
        drop(gone);
        self.changed.send_replace(());
        self.room.send_replace(());
    }

    /// Withdraws a version that was taken out of retention: its transfers have a deadline, and it may not be a base.
    fn reclaim(&self, retained: &Arc<Retained>) -> bases::ReleasedVersions {
        retained.leave_retention();
        retained.base.withdraw();
        self.bases.handle_left_retention(self.number, retained)
    }

    /// Holds a version as the base of a subscription, so that it may stay in memory after it leaves retention.
    pub(crate) fn hold(&self, retained: &Arc<Retained>) -> Hold {
        let state = self.state.lock();
        state.check_terms(retained);
        let is_retained = state.retention.iter().any(|(_, other)| Arc::ptr_eq(other, retained));
        self.bases.hold(self.number, retained, is_retained)
    }

    /// Holds a version that a subscribing client names as its base, if it is still in memory.
    pub(crate) fn hold_base(&self, (epoch, version): bases::VersionKey) -> Option<Hold> {
        let found = self.in_memory((epoch, version));
        let hold = found.map(|retained| self.hold(&retained))?;
        self.bases.handle_reconnected(self.number, (epoch, version));
        Some(hold)
    }

    /// Why the topic ended, if it has.
    pub(crate) fn ended(&self) -> Option<EndReason> {
        self.state.lock().ended
    }

    /// The time of the last publish.
    pub(crate) fn published_at(&self) -> Option<Instant> {
        self.state.lock().published_at
    }

    /// The number of the next version in `epoch`: the one after the last version if that is of `epoch`, else the first.
    pub(crate) fn number_after(&self, epoch: Epoch) -> Version {
        let last = self.state.lock().last.filter(|(last_epoch, _)| *last_epoch == epoch);
        last.map_or(Version::FIRST, |(_, last)| last.next())
    }

    /// The newest version that `is_wanted`. One that waits for a lost origin of its own counts only if there is no
    /// other.
    pub(crate) fn current(&self, is_wanted: impl Fn(&Retained) -> bool) -> Option<(Seq, Arc<Retained>)> {
        let state = self.state.lock();
        let wanted = || state.retention.iter().rev().filter(|(_, retained)| is_wanted(retained));
        let is_moving = |retained: &Retained| retained.arrival().is_none_or(|arrival| arrival.is_moving());
        let found = wanted().find(|(_, retained)| is_moving(retained)).or_else(|| wanted().next());
        found.map(|(seq, retained)| (seq, Arc::clone(retained)))
    }

    /// Signals subscriptions that more of a version is here.
    pub(crate) fn handle_arrived(&self) {
        self.changed.send_replace(());
    }

    /// The oldest version from `seq` on.
    pub(crate) fn first_from(&self, seq: Seq) -> Option<(Seq, Arc<Retained>)> {
        self.state
            .lock()
            .retention
            .first_from(seq)
            .map(|(seq, retained)| (seq, Arc::clone(retained)))
    }

    /// A version by its epoch and number, if it is retained.
    pub(crate) fn find(&self, epoch: Epoch, version: Version) -> Option<(Seq, Arc<Retained>)> {
        let state = self.state.lock();
        let mut versions = state.retention.iter();
        let (seq, retained) = versions.rfind(|(_, retained)| retained.has_id(epoch, version))?;
        Some((seq, Arc::clone(retained)))
    }

    /// A version by its epoch and number, if it is retained, or kept for those who read it in parts.
    pub(crate) fn find_for_parts(&self, epoch: Epoch, version: Version) -> Option<Arc<Retained>> {
        let state = self.state.lock();
        let mut versions = state.retention.iter().map(|(_, retained)| retained);
        let retained = versions.rfind(|retained| retained.has_id(epoch, version));
        let kept = || state.part_reads.kept().filter(|kept| kept.has_id(epoch, version));
        retained.or_else(kept).cloned()
    }

    /// Notes that a part of a version is requested by its number: if it leaves retention, it stays for the next request.
    pub(crate) fn note_part_read(self: &Arc<Self>, epoch: Epoch, version: Version) {
        let Some(read) = self.find_for_parts(epoch, version) else { return };
        let check_at = self.state.lock().part_reads.note(&read, self.linger, Instant::now());
        if let Some(check_at) = check_at {
            tokio::spawn(release_after_part_reads(Arc::downgrade(self), check_at));
        }
    }

    fn expire_part_reads(&self) -> Option<Instant> {
        let (recheck_at, gone) = self.state.lock().part_reads.expire(Instant::now());
        drop(gone);
        recheck_at
    }

    /// A version by its epoch and number, if it is retained or a base.
    pub(crate) fn in_memory(&self, key: bases::VersionKey) -> Option<Arc<Retained>> {
        let retained = self.find(key.0, key.1).map(|(_, retained)| retained);
        retained.or_else(|| self.bases.find(self.number, key))
    }

    /// Releases the oldest versions beyond `keep`, as far as no reader needs them.
    pub(crate) fn trim(&self, keep: Keep) {
        let gone = {
            let mut state = self.state.lock();
            let left = state.retention.trim(keep);
            let mut handle = |retained: &Arc<Retained>| {
                retained.leave_retention();
                state.part_reads.handle_left(retained);
                self.bases.handle_left_retention(self.number, retained)
            };
            (left.iter().map(&mut handle).collect::<Vec<_>>(), left)
        };
        drop(gone); // Outside of the lock: it may be gigabytes.
    }

    /// The loads of one of the last versions, retained or not.
    pub(crate) fn loads(&self, epoch: Epoch, version: Version) -> Option<Arc<Loads>> {
        self.state.lock().loads.find(epoch, version)
    }

    /// Records that the publisher continues the numbers of `epoch`, and will not publish earlier versions again.
    pub(crate) fn continue_epoch(&self, epoch: Epoch) {
        self.state.lock().continued = Some(epoch);
    }

    /// Whether `held`, which a client has, is newer than any version of an epoch that its publisher continued: from an
    /// older record than the client knows, such as a restored backup. Other publishers may publish the client's version
    /// again.
    pub(crate) fn is_behind(&self, held: (Epoch, Version)) -> bool {
        self.state.lock().is_behind(held)
    }

    /// The position of the first version for a subscription whose client has `have`.
    pub(crate) fn start_of(&self, have: Option<(Epoch, Version)>, start: Start) -> Seq {
        start_of(&self.state.lock().retention, have, start)
    }

    pub(crate) fn add_follower(&self) {
        let mut state = self.state.lock();
        state.followers += 1;
        state.last_follower_left = None;
    }

    /// Removes a follower. Returns whether to run [`release_abandoned_bases`]: it was the last one, the topic has
    /// bases, and that task does not run yet.
    pub(crate) fn remove_follower(&self) -> bool {
        let mut state = self.state.lock();
        state.followers -= 1;
        state.last_follower_left = (state.followers == 0).then(Instant::now);
        let begins = state.last_follower_left.is_some()
            && !state.is_release_scheduled
            && self.bases.has_any(self.number);
        state.is_release_scheduled |= begins;
        begins
    }

    /// Releases the bases if no follower returned before the timeout. Returns when to check again; `None` if that is
    /// not necessary.
    fn release_if_abandoned(&self) -> Option<Instant> {
        let mut state = self.state.lock();
        let recheck_at = state.last_follower_left.map(|left| left + self.linger);
        if recheck_at.is_some_and(|recheck_at| Instant::now() <= recheck_at) {
            return recheck_at;
        }
        state.is_release_scheduled = false; // With new followers, too: the last one reschedules it.
        let gone = recheck_at.map(|_| self.bases.forget(self.number));
        drop(state);
        drop(gone); // Outside of the lock: it may be gigabytes.
        None
    }

    pub(crate) fn followers(&self) -> u64 {
        self.state.lock().followers
    }

    /// Whether the catalogue must keep the topic. A topic with neither a publisher nor a version is removed with its
    /// last subscriber, so that requests for unknown names leave no state.
    pub(crate) fn is_needed(&self) -> bool {
        let state = self.state.lock();
        state.has_publisher || state.followers > 0 || state.retention.newest().is_some()
    }
}

impl State {
    /// Forbids a version of an earlier epoch, or of a withdrawn or expired topic, to be a base after it left retention.
    fn check_terms(&self, retained: &Retained) {
        let is_available = matches!(self.ended, None | Some(EndReason::TopicEnded));
        let is_last_epoch = self.last.is_none_or(|(epoch, _)| epoch == retained.id.epoch);
        if !is_available || !is_last_epoch {
            retained.base.withdraw();
        }
    }

    /// Gives up the place of a reader; returns whether it had one. A named reader is told when it returns.
    fn give_up(&mut self, reader: ReaderId) -> bool {
        let place = self.retention.place(reader);
        let first = place
            .and_then(|place| self.retention.first_from(place))
            .map(|(_, retained)| &retained.id);
        let next = self.last.map(|(epoch, last)| (epoch, last.next()));
        self.places.give_up(reader, first.map(|id| (id.epoch, id.version)).or(next));
        self.retention.leave(reader)
    }

    fn is_behind(&self, (held_epoch, held): (Epoch, Version)) -> bool {
        let is_older = |(epoch, last)| epoch == held_epoch && last < held;
        self.continued == Some(held_epoch) && self.last.is_some_and(is_older)
    }

    /// Whether the last follower left so long ago that none will reconnect for a base.
    fn is_abandoned(&self, now: Instant, linger: Duration) -> bool {
        self.last_follower_left.is_some_and(|left| now.duration_since(left) > linger)
    }
}

impl Drop for TopicState {
    fn drop(&mut self) {
        drop(self.bases.forget(self.number));
    }
}

/// Releases the bases of a topic that had no follower for the time in which a lost subscriber may reconnect. Without
/// this task they would stay until the next publish.
pub(crate) async fn release_abandoned_bases(topic: Weak<TopicState>) {
    while let Some(recheck_at) = topic.upgrade().and_then(|topic| topic.release_if_abandoned()) {
        tokio::time::sleep_until(recheck_at + Duration::from_millis(1)).await;
    }
}

/// Releases the version that was read in parts once its readers are gone.
async fn release_after_part_reads(topic: Weak<TopicState>, mut check_at: Instant) {
    loop {
        tokio::time::sleep_until(check_at).await;
        match topic.upgrade().and_then(|topic| topic.expire_part_reads()) {
            Some(recheck_at) => check_at = recheck_at,
            None => return,
        }
    }
}

/// The first version of a subscription: after the one that its client has, or according to its `start`.
fn start_of(retention: &Retention<Arc<Retained>>, have: Option<(Epoch, Version)>, start: Start) -> Seq {
    match (have, start) {
        (Some((epoch, version)), _) => after(retention, epoch, version),
        (None, Start::Newest) => retention.newest().map_or_else(|| retention.next(), |(seq, _)| seq),
        (None, Start::Next) => retention.next(),
        (None, Start::At(epoch, version) | Start::Exactly(epoch, version)) => {
            let newest = retention.newest().map(|(_, retained)| retained.id.epoch);
            match (epoch.or(newest), version.0.checked_sub(1)) {
                (Some(epoch), Some(before)) => after(retention, epoch, Version(before)),
                _ => retention.oldest(),
            }
        }
        (None, _) => retention.oldest(),
    }
}

/// The first version after this one. If no version of its epoch is retained, the gap is unknown: then the oldest of
/// all.
fn after(retention: &Retention<Arc<Retained>>, epoch: Epoch, version: Version) -> Seq {
    let of_epoch = || retention.iter().filter(|(_, retained)| retained.id.epoch == epoch);
    let later = of_epoch().find(|(_, retained)| retained.id.version > version);
    let last = of_epoch().next_back();
    match (later, last) {
        (Some((seq, _)), _) => seq,
        (None, Some((seq, _))) => seq.next(),
        (None, None) => retention.oldest(),
    }
}
