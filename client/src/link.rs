//! One connection to the server: greeted, and then a source of events. A session outlives it.

use crate::{
    ClientError, Config,
    arrivals::Ready,
    base,
    error::SessionError,
    lanes::{Further, Roster},
    progress::Counters,
    transfer::Place,
};
use std::{sync::Arc, time::Duration};
use tensor_relay_protocol::{
    ChunkHeader, ClientMessage, CloseCode, Hello, Limits, Manifest, ManifestHeader, Misbehaved,
    PROTOCOL_REVISIONS, ServerMessage, StreamHeader, SubscriptionId, Verified, Welcome,
};
use tensor_relay_transport::{
    Connector, DataIn, Fingerprint, HeaderError, Lane, LaneError, control,
    control::ControlError,
    ingress::{Gathered, Ingress, ReceiveError, ReceiveManifestError, receive_manifest},
};
use tokio::task::{AbortHandle, JoinError, JoinSet};

/// How long chunks that have all their bytes may take to be decoded when the connection is lost.
const FINISH: Duration = Duration::from_secs(1);

/// A connection, and the work on what comes over it.
#[derive(Debug)]
pub(crate) struct Link {
    lane: Lane,
    further: Further,
    sender: control::Sender<ClientMessage>,
    receiver: control::Receiver<ServerMessage>,
    tasks: JoinSet<Event>,
    header_timeout: Duration,
}

/// What happens on a link.
#[derive(Debug)]
pub(crate) enum Event {
    /// The server said something.
    Message(ServerMessage),
    /// A data stream was opened and its header read.
    Opened(StreamHeader, DataIn),
    /// A manifest came, or why it did not.
    Manifest(SubscriptionId, Result<Manifest, ReceiveManifestError>),
    /// A chunk came, or why it did not; with the generation it was begun in.
    Chunk(ChunkHeader, u64, Result<Verified, ReceiveError>),
    /// A data stream has no header that this build can read.
    Unreadable(HeaderError),
    /// A further lane joined the session.
    Joined,
    /// Something ended with the version or the further lane it belonged to.
    GivenUp,
}

/// What the server is told when this end closes a connection.
#[derive(Debug)]
pub(crate) struct LastWord {
    pub(crate) code: CloseCode,
    pub(crate) text: String,
    pub(crate) by_user: bool,
}

/// Who to connect to, and how.
#[derive(Debug, Clone)]
pub(crate) struct Way {
    pub(crate) connector: Connector,
    pub(crate) hosts: Vec<String>,
    pub(crate) keys: Vec<Fingerprint>,
    /// Where the further lanes of the present connection are named.
    pub(crate) roster: Arc<Roster>,
}

impl Link {
    /// Connects and says hello. Only the welcome counts: before it the client is not let in, whatever QUIC thinks.
    pub(crate) async fn open(way: &Way, config: &Config) -> Result<(Self, Welcome), ClientError> {
        let lane = way.connector.connect(&way.hosts, &way.keys).await?;
        let timeout = way.connector.tuning().control_timeout();
        let greeting = tokio::time::timeout(timeout, greet(&lane, config, timeout)).await;
        let greeting =
            greeting.unwrap_or_else(|_| Err(ClientError::NoWelcome { timeout_ms: timeout.as_millis() }));
        match greeting {
            Ok((sender, receiver, welcome)) => {
                let further = Further::begin(way, config, &welcome, &lane);
                let (tasks, header_timeout) = (JoinSet::new(), config.stall_timeout);
                Ok((Self { lane, further, sender, receiver, tasks, header_timeout }, welcome))
            }
            Err(error) => {
                lane.close(error.close_code(), &error.to_string());
                lane.flush_close().await;
                Err(error)
            }
        }
    }

    pub(crate) fn lane(&self) -> &Lane {
        &self.lane
    }

    /// How many lanes there are.
    pub(crate) fn lanes(&self) -> usize {
        1 + self.further.lanes().len()
    }

    pub(crate) fn further(&self) -> &Further {
        &self.further
    }

    /// Notes whether a large version is under way, where that helps to find out how many lanes are worth it.
    pub(crate) fn note_bulky(&mut self, is_bulky: impl FnOnce() -> bool) {
        if self.further.is_seeking() {
            self.further.note_bulky(is_bulky());
        }
    }

    /// Lets the server have `bytes` of payload on their way that this end has not read, over whichever lane.
    pub(crate) fn allow_unread(&self, bytes: u64) {
        self.lane.allow_unread(bytes);
        self.further.lanes().for_each(|lane| lane.allow_unread(bytes));
    }

    pub(crate) async fn send(&self, message: ClientMessage) -> Result<(), LaneError> {
        self.sender.send(message).await
    }

    /// The next event. Cancel safe.
    pub(crate) async fn next(&mut self) -> Result<Event, SessionError> {
        loop {
            tokio::select! {
                message = self.receiver.next() => return Ok(Event::Message(message?)),
                stream = self.lane.accept_data() => {
                    self.tasks.spawn(read_header(stream?, self.header_timeout));
                }
                event = self.further.next() => return Ok(event),
                Some(event) = self.tasks.join_next() => return Ok(event.unwrap_or_else(cut_off)),
            }
        }
    }

