//! Serves the connection of one producer, from its handshake to its end.

use super::{
    Peer, Published,
    channel::{ChannelError, FrameReader, FrameWriter, MESSAGE_TIMEOUT, split},
    draft::{Draft, Ready, Refused, accepted_kinds},
    quota::Share,
    topics::Topics,
};
use crate::{Device, Publication, PublishError, Staging};
use std::{collections::HashMap, sync::Arc};
use tensor_relay_device::{Lock, Returned};
use tensor_relay_protocol::{
    Metadata, Topic,
    sidecar::{
        Hello, MemoryKind, ProducerMessage, Progress, PublicationId, Publish, REVISIONS, Refusal,
        ServerMessage, Welcome, encode_server,
    },
};
use tokio::{
    net::UnixStream,
    sync::{
        Notify,
        mpsc::{self, error::TrySendError},
    },
    task::JoinSet,
};

/// The maximum number of waiting requests of one producer; further ones are refused. So at least this many threads of a
/// producer can publish concurrently.
pub(super) const WAITING_MAX: usize = 16;

/// The maximum number of unsent messages to a producer: as many as it is likely to have unreleased versions. Further
/// ones wait.
const UNSENT_MAX: usize = 64;

/// The context shared by all producer connections of a server.
pub(super) struct PublishContext {
    pub(super) topics: Topics,
    pub(super) staging: Staging,
    /// The device to serve from.
    pub(super) device: Option<Device>,
    pub(super) agent: String,
    pub(super) report: Box<dyn Fn(Published) + Send + Sync>,
}

/// A request of the producer; executed in order.
enum Task {
    Publish(Publish, Box<Draft>),
    End { request: PublicationId, topic: Topic, withdraw: bool },
}

/// The state of a complete version.
enum VersionState {
    /// Not published yet; notified when it is withdrawn.
    Waiting(Arc<Notify>),
    /// Published; true if its memory ends with its producer.
    Published(Publication, bool),
}

/// The versions of one producer that wait to be published, or whose memory is in use.
type Versions = Arc<Lock<HashMap<PublicationId, VersionState>>>;

/// Serves a producer until it closes the connection or breaks a rule. Dropping the future ends the connection.
/// Published versions stay, except those in the producer's own GPU memory.
pub(super) async fn serve(stream: UnixStream, peer: Peer, share: Share, context: Arc<PublishContext>) {
    let (reader, writer) = split(stream);
    let _shutdown_guard = writer.shutdown_guard();
    if let Err(error) = run_connection(reader, writer, &peer, &share, context).await {
        let peer = peer.name;
        tracing::warn!(%peer, "The connection to a sidecar producer was closed: {error}.");
    }
}

async fn run_connection(
    mut reader: FrameReader,
    writer: FrameWriter,
    peer: &Peer,
    share: &Share,
    context: Arc<PublishContext>,
) -> Result<(), ChannelError> {
    let hello = tokio::time::timeout(MESSAGE_TIMEOUT, handshake(&mut reader, &writer, &context)).await;
    match hello.map_err(|_| ChannelError::Slow).flatten() {
        Ok(true) => {}
        Ok(false) => return Ok(()),
        Err(error) => return close(&writer, error).await,
    }
    let (outgoing, unsent) = mpsc::channel(UNSENT_MAX);
    let (task_sender, tasks) = mpsc::channel(WAITING_MAX);
    let versions = Versions::default();
    let close_sender = outgoing.clone();
    let worker = Worker {
        context: Arc::clone(&context),
        versions: Arc::clone(&versions),
        outgoing,
        peer: peer.clone(),
    };
    let mut writing = std::pin::pin!(write_messages(&writer, unsent));
    let reclaim = ReclaimOnDrop(Arc::clone(&versions));
    // The first of these to end cancels the others.
    let ended = tokio::select! {
        ended = read_messages(&mut reader, (&context, share), &versions, &task_sender, &close_sender) => ended,
        written = &mut writing => return written,
        () = worker.run(tasks) => Ok(()),
    };
    drop(reclaim); // First, because the producer's memory may be freed already.
    if let Err(error) = &ended {
        // Queued after the current message, not within it.
        let message = ServerMessage::Close { text: error.to_string().into() };
        let last = async { tokio::join!(close_sender.send(message), writing) };
        let _ = tokio::time::timeout(MESSAGE_TIMEOUT, last).await; // The producer may not read it.
    }
    ended
}

/// Withdraws the versions in the producer's own GPU memory when the connection ends.
struct ReclaimOnDrop(Versions);

impl Drop for ReclaimOnDrop {
    fn drop(&mut self) {
        for state in self.0.lock().values() {
            if let VersionState::Published(publication, true) = state {
                publication.withdraw();
            }
        }
    }
}

