//! The other end of the socket: a process that publishes into the server beside it.

use super::{
    channel::{ChannelError, Ends, Hearer, PROMPT, Speaker, split},
    publication::Publication,
    version::{SealedVersion, Terms},
};
use std::{
    any::Any,
    collections::HashMap,
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tensor_relay_protocol::{
    Epoch, Manifest, MessageError, Metadata, Topic, Version, VersionId,
    beside::{
        Hello, Lend, MANIFEST_PART_MAX_BYTES, Memory, MemoryKind, ProducerMessage, Progress, PublicationId,
        Publish, REVISIONS, Refusal, ServerMessage, encode_producer, text_that_fits,
    },
    check_metadata,
};
use tokio::{
    net::UnixStream,
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
};

/// Why tensors in host memory come as they do.
const IN_HOST_MEMORY: &str = "the tensors are in host memory";

/// How often it is tried to connect to a server that is not there yet.
const LOOK: Duration = Duration::from_millis(100);

/// How long a server that is there may take to answer, when no time is left to wait for one.
const ANSWER: Duration = Duration::from_secs(1);

/// Messages that belong together, each with the descriptor that goes with it.
pub(super) type Outgoing = Vec<(Vec<u8>, Option<OwnedFd>)>;

/// Publishes into the server at the other end of a socket. Dropping it ends the connection; what is published stays.
#[derive(Debug)]
pub struct Producer {
    path: PathBuf,
    terms: Terms,
    desk: Arc<Desk>,
    outgoing: mpsc::UnboundedSender<Outgoing>,
    next: AtomicU64,
    talking: JoinHandle<()>,
    /// Dropped with this: children that were forked have the socket, too, and must not keep the connection.
    _ends: Ends,
}

/// Why there is no connection to a server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// There is no socket.
    #[error("there is no socket at {}: start `tensor-relay serve --publish-socket` with this path", path.display())]
    NoSocket {
        /// Where.
        path: PathBuf,
    },
    /// The server that made it is gone, or something else is there.
    #[error("nobody listens at {}: the server that made it has ended", path.display())]
    NobodyListens {
        /// Where.
        path: PathBuf,
    },
    /// So many wait to be let in that the system turns further ones away.
    #[error("the server at {} is too busy to let this process in: try again", path.display())]
    Busy {
        /// Where.
        path: PathBuf,
    },
    /// The socket is another user's.
    #[error(
        "the socket {} is private to another user: run as that user, or start the server with --publish-uid {uid}",
        path.display()
    )]
    NotPermitted {
        /// Where.
        path: PathBuf,
        /// Who asks.
        uid: u32,
    },
    /// Somebody else than expected listens. Nothing was told to them.
    #[error(
        "a process of user {found_uid} listens at {}, and not one of user {expected_uid}: see who made this socket, or name \
         the user that the server runs as",
        path.display()
    )]
    Stranger {
        /// Where.
        path: PathBuf,
        /// Who listens.
        found_uid: u32,
        /// Who should.
        expected_uid: u32,
    },
    /// The server said why not.
    #[error("the server at {} does not let this process publish: {why}", path.display())]
    Refused {
        /// Where.
        path: PathBuf,
        /// What it said.
        why: String,
    },
    /// The server does not answer.
    #[error("the server at {} did not answer in time", path.display())]
    NoAnswer {
        /// Where.
        path: PathBuf,
    },
    /// The system refused, or what answered is no server.
    #[error("cannot connect to {}: {why}", path.display())]
    Broken {
        /// Where.
        path: PathBuf,
        /// What happened.
        why: String,
    },
}

/// Why a version was not published.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// The server refused it.
    #[error("the server did not publish it: {text}")]
    Refused {
        /// Why.
        reason: Refusal,
        /// The same for people.
        text: String,
    },
    /// More metadata than an announcement holds.
    #[error(transparent)]
    Metadata(#[from] MessageError),
    /// The server takes no memory of this kind.
    #[error("the server takes no memory of the kind {0}: the two ends are of different versions")]
    Kind(MemoryKind),
    /// The connection ended. The version may have been published all the same.
    #[error("whether it was published cannot be known: {0}")]
    Lost(Arc<str>),
}

