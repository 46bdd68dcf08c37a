//! A session: one client, from its handshake to its end.

mod checking;
mod error;
mod opening;
mod taker;
mod watches;

use crate::{
    Config,
    access::{Credentials, Denied, Holder, LocalUser, Permit, Standing},
    consumers::ConsumerId,
    failures::FailedAt,
    gauge::{Counted, Gauge},
    handshakes::pace,
    inboxes::Inboxes,
    joinable::SharedLanes,
    joining,
    loads::{LoadReporters, Report},
    logins::Login,
    offer::Offer,
    probing::Probing,
    refusals::Reason,
    shared::{ConnectionMemory, Shared},
    shares::{Eviction, Place},
    subscribers::SubscriberInfo,
    subscription_host::SubscriptionHost,
    swarm::{Sharer, Sharing},
    takers, watching,
};
use error::SessionError;
use opening::Opening;
use std::{convert::Infallible, sync::Arc, time::Duration};
use tensor_relay_protocol::{
    ClientMessage, CodecChoice, CodecSet, EndReason, Epoch, Feature, FeatureSet, Glob, Held, Hello,
    LaneOffer, ProtocolViolation, ServerMessage, Share, Subscribe, SubscriptionId, SubscriptionMessage,
    Topic, Verb, Version, VersionDigest, WatchId, Welcome,
};
use tensor_relay_transport::{
    AbortOnDrop, Lane, LaneKind, control,
    sending::{Coding, Delivery, Lanes, Route, Selector},
};

use taker::Taker;
use tokio::{
    sync::watch,
    task::{AbortHandle, JoinError, JoinSet},
    time::Instant,
};
use tracing::Instrument;
use watches::Watches;

/// Serves one connection until it ends: a session that begins with `Hello`, or a lane that joins one with `Join`.
#[tracing::instrument(name = "session", skip_all, fields(peer = %lane.peer()))]
pub(crate) async fn serve(lane: Lane, login: Login, control_timeout: Duration, shared: Arc<Shared>) {
    let _traffic = shared.traffic.count(&lane);
    let streams = tokio::time::timeout(control_timeout, control::accept(&lane, control_timeout)).await;
    let (sender, mut receiver) = match streams {
        Ok(Ok(streams)) => streams,
        Ok(Err(error)) => return refuse(&lane, None, login, &error.into(), &shared).await,
        Err(_) => return refuse(&lane, None, login, &SessionError::NoHello, &shared).await,
    };
    let first = first_message(&mut receiver, control_timeout).await;
    let admitted = match first.and_then(Opening::new) {
        Ok(Opening::Lane(join)) => {
            return joining::serve(lane, login, sender, receiver, join, &shared).await;
        }
        Ok(Opening::Check(check)) => {
            let control = (&sender, &mut receiver);
            match checking::answer(check, &lane, control, control_timeout, &shared).await {
                Ok(()) => return drop((login, sender, receiver)),
                Err(error) => Err(error),
            }
        }
        Ok(Opening::Session(hello, revision)) => AdmittedClient::new(hello, revision, &lane, &shared).await,
        Err(error) => Err(error),
    };
    let AdmittedClient { hello, revision, permit, taker, mut evictions, admission } = match admitted {
        Ok(admitted) => admitted,
        Err(error) => return refuse(&lane, Some((sender, receiver)), login, &error, &shared).await,
    };
    drop(login); // An authenticated client is not evicted for unauthenticated ones.
    let negotiated = Negotiated { codecs: hello.codecs, features: hello.features, revision, permit, taker };
    let error = tokio::select! {
        Err(error) = welcome_and_run(&lane, &sender, &mut receiver, negotiated, &shared) => error,
        () = Eviction::of_either(&mut evictions) => SessionError::Evicted,
    };
    if let Some(reason) = error.failure() {
        shared.failures.note(FailedAt::Session, reason);
    }
    match error.refusal() {
        Some(reason) => log_refusal(&lane, reason, &error, &shared),
        None if matches!(error, SessionError::AccessLost(_)) => tracing::warn!(%error, "The session ended."),
        None if error.is_close_by_client() => tracing::info!("The client closed the session."),
        None => tracing::info!(%error, "The session ended."),
    }
    close(&lane, Some(&sender), &error).await;
    // The session counts until the lane is closed. The control stream must not end before the lane: its end carries no
    // code.
    drop((admission, sender, receiver));
}

