//! The connections to peers: made while the origin names them, with the pin and the grant that it gave.

use super::{FIRST_PEER, Link, OtherServers, Server, give_up, is_peer};
use crate::{
    ClientError, Config, Lanes,
    backoff::Backoff,
    connection::{CloseReason, Connection, Target},
    peers::{PEERS_MAX, PeerReport, PeerReports, PeerState, Peers},
};
use std::{sync::Arc, time::Duration};
use tensor_relay_protocol::{
    CloseCode, Feature, LaneGrant, PeerAddress, Source, SubscriptionId, Transport as AddressKind,
};
use tensor_relay_transport::{Connector, Fingerprint, LaneKind, Transport};

/// The deadline for the connection to a peer, its `Welcome` included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How a session connects to peers, and those that it knows.
#[derive(Debug)]
pub(crate) struct PeerLinks {
    /// Shows this member's key.
    connector: Connector,
    config: Config,
    peers: Peers,
    /// The peer at each index, from [`FIRST_PEER`] on.
    linked: [Option<Linked>; PEERS_MAX],
    reports: PeerReports,
}

/// A peer that has an index.
#[derive(Debug, Clone)]
struct Linked {
    key: [u8; 32],
    addresses: Vec<PeerAddress>,
}

/// A connected peer that may be asked for a version.
#[derive(Debug)]
pub(crate) struct UsablePeer {
    pub(crate) link: Link,
    pub(crate) index: usize,
    pub(crate) key: [u8; 32],
    pub(crate) grant: LaneGrant,
}

impl PeerLinks {
    /// Connects through `connector`, which shows the certificate with the key `own`.
    pub(crate) fn new(connector: Connector, own: Fingerprint, config: &Config, reports: PeerReports) -> Self {
        Self {
            connector,
            // One lane: a peer is one of many.
            config: Config { lanes: Lanes::Fixed(1), identity: None, sources: vec![], ..config.clone() },
            peers: Peers::new(own),
            linked: [const { None }; PEERS_MAX],
            reports,
        }
    }

    pub(super) fn config(&self) -> &Config {
        &self.config
    }

    /// Where a peer is, without any token; `None` if it cannot be reached over the allowed transports.
    fn target(&self, source: &Source) -> Option<Target> {
        let allowed = self.connector.transport();
        let usable = source
            .addresses
            .iter()
            .filter(|it| kind(it).is_some_and(|kind| allowed.allows(kind)));
        let usable: Vec<_> = usable.collect();
        let is_all = |wanted| usable.iter().all(|it| kind(it) == Some(wanted));
        let transport = match usable.first() {
            None => return None,
            Some(_) if is_all(LaneKind::Tcp) => Transport::Tcp,
            Some(_) if is_all(LaneKind::Quic) => Transport::Quic,
            Some(_) => Transport::Auto,
        };
        let mut hosts: Vec<_> = usable.iter().map(|it| it.address.to_string()).collect();
        hosts.dedup();
        Some(Target {
            connector: self.connector.clone().with_transport(transport),
            hosts,
            keys: vec![Fingerprint(source.key)],
            token: None,
            registry: Arc::default(),
        })
    }

    fn linked(&self, index: usize) -> Option<&Linked> {
        self.linked.get(index.checked_sub(FIRST_PEER)?)?.as_ref()
    }

    fn report(&self, index: usize, state: PeerState) {
        if let Some(Linked { key, addresses }) = self.linked(index).cloned() {
            self.reports.set(PeerReport { key: Fingerprint(key), addresses, state });
        }
    }
}

/// The kind of lane to an address.
fn kind(address: &PeerAddress) -> Option<LaneKind> {
    match address.transport {
        AddressKind::Tcp => Some(LaneKind::Tcp),
        AddressKind::Quic => Some(LaneKind::Quic),
        _ => None,
    }
}