impl Producer {
    /// Connects to the server that listens at `path`, in a tokio runtime.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub async fn connect(path: &Path) -> Result<Self, ConnectError> {
        Self::try_for(path, PROMPT, None).await
    }

    async fn try_for(path: &Path, timeout: Duration, server_uid: Option<u32>) -> Result<Self, ConnectError> {
        let greeted = tokio::time::timeout(timeout, greet(path, server_uid)).await;
        let greeted = greeted.unwrap_or_else(|_| Err(ConnectError::NoAnswer { path: path.into() }));
        let (hearer, speaker, terms) = greeted?;
        let _ends = speaker.ends();
        let desk =
            Arc::new(Desk { waiting: Mutex::default(), lost: watch::Sender::new(None), path: path.into() });
        let (outgoing, unsaid) = mpsc::unbounded_channel();
        let talking = tokio::spawn(talk(hearer, speaker, unsaid, Arc::clone(&desk)));
        Ok(Self { path: path.into(), terms, desk, outgoing, next: AtomicU64::new(1), talking, _ends })
    }

    /// The same for at most `timeout`, while there is no server yet: one beside may start later, or again. A server that is
    /// there has a second to answer, however short that is.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub async fn connect_within(path: &Path, timeout: Duration) -> Result<Self, ConnectError> {
        Self::connect_to(path, timeout, None).await
    }

    /// The same, and only to a server of the user `server_uid`, if one is given: for sockets in folders where others may make
    /// files, who could listen there in its place. The system vouches for who listens.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub async fn connect_to(
        path: &Path,
        timeout: Duration,
        server_uid: Option<u32>,
    ) -> Result<Self, ConnectError> {
        let begun = Instant::now();
        loop {
            let left = timeout.saturating_sub(begun.elapsed());
            match Self::try_for(path, left.clamp(ANSWER, PROMPT), server_uid).await {
                Err(
                    ConnectError::NoSocket { .. }
                    | ConnectError::NobodyListens { .. }
                    | ConnectError::Busy { .. },
                ) if begun.elapsed() < timeout => tokio::time::sleep(LOOK.min(left)).await,
                outcome => return outcome,
            }
        }
    }

    /// Where the server listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it wants of versions.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// How the connection ended, if it has.
    pub fn lost(&self) -> Option<Arc<str>> {
        self.desk.lost.borrow().clone()
    }

    /// Publishes a version into `topic`: visible to all of the server's subscribers at once, or not at all. Waits as the
    /// server's topics do for readers in mode `every`. When this is cancelled, the version is taken back.
    ///
    /// # Errors
    /// [`PublishError`].
    pub async fn publish(
        &self,
        topic: Topic,
        version: SealedVersion,
        metadata: Metadata,
    ) -> Result<Publication, PublishError> {
        let (payload_bytes, copied_bytes) = (version.manifest.payload_bytes(), version.copied_bytes());
        let lend = Lend { range: 0..payload_bytes, memory: Memory::Memfd { offset: 0 } };
        let lends = version.memory.map(|memory| (lend, Some(memory.into()))).into_iter().collect();
        let reason = IN_HOST_MEMORY.into();
        let way = Way { path: MemoryKind::Memfd, reason, copied_bytes, lends, kept: None };
        self.send(topic, &version.manifest, metadata, way).await
    }

    /// Publishes what `manifest` describes and `way` lends.
    pub(super) async fn send(
        &self,
        topic: Topic,
        manifest: &Manifest,
        metadata: Metadata,
        way: Way,
    ) -> Result<Publication, PublishError> {
        check_metadata(&metadata)?;
        let Way { path, reason, copied_bytes, lends, kept } = way;
        if !self.terms.memories.contains(&path) {
            return Err(PublishError::Kind(path));
        }
        let number = PublicationId(self.next.fetch_add(1, Ordering::Relaxed));
        let said = text_that_fits(reason.to_string());
        let publish = Publish { publication: number, topic: topic.clone(), metadata, reason: said };
        let (progress, answer) = self.ask(number);
        if let Some(kept) = kept {
            keep(kept, progress.clone()); // Also where nobody waits for the answer any more: the server may read it by then.
        }
        self.say(messages(manifest, lends, publish));
        let mut unanswered = Unanswered { number: Some(number), producer: self };
        let answered = answer.await;
        unanswered.number = None;
        let Answer::Published(epoch, version) = self.understand(answered)? else {
            return Err(PublishError::Lost("the server answered something else".into()));
        };
        Ok(Publication {
            id: VersionId { topic, epoch, version },
            number,
            progress,
            lost: self.desk.lost.subscribe(),
            outgoing: self.outgoing.clone(),
            path,
            reason,
            payload_bytes: manifest.payload_bytes(),
            copied_bytes,
        })
    }

    /// Says that nothing will follow in `topic`; with `withdraw`, takes back what is retained, too.
    ///
    /// # Errors
    /// [`PublishError`] when it is not open.
    pub async fn end(&self, topic: Topic, withdraw: bool) -> Result<(), PublishError> {
        let request = PublicationId(self.next.fetch_add(1, Ordering::Relaxed));
        let (_progress, answer) = self.ask(request);
        self.say(vec![(encode_producer(ProducerMessage::End { request, topic, withdraw }), None)]);
        self.understand(answer.await).map(drop)
    }

    /// Begins to wait for an answer.
    fn ask(&self, number: PublicationId) -> (watch::Receiver<Progress>, oneshot::Receiver<Answer>) {
        let (answered, answer) = oneshot::channel();
        let begin = Progress { publication: number, committed: 0, is_over: false, is_released: false };
        let (progress, watched) = watch::channel(begin);
        self.desk
            .waiting()
            .insert(number, Waiting { answered: Some(answered), progress });
        if self.lost().is_some() {
            self.desk.waiting().clear(); // Nobody would answer any more.
        }
        (watched, answer)
    }

    fn say(&self, messages: Outgoing) {
        let _ = self.outgoing.send(messages); // Without a connection, the answer says so.
    }

    fn understand(
        &self,
        answered: Result<Answer, oneshot::error::RecvError>,
    ) -> Result<Answer, PublishError> {
        match answered {
            Ok(Answer::Refused(reason, text)) => Err(PublishError::Refused { reason, text }),
            Ok(answer) => Ok(answer),
            Err(_) => Err(PublishError::Lost(self.lost().unwrap_or_else(|| "the connection ended".into()))),
        }
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        self.talking.abort();
        self.desk.end(|| "this process closed the connection".into());
    }
}

