//! Runs a life: applies its operations to real servers and clients, and records the events that the clients see.

mod client;

use super::{
    checker::{Answer, DELIVERY_TIMEOUT_MS, Event, History, Id, Published},
    operation::{CLIENTS, Operation, Setup, StartState, TOPICS},
};
use client::ConnectedClient;
use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    sync::{Arc, Mutex, atomic::AtomicBool, atomic::Ordering},
    time::Duration,
};
use tensor_relay_protocol::{Epoch, Topic, Version};
use tensor_relay_server::{Access, Listener, Publishable, Publisher, Rules, Server, TopicOptions, WhenFull};
use tensor_relay_tests::{
    pair::{Sim, retaining, rules, server_config, topic},
    read_switch::ReadSwitch,
    simnet::Path,
    tensors,
};
use tensor_relay_transport::Transport;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

/// The chunks of these servers: small, so that most versions have several.
const CHUNK_BYTES: u32 = 16 << 10;

/// The time after which no more operations are begun, so that readers have time to receive the last versions.
const LIFE_DURATION: Duration = Duration::from_secs(330);

/// The maximum time that a publisher waits for readers: long enough to notice the loss of a reader, and for the place
/// of that reader to expire.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(45);

/// The longest time for which reads fail.
const READS_FAIL_FOR: Duration = Duration::from_secs(100);

/// The time for which a server tries to read a version for a reader in mode `every`, while another one waits.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(10);

/// The recorder of the history, shared by all clients.
#[derive(Clone)]
struct Log {
    history: Arc<Mutex<History>>,
    began: Instant,
    /// Whether readers take versions without a pause.
    no_pauses: Arc<AtomicBool>,
}

/// The state of a topic, which survives restarts of the server.
struct TopicState {
    name: Topic,
    numbers: Numbers,
    /// The numbers that were backed up last.
    backup: Numbers,
    publisher: Option<Publisher>,
}

/// What a server records of a topic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Numbers {
    epoch: u64,
    /// The newest version of this epoch, if there is one.
    newest: Option<Newest>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Newest {
    version: u64,
    /// The number that its content is derived from, unique among all versions of a life.
    content: u64,
    bytes: u64,
}

/// The servers and clients of a life.
struct Runner<'a> {
    sim: &'a Sim,
    setup: Setup,
    log: Log,
    rules: watch::Sender<Arc<Rules>>,
    server: Option<Server>,
    topics: Vec<TopicState>,
    /// The number of epochs so far, and of contents.
    epochs: u64,
    contents: u64,
    reads: ReadSwitch,
    clients: BTreeMap<u8, ConnectedClient>,
    principals: client::Principals,
    /// The client and lane of each path that is cut.
    cut_lanes: BTreeSet<(u8, u8)>,
}