/// Connects to a peer.
pub(super) async fn open(target: &Target, config: &Config) -> Result<Connection, ClientError> {
    let opened = tokio::time::timeout(CONNECT_TIMEOUT, Connection::open(target, config)).await;
    let (connection, welcome) =
        opened.unwrap_or(Err(ClientError::NoWelcome { timeout_ms: CONNECT_TIMEOUT.as_millis() }))?;
    for feature in [Feature::Peers, Feature::Get] {
        welcome.features.permit("a peer's Welcome", feature)?;
    }
    Ok(connection)
}

impl OtherServers {
    /// Handles the list of peers for the version that a subscription receives: connects to those that are new, and
    /// disconnects from those that no subscription needs any more.
    pub(crate) fn name_peers(&mut self, reception: SubscriptionId, sources: Vec<Source>) {
        let Some(links) = &mut self.peers else { return };
        links.peers.name(reception, sources);
        self.connect_peers();
    }

    /// Handles the end of a subscription's version. Connections to its peers are kept, for the next version.
    pub(crate) fn handle_version_ended(&mut self, reception: SubscriptionId) {
        if let Some(links) = &mut self.peers {
            links.peers.handle_version_ended(reception);
            for (_, server) in self.servers.range_mut(FIRST_PEER..) {
                server.unread.remove(&reception);
            }
        }
    }

    /// Disconnects from the peers of the subscriptions that have ended.
    pub(crate) fn forget_peers(&mut self, is_ended: impl Fn(SubscriptionId) -> bool) {
        if self.peers.as_mut().is_some_and(|links| links.peers.forget(is_ended)) {
            self.connect_peers();
        }
    }

    /// The connected peers of which chunks of a subscription's version may be ordered.
    pub(crate) fn peers_of(&self, reception: SubscriptionId) -> Vec<UsablePeer> {
        let Some(links) = &self.peers else { return vec![] };
        let connected = self
            .servers
            .range(FIRST_PEER..)
            .filter(|(_, server)| server.connection.is_some());
        let usable = connected.filter_map(|(index, _)| {
            let key = links.linked(*index)?.key;
            let grant = links.peers.grant(reception, &key)?;
            Some(UsablePeer { link: Link::Other(*index), index: *index, key, grant })
        });
        usable.collect()
    }

    /// Lets so many bytes that a subscription ordered of a peer arrive unread, in addition to those of others. Has no effect
    /// for a server. The window is not lowered: the next orders may be as many.
    pub(crate) fn allow_unread_of_peer(&mut self, index: usize, reception: SubscriptionId, bytes: u64) {
        let server = self.servers.get_mut(&index).filter(|_| is_peer(index));
        let Some(Server { connection: Some(connection), unread, .. }) = server else { return };
        let allowed = unread.entry(reception).or_default();
        if bytes > *allowed {
            *allowed = bytes;
            connection.lanes().allow_unread(unread.values().sum());
        }
    }

    /// The key of the peer at an index; `None` for a server.
    pub(crate) fn peer_key(&self, index: usize) -> Option<[u8; 32]> {
        Some(self.peers.as_ref()?.linked(index)?.key)
    }

    /// Closes the connection to a peer that sent other bytes than the origin named, and uses it no more in this session.
    /// Returns its key.
    pub(crate) fn bar_peer(&mut self, index: usize) -> Option<[u8; 32]> {
        let links = self.peers.as_mut()?;
        let Linked { key, addresses } = links.linked(index).cloned()?;
        links.peers.bar(key);
        links.report(index, PeerState::Barred);
        let addresses: Vec<_> = addresses.iter().map(|it| it.address).collect();
        tracing::warn!(
            ?addresses, key = %Fingerprint(key),
            "A peer sent other bytes than the server vouches for. They were discarded, and it is not used any more: the \
             program at this address is broken, or hostile."
        );
        self.disconnect_peer(
            index,
            CloseCode::ProtocolViolation,
            "the chunk is not encoded as its origin encoded it",
        );
        Some(key)
    }

    /// Records why a peer is not used at the moment.
    pub(super) fn note_unused(&self, index: usize, reason: String) {
        let Some(links) = &self.peers else { return };
        if let Some(Linked { key, addresses }) = links.linked(index) {
            let addresses: Vec<_> = addresses.iter().map(|it| it.address).collect();
            tracing::info!(?addresses, key = %Fingerprint(*key), reason, "A peer is not used at the moment.");
        }
        links.report(index, PeerState::NotUsed(reason));
    }