/// An authenticated client that was admitted to a session.
struct AdmittedClient {
    hello: Hello,
    revision: u32,
    permit: Permit,
    /// What is known of it, if it has no rights but may show grants.
    taker: Option<Taker>,
    /// From its place among the sessions, and from its memory.
    evictions: [Eviction; 2],
    admission: Admission,
}

/// Counts one session and reserves its memory, until this is dropped.
struct Admission {
    _place: Place<Arc<str>>,
    _counted: Counted,
    _memory: ConnectionMemory,
}

impl AdmittedClient {
    /// Admits the client that sent `hello`, if it may connect.
    async fn new(
        hello: Hello,
        revision: u32,
        lane: &Lane,
        shared: &Arc<Shared>,
    ) -> Result<Self, SessionError> {
        let certificate = lane.client_certificate().cloned();
        let user = lane.local_user().map(LocalUser::seen);
        let credentials = Credentials { token: hello.token.clone(), certificate, user };
        let (permit, taker) = match shared.access.admit(credentials) {
            Ok(permit) => (permit, None),
            Err(Denied::UnknownKey(key)) if may_take(&hello, shared) => {
                let taker = Taker::new(&shared.forwarding.places, lane.peer().ip());
                (shared.access.admit_peer(key), Some(taker))
            }
            Err(denied) => return Err(denied.into()),
        };
        let share = permit.holder().principal().share(lane.peer().ip());
        let reserved = shared.places.reserve(Arc::clone(&share), lane.kind()).await;
        let (memory, memory_eviction) = reserved.map_err(SessionError::NoMemory)?;
        let (place, eviction) = shared.places.sessions.enter_fairly(share).ok_or(SessionError::TooBusy)?;
        let (principal, agent) = (permit.holder().principal(), hello.agent.escape_debug());
        let holder = principal.holder().unwrap_or_default().escape_debug();
        tracing::info!(%principal, %holder, %agent, revision, "A client was admitted.");
        let admission = Admission { _place: place, _counted: shared.sessions.count(), _memory: memory };
        Ok(Self { hello, revision, permit, taker, evictions: [eviction, memory_eviction], admission })
    }
}

/// Whether a client without rights may take versions from here by grants.
fn may_take(hello: &Hello, shared: &Shared) -> bool {
    hello.token.is_none() && hello.features.contains(Feature::Peers) && shared.forwarding.is_active()
}

/// The negotiated settings of client and server.
struct Negotiated {
    codecs: CodecSet,
    features: FeatureSet,
    revision: u32,
    permit: Permit,
    taker: Option<Taker>,
}

async fn first_message(
    receiver: &mut control::Receiver<ClientMessage>,
    control_timeout: Duration,
) -> Result<ClientMessage, SessionError> {
    let first = tokio::time::timeout(control_timeout, receiver.next()).await;
    Ok(first.map_err(|_| SessionError::NoHello)??)
}

/// Refuses a client that was not admitted. It counts as a login until it is closed.
async fn refuse(
    lane: &Lane,
    control: Option<(control::Sender<ServerMessage>, control::Receiver<ClientMessage>)>,
    login: Login,
    error: &SessionError,
    shared: &Shared,
) {
    if let Some(reason) = error.failure() {
        shared.failures.note(FailedAt::Session, reason);
    }
    let is_logged = |name| {
        shared
            .refusals
            .note(lane.peer().ip(), Reason::Named(name), Instant::now())
            .is_some()
    };
    match error.refusal() {
        Some(reason) => log_refusal(lane, reason, error, shared),
        None if error.failure().is_some_and(is_logged) => tracing::info!(%error, "The session ended."),
        None => tracing::debug!(%error, "The session ended."),
    }
    close(lane, control.as_ref().map(|(sender, _)| sender), error).await;
    lane.lingered().await;
    drop((login, control)); // The control stream must not end before the lane: its end carries no code.
}

