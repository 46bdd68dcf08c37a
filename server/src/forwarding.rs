//! [`Forwarding`]: what the clients of this process receive, and this server offers to their peers (PROTOCOL.md §3.15).

mod places;
mod secrets;
mod version;

pub(crate) use places::{GrantedPlace, TakerPlaces};
pub(crate) use version::ForwardedVersion;

use secrets::Secrets;
pub(crate) use secrets::Validity;
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{EndReason, Epoch, LaneGrant, Topic, Version};
use tensor_relay_transport::{
    Fingerprint, Workers,
    egress::Pace,
    forwarding::{Forward, Forwarded, Origin, ReceivedVersion},
};
use tokio::{sync::watch, time::Instant};
use version::OnOffer;

/// The most versions of one member on offer: of a few topics, or in mode `every`. Further ones are not offered.
const VERSIONS_MAX: usize = 256;

/// The most revocations of one member that are remembered. The oldest are forgotten, long after what they are about.
const REVOKED_MAX: usize = 4_096;

/// How a member offers what it receives.
#[derive(Debug, Clone)]
pub struct ForwardOptions {
    /// The key of the port at which this server listens, which the member tells its origin.
    pub key: Fingerprint,
    /// The memory for encodings that are kept of each version. Default: a quarter of its payload, at most 1 GiB. Chunks
    /// without room are not offered. Raw chunks need none, if the version is received into the client's own memory.
    pub kept_bytes: Option<u64>,
    /// The maximum rate at which chunks are sent to peers, in bytes per second. Default: no limit. Peers take chunks of which
    /// they wait too long elsewhere.
    pub rate: Option<u64>,
}

/// The members in this process, and what they offer.
#[derive(Debug, Default)]
pub(crate) struct Forwarding {
    members: Lock<BTreeMap<u64, Member>>,
    next_member: AtomicU64,
    /// Signals that versions, secrets or revocations changed.
    changed: watch::Sender<()>,
    pub(crate) places: TakerPlaces,
}

/// One client session of this process.
#[derive(Debug)]
struct Member {
    secrets: Secrets,
    key: Fingerprint,
    versions: HashMap<VersionKey, Arc<ForwardedVersion>>,
    revoked: VecDeque<Revoked>,
}

type VersionKey = (Topic, (Epoch, Version));

/// A taker that may take a topic no longer, by the grants of this session with the origin and those before it.
#[derive(Debug)]
struct Revoked {
    topic: Topic,
    taker: [u8; 32],
    session: u64,
}

/// What a taker wants: one version, by a grant for its key.
#[derive(Debug, Clone)]
pub(crate) struct Take {
    pub(crate) topic: Topic,
    pub(crate) version: (Epoch, Version),
    pub(crate) taker: [u8; 32],
}

/// A take that was granted.
#[derive(Debug, Clone)]
pub(crate) struct GrantedTake {
    take: Take,
    member: u64,
    /// The session of the member with its origin, from which the grant is derived.
    session: u64,
}

/// Whether there is a version on offer.
#[derive(Debug)]
pub(crate) enum Found {
    Version(Arc<ForwardedVersion>),
    /// It may begin soon.
    NotYet,
    /// A newer one has begun.
    Passed,
}

impl Forwarding {
    /// Adds a member.
    pub(crate) fn join(self: &Arc<Self>, options: ForwardOptions, workers: Workers) -> Arc<dyn Forward> {
        let number = self.next_member.fetch_add(1, Ordering::Relaxed);
        let member = Member {
            secrets: Secrets::default(),
            key: options.key,
            versions: HashMap::new(),
            revoked: VecDeque::new(),
        };
        self.members.lock().insert(number, member);
        let pace = options.rate.map(|rate| Arc::new(Pace::new(rate)));
        Arc::new(MemberForward { forwarding: Arc::clone(self), number, options, pace, workers })
    }

    /// Whether there is a member.
    pub(crate) fn is_active(&self) -> bool {
        !self.members.lock().is_empty()
    }

    /// The proof that a member with this session listens here, for its origin.
    pub(crate) fn proof(&self, session: u64, nonce: &[u8; 32]) -> Option<[u8; 32]> {
        let members = self.members.lock();
        members
            .values()
            .find_map(|member| member.secrets.proof(session, nonce, &member.key.0))
    }

    /// The take that `grant` permits; `None` if it is not one of these origins for this taker and version.
    pub(crate) fn check(&self, take: &Take, grant: &LaneGrant) -> Option<GrantedTake> {
        let (members, now) = (self.members.lock(), Instant::now());
        members.iter().find_map(|(number, member)| {
            let session = member.secrets.granted_by(&take.topic, take.version, &take.taker, grant, now)?;
            Some(GrantedTake { take: take.clone(), member: *number, session })
        })
    }

