//! [`Producer`]: the producer's side of the publish socket.

mod handshake;
mod requests;

pub use handshake::ConnectError;

use super::{
    channel::{ChannelError, FrameReader, FrameWriter, MESSAGE_TIMEOUT, ShutdownGuard},
    publication::Publication,
    version::{SealedVersion, Terms},
};
use handshake::handshake;
use requests::{Answer, PendingRequests, Waiting};
use std::{
    any::Any,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{
    Manifest, MessageError, Metadata, Topic, VersionId, check_metadata,
    sidecar::{
        Lend, MANIFEST_PART_MAX_BYTES, Memory, MemoryKind, ProducerMessage, Progress, PublicationId, Publish,
        Refusal, ServerMessage, encode_producer,
    },
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
};

/// The reason given for tensors in host memory.
const IN_HOST_MEMORY: &str = "the tensors are in host memory";

/// The interval of attempts to connect to a server that is not running yet.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The minimum time that a running server has to answer.
const ANSWER_TIMEOUT_MIN: Duration = Duration::from_secs(1);

/// Messages that are written one after the other, with their descriptors.
pub(super) type MessageBatch = Vec<(Vec<u8>, Option<OwnedFd>)>;

/// Publishes to a server over its publish socket. Dropping it ends the connection. Published versions stay, except
/// those shared in place (`cuda_ipc`), which are withdrawn.
#[derive(Debug)]
pub struct Producer {
    path: PathBuf,
    terms: Terms,
    requests: Arc<PendingRequests>,
    outgoing: mpsc::UnboundedSender<MessageBatch>,
    next: AtomicU64,
    task: JoinHandle<()>,
    /// Ends the connection on drop, even if forked children have the socket.
    _shutdown_guard: ShutdownGuard,
}

/// Why a version was not published.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// The server refused it.
    #[error("the server did not publish it: {text}")]
    Refused {
        /// The reason.
        reason: Refusal,
        /// The explanation.
        text: String,
    },
    /// The metadata is larger than an announcement can hold.
    #[error(transparent)]
    Metadata(#[from] MessageError),
    /// The server does not accept memory of this kind.
    #[error("the server accepts no memory of the kind {0}: producer and server have different versions")]
    Kind(MemoryKind),
    /// The connection ended. The version may have been published nevertheless.
    #[error("it is unknown whether the version was published: {0}")]
    ConnectionLost(Arc<str>),
}

impl Producer {
    /// Connects to the server that listens at `path`, in a tokio runtime.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub async fn connect(path: &Path) -> Result<Self, ConnectError> {
        Self::try_for(path, MESSAGE_TIMEOUT, None).await
    }

    async fn try_for(path: &Path, timeout: Duration, server_uid: Option<u32>) -> Result<Self, ConnectError> {
        let connected = tokio::time::timeout(timeout, handshake(path, server_uid)).await;
        let connected = connected.unwrap_or_else(|_| Err(ConnectError::NoAnswer { path: path.into() }));
        let (reader, writer, terms) = connected?;
        let _shutdown_guard = writer.shutdown_guard();
        let requests = Arc::new(PendingRequests {
            waiting: Lock::default(),
            lost: watch::Sender::new(None),
            path: path.into(),
        });
        #[expect(
            clippy::disallowed_methods,
            reason = "a drop cannot wait; each batch is a call or a drop of this process, and a server that reads none \
                      within MESSAGE_TIMEOUT ends the connection and the queue"
        )]
        let (outgoing, unsent) = mpsc::unbounded_channel();
        let task = tokio::spawn(run(reader, writer, unsent, Arc::clone(&requests)));
        Ok(Self {
            path: path.into(),
            terms,
            requests,
            outgoing,
            next: AtomicU64::new(1),
            task,
            _shutdown_guard,
        })
    }

    /// Connects like [`connect`](Self::connect), but retries for at most `timeout` while no server listens: it may
    /// start later, or restart. A running server has at least a second to answer. With `server_uid`, accepts only a
    /// server of that user, as reported by the system: for sockets in folders where other users could create a socket.
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
            let remaining = timeout.saturating_sub(begun.elapsed());
            match Self::try_for(path, remaining.clamp(ANSWER_TIMEOUT_MIN, MESSAGE_TIMEOUT), server_uid).await
            {
                Err(
                    ConnectError::NoSocket { .. }
                    | ConnectError::NobodyListens { .. }
                    | ConnectError::Busy { .. },
                ) if begun.elapsed() < timeout => tokio::time::sleep(RETRY_INTERVAL.min(remaining)).await,
                outcome => return outcome,
            }
        }
    }

    /// The path of the server's socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The server's terms for versions.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Why the connection ended, if it has.
    pub fn lost(&self) -> Option<Arc<str>> {
        self.requests.lost.borrow().clone()
    }

    /// Publishes a version into `topic`, atomically for all subscribers. May wait for readers in mode `every`,
    /// according to the server's options. If this is cancelled, the version is withdrawn.
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
        let route = MemoryRoute { path: MemoryKind::Memfd, reason, copied_bytes, lends, kept: None };
        self.send(topic, &version.manifest, metadata, route).await
    }

    /// Publishes the version that `manifest` describes, with the memory that `route` lends.
    pub(super) async fn send(
        &self,
        topic: Topic,
        manifest: &Manifest,
        metadata: Metadata,
        route: MemoryRoute,
    ) -> Result<Publication, PublishError> {
        check_metadata(&metadata)?;
        let MemoryRoute { path, reason, copied_bytes, lends, kept } = route;
        if !self.terms.memories.contains(&path) {
            return Err(PublishError::Kind(path));
        }
        let publication_id = PublicationId(self.next.fetch_add(1, Ordering::Relaxed));
        let (topic_sent, reason_sent) = (topic.clone(), (&*reason).into());
        let publish =
            Publish { publication: publication_id, topic: topic_sent, metadata, reason: reason_sent };
        let (progress, answer) = self.register(publication_id);
        if let Some(kept) = kept {
            // Even if the caller is cancelled: the server may read it already.
            keep_until_released(kept, progress.clone());
        }
        self.queue(messages(manifest, lends, publish));
        let mut unanswered = Unanswered { publication_id: Some(publication_id), producer: self };
        let answered = answer.await;
        unanswered.publication_id = None;
        let Some((epoch, version)) = self.check_answer(answered)? else {
            return Err(PublishError::ConnectionLost("the server answered something else".into()));
        };
        Ok(Publication {
            id: VersionId { topic, epoch, version },
            publication_id,
            progress,
            lost: self.requests.lost.subscribe(),
            outgoing: self.outgoing.clone(),
            path,
            reason,
            payload_bytes: manifest.payload_bytes(),
            copied_bytes,
        })
    }

    /// Ends `topic`; with `withdraw`, withdraws retained versions too.
    ///
    /// # Errors
    /// [`PublishError`], for example when it is not open.
    pub async fn end(&self, topic: Topic, withdraw: bool) -> Result<(), PublishError> {
        let request = PublicationId(self.next.fetch_add(1, Ordering::Relaxed));
        let (_progress, answer) = self.register(request);
        self.queue(vec![(encode_producer(ProducerMessage::End { request, topic, withdraw }), None)]);
        self.check_answer(answer.await).map(drop)
    }

    /// Registers a request, to receive its progress and its answer.
    fn register(
        &self,
        publication_id: PublicationId,
    ) -> (watch::Receiver<Progress>, oneshot::Receiver<Answer>) {
        let (answered, answer) = oneshot::channel();
        let initial = Progress {
            publication: publication_id,
            committed: 0,
            loaded: 0,
            left_retention: false,
            is_released: false,
        };
        let (progress, watched) = watch::channel(initial);
        self.requests
            .waiting
            .lock()
            .insert(publication_id, Waiting { answered: Some(answered), progress });
        if self.lost().is_some() {
            self.requests.waiting.lock().clear(); // There will be no answer.
        }
        (watched, answer)
    }

    fn queue(&self, messages: MessageBatch) {
        let _ = self.outgoing.send(messages); // Without a connection, the pending request fails.
    }

    fn check_answer(&self, answered: Result<Answer, oneshot::error::RecvError>) -> Answer {
        let lost = || self.lost().unwrap_or_else(|| "the connection ended".into());
        answered.unwrap_or_else(|_| Err(PublishError::ConnectionLost(lost())))
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        self.task.abort();
        self.requests.end(|| "this process closed the connection".into());
    }
}