thread_local! {
    /// The time when this thread's life began, for the clock by which tickets expire.
    static BEGAN: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// The maximum time until the address of a stopped server is free: its connections drain for three probe timeouts
/// (RFC 9000 §10.2), which are long after a network failure.
const ADDRESS_FREE_TIMEOUT: Duration = Duration::from_secs(60);

/// The time when a life begins, on the clock by which tickets expire.
const CLOCK_START_S: u64 = 1_000_000;

/// The clock by which tickets expire.
fn clock_s() -> u64 {
    CLOCK_START_S + BEGAN.get().map_or(0, |began| began.elapsed().as_secs())
}

/// Applies `operations`; then mends all faults, and gives the readers time to receive the current and the last versions.
pub(super) async fn run(sim: &Sim, setup: Setup, operations: &[Operation]) -> History {
    let mut runner = Runner::new(sim, setup);
    for operation in operations {
        if runner.log.began.elapsed() < LIFE_DURATION {
            runner.handle(operation).await;
        }
    }
    runner.end().await;
    for (_, client) in std::mem::take(&mut runner.clients) {
        client.leave().await;
    }
    let mut history = runner.log.history();
    history.unreadable = runner.reads.failed_for(UNREAD_TIMEOUT).collect();
    std::mem::take(&mut *history)
}

impl<'a> Runner<'a> {
    fn new(sim: &'a Sim, setup: Setup) -> Self {
        let delay = Duration::from_millis(setup.delay_ms);
        let delay = delay..=delay + Duration::from_millis(setup.jitter_ms);
        sim.net.set_path(Path { delay, loss: setup.loss, ..Path::default() });
        let began = Instant::now();
        BEGAN.set(Some(began));
        let history = History {
            linger_ms: setup.linger_s * 1_000,
            current: vec![None; TOPICS],
            last: vec![None; TOPICS],
            ..History::default()
        };
        let log = Log { history: Arc::new(Mutex::new(history)), began, no_pauses: Arc::default() };
        let topic_state = |number| TopicState {
            name: topic(TOPIC_NAMES[number]),
            numbers: Numbers::default(),
            backup: Numbers::default(),
            publisher: None,
        };
        let mut runner = Self {
            sim,
            setup,
            rules: watch::Sender::new(Arc::new(rules())),
            principals: client::Principals::new(sim),
            log,
            server: None,
            topics: (0..TOPICS).map(topic_state).collect(),
            epochs: 0,
            contents: 0,
            reads: ReadSwitch::default(),
            clients: BTreeMap::new(),
            cut_lanes: BTreeSet::new(),
        };
        runner.allow((1 << TOPICS) - 1);
        runner
    }

    async fn handle(&mut self, operation: &Operation) {
        match *operation {
            Operation::Wait { ms } => sleep(Duration::from_millis(ms)).await,
            Operation::Publish { topic, versions, bytes } => {
                for _ in 0..versions {
                    self.publish(topic, bytes).await;
                }
            }
            Operation::Withdraw { topic } => self.withdraw(topic),
            Operation::Stop { silently } => self.stop(silently).await,
            Operation::Start { state } => self.start(state).await,
            Operation::BackUp => self.topics.iter_mut().for_each(|state| state.backup = state.numbers),
            Operation::FailReads { failing } => self.fail_reads(failing),
            Operation::Join { client, tcp, lanes, kind, pause_ms, terms } => {
                self.principals.issue(&self.log, client, terms);
                let options = client::ClientOptions { tcp, lanes, kind, pause_ms };
                self.join(client, options).await;
            }
            Operation::JoinAgain { client } => {
                if let Some(options) = self.clients.get(&client).map(|connected| connected.options) {
                    self.join(client, options).await;
                }
            }
            Operation::Leave { client } => self.leave(client).await,
            Operation::List { client } => self.list(client).await,
            Operation::Cut { client } => (0..LANES_MAX).for_each(|lane| self.cut(client, lane)),
            Operation::CutLane { client, lane } => self.cut(client, lane),
            Operation::ResetStreams { client } => {
                self.record_cut(client);
                for lane in 0..LANES_MAX {
                    self.sim.net.reset_streams(
                        &self.sim.server_host(),
                        &self.sim.net.host(lane_address(client, lane)),
                    );
                }
            }
            Operation::Mend { client } => self.mend(client),
            Operation::Revoke { client } => {
                let revoked = self.principals.revoke(&self.log, client);
                self.rules.send_modify(|rules| Arc::make_mut(rules).revoked.extend(revoked));
            }
            Operation::Allow { topics } => self.allow(topics),
        }
    }

    /// Sets the access list to one that allows the client with the key these topics.
    fn allow(&mut self, topics: u8) {
        let (acl, keys) = self.principals.allow(&self.log, topics);
        self.rules.send_modify(|rules| {
            let rules = Arc::make_mut(rules);
            (rules.acl, rules.keys) = (acl, keys);
        });
    }

    async fn join(&mut self, client: u8, options: client::ClientOptions) {
        self.leave(client).await;
        let blocks = self.setup.blocks;
        let connected =
            ConnectedClient::join(self.sim, &self.log, &self.principals, client, options, blocks).await;
        if let Some(connected) = connected {
            self.clients.insert(client, connected);
        }
    }

    async fn leave(&mut self, client: u8) {
        if let Some(connected) = self.clients.remove(&client) {
            connected.leave().await;
        }
    }

    async fn list(&self, client: u8) {
        if let Some(connected) = self.clients.get(&client) {
            connected.list().await;
        }
    }

    fn cut(&mut self, client: u8, lane: u8) {
        self.record_cut(client);
        self.cut_lanes.insert((client, lane));
        self.sim
            .net
            .partition(&self.sim.server_host(), &self.sim.net.host(lane_address(client, lane)));
    }

    fn record_cut(&self, client: u8) {
        if let Some(connected) = self.clients.get(&client) {
            connected.record_cut();
        }
    }

    fn mend(&mut self, client: u8) {
        for lane in 0..LANES_MAX {
            self.cut_lanes.remove(&(client, lane));
            self.sim
                .net
                .repair(&self.sim.server_host(), &self.sim.net.host(lane_address(client, lane)));
        }
    }

    /// Stops the server; `silently` behind a partition, so that no client is notified.
    async fn stop(&mut self, silently: bool) {
        let Some(server) = self.server.take() else { return };
        let now = self.log.now_ms();
        self.log.history().stops_ms.push(now);
        let were_cut = self.cut_lanes.clone();
        for client in 1..=CLIENTS {
            self.record_cut(client);
            if silently {
                (0..LANES_MAX).for_each(|lane| self.cut(client, lane));
            }
        }
        self.topics.iter_mut().for_each(|state| state.publisher = None);
        drop(server);
        sleep(Duration::from_secs(2)).await;
        (1..=CLIENTS).for_each(|client| self.mend(client));
        were_cut.into_iter().for_each(|(client, lane)| self.cut(client, lane));
    }

    async fn start(&mut self, start_state: StartState) {
        if self.server.is_some() {
            return;
        }
        let config = tensor_relay_server::Config {
            chunk_bytes: CHUNK_BYTES,
            reader_linger: Duration::from_secs(self.setup.linger_s),
            ..server_config()
        };
        let access = Access::following(self.rules.subscribe()).with_clock(clock_s);
        self.server = Some(Server::start(self.listener().await, access, config));
        for number in 0..TOPICS {
            let state = &mut self.topics[number];
            match start_state {
                StartState::None => state.numbers.newest = None,
                StartState::Restored if state.numbers != state.backup => {
                    state.numbers = state.backup;
                    let now = self.log.now_ms();
                    self.log.history().restored_ms.get_or_insert(now);
                }
                StartState::Last | StartState::Restored => {}
            }
            if let Some(newest) = self.topics[number].numbers.newest {
                self.open(number);
                let publisher = self.topics[number].publisher.as_mut();
                publisher.expect("it was opened").continue_at(Version(newest.version));
                self.publish_as(number, newest).await;
            }
        }
    }

    /// Binds a listener on the server's address, as soon as the address is free.
    async fn listener(&self) -> Listener {
        let began = Instant::now();
        while began.elapsed() < ADDRESS_FREE_TIMEOUT {
            let host = Arc::new(self.sim.server_host());
            let (address, identity) = (self.sim.server_address(), self.sim.identity());
            match Listener::bind_on(host, Transport::Auto, address, &identity, self.sim.tuning.clone()) {
                Ok(listener) => return listener,
                Err(_) => sleep(Duration::from_millis(10)).await,
            }
        }
        panic!("a server that was stopped {ADDRESS_FREE_TIMEOUT:?} ago still has its address");
    }

    /// Opens a topic, in a new epoch unless it has versions in its current one.
    fn open(&mut self, number: usize) {
        let when_full = if self.setup.blocks { WhenFull::Block } else { WhenFull::Evict };
        let publish_timeout = Duration::from_millis(self.setup.publish_timeout_ms);
        let options = TopicOptions { when_full, publish_timeout, ..retaining(self.setup.keep_versions) };
        let state = &mut self.topics[number];
        if state.numbers.newest.is_none() {
            self.epochs += 1;
            state.numbers.epoch = self.epochs;
        }
        let server = self.server.as_ref().expect("topics are opened only while there is a server");
        let publisher = server.publisher_with(state.name.clone(), Some(Epoch(state.numbers.epoch)), options);
        state.publisher = Some(publisher.unwrap());
    }

    /// Publishes the next version; `None` if there is no server, or readers delay the publish for too long.
    async fn publish(&mut self, number: usize, bytes: u64) -> Option<Published> {
        self.server.as_ref()?;
        if self.topics[number].publisher.is_none() {
            self.open(number);
        }
        self.contents += 1;
        let version = self.topics[number].numbers.newest.map_or(1, |newest| newest.version + 1);
        self.publish_as(number, Newest { version, content: self.contents, bytes }).await
    }

    async fn publish_as(&mut self, number: usize, newest: Newest) -> Option<Published> {
        let Newest { version, content, bytes } = newest;
        let (state, server) = (&mut self.topics[number], self.server.as_ref()?);
        let specs = vec![tensors::noise("noise", bytes / 2), tensors::steady("steady", bytes / 2)];
        let publishable: Publishable = match self.setup.borrows {
            true => self.reads.borrow(server, specs, content).into(),
            false => tensors::stage(server, specs, content).into(),
        };
        // Taken before publishing: a reader may receive the version before `publish` returns.
        let (at_ms, log) = (self.log.now_ms(), self.log.clone());
        let published =
            Published { at_ms, topic: number, id: Id { epoch: state.numbers.epoch, version }, content };
        let is_new = !log.history().published.iter().any(|one| one.content == content);
        let publishing = state.publisher.as_mut()?.publish(publishable, tensors::metadata(content));
        timeout(PUBLISH_TIMEOUT, publishing).await.ok()?.unwrap();
        state.numbers.newest = Some(newest);
        if is_new {
            log.history().published.push(published.clone());
        }
        Some(published)
    }

    /// Lets reads fail for a while, or succeed again. Clients without a version wait only a little longer than a life.
    fn fail_reads(&self, failing: bool) {
        self.reads.set_failing(failing);
        let reads = self.reads.clone();
        tokio::spawn(async move {
            sleep(READS_FAIL_FOR).await;
            reads.set_failing(false);
        });
    }

    fn withdraw(&mut self, number: usize) {
        if let Some(publisher) = self.topics[number].publisher.take() {
            publisher.withdraw();
            self.topics[number].numbers.newest = None;
        }
    }

    /// Mends all faults, and waits until the readers have received the current versions, or their deadline has passed;
    /// then the same with one more version of each topic.
    async fn end(&mut self) {
        self.sim.net.set_path(Path::default());
        (1..=CLIENTS).for_each(|client| self.mend(client));
        self.reads.set_failing(false);
        self.log.no_pauses.store(true, Ordering::Relaxed);
        self.start(StartState::Last).await;
        for number in 0..TOPICS {
            let Numbers { epoch, newest } = self.topics[number].numbers;
            let at_ms = self.log.now_ms();
            self.log.history().current[number] = newest.map(|Newest { version, content, .. }| Published {
                at_ms,
                topic: number,
                id: Id { epoch, version },
                content,
            });
        }
        self.log.wait_for(|history| &history.current).await;
        for number in 0..TOPICS {
            let published = self.publish(number, 10_000).await;
            let at_ms = self.log.now_ms();
            self.log.history().last[number] = published.map(|published| Published { at_ms, ..published });
        }
        self.log.wait_for(|history| &history.last).await;
        self.log.history().ended_ms = self.log.now_ms();
    }
}

impl Log {
    fn history(&self) -> std::sync::MutexGuard<'_, History> {
        self.history.lock().unwrap()
    }

    fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    fn record(&self, reader: usize, event: Event) {
        let at = self.now_ms();
        self.history().readers[reader].events.push((at, event));
    }

    fn record_answer(&self, principal: usize, answer: Answer) {
        let at = self.now_ms();
        self.history().answers.push((at, principal, answer));
    }

    /// Waits until all readers have received these versions of their topics or have ended, or the deadline has passed.
    async fn wait_for(&self, versions: impl Fn(&History) -> &Vec<Option<Published>>) {
        let is_done = || {
            let history = self.history();
            history.readers.iter().all(|reader| {
                let version = versions(&history)[reader.topic].as_ref();
                let has_received = |version| history.has_received(reader, version, u64::MAX);
                reader.end_ms().is_some() || version.is_none_or(has_received)
            })
        };
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(DELIVERY_TIMEOUT_MS) && !is_done() {
            sleep(Duration::from_millis(50)).await;
        }
    }
}

const TOPIC_NAMES: [&str; TOPICS] = ["a/t", "b/t"];

/// The maximum number of a client's lanes.
const LANES_MAX: u8 = 3;

/// The local address of a client's lane.
fn lane_address(client: u8, lane: u8) -> IpAddr {
    Ipv4Addr::new(10, lane, 1, client).into()
}
