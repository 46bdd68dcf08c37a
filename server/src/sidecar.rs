//! Publishing from another process on the same machine, over a Unix socket (SIDECAR.md §14): a training process passes
//! its tensors to a server in the same container or pod.
//!
//! ```no_run
//! # async fn example(server: tensor_relay_server::Server) -> Result<(), Box<dyn std::error::Error>> {
//! use tensor_relay_server::{TopicOptions, sidecar::{PublishSocket, Producer, SealedVersion}, TensorFiles, Topic};
//!
//! // In the server:
//! let socket = PublishSocket::open("/run/relay/publish.sock".as_ref(), &[])?;
//! let _open = server.publish_from(socket, TopicOptions::default(), None, |published| println!("{}", published.id));
//!
//! // In the other process:
//! let producer = Producer::connect("/run/relay/publish.sock".as_ref()).await?;
//! let files = TensorFiles::open("policy.safetensors".as_ref())?;
//! let version = files.seal(producer.terms())?;
//! let mut publication = producer.publish(Topic::new("policy")?, version, vec![]).await?;
//! publication.committed(1, std::time::Duration::from_secs(60)).await?;
//! # Ok(()) }
//! ```
//!
//! Tensors in host memory are passed in a sealed memfd, without `/dev/shm`: the producer copies them into it once, and
//! the server maps it and sends from there. Tensors on a GPU are passed in shared GPU memory, if both ends can share it
//! (`gpu`). The server's side is [`PublishSocket`], `connection` for each producer, `draft` for the version being
//! received, and `topics`, which outlive producers. The producer's side is [`Producer`], [`SealedVersion`] and
//! [`Publication`].

mod channel;
mod connection;
mod draft;
mod gpu;
mod producer;
mod publication;
mod quota;
mod socket;
#[cfg(test)]
mod tests;
mod topics;
mod version;

pub use gpu::PublishDeviceError;
pub use producer::{ConnectError, Producer, PublishError};
pub use publication::{ConnectionLost, Publication};
pub use socket::{PublishSocket, PublishSocketError};
pub use tensor_relay_protocol::sidecar::{MemoryKind, Refusal};
pub use version::{SealError, SealedVersion, TensorWriter, Terms};

use crate::{Device, Server, TopicOptions};
use channel::split;
use connection::PublishContext;
use quota::{PRODUCERS_MAX, Quotas, Share};
use std::{path::Path, sync::Arc, time::Duration};
use tensor_relay_protocol::{
    VersionId,
    sidecar::{ServerMessage, encode_server},
};
use tokio::{
    net::UnixStream,
    task::{JoinHandle, JoinSet},
    time::Instant,
};
use topics::Topics;

/// The maximum number of refused producers that are sent the reason concurrently. The connections of further ones are
/// closed without it.
const REFUSED_MAX: usize = 8;

/// The deadline for a refused producer to read the reason.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);

/// The minimum time between two warnings about refused producers.
const WARNING_INTERVAL: Duration = Duration::from_secs(1);

/// The pause after a failed accept, perhaps because the system has no descriptors left.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(200);

/// A version published by a producer on the same machine.
#[derive(Debug, Clone)]
pub struct Published {
    /// The version.
    pub id: VersionId,
    /// The number of tensors.
    pub tensors: usize,
    /// The size of the payload.
    pub payload_bytes: u64,
    /// The kind of memory.
    pub path: MemoryKind,
    /// The producer's reason for this kind of memory.
    pub reason: String,
    /// The producer's process, for logs.
    pub peer: String,
}

/// Accepts producers until it is dropped. Their topics and retained versions stay, except versions in the producers'
/// own GPU memory.
#[derive(Debug)]
pub struct OpenSocket {
    path: Box<Path>,
    accepting: JoinHandle<()>,
}

impl OpenSocket {
    /// The path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for OpenSocket {
    fn drop(&mut self) {
        self.accepting.abort(); // Drops the socket and the producers' connections.
    }
}