    /// Watches versions, secrets and revocations.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Until when a take is permitted, if that is known.
    pub(crate) fn validity(&self, granted: &GrantedTake) -> Validity {
        let members = self.members.lock();
        let Some(member) = members.get(&granted.member) else { return Validity::Ended };
        let Take { topic, taker, .. } = &granted.take;
        let is_of = |revoked: &&Revoked| (&revoked.topic, &revoked.taker) == (topic, taker);
        let mut revoked = member.revoked.iter().filter(is_of);
        match revoked.any(|revoked| member.secrets.is_until(granted.session, revoked.session)) {
            true => Validity::Ended,
            false => member.secrets.validity(granted.session),
        }
    }

    /// The version of a take.
    pub(crate) fn find(&self, granted: &GrantedTake) -> Found {
        let members = self.members.lock();
        let Some(member) = members.get(&granted.member) else { return Found::Passed };
        let Take { topic, version: wanted, .. } = &granted.take;
        if let Some(version) = member.versions.get(&(topic.clone(), *wanted)) {
            return Found::Version(Arc::clone(version));
        }
        let of_topic = member.versions.keys().filter(|(other, _)| other == topic);
        let mut newer = of_topic.filter(|(_, (epoch, version))| *epoch == wanted.0 && *version > wanted.1);
        if newer.next().is_some() { Found::Passed } else { Found::NotYet }
    }

    /// Changes a member, if it is still there, and tells those who wait.
    fn change<T>(&self, number: u64, change: impl FnOnce(&mut Member) -> T) -> Option<T> {
        let changed = self.members.lock().get_mut(&number).map(change);
        self.changed.send_replace(());
        changed
    }

    /// Removes a version, unless another one has its place.
    fn remove(&self, number: u64, key: &VersionKey, version: &Arc<ForwardedVersion>) {
        self.change(number, |member| {
            if member.versions.get(key).is_some_and(|current| Arc::ptr_eq(current, version)) {
                member.versions.remove(key);
            }
        });
    }
}

/// The side of a member that its client has.
#[derive(Debug)]
struct MemberForward {
    forwarding: Arc<Forwarding>,
    number: u64,
    options: ForwardOptions,
    pace: Option<Arc<Pace>>,
    workers: Workers,
}

impl Forward for MemberForward {
    fn set_origin(&self, origin: Origin) {
        self.forwarding
            .change(self.number, |member| member.secrets.set(origin, Instant::now()));
    }

    fn begin(&self, version: ReceivedVersion) -> Option<Arc<dyn Forwarded>> {
        if !version.shared {
            return None;
        }
        let key = (version.id.topic.clone(), (version.id.epoch, version.id.version));
        let begun = Arc::new(ForwardedVersion::new(
            version,
            self.options.kept_bytes,
            self.pace.clone(),
            self.workers,
        ));
        let is_added = self.forwarding.change(self.number, |member| {
            let has_room = member.versions.len() < VERSIONS_MAX;
            has_room.then(|| member.versions.insert(key.clone(), Arc::clone(&begun)))
        });
        is_added.flatten()?;
        let (forwarding, member) = (Arc::clone(&self.forwarding), self.number);
        let remove = move |version: &Arc<ForwardedVersion>| forwarding.remove(member, &key, version);
        Some(Arc::new(OnOffer::new(begun, remove)))
    }

    fn revoke(&self, topic: &Topic, taker: [u8; 32], restored: bool) {
        self.forwarding.change(self.number, |member| {
            member
                .revoked
                .retain(|revoked| (&revoked.topic, revoked.taker) != (topic, taker));
            let Some(session) = member.secrets.session().filter(|_| !restored) else { return };
            if member.revoked.len() >= REVOKED_MAX {
                member.revoked.pop_front();
            }
            member.revoked.push_back(Revoked { topic: topic.clone(), taker, session });
        });
    }

    fn end(&self, topic: &Topic, reason: EndReason) {
        let ended = self.forwarding.change(self.number, |member| {
            let of_topic = member.versions.iter().filter(|((other, _), _)| other == topic);
            of_topic.map(|(_, version)| Arc::clone(version)).collect::<Vec<_>>()
        });
        ended.into_iter().flatten().for_each(|version| version.end(reason));
        self.forwarding.changed.send_replace(());
    }
}

impl Drop for MemberForward {
    fn drop(&mut self) {
        let gone = self.forwarding.members.lock().remove(&self.number);
        let versions = gone.into_iter().flat_map(|member| member.versions.into_values());
        versions.for_each(|version| version.close());
        self.forwarding.changed.send_replace(());
    }
}

#[cfg(test)]
mod tests;