/// Logs that a session ended, at most once a minute for each network and reason.
fn log_refusal(lane: &Lane, reason: Reason, error: &SessionError, shared: &Shared) {
    match shared.refusals.note(lane.peer().ip(), reason, Instant::now()) {
        Some(0) => tracing::warn!(%error, "The session ended."),
        Some(unlogged) => {
            tracing::warn!(%error, unlogged, "The session ended; `unlogged` similar ones were not logged.")
        }
        None => tracing::debug!(%error, "The session ended."),
    }
}

/// Delivers earlier messages and closes the lane, unless it is closed already.
async fn close(lane: &Lane, sender: Option<&control::Sender<ServerMessage>>, error: &SessionError) {
    if let Some(code) = error.close_code() {
        match sender {
            Some(sender) => sender.flush().await,
            None => lane.flush().await,
        }
        lane.close(code, &error.close_text());
    }
}

/// The features that this server offers to the client of a lane. Of peers only a client learns that asks for them, and
/// that has a secret in common with the server, by its grant for lanes; or one that `may_take` by grants of others.
fn features_over(
    lane: &Lane,
    may_take: bool,
    by_client: FeatureSet,
    lanes: Option<&LaneOffer>,
    config: &Config,
) -> FeatureSet {
    let may_share = config.peers.is_some() && by_client.contains(Feature::Peers) && lanes.is_some();
    match lane.descriptors() {
        Some(_) => FeatureSet::OF_SERVER.with(Feature::Memory),
        None if may_take || may_share => FeatureSet::OF_SERVER.with(Feature::Peers),
        None => FeatureSet::OF_SERVER,
    }
}

async fn welcome_and_run(
    lane: &Lane,
    sender: &control::Sender<ServerMessage>,
    receiver: &mut control::Receiver<ClientMessage>,
    negotiated: Negotiated,
    shared: &Arc<Shared>,
) -> Result<Infallible, SessionError> {
    let share = negotiated.permit.holder().principal().share(lane.peer().ip());
    let lanes = SharedLanes { lanes: Arc::new(Lanes::new(lane.clone(), sender.clone())), holder: share };
    let session_id = rand::random();
    let lanes_max = match lane.kind() {
        LaneKind::Unix => 1,                  // The kernel copies as fast over one.
        _ if negotiated.taker.is_some() => 1, // It takes from several peers at once.
        _ => shared.config.lanes_offer(shared.egress.transfers.get()),
    };
    let (_joinable, offer) = shared.joinable.register(session_id, lanes.clone(), lanes_max);
    let is_taker = negotiated.taker.is_some();
    let offered = features_over(lane, is_taker, negotiated.features, offer.as_ref(), &shared.config);
    let sharer =
        offer
            .filter(|_| offered.contains(Feature::Peers) && !is_taker)
            .map(|LaneOffer { grant, .. }| {
                let (right, principal) = (negotiated.permit.right(), Arc::clone(&lanes.holder));
                Arc::new(Sharer::new((session_id, &grant), right, principal, lane.peer()))
            });
    let welcome = Welcome {
        revision: negotiated.revision,
        agent: shared.config.agent.clone(),
        session: session_id,
        subscriptions_max: shared.config.subscriptions_max,
        lanes: offer,
        instance: shared.instance,
        lane_addresses: vec![],
        features: offered,
    };
    sender.send(ServerMessage::Welcome(welcome)).await?;
    let session = Session {
        lanes: lanes.lanes,
        share: lanes.holder,
        sender: sender.clone(),
        holder: negotiated.permit.holder().clone(),
        codecs: negotiated.codecs,
        features: negotiated.features,
        offered,
        taker: negotiated.taker,
        sharer,
        dialling: None,
        shared: Arc::clone(shared),
        inboxes: Inboxes::default(),
        loaders: LoadReporters::default(),
        running: JoinSet::new(),
        unfinished: Gauge::default(),
        loans: takers::Loans::default(),
        watching: Watches::default(),
        watches: JoinSet::new(),
        probing: Probing::default(),
    };
    session.run(receiver, negotiated.permit).await
}