/// Exchanges `Hello` and `Welcome`; returns false if the producer closed the connection first.
async fn handshake(
    reader: &mut FrameReader,
    writer: &FrameWriter,
    context: &PublishContext,
) -> Result<bool, ChannelError> {
    let Some(frame) = reader.next().await? else { return Ok(false) };
    let ProducerMessage::Hello(Hello { revision_min, revision_max, .. }) = ProducerMessage::decode(&frame)?
    else {
        return Err(out_of_turn("a message before its Hello"));
    };
    let revision = revision_max.min(*REVISIONS.end());
    if revision < revision_min || revision < *REVISIONS.start() {
        return Err(out_of_turn("a Hello of unsupported revisions: update the older of the two programs"));
    }
    let (agent, memories) = (context.agent.as_str().into(), accepted_kinds(context.device.as_ref()).to_vec());
    let welcome = Welcome { revision, agent, chunk_bytes: context.staging.chunk_bytes, memories };
    writer.write(&encode_server(ServerMessage::Welcome(welcome)), None).await?;
    Ok(true)
}

fn out_of_turn(what: &str) -> ChannelError {
    ChannelError::Io(std::io::Error::other(format!("the producer sent {what}")))
}

/// Sends the reason for the close, if the producer still reads.
async fn close(writer: &FrameWriter, error: ChannelError) -> Result<(), ChannelError> {
    let text = error.to_string().into();
    let _ = writer.write(&encode_server(ServerMessage::Close { text }), None).await;
    Err(error)
}