impl Server {
    /// Accepts local producers through `socket`. Their topics have `options`; `report` is called for each version, on a
    /// thread of the runtime.
    ///
    /// Versions in host memory count within [`Config::staged_bytes`](crate::Config::staged_bytes). With a `device` that
    /// processes can share, tensors on it are served in place, or from a copy on it.
    pub fn publish_from(
        &self,
        socket: PublishSocket,
        options: TopicOptions,
        device: Option<Device>,
        report: impl Fn(Published) + Send + Sync + 'static,
    ) -> OpenSocket {
        let shared = self.shared();
        let agent = shared.config.agent.clone();
        let topics = Topics::new(Arc::clone(shared), options);
        let report = Box::new(report);
        let context = PublishContext { topics, staging: self.staging(), device, agent, report };
        let path = socket.path().into();
        OpenSocket { path, accepting: tokio::spawn(accept(socket, Arc::new(context))) }
    }
}

async fn accept(socket: PublishSocket, context: Arc<PublishContext>) {
    // Separate, because the number of refused producers has its own bound.
    let (mut producers, mut refused) = (JoinSet::new(), JoinSet::new());
    let mut quotas = Quotas::default();
    let mut warned: Option<Instant> = None;
    loop {
        let stream = match socket.accept().await {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!("A sidecar producer could not be accepted: {error}.");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            }
        };
        while producers.try_join_next().is_some() {}
        while refused.try_join_next().is_some() {}
        match admit(&stream, &socket, &mut quotas) {
            Ok((peer, share)) => {
                producers.spawn(connection::serve(stream, peer, share, Arc::clone(&context)));
            }
            Err(text) => {
                if warned.is_none_or(|at| at.elapsed() >= WARNING_INTERVAL) {
                    warned = Some(Instant::now());
                    tracing::warn!("A sidecar producer was refused at {}: {text}.", socket.path().display());
                }
                if refused.len() < REFUSED_MAX {
                    refused.spawn(tokio::time::timeout(REFUSAL_TIMEOUT, refuse(stream, text)));
                }
            }
        }
    }
}

/// A producer's process: its name for messages and logs, and its user.
#[derive(Debug, Clone)]
struct Peer {
    name: String,
    uid: u32,
}

/// Identifies a producer by its socket credentials, checks that it may publish, and takes a share of its user's quota.
fn admit(stream: &UnixStream, socket: &PublishSocket, quotas: &mut Quotas) -> Result<(Peer, Share), String> {
    let peer = stream
        .peer_cred()
        .map_err(|error| format!("the producer's user cannot be determined: {error}"))?;
    let uid = peer.uid();
    // A process in another container has no pid here, unless the containers share a PID namespace.
    let name = match peer.pid().filter(|pid| *pid > 0) {
        Some(pid) => format!("process {pid} of user {uid}"),
        None => format!("a process of user {uid}"),
    };
    if socket.is_overflow(uid) {
        return Err(format!(
            "its user is {uid}, which stands for every user without a number in this container: run it as a user that \
             exists in the server's container"
        ));
    }
    if !socket.admits(uid) {
        let ours = rustix::process::geteuid().as_raw();
        return Err(format!(
            "user {uid} may not publish to this server, which runs as user {ours}: run the producer as that user, or start \
             the server with --publish-uid {uid}"
        ));
    }
    match quotas.take(uid) {
        Some(share) => Ok((Peer { name, uid }, share)),
        None => Err(format!(
            "{PRODUCERS_MAX} producers of user {uid} are connected, which is the maximum: close one of them first"
        )),
    }
}

async fn refuse(stream: UnixStream, text: String) {
    let (mut reader, writer) = split(stream);
    let written = writer
        .write(&encode_server(ServerMessage::Close { text: text.into() }), None)
        .await;
    if written.is_ok() {
        // Reads the pending bytes: closing a socket with unread bytes discards the last sent message.
        let _ = reader.next().await;
    }
}