/// The session of an admitted client, with its subscriptions.
struct Session {
    lanes: Arc<Lanes>,
    /// The holder whose share of the server it takes.
    share: Arc<str>,
    sender: control::Sender<ServerMessage>,
    holder: Holder,
    codecs: CodecSet,
    /// The features that the client offered.
    features: FeatureSet,
    /// The features that it was offered.
    offered: FeatureSet,
    /// What is known of the client, if only grants admit it.
    taker: Option<Taker>,
    /// Its part in swarms, if it may have one.
    sharer: Option<Arc<Sharer>>,
    /// Dials the client's ports.
    dialling: Option<AbortOnDrop>,
    shared: Arc<Shared>,
    inboxes: Inboxes,
    loaders: LoadReporters,
    running: JoinSet<EndedSubscription>,
    /// The subscriptions of this session that a shutdown waits for.
    unfinished: Gauge,
    /// The versions that its clients map.
    loans: takers::Loans,
    /// The active watches; their tasks end with the session.
    watching: Watches<AbortHandle>,
    watches: JoinSet<()>,
    probing: Probing,
}

/// A subscription that has ended; an error means that the client broke a rule.
type EndedSubscription = (SubscriptionId, Result<(), ProtocolViolation>);

/// A subscription that has ended, or the panic of its task.
type EndedTask = Result<EndedSubscription, JoinError>;

/// Waits until `flag` is true. Cancel safe.
async fn wait_until_set(flag: &mut watch::Receiver<bool>) {
    let _ = flag.wait_for(|is_set| *is_set).await; // `Shared` holds the sender.
}

/// The time for subscriptions to handle a client's last messages.
const SUBSCRIPTIONS_TIMEOUT: Duration = Duration::from_secs(1);

/// The interval between requests of a session that look at all topics, which takes up to half a millisecond of the
/// network's thread. Beyond a burst, they wait.
const SCAN_INTERVAL: Duration = Duration::from_millis(20);

/// The number of such requests that need not wait: more than the watches that a client may begin with.
const SCAN_BURST: u32 = 32;

impl Session {
    async fn run(
        mut self,
        receiver: &mut control::Receiver<ClientMessage>,
        mut permit: Permit,
    ) -> Result<Infallible, SessionError> {
        let (mut draining, mut ending) = (self.shared.draining.subscribe(), self.shared.ending.subscribe());
        let (mut is_draining, unfinished) = (false, self.unfinished.clone());
        let mut scan_due = Instant::now();
        let mut wait_for_scan = || {
            let (begins, next) = pace(scan_due, Instant::now(), SCAN_INTERVAL, SCAN_BURST);
            scan_due = next;
            tokio::time::sleep_until(begins)
        };
        loop {
            tokio::select! {
                () = wait_until_set(&mut draining), if !is_draining => {
                    is_draining = true;
                    if self.features.contains(Feature::Drain) {
                        self.sender.send(ServerMessage::Drain { alternatives: vec![] }).await?;
                    }
                }
                // A server drains before it ends.
                () = wait_until_set(&mut ending), if is_draining => return Err(SessionError::ShuttingDown),
                // A client without unfinished transfers may reconnect elsewhere while others finish.
                () = unfinished.wait_for_zero(), if is_draining => return Err(SessionError::ShuttingDown),
                message = receiver.next() => match message {
                    // A client that reads a long list slowly must not keep rights that it lost meanwhile.
                    Ok(ClientMessage::List) => {
                        let turn = wait_for_scan();
                        let listing = async {
                            turn.await;
                            self.list().await
                        };
                        tokio::select! {
                            listed = listing => listed?,
                            lost = self.access_lost(&mut permit) => return Err(lost),
                        }
                    }
                    Ok(message) => {
                        if matches!(message, ClientMessage::Watch { .. }) {
                            wait_for_scan().await;
                        }
                        self.handle_message(message).await?;
                    }
                    Err(error) => {
                        self.finish_subscriptions().await;
                        return Err(error.into());
                    }
                },
                Some(ended) = self.running.join_next() => self.handle_ended(ended)?,
                error = taker::ended(&mut self.taker) => return Err(error),
                changed = permit.changed() => {
                    changed.map_err(SessionError::AccessLost)?;
                    self.handle_rights_changed();
                }
            }
        }
    }

