//! The further lanes of a link: joining them, hearing them, and joining them again.
//!
//! Each has a socket and, where the network has threads, a thread of its own, on which everything that moves its bytes
//! runs. What it hears becomes events of the link like all others, so a session need not know how many lanes it has.

mod plan;

use crate::{
    ClientError,
    backoff::Backoff,
    config::{Config, LANES_MAX, Lanes},
    link::{Event, Way, read_header},
};
use plan::{Plan, Sample};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tensor_relay_protocol::{Blame, ClientMessage, CloseCode, LaneGrant, Misbehaved, ServerMessage, Welcome};
use tensor_relay_transport::{
    HeaderError, Lane, LaneError,
    control::{self, ControlError},
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep},
};

/// How many events of further lanes wait for the session. It takes them at once; a lane that is ahead waits.
const EVENTS_MAX: usize = 64;

/// How long a lane must have lived so that the next one in its place is tried at once, as if it were the first.
const LIVED: Duration = Duration::from_secs(10);

/// How often the rate is looked at, while the number of lanes is sought. Shorter than the versions that it is about.
const LOOK: Duration = Duration::from_millis(100);

/// The further lanes of a client's present connection, for who wants to know what they do.
#[derive(Debug, Default)]
pub(crate) struct Roster(Mutex<Vec<Lane>>);

/// The further lanes of one link. They end when this is dropped.
#[derive(Debug)]
pub(crate) struct Further {
    lanes: BTreeMap<usize, Lane>,
    roster: Arc<Roster>,
    told: mpsc::Receiver<Told>,
    /// Kept, so that a link without further lanes waits for their events, and is not told that there are none.
    _tell: mpsc::Sender<Told>,
    tasks: JoinSet<()>,
    /// Counts the stretches of time in which a large version is under way; `None` between them.
    bulky: watch::Sender<Option<u64>>,
    stretches: u64,
    /// Whether any lane ever asked to join.
    has_asked: Arc<AtomicBool>,
}

/// What the task of a lane tells the link.
#[derive(Debug)]
enum Told {
    Joined(Lane),
    Left(Lane),
    Heard(Event),
}

impl Roster {
    pub(crate) fn lanes(&self) -> Vec<Lane> {
        self.get().clone()
    }

    fn clear(&self) {
        self.get().clear();
    }

    fn join(&self, lane: &Lane) {
        self.get().push(lane.clone());
    }

    fn leave(&self, lane: &Lane) {
        self.get().retain(|other| other.number() != lane.number());
    }

    fn get(&self) -> MutexGuard<'_, Vec<Lane>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Further {
    /// Begins to join the lanes that `config` wants and `welcome` allows, to where `first` leads.
    pub(crate) fn begin(way: &Way, config: &Config, welcome: &Welcome, first: &Lane) -> Self {
        way.roster.clear();
        let (tell, told) = mpsc::channel(EVENTS_MAX);
        let bulky = watch::Sender::new(None);
        let has_asked = Arc::new(AtomicBool::new(false));
        let mut tasks = JoinSet::new();
        if let Some(offer) = welcome.lanes {
            let most = config.lanes.most().min(offer.lanes_max).min(LANES_MAX);
            let plan = Plan::new(most);
            let wanted = watch::Sender::new(if config.lanes.is_sought() { plan.lanes() } else { most });
            for number in 1..most as usize {
                let berth = Berth {
                    number,
                    way: way.clone(),
                    first: first.clone(),
                    session: welcome.session,
                    grant: offer.grant,
                    has_asked: Arc::clone(&has_asked),
                    header_timeout: config.stall_timeout,
                    wanted: wanted.subscribe(),
                    tell: tell.clone(),
                };
                tasks.spawn(berth.keep());
            }
            match config.lanes {
                Lanes::Auto | Lanes::UpTo(_) => drop(tasks.spawn(seek(
                    plan,
                    way.roster.clone(),
                    first.clone(),
                    bulky.subscribe(),
                    wanted,
                ))),
                // The number stays, and with it who could change it.
                Lanes::Fixed(_) => drop(tasks.spawn(async move { wanted.closed().await })),
            }
        }
        Self {
            lanes: BTreeMap::new(),
            roster: Arc::clone(&way.roster),
            told,
            _tell: tell,
            tasks,
            bulky,
            stretches: 0,
            has_asked,
        }
    }

