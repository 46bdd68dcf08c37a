//! [`Sharing`]: how a consumer shares what it receives, with processes of its host and with subscribers on other hosts.

use crate::serve;
use anyhow::Context;
use std::{
    net::SocketAddr,
    path::{self, PathBuf},
    sync::Arc,
    time::Duration,
};
use tensor_relay_client::{Config, EndReason, Membership, PeerAddress, PeerTransport, Site, Snapshot, Topic};
use tensor_relay_server::{
    self as server, Access, ForwardOptions, Forwarder, Identity, Listener, Rules, Server, Tuning,
};

/// The maximum number of clients: processes of one host, and takers.
const SESSIONS_MAX: usize = 256;

/// The versions that may be on their way to clients of this host while the next is received; their memory is bounded by
/// that of the client.
const VERSIONS_HELD_MAX: usize = 64;

/// With whom a consumer shares.
#[derive(Debug, Clone, Default)]
pub struct SharingOptions {
    /// The socket for processes of this host, if they may take versions.
    pub host: Option<HostOptions>,
    /// Whether chunks are taken from other subscribers, and offered to them.
    pub swarm: Option<SwarmOptions>,
    /// The maximum memory for versions; `None` without a limit.
    pub memory_bytes: Option<u64>,
}

/// How processes of this host take versions.
#[derive(Debug, Clone)]
pub struct HostOptions {
    /// The path of the socket.
    pub path: PathBuf,
    /// The permissions of its file.
    pub mode: u32,
    /// The users who may take, besides the own one and root.
    pub uids: Vec<u32>,
}

/// How chunks are taken from other subscribers.
#[derive(Debug, Clone, Default)]
pub struct SwarmOptions {
    /// Where this client is.
    pub site: Site,
    /// Where own chunks are offered to them. `None`: chunks are only taken.
    pub offer: Option<OfferOptions>,
}

/// How chunks are offered to other subscribers.
#[derive(Debug, Clone)]
pub struct OfferOptions {
    /// The address to listen on.
    pub listen: SocketAddr,
    /// The maximum rate in bytes per second; `None` without a limit.
    pub rate: Option<u64>,
    /// The maximum memory for encoded chunks of each version; `None` for the default.
    pub kept_bytes: Option<u64>,
}

/// What a consumer shares, until this is closed or dropped.
#[derive(Debug)]
pub struct Sharing {
    /// The server of those who take; `None` if nobody may.
    server: Option<Server>,
    membership: Option<Membership>,
    has_host: bool,
}

impl Sharing {
    /// Opens the socket and the port. Call it before connecting, on a runtime: those who take wait for versions.
    ///
    /// # Errors
    /// When one of them cannot be opened, or the container has too little memory.
    pub fn open(options: &SharingOptions) -> anyhow::Result<Self> {
        let SharingOptions { host, swarm, memory_bytes } = options;
        let offer = swarm.as_ref().and_then(|swarm| swarm.offer.as_ref());
        // A key for this process alone: others learn it, and it says nothing of whom they take from.
        let identity = swarm.as_ref().map(|_| Identity::ephemeral().map(Arc::new)).transpose()?;
        let network = match (offer, &identity) {
            (Some(offer), Some(identity)) => {
                let listener = Listener::bind(offer.listen, identity, Tuning::default());
                Some(listener.context("cannot listen for other subscribers; choose another --share-listen")?)
            }
            _ => None,
        };
        let socket = host
            .as_ref()
            .map(|host| serve::open_socket(&host.path, host.mode))
            .transpose()?;
        let listener = match (network, socket) {
            (Some(network), Some(socket)) => Some(network.and_socket(socket)),
            (Some(network), None) => Some(network),
            (None, Some(socket)) => Some(Listener::on_socket(socket, Tuning::default())),
            (None, None) => None,
        };
        let uids = host.as_ref().map_or(&[][..], |host| &host.uids);
        let server = listener.map(|listener| start(listener, uids, *memory_bytes)).transpose()?;
        let membership = identity.zip(swarm.as_ref()).map(|(identity, SwarmOptions { site, .. })| {
            let site = site.clone();
            match (&server, offer) {
                (Some(server), Some(offer)) => offering(server, identity, site, offer),
                _ => Membership { identity, addresses: vec![], site, forward: None },
            }
        });
        Ok(Self { server, membership, has_host: host.is_some() })
    }