    /// Handles the end of an attempt to connect to a peer; returns whether it succeeded.
    pub(super) fn handle_peer_opened(
        &mut self,
        index: usize,
        opened: Result<Connection, ClientError>,
    ) -> bool {
        let (Some(server), Some(links)) = (self.servers.get_mut(&index), &self.peers) else { return false };
        match opened {
            Ok(connection) => {
                tracing::info!(peer = %connection.control().peer(), "A peer is connected.");
                server.connection = Some(connection);
                links.report(index, PeerState::Connected);
                true
            }
            Err(error) => {
                self.note_unused(index, error.to_string());
                self.handle_peer_closed(index);
                false
            }
        }
    }

    /// Handles the end of a connection to a peer, or of an attempt: tries again while the peer is needed.
    pub(super) fn handle_peer_closed(&mut self, index: usize) {
        let Some(links) = &mut self.peers else { return };
        let key = links.linked(index).map(|linked| linked.key);
        if key.is_some_and(|key| links.peers.is_needed(&key)) {
            return self.open_later(index);
        }
        if let Some(place) = links.linked.get_mut(index - FIRST_PEER) {
            *place = None;
        }
        self.servers.remove(&index);
        self.connect_peers(); // Its place is free.
    }

    /// Connects to the peers that are needed, as far as there are places, and disconnects from those that are not named.
    fn connect_peers(&mut self) {
        let Some(links) = &self.peers else { return };
        let is_unnamed = |linked: &Linked| !links.peers.is_named(&linked.key);
        let unnamed: Vec<_> = (FIRST_PEER..)
            .zip(&links.linked)
            .filter(|(_, linked)| linked.as_ref().is_some_and(is_unnamed))
            .map(|(index, _)| index)
            .collect();
        for index in unnamed {
            self.disconnect_peer(index, CloseCode::Done, "the server does not name this peer any more");
        }
        let Some(links) = &mut self.peers else { return };
        let in_use: Vec<_> = links.linked.iter().flatten().map(|linked| linked.key).collect();
        let mut opening = vec![];
        for source in links.peers.missing(&in_use) {
            let linked = Linked { key: source.key, addresses: source.addresses.clone() };
            let Some(target) = links.target(&source) else {
                let reason = "it has no address of a transport that this client may use";
                let state = PeerState::NotUsed(reason.into());
                let (key, addresses) = (Fingerprint(linked.key), linked.addresses);
                links.reports.set(PeerReport { key, addresses, state });
                continue;
            };
            let Some(place) = links.linked.iter().position(Option::is_none) else { break };
            links.linked[place] = Some(linked);
            let index = FIRST_PEER + place;
            links.report(index, PeerState::Connecting);
            opening.push((index, Server { backoff: Backoff::of_peer(), ..Server::new(target) }));
        }
        for (index, server) in opening {
            self.servers.insert(index, server);
            self.open(index, Duration::ZERO);
        }
    }

    /// Disconnects from a peer that will not be needed again. Its place is free at once if it is not connected, and
    /// otherwise when its last chunks are decoded.
    fn disconnect_peer(&mut self, index: usize, code: CloseCode, text: &str) {
        match self.take_connection(index) {
            Some(connection) => {
                if let (CloseCode::Done, Some(links)) = (code, &self.peers) {
                    links.report(index, PeerState::NotUsed(text.into()));
                }
                let reason = CloseReason { code, text: text.into(), by_user: false };
                self.tasks.spawn(give_up(index, connection, reason));
            }
            // It is being closed already, or it is being connected, which ends with the server.
            None => {
                let is_connecting = self.servers.get(&index).is_some_and(|server| server.attempt.is_some());
                if let Some(links) = self.peers.as_mut().filter(|_| is_connecting) {
                    links.report(index, PeerState::NotUsed(text.into()));
                    links.linked[index - FIRST_PEER] = None;
                    self.servers.remove(&index);
                }
            }
        }
    }
}
