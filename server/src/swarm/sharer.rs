//! [`Sharer`]: a client that takes chunks from others, and perhaps serves them, for the time of its session.

use super::{
    PeerDialling, Seat,
    addresses::permitted,
    dial_back::{self, Claimed},
    held::Pace,
};
use crate::access::Right;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Weak},
    time::Duration,
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{
    Epoch, Held, LaneGrant, PeerAddress, PeerSecret, Share, Site, SubscriptionId, Topic, Verb, Version,
};
use tensor_relay_transport::Peer;
use tokio::{task::JoinSet, time::Instant};

/// The shortest time between two rounds of dialling the ports of a client.
const DIAL_INTERVAL: Duration = Duration::from_secs(5);

/// The time for which pushing to one of several members waits for the first answer of its port: what is pushed to a client
/// that only takes comes to nobody else.
const FIRST_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The rounds after one `Share`, in which no port answers: packets may be lost, and a port may be opened a little later.
const DIAL_ROUNDS: usize = 3;

/// The most peers that are not named to a client any more: as many as it uses no more itself.
const DISTRUSTED_MAX: usize = 1_024;

/// A client that said that it shares, with what this server knows of it.
#[derive(Debug)]
pub(crate) struct Sharer {
    session: u64,
    secret: PeerSecret,
    /// Asked for in turns, also after the session: its grants must not outlive its rights.
    right: Right,
    /// Who it is, for logs and for its share of what the server does.
    principal: Arc<str>,
    peer: Peer,
    /// How much is handled of what it says that it holds.
    pace: Arc<Lock<Pace>>,
    state: Lock<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The SHA-256 of its public key; `None` until it shares.
    key: Option<[u8; 32]>,
    site: Site,
    /// The addresses of its port that answered with the key.
    proven: Arc<[PeerAddress]>,
    /// Where it has its versions from.
    seats: BTreeMap<SubscriptionId, Weak<Seat>>,
    /// When its ports may be dialled again.
    dial_at: Option<Instant>,
    /// Until when it is not known whether its port answers.
    is_asked_until: Option<Instant>,
    /// The keys of the peers that sent it other encodings, as it says.
    distrusted: BTreeSet<[u8; 32]>,
    /// Whether a subscription of it was told of rights.
    has_followed: bool,
}

impl Sharer {
    /// The client at `peer` of the session with this number and grant of lanes, who does not share yet.
    pub(crate) fn new(
        (session, grant): (u64, &LaneGrant),
        right: Right,
        principal: Arc<str>,
        peer: Peer,
    ) -> Self {
        let pace = Arc::new(Lock::new(Pace::new(Instant::now())));
        Self { session, secret: PeerSecret::of(grant), right, principal, peer, pace, state: Lock::default() }
    }

    /// Handles that the client says where it listens. Then [`dial`](Self::dial).
    pub(crate) fn handle_share(&self, share: &Share) {
        let seats = {
            let mut state = self.state.lock();
            (state.key, state.proven) = (share.key, Arc::default());
            state.site = share.site.clone();
            let is_asked = !share.addresses.is_empty();
            state.is_asked_until = is_asked.then(|| Instant::now() + FIRST_ANSWER_TIMEOUT);
            state.seats()
        };
        seats.iter().for_each(|seat| seat.handle_addresses_changed());
    }

    /// Dials the ports that a client told, until one has proven that it is the client's, or some rounds have passed. Then
    /// peers are told of those that did. Dropping it gives up.
    pub(crate) async fn dial(self: Arc<Self>, share: Share, dialling: PeerDialling) {
        let Some(key) = share.key else { return };
        let told = permitted(&share.addresses, self.peer.ip(), &dialling.networks);
        if told.is_empty() && !share.addresses.is_empty() {
            tracing::info!(
                told = ?share.addresses,
                "A client shares at addresses that are not its own: it is named to no peer. Name its network with \
                 --peer-networks if the addresses are right."
            );
        }
        let claimed = Claimed { session: self.session, secret: self.secret.clone(), key };
        for round in 1..=DIAL_ROUNDS {
            if told.is_empty() {
                return self.handle_unproven();
            }
            self.wait_for_turn().await;
            let mut asking = JoinSet::new();
            for address in told.iter().copied() {
                let (dialling, claimed) = (dialling.clone(), claimed.clone());
                let principal = Arc::clone(&self.principal);
                asking.spawn(async move {
                    let _turn = dialling.turns.take(&principal).await?;
                    let answered = dial_back::ask(&dialling.connector, address, &claimed).await;
                    let log = |why_not: &_| {
                        let address = address.address;
                        tracing::info!(%address, round, %why_not, "A client's port is not named to its peers.");
                    };
                    answered.inspect_err(log).ok().map(|()| address)
                });
            }
            let proven: Vec<PeerAddress> = asking.join_all().await.into_iter().flatten().collect();
            if !proven.is_empty() {
                return self.handle_proven(key, proven.into());
            }
            self.handle_unproven();
        }
    }

