//! Publishing from another process on the same machine, over a Unix socket (SIDECAR.md §14): a training process hands its
//! tensors to a server that runs beside it, in the same container or pod.
//!
//! ```no_run
//! # async fn example(server: tensor_relay_server::Server) -> Result<(), Box<dyn std::error::Error>> {
//! use tensor_relay_server::{TopicOptions, sidecar::{PublishSocket, Producer, SealedVersion}, TensorFiles, Topic};
//!
//! // In the server:
//! let door = PublishSocket::open("/run/relay/publish.sock".as_ref(), &[])?;
//! let _open = server.publish_from(door, TopicOptions::default(), None, |published| println!("{}", published.id));
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
//! The tensors travel in a sealed memfd: the producer copies them into it once, and the server maps it and sends from there.
//! `/dev/shm` has no part in it. What each file here is: [`PublishSocket`] is the socket; `connection` is one producer, and `draft`
//! the version that it speaks of; `topics` outlive producers; [`Producer`] is the other end, with [`SealedVersion`] and
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
    sidecar::{ServerMessage, encode_server, text_that_fits},
};
use tokio::{
    net::UnixStream,
    task::{JoinHandle, JoinSet},
    time::Instant,
};
use topics::Topics;

/// How many rejected producers may be told the reason at once. The others only see the connection closed.
const TURNED_AWAY_MAX: usize = 8;

/// How long a rejected producer may take to read the reason.
const TURNING_AWAY: Duration = Duration::from_secs(1);

/// The least time between two warnings about rejected producers.
const WARNING: Duration = Duration::from_secs(1);

/// How long accepting pauses when the system has no descriptors left.
const REST: Duration = Duration::from_millis(200);

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
    /// The producer's reason for it.
    pub reason: String,
    /// The producer's process, for people.
    pub peer: String,
}

/// Accepts producers until it is dropped. Their topics and retained versions stay.
#[derive(Debug)]
pub struct Open {
    path: Box<Path>,
    accepting: JoinHandle<()>,
}

impl Open {
    /// The path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.accepting.abort(); // With it go the door and all that came through it.
    }
}

impl Server {
    /// Accepts local producers through `door`: their topics have `options`, and `report` is called for each version, on
    /// the runtime's thread.
    ///
    /// What they publish in host memory counts within [`Config::staged_bytes`](crate::Config::staged_bytes). With a `device`
    /// that processes can share, its memory is served from where their tensors lie, or from a copy on it.
    pub fn publish_from(
        &self,
        door: PublishSocket,
        options: TopicOptions,
        device: Option<Device>,
        report: impl Fn(Published) + Send + Sync + 'static,
    ) -> Open {
        let shared = self.shared();
        let agent = shared.config.agent.clone();
        let topics = Topics::new(Arc::clone(shared), options);
        let report = Box::new(report);
        let context = PublishContext { topics, staging: self.staging(), device, agent, report };
        let path = door.path().into();
        Open { path, accepting: tokio::spawn(accept(door, Arc::new(context))) }
    }
}

async fn accept(door: PublishSocket, context: Arc<PublishContext>) {
    // Separate, so that rejected producers take nobody's place.
    let (mut producers, mut turned_away) = (JoinSet::new(), JoinSet::new());
    let mut quotas = Quotas::default();
    let mut warned: Option<Instant> = None;
    loop {
        let stream = match door.accept().await {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!("A sidecar producer could not be let in: {error}.");
                tokio::time::sleep(REST).await;
                continue;
            }
        };
        while producers.try_join_next().is_some() {}
        while turned_away.try_join_next().is_some() {}
        match admit(&stream, &door, &mut quotas) {
            Ok((peer, share)) => {
                producers.spawn(connection::serve(stream, peer, share, Arc::clone(&context)));
            }
            Err(text) => {
                if warned.is_none_or(|at| at.elapsed() >= WARNING) {
                    warned = Some(Instant::now());
                    tracing::warn!("A producer was turned away from {}: {text}.", door.path().display());
                }
                if turned_away.len() < TURNED_AWAY_MAX {
                    turned_away.spawn(tokio::time::timeout(TURNING_AWAY, turn_away(stream, text)));
                }
            }
        }
    }
}

/// A process that publishes: its name in messages and logs, and the user that it runs as.
#[derive(Debug, Clone)]
struct Peer {
    name: String,
    uid: u32,
}

/// Identifies a producer by its peer credentials, checks that it may publish, and takes its share of its user's quota.
fn admit(stream: &UnixStream, door: &PublishSocket, quotas: &mut Quotas) -> Result<(Peer, Share), String> {
    let peer = stream
        .peer_cred()
        .map_err(|error| format!("the system does not say who it is: {error}"))?;
    let uid = peer.uid();
    // In another container without a shared PID namespace, it has no number.
    let name = match peer.pid().filter(|pid| *pid > 0) {
        Some(pid) => format!("process {pid} of user {uid}"),
        None => format!("a process of user {uid}"),
    };
    if door.is_nobody(uid) {
        return Err(format!(
            "the system says that its user is {uid}, which stands for every user who has no number here: let it run as one that \
             the server's container knows"
        ));
    }
    if !door.admits(uid) {
        let ours = rustix::process::geteuid().as_raw();
        return Err(format!(
            "user {uid} may not publish to this server, which runs as user {ours}: let it run as that user, or start the \
             server with --publish-uid {uid}"
        ));
    }
    match quotas.take(uid) {
        Some(share) => Ok((Peer { name, uid }, share)),
        None => Err(format!(
            "{PRODUCERS_MAX} producers of user {uid} are connected, and no more are let in: close one of them first"
        )),
    }
}

async fn turn_away(stream: UnixStream, text: String) {
    let (mut reader, writer) = split(stream);
    let written = writer
        .write(&encode_server(ServerMessage::Close { text: text_that_fits(text) }), None)
        .await;
    if written.is_ok() {
        // Unread bytes are read first: a socket closed over them loses its last message.
        let _ = reader.next().await;
    }
}