/// Withdraws a version when its caller stops waiting for the answer.
struct Unanswered<'a> {
    publication_id: Option<PublicationId>,
    producer: &'a Producer,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if let Some(publication_id) = self.publication_id {
            self.producer
                .queue(vec![(encode_producer(ProducerMessage::Withdraw(publication_id)), None)]);
        }
    }
}

/// How the memory of a version is shared: its kind, the reason for it, the `Lend` messages, and what must stay alive.
#[derive(Debug)]
pub(super) struct MemoryRoute {
    pub(super) path: MemoryKind,
    pub(super) reason: Arc<str>,
    pub(super) copied_bytes: u64,
    pub(super) lends: Vec<(Lend, Option<OwnedFd>)>,
    pub(super) kept: Option<KeepAlive>,
}

/// Memory that must live while the server reads a version.
pub(super) type KeepAlive = Box<dyn Any + Send>;

/// Keeps `kept` alive until the server releases or refuses the version, or the connection ends.
fn keep_until_released(kept: KeepAlive, mut progress: watch::Receiver<Progress>) {
    tokio::spawn(async move {
        let _ = progress.wait_for(|progress| progress.is_released).await; // Fails if the connection ended.
        drop(kept);
    });
}

/// The messages of a version: its manifest in parts, its memory, and `Publish`.
fn messages(manifest: &Manifest, lends: Vec<(Lend, Option<OwnedFd>)>, publish: Publish) -> MessageBatch {
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

/// Writes queued messages and reads incoming ones, until the connection ends.
async fn run(
    mut reader: FrameReader,
    writer: FrameWriter,
    mut unsent: mpsc::UnboundedReceiver<MessageBatch>,
    requests: Arc<PendingRequests>,
) {
    let writing = async {
        while let Some(messages) = unsent.recv().await {
            for (frame, descriptor) in messages {
                writer.write(&frame, descriptor.as_ref().map(AsFd::as_fd)).await?;
            }
        }
        std::future::pending::<Result<(), ChannelError>>().await
    };
    let _shutdown_guard = writer.shutdown_guard();
    let reading = async {
        while let Some(frame) = reader.next().await? {
            match ServerMessage::decode(&frame)? {
                // The last message. The connection may now break over bytes that the server did not read.
                ServerMessage::Close { text } => return Ok(Some(text.to_string())),
                message => requests.handle(message),
            }
        }
        Ok::<_, ChannelError>(None)
    };
    let mut reading = std::pin::pin!(reading);
    let ended = tokio::select! {
        ended = &mut reading => ended,
        // A server that closed the connection has sent the reason before.
        Err(error) = writing => tokio::time::timeout(MESSAGE_TIMEOUT, reading).await.unwrap_or(Err(error)),
    };
    let path = requests.path.display();
    requests.end(|| match ended {
        Ok(Some(text)) => format!("the server at {path} ended the connection: {text}"),
        Ok(None) => format!("the server at {path} has ended"),
        Err(error) => format!("the connection to the server at {path} broke: {error}"),
    });
}