    /// Waits until the client's ports may be dialled.
    async fn wait_for_turn(&self) {
        let now = Instant::now();
        let begins = {
            let mut state = self.state.lock();
            let begins = state.dial_at.map_or(now, |at| at.max(now));
            state.dial_at = Some(begins + DIAL_INTERVAL);
            begins
        };
        if begins > now {
            tokio::time::sleep_until(begins).await;
        }
    }

    fn handle_proven(&self, key: [u8; 32], proven: Arc<[PeerAddress]>) {
        tracing::debug!(addresses = ?proven, "A client's port for peers answered.");
        let seats = {
            let mut state = self.state.lock();
            if state.key != Some(key) {
                return;
            }
            (state.proven, state.is_asked_until) = (proven, None);
            state.seats()
        };
        seats.iter().for_each(|seat| seat.handle_addresses_changed());
    }

    /// Handles that no port of the client answered: it only takes, for now.
    fn handle_unproven(&self) {
        let seats = {
            let mut state = self.state.lock();
            state.is_asked_until = None;
            state.seats()
        };
        seats.iter().for_each(|seat| seat.handle_addresses_changed());
    }

    /// Whether it will be known in a moment whether it serves or only takes.
    pub(super) fn is_being_asked(&self) -> bool {
        self.state.lock().is_asked_until.is_some_and(|until| Instant::now() < until)
    }

    /// Its seat in a version, if that is the last one of the subscription.
    fn seat(&self, subscription: SubscriptionId, version: (Epoch, Version)) -> Option<Arc<Seat>> {
        let seat = self.state.lock().seats.get(&subscription).and_then(Weak::upgrade);
        seat.filter(|seat| seat.is_in(version))
    }

    /// Handles that the client can, or can no longer, send chunks of a version to its peers. About another version than the last
    /// one of the subscription it says nothing any more.
    pub(crate) fn handle_held(&self, held: &Held) {
        if let Some(seat) = self.seat(held.subscription, (held.epoch, held.version)) {
            seat.report_held(&held.added, &held.withdrawn);
        }
    }

    /// Handles that a peer sent the client another encoding of a version's chunk than this server named, as the client
    /// says. It is the word of one client, so that nothing follows for others.
    pub(crate) fn handle_bad_peer(
        &self,
        subscription: SubscriptionId,
        version: (Epoch, Version),
        peer: [u8; 32],
    ) {
        if let Some(seat) = self.seat(subscription, version) {
            seat.handle_bad_peer(peer);
        }
    }

    /// Names a peer to the client no more in this session. Returns whether that is new.
    pub(super) fn distrust(&self, peer: [u8; 32]) -> bool {
        let mut state = self.state.lock();
        state.distrusted.len() < DISTRUSTED_MAX && state.distrusted.insert(peer)
    }

    /// Whether a peer may be named to the client.
    pub(super) fn trusts(&self, peer: &[u8; 32]) -> bool {
        !self.state.lock().distrusted.contains(peer)
    }

    /// Handles that a subscription begins to be told of rights. Returns whether it is the first one.
    pub(super) fn begin_following(&self) -> bool {
        !std::mem::replace(&mut self.state.lock().has_followed, true)
    }

    /// Keeps the seat of a subscription in a version, as long as it exists.
    pub(super) fn take_seat(&self, subscription: SubscriptionId, seat: &Arc<Seat>) {
        let mut state = self.state.lock();
        state.seats.retain(|_, seat| seat.strong_count() > 0);
        state.seats.insert(subscription, Arc::downgrade(seat));
    }

    /// The SHA-256 of its public key, if it shares.
    pub(crate) fn key(&self) -> Option<[u8; 32]> {
        self.state.lock().key
    }

    /// The addresses of its port, and its key, if peers may be told of it.
    pub(super) fn nameable(&self) -> Option<([u8; 32], Arc<[PeerAddress]>)> {
        let state = self.state.lock();
        let proven = Arc::clone(&state.proven);
        state.key.filter(|_| !proven.is_empty()).map(|key| (key, proven))
    }

    /// The secret that this server shares with its session.
    pub(super) fn secret(&self) -> &PeerSecret {
        &self.secret
    }

    /// How much is handled of what it says that it holds, of all its subscriptions.
    pub(super) fn pace(&self) -> &Arc<Lock<Pace>> {
        &self.pace
    }

    /// Where it is, as it says.
    pub(super) fn site(&self) -> Site {
        self.state.lock().site.clone()
    }

    /// Who it is.
    pub(super) fn principal(&self) -> &Arc<str> {
        &self.principal
    }

    /// Where it is.
    pub(super) fn peer(&self) -> Peer {
        self.peer
    }

    /// Whether it may have this topic now.
    pub(super) fn may_take(&self, topic: &Topic) -> bool {
        self.right.may(Verb::Subscribe, topic)
    }
}

impl State {
    fn seats(&self) -> Vec<Arc<Seat>> {
        self.seats.values().filter_map(Weak::upgrade).collect()
    }
}