    /// Applies changes of the client's rights until it loses its access; returns the reason. Cancel safe.
    async fn access_lost(&self, permit: &mut Permit) -> SessionError {
        loop {
            match permit.changed().await {
                Ok(()) => self.handle_rights_changed(),
                Err(denied) => return SessionError::AccessLost(denied),
            }
        }
    }

    fn handle_ended(&mut self, ended: EndedTask) -> Result<(), SessionError> {
        let (id, result) = ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
        self.inboxes.close(id);
        self.loaders.handle_ended(id);
        self.handle_take_ended();
        Ok(result?)
    }

    /// Ends the subscriptions for which the client has lost its permission.
    fn handle_rights_changed(&self) {
        tracing::info!("The client's rights were changed.");
        for topic in self.inboxes.forbid(|topic| self.holder.may(Verb::Subscribe, topic)) {
            tracing::warn!(%topic, "A subscription is ended: the client lost its permission.");
        }
    }

    /// Waits, for a bounded time, until the task of an unsubscribed subscription has ended: the client's next message
    /// may subscribe as the same reader, which needs the released place.
    async fn wait_for_end(&mut self, id: SubscriptionId) -> Result<(), SessionError> {
        let ended = async {
            while self.inboxes.is_open(id)
                && let Some(ended) = self.running.join_next().await
            {
                self.handle_ended(ended)?;
            }
            Ok(())
        };
        tokio::time::timeout(SUBSCRIPTIONS_TIMEOUT, ended).await.unwrap_or(Ok(()))
    }