    /// The configuration of a client that shares so.
    pub fn configure(&self, config: Config) -> Config {
        let is_offered = self.server.is_some();
        Config {
            // Those who take need memory that users cannot write to, and processes of this host need to map it.
            shareable: self.has_host || is_offered && config.volatile_snapshots,
            versions_held_max: match self.has_host && !config.volatile_snapshots {
                true => config.versions_held_max.max(VERSIONS_HELD_MAX),
                false => config.versions_held_max,
            },
            sharing: self.membership.clone(),
            ..config
        }
    }

    /// The absolute path of the socket for processes of this host.
    pub fn socket_path(&self) -> Option<PathBuf> {
        let path = self.server.as_ref()?.socket_path()?;
        Some(path::absolute(path).unwrap_or_else(|_| path.into()))
    }

    /// Offers `topic` to processes of this host, under its own name; `None` if they may not take.
    pub fn topic(&self, topic: &Topic) -> Option<SharedTopic> {
        let server = self.server.as_ref().filter(|_| self.has_host)?;
        Some(SharedTopic { forwarder: server.forwarder(topic.clone()), is_refusal_logged: false })
    }

    /// Tells those who take that the server ends, lets transfers in progress finish for the given time, and removes the
    /// socket.
    pub async fn close(self, grace: Duration) {
        if let Some(server) = self.server {
            server.shutdown(grace).await;
        }
    }
}

/// Starts the server of those who take.
fn start(listener: Listener, uids: &[u32], memory_bytes: Option<u64>) -> anyhow::Result<Server> {
    let config = server::Config {
        staged_bytes: memory_bytes.unwrap_or(u64::MAX),
        sessions_max: SESSIONS_MAX,
        ..server::Config::default()
    }
    .for_container(None);
    let reserved = config.reserve()?;
    let server = Server::start(listener, Access::new(Rules::for_users(uids)), config);
    if let Some(address) = server.network_address() {
        tracing::info!(%address, "Other subscribers take chunks here.");
    }
    Ok(server.with_reservation(Some(reserved)))
}

/// The membership of a client whose chunks `server` offers.
fn offering(server: &Server, identity: Arc<Identity>, site: Site, offer: &OfferOptions) -> Membership {
    let options =
        ForwardOptions { key: identity.fingerprint(), kept_bytes: offer.kept_bytes, rate: offer.rate };
    let address = server.local_address();
    let transports = [PeerTransport::Tcp, PeerTransport::Quic];
    let addresses = transports.map(|transport| PeerAddress { transport, address }).into();
    Membership { identity, addresses, site, forward: Some(server.forward(options)) }
}

/// One topic on offer to this host.
#[derive(Debug)]
pub struct SharedTopic {
    forwarder: Forwarder,
    is_refusal_logged: bool,
}

impl SharedTopic {
    /// Offers `snapshot` instead of the earlier version.
    ///
    /// # Errors
    /// When it cannot be offered.
    pub async fn offer(&mut self, snapshot: &Snapshot) -> anyhow::Result<()> {
        let id = snapshot.id();
        let Some(source) = snapshot.source() else {
            if !std::mem::replace(&mut self.is_refusal_logged, true) {
                tracing::warn!(
                    version = %id,
                    "A version is not offered to this host: it is a part, in pieces, or in memory that users write to."
                );
            }
            return Ok(());
        };
        let (manifest, metadata) = (snapshot.manifest().clone(), snapshot.metadata().to_vec());
        let offered = self.forwarder.offer((id.epoch, id.version), manifest, source, metadata).await;
        offered.with_context(|| format!("cannot offer {id} to this host"))?;
        Ok(())
    }

    /// Ends the topic, as it ended at its origin.
    pub fn end(self, reason: EndReason) {
        self.forwarder.end(reason);
    }
}