/// Reads a producer's messages until it closes.
async fn read_messages(
    reader: &mut FrameReader,
    (context, share): (&PublishContext, &Share),
    versions: &Versions,
    tasks: &mpsc::Sender<Task>,
    outgoing: &mpsc::Sender<ServerMessage>,
) -> Result<(), ChannelError> {
    let mut draft = Draft::default();
    while let Some(frame) = reader.next().await? {
        let task = match ProducerMessage::decode(&frame)? {
            ProducerMessage::Manifest(part) => {
                draft.handle_manifest(&part, &context.staging.limits, &share.manifests);
                continue;
            }
            ProducerMessage::Lend(lend) => {
                let descriptor =
                    lend.memory.kind().has_descriptor().then(|| reader.take_descriptor()).flatten();
                let kinds = accepted_kinds(context.device.as_ref());
                draft.handle_lend(lend, descriptor, kinds, context.staging.limits.tensors);
                continue;
            }
            ProducerMessage::Publish(publish) => {
                let waiting = VersionState::Waiting(Arc::default());
                if versions.lock().insert(publish.publication, waiting).is_some() {
                    return Err(out_of_turn("two versions under one number"));
                }
                Task::Publish(publish, Box::new(std::mem::take(&mut draft)))
            }
            ProducerMessage::Withdraw(publication) => {
                match versions.lock().get(&publication) {
                    Some(VersionState::Published(publication, _)) => publication.withdraw(),
                    Some(VersionState::Waiting(withdrawn)) => withdrawn.notify_one(),
                    None => {} // It was released already.
                }
                continue;
            }
            ProducerMessage::End { request, topic, withdraw } => Task::End { request, topic, withdraw },
            _ => return Err(out_of_turn("a message that is not allowed here")),
        };
        // Refused, because waiting here would delay withdrawals and the detection of the producer's end.
        let refused = match tasks.try_send(task) {
            Ok(()) => continue,
            Err(TrySendError::Closed(_)) => return Ok(()),
            Err(TrySendError::Full(Task::Publish(Publish { publication, .. }, _))) => {
                versions.lock().remove(&publication);
                publication
            }
            Err(TrySendError::Full(Task::End { request, .. })) => request,
        };
        let text =
            format!("{WAITING_MAX} requests of its producer are pending: publish when one is answered")
                .into();
        let refused = ServerMessage::Refused { publication: refused, reason: Refusal::NoRoom, text };
        if outgoing.send(refused).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}

/// Writes queued messages in order, and nothing after a `Close`.
async fn write_messages(
    writer: &FrameWriter,
    mut unsent: mpsc::Receiver<ServerMessage>,
) -> Result<(), ChannelError> {
    while let Some(message) = unsent.recv().await {
        let is_last = matches!(message, ServerMessage::Close { .. });
        writer.write(&encode_server(message), None).await?;
        if is_last {
            break;
        }
    }
    Ok(())
}

/// A published version, with the handles that track its memory.
struct TrackedVersion {
    publication: Publication,
    returned: Vec<Returned>,
    path: MemoryKind,
    tensors: usize,
    payload_bytes: u64,
}

/// Executes a producer's tasks in order.
struct Worker {
    context: Arc<PublishContext>,
    versions: Versions,
    outgoing: mpsc::Sender<ServerMessage>,
    peer: Peer,
}

impl Worker {
    async fn run(self, mut tasks: mpsc::Receiver<Task>) {
        let mut followers = JoinSet::new();
        loop {
            let task = tokio::select! {
                task = tasks.recv() => task,
                Some(_) = followers.join_next() => continue,
            };
            let answer = match task {
                None => return,
                Some(Task::Publish(publish, draft)) => {
                    let id = publish.publication;
                    match self.publish(publish, *draft, &mut followers).await {
                        Ok(published) => published,
                        Err((reason, text)) => {
                            self.versions.lock().remove(&id);
                            ServerMessage::Refused { publication: id, reason, text: text.into() }
                        }
                    }
                }
                Some(Task::End { request, topic, withdraw }) => match self.end(&topic, withdraw).await {
                    Ok(()) => ServerMessage::Ended { request },
                    Err((reason, text)) => {
                        ServerMessage::Refused { publication: request, reason, text: text.into() }
                    }
                },
            };
            if self.outgoing.send(answer).await.is_err() {
                return;
            }
        }
    }

    async fn publish(
        &self,
        publish: Publish,
        draft: Draft,
        followers: &mut JoinSet<()>,
    ) -> Result<ServerMessage, Refused> {
        let Publish { publication: id, topic, metadata, reason } = publish;
        let withdrawn = match self.versions.lock().get(&id) {
            Some(VersionState::Waiting(withdrawn)) => Arc::clone(withdrawn),
            _ => Arc::default(),
        };
        let published = tokio::select! {
            biased; // A version withdrawn before its turn is never published.
            () = withdrawn.notified() => {
                Err((Refusal::TopicEnded, "its producer withdrew it before it was published".into()))
            }
            // Also while the version waits for its turn or for readers.
            refused = self.context.topics.forbidden(self.peer.uid, &topic) => Err(refused),
            published = self.push(&topic, draft, metadata) => published,
        };
        let TrackedVersion { publication, returned, path, tensors, payload_bytes } = match published {
            Ok(published) => published,
            Err(refused) => {
                self.context.topics.remove_unneeded(&topic); // It may have been created for this version only.
                return Err(refused);
            }
        };
        let version = publication.id().clone();
        let state = VersionState::Published(publication.clone(), path == MemoryKind::CudaIpc);
        self.versions.lock().insert(id, state);
        let answer =
            ServerMessage::Published { publication: id, epoch: version.epoch, version: version.version };
        followers.spawn(follow(id, publication, returned, Arc::clone(&self.versions), self.outgoing.clone()));
        let (peer, reason) = (self.peer.name.clone(), reason.to_string());
        tracing::info!(%version, %peer, payload_bytes, %path, ?reason, "A sidecar producer published.");
        (self.context.report)(Published { id: version, tensors, payload_bytes, path, reason, peer });
        Ok(answer)
    }

    /// Publishes a version in its turn. Until then its memory is neither mapped nor counted.
    async fn push(&self, topic: &Topic, draft: Draft, metadata: Metadata) -> Result<TrackedVersion, Refused> {
        let mut lease = self.context.topics.lease(self.peer.uid, topic).await?;
        let context = Arc::clone(&self.context);
        // Blocks: parses a large manifest, touches each page of a large memfd, and calls a GPU's driver.
        let ready = move || draft.ready(&context.staging, context.device.as_ref());
        let ready = tokio::task::spawn_blocking(ready).await;
        let Ready { held, returned, path } =
            ready.map_err(|error| (Refusal::UnfitMemory, error.to_string()))??;
        let manifest = held.manifest();
        let (tensors, payload_bytes) = (manifest.tensors().len(), manifest.payload_bytes());
        let publisher = self.context.topics.open(topic, &mut lease)?;
        match publisher.publish(held, metadata).await {
            Ok(publication) => Ok(TrackedVersion { publication, returned, path, tensors, payload_bytes }),
            Err(error @ PublishError::Expired { .. }) => {
                *lease = None; // The next publish reopens it.
                Err((Refusal::TopicEnded, error.to_string()))
            }
            Err(error) => Err((Refusal::BadManifest, error.to_string())),
        }
    }

    async fn end(&self, topic: &Topic, withdraw: bool) -> Result<(), Refused> {
        self.context.topics.check_may_publish(self.peer.uid, topic)?;
        match self.context.topics.end(self.peer.uid, topic, withdraw).await? {
            true => Ok(()),
            false => Err(not_open(topic)),
        }
    }
}

fn not_open(topic: &Topic) -> Refused {
    (Refusal::TopicEnded, format!("topic {topic} is not open: it was ended, withdrawn, or never published"))
}

/// Reports the progress of a version to its producer, until its memory is released.
async fn follow(
    id: PublicationId,
    publication: Publication,
    returned: Vec<Returned>,
    versions: Versions,
    outgoing: mpsc::Sender<ServerMessage>,
) {
    let all_returned = async {
        for returned in returned {
            returned.wait().await;
        }
    };
    let mut all_returned = std::pin::pin!(all_returned);
    let (mut commits, mut loads) = (publication.commits(), publication.loads());
    let mut progress =
        Progress { publication: id, committed: 0, loaded: 0, left_retention: false, is_released: false };
    while !progress.is_released {
        let has_left = progress.left_retention;
        tokio::select! {
            changed = commits.changed(), if !has_left => progress.left_retention = changed.is_err(),
            Ok(()) = loads.changed() => {}
            () = &mut all_returned => progress.is_released = true,
        }
        (progress.committed, progress.loaded) = (*commits.borrow_and_update(), *loads.borrow_and_update());
        progress.left_retention |= progress.is_released;
        if progress.is_released {
            versions.lock().remove(&id);
        }
        if outgoing.send(ServerMessage::Progress(progress)).await.is_err() {
            return;
        }
    }
}