    /// Waits, for a bounded time, until subscriptions have handled the client's last messages, perhaps a commit.
    async fn finish_subscriptions(&mut self) {
        self.inboxes.close_all();
        let ended = async { while self.running.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(SUBSCRIPTIONS_TIMEOUT, ended).await;
    }

    /// Handles a message of the client.
    async fn handle_message(&mut self, message: ClientMessage) -> Result<(), SessionError> {
        message.check_features(self.offered)?;
        let message = match SubscriptionMessage::of(message) {
            Ok((subscription, message)) => {
                let unsubscribes = matches!(message, SubscriptionMessage::Unsubscribe { .. });
                self.inboxes.deliver(subscription, message).await?;
                if unsubscribes {
                    self.wait_for_end(subscription).await?;
                }
                return Ok(());
            }
            Err(message) => message,
        };
        match message {
            ClientMessage::Subscribe(subscribe) => self.handle_subscribe(subscribe).await?,
            ClientMessage::Retire(lane) if !Lanes::is_number(lane) => {
                return Err(ProtocolViolation::LaneOutOfRange(lane).into());
            }
            ClientMessage::Retire(lane) => self.lanes.retire(lane).await?,
            ClientMessage::Probe { probe, lane, bytes } => {
                let may_probe = self.holder.principal().may_anywhere(Verb::Subscribe);
                let bytes = may_probe.then(|| bytes.get());
                let holder = Arc::clone(&self.share);
                self.probing.begin((probe, bytes), self.lanes.get(lane), holder, &self.shared)?;
            }
            ClientMessage::Loaded { subscription, epoch, version, digest } => {
                self.handle_loaded(subscription, epoch, version, digest);
            }
            ClientMessage::Share(share) => self.handle_share(share),
            ClientMessage::Held(held) => self.handle_held(&held)?,
            ClientMessage::BadPeer { subscription, epoch, version, key } => {
                self.handle_bad_peer(subscription, (epoch, version), key)?;
            }
            ClientMessage::Watch { watch, glob } => self.handle_watch(watch, glob)?,
            ClientMessage::Unwatch(watch) => self.watching.end(watch)?.abort(),
            ClientMessage::Hello(_) | ClientMessage::Join { .. } | _ => {
                let found = "a second Hello or Join";
                return Err(ProtocolViolation::OutOfTurn { found, expected: "a request" }.into());
            }
        }
        Ok(())
    }

    /// Counts a load. One of a subscription or version that is not known any more is passed over: it may be a repetition
    /// of a report from an earlier session.
    fn handle_loaded(&self, id: SubscriptionId, epoch: Epoch, version: Version, digest: VersionDigest) {
        let Some((topic, consumer)) = self.loaders.get(id) else { return };
        let Some(loads) = topic
            .loads(epoch, version)
            .filter(|_| self.holder.may(Verb::Subscribe, topic.name()))
        else {
            return;
        };
        let topic = topic.name();
        match loads.handle_report(consumer, digest) {
            Report::Loaded => tracing::debug!(%topic, %epoch, %version, "A subscriber loaded a version."),
            Report::Differs(sent) => tracing::warn!(
                subscription = %id, %topic, %epoch, %version, loaded = %digest, ?sent,
                "A subscriber loaded other content than was sent to it, so it is not counted. Its memory was changed \
                 between the commit and the load, or its engine converts the tensors: such an engine must report the \
                 digest of the commit."
            ),
            Report::Ignored => {}
        }
    }

    /// Handles where the client listens for peers: they are told once its port has answered.
    fn handle_share(&mut self, share: Share) {
        let (Some(sharer), Some(dialling)) = (&self.sharer, &self.shared.config.peers) else { return };
        sharer.handle_share(&share);
        let dial = Arc::clone(sharer).dial(share, dialling.clone());
        self.dialling = Some(AbortOnDrop(tokio::spawn(dial.in_current_span()).abort_handle()));
    }

    /// Handles what the client holds for its peers.
    fn handle_held(&self, held: &Held) -> Result<(), ProtocolViolation> {
        self.inboxes.check_opened(held.subscription)?;
        if let Some(sharer) = &self.sharer {
            sharer.handle_held(held);
        }
        Ok(())
    }

    fn handle_bad_peer(
        &self,
        subscription: SubscriptionId,
        version: (Epoch, Version),
        peer: [u8; 32],
    ) -> Result<(), ProtocolViolation> {
        self.inboxes.check_opened(subscription)?;
        if let Some(sharer) = &self.sharer {
            sharer.handle_bad_peer(subscription, version, peer);
        }
        Ok(())
    }

    async fn list(&self) -> Result<(), SessionError> {
        let principal = self.holder.principal();
        let listed = self.shared.catalogue.list(|topic| principal.may(Verb::List, topic));
        for mut part in ServerMessage::topics(listed) {
            if let ServerMessage::Topics { topics, .. } = &mut part {
                topics.retain(|entry| self.holder.may(Verb::List, &entry.id.topic)); // Rights may change between parts.
            }
            self.sender.send(part).await?;
        }
        Ok(())
    }

    async fn refuse(&self, subscription: SubscriptionId, reason: EndReason) -> Result<(), SessionError> {
        self.shared.failures.note_end(reason);
        Ok(self.sender.send(ServerMessage::End { subscription, reason }).await?)
    }

    async fn handle_subscribe(&mut self, subscribe: Subscribe) -> Result<(), SessionError> {
        if let Some(grant) = subscribe.grant {
            return self.handle_take(subscribe, grant).await;
        }
        let id = subscribe.subscription;
        let max = self.shared.config.subscriptions_max as usize;
        let Some(mut inbox) = self.inboxes.open(id, &subscribe.topic, max)? else {
            return self.refuse(id, EndReason::TooManySubscriptions).await;
        };
        // Before any lookup: the refusal must not show whether the topic exists.
        if !self.holder.may(Verb::Subscribe, &subscribe.topic) {
            self.inboxes.close(id);
            self.log_refused(&subscribe.topic);
            return self.refuse(id, EndReason::Forbidden).await;
        }
        let place = self.shared.places.subscriptions.enter_fairly(Arc::clone(&self.share));
        let Some((place, eviction)) = place else {
            self.inboxes.close(id);
            return self.refuse(id, EndReason::TooManySubscriptions).await;
        };
        inbox.eviction = Some(eviction);
        let follower = self.shared.catalogue.follow(&subscribe.topic);
        let control = self.lanes.control();
        let entry = self.shared.subscribers.insert(SubscriberInfo {
            topic: Arc::clone(follower.topic()),
            peer: control.peer(),
            kind: control.kind(),
            mode: subscribe.mode,
            have: subscribe.have.map(|have| have.key()),
        });
        let (offer, mut machine) =
            Offer::new(follower.topic(), &subscribe, self.features, &self.holder.principal().to_string())?;
        let sharer = self.sharer.as_ref().filter(|_| !subscribe.describe);
        let offer = offer.with_sharing(sharer.map(|sharer| Sharing::new(Arc::clone(sharer), id)));
        let coding = Coding {
            choice: subscribe.codec.map_or(CodecChoice::Auto, CodecChoice::Fixed),
            offered: if subscribe.describe { self.codecs.without_bases() } else { self.codecs },
            effort: self.shared.effort_meters.get(control.peer().ip(), control.kind()),
        };
        let consumer = ConsumerId::of(&self.holder.principal(), subscribe.consumer);
        self.loaders.insert(id, follower.topic(), consumer.clone());
        let mut draining = self.shared.draining.subscribe();
        if *draining.borrow_and_update() {
            machine.handle_draining();
        }
        let delivery = Delivery {
            machine,
            sent: Arc::clone(entry.sent()),
            host: SubscriptionHost {
                subscription: id,
                offer,
                follower,
                inbox,
                draining,
                codec: self.shared.config.codec,
                consumer,
                entry,
                counters: Arc::clone(&self.shared.counters),
                failures: Arc::clone(&self.shared.failures),
                takers: Arc::clone(&self.shared.takers),
                taker: takers::Taker { loans: self.loans.clone(), is_trusted: self.is_trusted_taker() },
            },
            route: Route { subscription: id, lanes: Arc::clone(&self.lanes) },
            coding,
            selector: Selector::new(&subscribe, self.shared.config.workers),
            egress: Arc::clone(&self.shared.egress),
        };
        tracing::debug!(subscription = %id, topic = subscribe.topic.as_str(), "A client subscribed.");
        let unfinished = [self.shared.unfinished.count(), self.unfinished.count()];
        let run = async move {
            let ended = delivery.run(unfinished).await;
            drop(place);
            (id, ended)
        };
        self.running.spawn(run.in_current_span());
        Ok(())
    }

    /// Whether the client may read everything that this server will ever write to its memory.
    fn is_trusted_taker(&self) -> bool {
        let user = self.lanes.control().local_user().map(LocalUser::seen);
        user.is_some_and(|user| user.standing == Standing::Own)
            && self.holder.principal().may_everywhere(Verb::Subscribe)
    }

    /// Logs a refused subscription, as a warning at most once a minute for each network.
    fn log_refused(&self, topic: &Topic) {
        let peer = self.lanes.control().peer().ip();
        match self.shared.refusals.note(peer, Reason::Topic, Instant::now()) {
            Some(unlogged) => {
                tracing::warn!(%topic, unlogged, "A subscription was refused: the client lacks permission.");
            }
            None => tracing::debug!(%topic, "A subscription was refused: the client lacks permission."),
        }
    }

    fn handle_watch(&mut self, watch: WatchId, glob: Glob) -> Result<(), ProtocolViolation> {
        while self.watches.try_join_next().is_some() {} // Reaps tasks that ended.
        self.watching.begin(watch, || {
            let catalogue = Arc::clone(&self.shared.catalogue);
            let task = watching::run(catalogue, self.holder.clone(), watch, glob, self.sender.clone());
            // Its only error is the end of the control stream's lane, which also ends the session.
            self.watches.spawn(async { drop(task.await) })
        })
    }
}