    /// Begins to receive a manifest.
    pub(crate) fn receive_manifest(
        &mut self,
        header: ManifestHeader,
        stream: DataIn,
        limits: Limits,
        counters: Arc<Counters>,
    ) {
        self.tasks.spawn(async move {
            let progress = |bytes| counters.add_moved(bytes);
            let manifest = receive_manifest(stream, &header, &limits, &progress).await;
            Event::Manifest(header.subscription, manifest)
        });
    }

    /// Begins to receive a chunk. A cut ends it only while bytes are missing: with all of them here it goes on, and a later
    /// attempt comes late. So never do two attempts write to one place.
    pub(crate) fn receive_chunk(
        &mut self,
        ready: Ready,
        base: Option<base::Chunk>,
        ingress: Ingress,
        counters: Arc<Counters>,
    ) -> AbortHandle {
        let Ready { header, stream, place, generation, cut } = ready;
        let range = place.range.clone();
        let ingress = ingress.counting(&place.tally);
        let lane = stream.lane().clone();
        let home = lane.clone(); // Its thread lives as long as something runs there.
        lane.spawn_in(&mut self.tasks, async move {
            let progress = |bytes| counters.add_wire(bytes);
            let gathering = ingress.gather_chunk(stream, &header, range, &*place.sink, &progress);
            let gathered = tokio::select! {
                biased;
                gathered = gathering => gathered,
                () = cut.made() => Err(LaneError::StreamGivenUp.into()),
            };
            let received = match gathered {
                Ok(gathered) => settle(&ingress, gathered, &header, &place, base).await,
                Err(error) => Err(error),
            };
            drop(home);
            Event::Chunk(header, generation, received)
        })
    }

    /// Gives a lost connection up, and waits for what has all its bytes. Nothing touches the memory of a version then.
    pub(crate) async fn give_up(mut self, last: LastWord) -> Vec<Event> {
        self.lane.close(last.code, &last.text);
        self.further.close(last.code, &last.text);
        let mut events = vec![];
        let finish = async {
            while let Some(event) = self.tasks.join_next().await {
                events.push(event.unwrap_or_else(cut_off));
            }
        };
        let _ = tokio::time::timeout(FINISH, finish).await;
        self.tasks.shutdown().await;
        events
    }

    /// Ends the connection. What this end said last is heard first, where the user ended it.
    pub(crate) async fn close(self, last: LastWord) {
        let Self { lane, mut further, sender, receiver, .. } = self;
        drop(sender);
        if last.by_user {
            receiver.flush().await;
        }
        further.close(last.code, &last.text);
        lane.close(last.code, &last.text);
        lane.flush_close().await;
        further.flush_close().await;
    }
}

/// Puts what was gathered of a chunk into its place, and into the base. Who has all its bytes is the only one who touches
/// the base's chunk: it is taken here and not before, and what does not come back is lost to the base.
async fn settle(
    ingress: &Ingress,
    gathered: Gathered<'_>,
    header: &ChunkHeader,
    place: &Place,
    base: Option<base::Chunk>,
) -> Result<Verified, ReceiveError> {
    let taken = base.as_ref().and_then(|base| base.take(header.base.is_some()));
    let settled = ingress.settle_chunk(gathered, place.dtype, &*place.sink, taken).await;
    let (verified, taken) = settled?;
    if let (Some(base), Some(taken)) = (base, taken) {
        base.put(taken);
    }
    Ok(verified)
}

/// Reads the header of a data stream, which is due within `timeout`.
pub(crate) async fn read_header(mut stream: DataIn, timeout: Duration) -> Event {
    match tokio::time::timeout(timeout, stream.read_header()).await {
        Ok(Ok(header)) => Event::Opened(header, stream),
        Ok(Err(HeaderError::Lane(LaneError::StreamGivenUp))) | Err(_) => Event::GivenUp,
        Ok(Err(error)) => Event::Unreadable(error),
    }
}

/// What a task that did not end by itself came to. A panic is passed on.
fn cut_off(error: JoinError) -> Event {
    match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_) => Event::GivenUp,
    }
}

type Greeting = (control::Sender<ClientMessage>, control::Receiver<ServerMessage>, Welcome);

async fn greet(lane: &Lane, config: &Config, timeout: Duration) -> Result<Greeting, ClientError> {
    let (sender, mut receiver) = control::open(lane, timeout).await?;
    let hello = Hello {
        revision_min: *PROTOCOL_REVISIONS.start(),
        revision_max: *PROTOCOL_REVISIONS.end(),
        agent: config.agent.clone(),
        codecs: config.codecs,
        token: None,
    };
    sender.send(ClientMessage::Hello(hello)).await?;
    match receiver.next().await {
        Ok(ServerMessage::Welcome(welcome)) if PROTOCOL_REVISIONS.contains(&welcome.revision) => {
            Ok((sender, receiver, welcome))
        }
        Ok(_) => Err(Misbehaved::OutOfTurn { found: "another message", expected: "Welcome" }.into()),
        Err(ControlError::Lane(error @ LaneError::ClosedByPeer { .. })) => Err(ClientError::Refused(error)),
        Err(error) => Err(error.into()),
    }
}