    /// The next event. Cancel safe.
    pub(crate) async fn next(&mut self) -> Event {
        match self.told.recv().await {
            Some(Told::Joined(lane)) => {
                tracing::info!(lane = lane.number(), peer = %lane.peer(), "A further lane joined the session.");
                self.roster.join(&lane);
                self.lanes.insert(lane.number(), lane);
                Event::Joined
            }
            Some(Told::Left(lane)) => {
                self.roster.leave(&lane);
                self.lanes.remove(&lane.number());
                Event::GivenUp
            }
            Some(Told::Heard(event)) => event,
            None => std::future::pending().await,
        }
    }

    /// The further lanes of now.
    pub(crate) fn lanes(&self) -> impl ExactSizeIterator<Item = &Lane> {
        self.lanes.values()
    }

    /// Whether the server may ever have had one, though this end may never have heard that it joined: from then on chunks
    /// may come again over another lane.
    pub(crate) fn has_asked(&self) -> bool {
        self.has_asked.load(Ordering::Acquire)
    }

    /// Whether the number of lanes is being sought, so that [`note_bulky`](Self::note_bulky) is worth something.
    pub(crate) fn is_seeking(&self) -> bool {
        self.bulky.receiver_count() > 0
    }

    /// Notes whether a large version is under way.
    pub(crate) fn note_bulky(&mut self, is_bulky: bool) {
        if is_bulky != self.bulky.borrow().is_some() {
            self.stretches += u64::from(is_bulky);
            self.bulky.send_replace(is_bulky.then_some(self.stretches));
        }
    }

    /// Lets no lane join any more, and ends those that did.
    pub(crate) fn close(&mut self, code: CloseCode, text: &str) {
        self.tasks.abort_all();
        self.roster.clear();
        self.lanes.values().for_each(|lane| lane.close(code, text));
    }

    /// Waits until the servers of lanes that were closed know it.
    pub(crate) async fn flush_close(&self) {
        for lane in self.lanes.values() {
            lane.flush_close().await;
        }
    }
}

/// Seeks the number of lanes that is worth its processors, and tells those who join them.
async fn seek(
    mut plan: Plan,
    roster: Arc<Roster>,
    first: Lane,
    mut bulky: watch::Receiver<Option<u64>>,
    wanted: watch::Sender<u32>,
) {
    while !plan.is_settled() {
        if bulky.wait_for(Option::is_some).await.is_err() {
            return;
        }
        let mut lanes = roster.lanes();
        lanes.push(first.clone());
        let received_bytes = lanes.iter().map(|lane| lane.stats().received_bytes).sum();
        let sample = Sample { stretch: *bulky.borrow(), lanes: lanes.len() as u32, received_bytes };
        if plan.handle_sample(Instant::now(), sample) {
            tracing::info!(
                lanes = plan.lanes(),
                settled = plan.is_settled(),
                "The rate decides on the number of lanes."
            );
            wanted.send_replace(plan.lanes());
        }
        sleep(LOOK).await;
    }
    drop(bulky);
    wanted.closed().await;
}

/// The place of one lane: takes care that there is one, as long as it is wanted.
struct Berth {
    number: usize,
    way: Way,
    first: Lane,
    session: u64,
    grant: LaneGrant,
    /// Set before the first word: the server may use the lane from when it hears that.
    has_asked: Arc<AtomicBool>,
    header_timeout: Duration,
    wanted: watch::Receiver<u32>,
    tell: mpsc::Sender<Told>,
}

/// Both directions of a further lane's control stream.
type Streams = (control::Sender<ClientMessage>, control::Receiver<ServerMessage>);

impl Berth {
    /// Joins, again and again with growing waits, until the server says that it is no use.
    async fn keep(mut self) {
        let mut backoff = Backoff::new();
        let mut has_warned = false;
        while self.wanted().await {
            let began = Instant::now();
            match self.join().await {
                Ok((lane, streams)) => {
                    if let Err(broken) = self.use_up(&lane, streams).await {
                        tracing::warn!(lane = self.number, %broken, "A further lane is given up for this session.");
                        return;
                    }
                    if began.elapsed() > LIVED {
                        backoff = Backoff::new();
                    }
                }
                Err(error) if error.blame() == Blame::Local && error.is_worth_a_retry() && !has_warned => {
                    has_warned = true; // Its user has to act, and is told once.
                    tracing::warn!(lane = self.number, %error, "A further lane cannot be opened here; it is tried again.");
                }
                Err(error) if error.is_worth_a_retry() => {
                    tracing::debug!(lane = self.number, %error, "A further lane did not join; it is tried again.");
                }
                Err(error) => {
                    tracing::warn!(lane = self.number, %error, "A further lane cannot join; the session goes on without.");
                    return;
                }
            }
            sleep(backoff.next(rand::random())).await;
        }
    }