/// A version whose producer may stop to wait for an answer.
struct Unanswered<'a> {
    number: Option<PublicationId>,
    producer: &'a Producer,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.producer
                .say(vec![(encode_producer(ProducerMessage::Withdraw(number)), None)]);
        }
    }
}

/// By which memory a version goes, and why.
#[derive(Debug)]
pub(super) struct Way {
    pub(super) path: MemoryKind,
    pub(super) reason: Arc<str>,
    pub(super) copied_bytes: u64,
    pub(super) lends: Vec<(Lend, Option<OwnedFd>)>,
    pub(super) kept: Option<Kept>,
}

/// What a server reads for as long as it holds a version.
pub(super) type Kept = Box<dyn Any + Send>;

/// Holds that until the server says that it has let go, refuses the version, or is gone.
fn keep(kept: Kept, mut progress: watch::Receiver<Progress>) {
    tokio::spawn(async move {
        let _ = progress.wait_for(|progress| progress.is_released).await; // An error: nothing is told of it any more.
        drop(kept);
    });
}

/// A version in messages: its manifest in parts, its memory, and the word that it is complete.
fn messages(manifest: &Manifest, lends: Vec<(Lend, Option<OwnedFd>)>, publish: Publish) -> Outgoing {
    let manifest = manifest.encoded();
    let parts = (0..manifest.len()).step_by(MANIFEST_PART_MAX_BYTES).map(|start| {
        let part = manifest.slice(start..manifest.len().min(start + MANIFEST_PART_MAX_BYTES));
        (encode_producer(ProducerMessage::Manifest(part)), None)
    });
    let lends = lends
        .into_iter()
        .map(|(lend, descriptor)| (encode_producer(ProducerMessage::Lend(lend)), descriptor));
    parts
        .chain(lends)
        .chain([(encode_producer(ProducerMessage::Publish(publish)), None)])
        .collect()
}

/// Where answers wait for who asked.
#[derive(Debug)]
struct Desk {
    /// What was asked and may still change. What is released is forgotten.
    waiting: Mutex<HashMap<PublicationId, Waiting>>,
    lost: watch::Sender<Option<Arc<str>>>,
    path: PathBuf,
}

#[derive(Debug)]
struct Waiting {
    answered: Option<oneshot::Sender<Answer>>,
    progress: watch::Sender<Progress>,
}

#[derive(Debug)]
enum Answer {
    Published(Epoch, Version),
    Refused(Refusal, String),
    Ended,
}

impl Desk {
    fn waiting(&self) -> MutexGuard<'_, HashMap<PublicationId, Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handle(&self, message: ServerMessage) {
        match message {
            ServerMessage::Published { publication, epoch, version } => {
                self.answer(publication, Answer::Published(epoch, version), true);
            }
            ServerMessage::Refused { publication, reason, text } => {
                self.answer(publication, Answer::Refused(reason, text), false);
            }
            ServerMessage::Ended { request } => self.answer(request, Answer::Ended, false),
            ServerMessage::Progress(progress) => {
                let mut waiting = self.waiting();
                if let Some(asked) = waiting.get(&progress.publication) {
                    asked.progress.send_replace(progress);
                }
                if progress.is_released
                    && waiting.get(&progress.publication).is_some_and(Waiting::is_answered)
                {
                    waiting.remove(&progress.publication);
                }
            }
            _ => {}
        }
    }

    /// Gives an answer to who waits for it, if anybody does. What is published may `change` further.
    fn answer(&self, number: PublicationId, answer: Answer, change: bool) {
        let mut waiting = self.waiting();
        if let Some(answered) = waiting.get_mut(&number).and_then(|asked| asked.answered.take()) {
            let _ = answered.send(answer); // It waits no longer.
        }
        let is_over = |asked: &Waiting| !change || asked.progress.borrow().is_released;
        if waiting.get(&number).is_some_and(is_over) {
            waiting.remove(&number);
        }
    }

    /// Lets all who wait know that the connection ended.
    fn end(&self, why: impl FnOnce() -> String) {
        self.lost.send_if_modified(|lost| {
            let is_first = lost.is_none();
            if is_first {
                *lost = Some(why().into());
            }
            is_first
        });
        // After that: who asks later looks whether it is lost.
        for (_, asked) in self.waiting().drain() {
            drop(asked.answered);
        }
    }
}