    /// Waits until this lane is wanted; returns false when it will never be.
    async fn wanted(&mut self) -> bool {
        let number = self.number;
        self.wanted.wait_for(|lanes| *lanes as usize > number).await.is_ok()
    }

    async fn join(&self) -> Result<(Lane, Streams), ClientError> {
        let Way { connector, keys, .. } = &self.way;
        let lane = connector.connect_further(self.first.peer(), keys, self.number).await?;
        let timeout = connector.tuning().control_timeout();
        let joined = tokio::time::timeout(timeout, self.greet(&lane, timeout)).await;
        match joined.unwrap_or_else(|_| Err(ClientError::NoWelcome { timeout_ms: timeout.as_millis() })) {
            Ok(streams) => Ok((lane, streams)),
            Err(error) => {
                lane.close(error.close_code(), &error.to_string());
                lane.flush_close().await;
                Err(error)
            }
        }
    }

    async fn greet(&self, lane: &Lane, timeout: Duration) -> Result<Streams, ClientError> {
        let (sender, mut receiver) = control::open(lane, timeout).await?;
        self.has_asked.store(true, Ordering::Release);
        sender
            .send(ClientMessage::Join { session: self.session, grant: self.grant })
            .await?;
        match receiver.next().await {
            Ok(ServerMessage::Joined) => Ok((sender, receiver)),
            Ok(_) => Err(Misbehaved::OutOfTurn { found: "another message", expected: "Joined" }.into()),
            Err(ControlError::Lane(error @ LaneError::ClosedByPeer { .. })) => {
                Err(ClientError::Refused(error))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Hears a lane to its end, on its own thread. A link that is gone hears nothing any more.
    ///
    /// # Errors
    /// [`Misbehaved`] when its server broke a rule: one that does so on one lane does it on the next.
    async fn use_up(&self, lane: &Lane, streams: Streams) -> Result<(), Misbehaved> {
        if self.tell.send(Told::Joined(lane.clone())).await.is_err() {
            return Ok(());
        }
        let hearing = Hearing {
            lane: lane.clone(),
            number: self.number,
            header_timeout: self.header_timeout,
            wanted: self.wanted.clone(),
            tell: self.tell.clone(),
        };
        let heard = lane.run(hearing.run(streams)).await;
        let why = lane.ended().map(|error| error.to_string());
        tracing::info!(lane = self.number, why, "A further lane ended.");
        let _ = self.tell.send(Told::Left(lane.clone())).await;
        heard.unwrap_or(Ok(()))
    }
}

/// What hears one further lane.
struct Hearing {
    lane: Lane,
    number: usize,
    header_timeout: Duration,
    wanted: watch::Receiver<u32>,
    tell: mpsc::Sender<Told>,
}

impl Hearing {
    /// Passes the lane's data streams on until it ends: when it is lost, when its server ends it, or some time after it is
    /// not wanted any more, with all that was on its way.
    async fn run(mut self, (sender, mut receiver): Streams) -> Result<(), Misbehaved> {
        let mut broken = Ok(());
        let mut headers = JoinSet::new();
        let mut saying = Some(sender);
        let mut hearing = true;
        loop {
            let heard = tokio::select! {
                stream = self.lane.accept_data() => match stream {
                    Ok(stream) => {
                        headers.spawn(read_header(stream, self.header_timeout));
                        continue;
                    }
                    Err(_) => break,
                },
                Some(Ok(event)) = headers.join_next() => event,
                said = receiver.next(), if hearing => {
                    hearing = false;
                    if said.is_ok() {
                        self.lane.close(CloseCode::Misbehaved, "a further lane hears Joined and nothing else");
                        broken = Err(Misbehaved::OutOfTurn { found: "another message", expected: "nothing after Joined" });
                    }
                    continue;
                }
                unwanted = self.wanted.wait_for(|lanes| *lanes as usize <= self.number), if saying.is_some() => {
                    drop(unwanted);
                    saying = None; // The server ends the lane, once what it has sent has arrived.
                    continue;
                }
            };
            if self.tell.send(Told::Heard(of_further(heard))).await.is_err() {
                return broken;
            }
        }
        while let Some(Ok(event)) = headers.join_next().await {
            let _ = self.tell.send(Told::Heard(of_further(event))).await;
        }
        broken
    }
}

/// What came over a further lane: one that is lost costs no session.
fn of_further(event: Event) -> Event {
    match event {
        Event::Unreadable(HeaderError::Lane(_)) => Event::GivenUp,
        other => other,
    }
}