impl Waiting {
    fn is_answered(&self) -> bool {
        self.answered.is_none()
    }
}

/// Connects and exchanges the first messages.
async fn greet(path: &Path, server_uid: Option<u32>) -> Result<(Hearer, Speaker, Terms), ConnectError> {
    let stream = UnixStream::connect(path).await.map_err(|error| why_not(path, &error))?;
    if let Some(expected_uid) = server_uid {
        let found_uid = stream.peer_cred().map_err(|error| why_not(path, &error))?.uid();
        if found_uid != expected_uid {
            return Err(ConnectError::Stranger { path: path.into(), found_uid, expected_uid });
        }
    }
    let (mut hearer, speaker) = split(stream);
    let hello = Hello {
        revision_min: *REVISIONS.start(),
        revision_max: *REVISIONS.end(),
        agent: concat!("tensor-relay/", env!("CARGO_PKG_VERSION")).into(),
    };
    // Who is turned away finds the socket closed, and why in it.
    let _ = speaker.say(&encode_producer(ProducerMessage::Hello(hello)), None).await;
    let broken = |why: String| ConnectError::Broken { path: path.into(), why };
    let frame = hearer.next().await.map_err(|error| broken(error.to_string()))?;
    let frame = frame.ok_or_else(|| broken("it ended before it answered".into()))?;
    match ServerMessage::decode(&frame).map_err(|error| broken(error.to_string()))? {
        ServerMessage::Welcome(welcome) => {
            let terms = Terms { chunk_bytes: welcome.chunk_bytes, memories: welcome.memories };
            Ok((hearer, speaker, terms))
        }
        ServerMessage::Close { text } => Err(ConnectError::Refused { path: path.into(), why: text }),
        _ => Err(broken("what answers is no server".into())),
    }
}

fn why_not(path: &Path, error: &io::Error) -> ConnectError {
    let path = path.to_owned();
    match error.kind() {
        io::ErrorKind::NotFound => ConnectError::NoSocket { path },
        io::ErrorKind::ConnectionRefused => ConnectError::NobodyListens { path },
        io::ErrorKind::WouldBlock => ConnectError::Busy { path },
        io::ErrorKind::PermissionDenied => {
            ConnectError::NotPermitted { path, uid: rustix::process::geteuid().as_raw() }
        }
        _ => ConnectError::Broken { path, why: error.to_string() },
    }
}

/// Says what is to be said and hears what comes, until the connection ends.
async fn talk(
    mut hearer: Hearer,
    speaker: Speaker,
    mut unsaid: mpsc::UnboundedReceiver<Outgoing>,
    desk: Arc<Desk>,
) {
    let speak = async {
        while let Some(messages) = unsaid.recv().await {
            for (frame, descriptor) in messages {
                speaker.say(&frame, descriptor.as_ref().map(AsFd::as_fd)).await?;
            }
        }
        std::future::pending::<Result<(), ChannelError>>().await
    };
    let _ends = speaker.ends();
    let hear = async {
        while let Some(frame) = hearer.next().await? {
            match ServerMessage::decode(&frame)? {
                // Nothing follows it. The connection may break now, over what the server did not hear.
                ServerMessage::Close { text } => return Ok(Some(text)),
                message => desk.handle(message),
            }
        }
        Ok::<_, ChannelError>(None)
    };
    let mut hear = std::pin::pin!(hear);
    let ended = tokio::select! {
        heard = &mut hear => heard,
        // A server that cuts us off has said why.
        Err(error) = speak => tokio::time::timeout(PROMPT, hear).await.unwrap_or(Err(error)),
    };
    let path = desk.path.display();
    desk.end(|| match ended {
        Ok(Some(text)) => format!("the server at {path} ended the connection: {text}"),
        Ok(None) => format!("the server at {path} has ended"),
        Err(error) => format!("the connection to the server at {path} broke: {error}"),
    });
}
