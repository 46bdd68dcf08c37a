//! A peer that speaks raw QUIC or TCP and can send arbitrary bytes.

mod quic;
mod tcp;
mod tls;

use rustls::crypto::aws_lc_rs;
use std::net::SocketAddr;
use tensor_relay_protocol::{
    ClientMessage, CloseCode, CodecSet, Feature, FeatureSet, Hello, InstanceId, LaneGrant, LaneOffer,
    ServerMessage, Subscribe, SubscriptionId, Welcome, decode_frame_length, encode_client, encode_server,
};
use tensor_relay_tests::{
    pair::{Sim, token, topic, transport},
    simnet::Host,
};
use tensor_relay_transport::Transport;
use tokio::sync::mpsc;

use quic::connect_with_tls;
pub(crate) use tls::client_tls;

/// The instance of a scripted server.
pub(crate) const INSTANCE: InstanceId = InstanceId([8; 16]);

/// The number of bytes read at once.
const READ_BYTES: usize = 4 << 10;

/// One endpoint of a connection, with its control stream.
pub(crate) struct Peer {
    pub(crate) connection: Connection,
    control: Control,
    /// Received bytes of the control stream that belong to later messages.
    unread: Vec<u8>,
    listener: Option<Listener>,
}

/// A connection over the transport of simulated sessions.
#[derive(Clone)]
pub(crate) enum Connection {
    Quic { connection: quinn::Connection, _endpoint: quinn::Endpoint },
    Tcp(tcp::Connection),
}

/// Both directions of the control stream.
pub(crate) enum Control {
    Quic(quinn::SendStream, quinn::RecvStream),
    Tcp { connection: tcp::Connection, incoming: mpsc::UnboundedReceiver<Vec<u8>> },
}

/// An outgoing data stream. Dropping it finishes it.
pub(crate) enum DataOut {
    Quic(quinn::SendStream),
    Tcp(tcp::DataOut),
}

/// Accepts the connections of a client.
#[derive(Clone)]
enum Listener {
    Quic(quinn::Endpoint),
    Tcp(tcp::Listener),
}

/// How the tested side ended a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End {
    Closed(Option<CloseCode>, String),
    /// TLS failed.
    Alert,
    Other(String),
}

/// Whether simulated sessions use TCP, for which a test has no meaning: prints the reason, `why`.
pub(crate) fn is_skipped_over_tcp(why: &str) -> bool {
    let is_skipped = transport() == Transport::Tcp;
    if is_skipped {
        println!("skipped over TCP: {why}");
    }
    is_skipped
}

impl Connection {
    /// Connects to the server without opening a control stream.
    pub(crate) async fn open(sim: &Sim, number: u8) -> Self {
        Self::open_over(transport(), sim, number, client_tls(aws_lc_rs::default_provider())).await
    }

    /// Connects over `transport` with a custom TLS configuration.
    pub(crate) async fn open_over(
        transport: Transport,
        sim: &Sim,
        number: u8,
        tls: rustls::ClientConfig,
    ) -> Self {
        match transport {
            Transport::Tcp => Self::Tcp(tcp::Connection::connect(sim, number, tls).await),
            _ => {
                let (_endpoint, connection) = connect_with_tls(sim, number, tls).await;
                Self::Quic { connection, _endpoint }
            }
        }
    }

    /// Opens the control stream; `None` if the connection has ended. Over TCP it is open from the start.
    pub(crate) async fn open_control(&self) -> Option<Control> {
        match self {
            Self::Quic { connection, .. } => {
                let (out, incoming) = connection.open_bi().await.ok()?;
                Some(Control::Quic(out, incoming))
            }
            Self::Tcp(connection) => Some(Control::tcp(connection)),
        }
    }

    async fn accept_control(&self) -> Control {
        match self {
            Self::Quic { connection, .. } => {
                let (out, incoming) = connection.accept_bi().await.unwrap();
                Control::Quic(out, incoming)
            }
            Self::Tcp(connection) => Control::tcp(connection),
        }
    }

    /// Opens a data stream; `None` if the connection has ended.
    pub(crate) async fn open_data(&self) -> Option<DataOut> {
        match self {
            Self::Quic { connection, .. } => connection.open_uni().await.ok().map(DataOut::Quic),
            Self::Tcp(connection) => Some(DataOut::Tcp(tcp::DataOut::open(connection))),
        }
    }

    /// Waits for the next data stream; `None` if the connection has ended.
    pub(crate) async fn accept_data(&self) -> Option<DataIn> {
        match self {
            Self::Quic { connection, .. } => connection.accept_uni().await.ok().map(DataIn::Quic),
            Self::Tcp(connection) => connection.accept_data().await.map(DataIn::Tcp),
        }
    }

    pub(crate) fn close(&self, code: u32) {
        match self {
            Self::Quic { connection, .. } => connection.close(code.into(), b""),
            Self::Tcp(connection) => connection.close(code),
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        match self {
            Self::Quic { connection, .. } => connection.close_reason().is_none(),
            Self::Tcp(connection) => connection.end().is_none(),
        }
    }

    /// Waits until the connection has ended.
    pub(crate) async fn ended(&self) -> End {
        match self {
            Self::Quic { connection, .. } => connection.closed().await.into(),
            Self::Tcp(connection) => connection.closed().await,
        }
    }

    /// Waits until the tested side closes the connection, and returns the code and text.
    pub(crate) async fn wait_for_close(&self) -> (Option<CloseCode>, String) {
        match self.ended().await {
            End::Closed(code, text) => (code, text),
            other => panic!("{other:?}"),
        }
    }
}

impl Control {
    fn tcp(connection: &tcp::Connection) -> Self {
        Self::Tcp { incoming: connection.take_control(), connection: connection.clone() }
    }

    /// Writes `bytes`. Errors are ignored: the tested side may have closed the connection, as it should.
    pub(crate) async fn write(&mut self, bytes: &[u8]) {
        match self {
            Self::Quic(out, _) => drop(out.write_all(bytes).await),
            Self::Tcp { connection, .. } => connection.send_control(bytes),
        }
    }

    /// The next bytes; `None` at the end of the stream or of the connection.
    pub(crate) async fn read(&mut self) -> Option<Vec<u8>> {
        match self {
            Self::Quic(_, incoming) => read_quic(incoming).await,
            Self::Tcp { incoming, .. } => incoming.recv().await,
        }
    }

    fn finish(&mut self) {
        match self {
            Self::Quic(out, _) => out.finish().unwrap(),
            Self::Tcp { connection, .. } => connection.finish_control(),
        }
    }

    fn stop(&mut self) {
        match self {
            Self::Quic(_, incoming) => incoming.stop(0u32.into()).unwrap(),
            Self::Tcp { connection, .. } => connection.stop_reading(),
        }
    }
}

impl DataOut {
    /// Writes `bytes`. Errors are ignored, as by [`Control::write`].
    pub(crate) async fn write(&mut self, bytes: &[u8]) {
        match self {
            Self::Quic(stream) => drop(stream.write_all(bytes).await),
            Self::Tcp(stream) => stream.write(bytes),
        }
    }

    pub(crate) fn finish(&mut self) {
        match self {
            Self::Quic(stream) => drop(stream.finish()),
            Self::Tcp(stream) => stream.finish(),
        }
    }
}

/// An incoming data stream.
pub(crate) enum DataIn {
    Quic(quinn::RecvStream),
    Tcp(mpsc::UnboundedReceiver<Vec<u8>>),
}

impl DataIn {
    /// The next bytes; `None` at the end of the stream or of the connection.
    pub(crate) async fn read(&mut self) -> Option<Vec<u8>> {
        match self {
            Self::Quic(stream) => read_quic(stream).await,
            Self::Tcp(pieces) => pieces.recv().await,
        }
    }

    pub(crate) async fn read_to_end(&mut self) -> Vec<u8> {
        let mut bytes = vec![];
        while let Some(piece) = self.read().await {
            bytes.extend(piece);
        }
        bytes
    }
}

async fn read_quic(stream: &mut quinn::RecvStream) -> Option<Vec<u8>> {
    let mut buffer = vec![0; READ_BYTES];
    let bytes = stream.read(&mut buffer).await.ok()??;
    buffer.truncate(bytes);
    Some(buffer)
}

impl Listener {
    /// Listens as the server of `sim`.
    fn new(sim: &Sim) -> Self {
        Self::bind(sim, &sim.server_host(), sim.server_address())
    }

    fn bind(sim: &Sim, host: &Host, address: SocketAddr) -> Self {
        let tls = tls::server_tls(sim);
        match transport() {
            Transport::Tcp => Self::Tcp(tcp::Listener::new(host, address, tls)),
            _ => Self::Quic(quic::listen(host, address, tls)),
        }
    }

    async fn accept(&self) -> Connection {
        match self {
            Self::Quic(endpoint) => {
                let connection = endpoint.accept().await.unwrap().await.unwrap();
                Connection::Quic { connection, _endpoint: endpoint.clone() }
            }
            Self::Tcp(listener) => Connection::Tcp(listener.accept().await),
        }
    }
}

impl Peer {
    /// A client that has sent nothing yet.
    pub(crate) async fn client(sim: &Sim, number: u8) -> Self {
        let connection = Connection::open(sim, number).await;
        let control = connection.open_control().await.unwrap();
        Self { connection, control, unread: vec![], listener: None }
    }

    /// A client that has received `Welcome`.
    pub(crate) async fn welcomed_client(sim: &Sim, number: u8) -> Self {
        let mut peer = Self::client(sim, number).await;
        peer.send_to_server(ClientMessage::Hello(hello())).await;
        assert!(matches!(peer.receive_from_server().await, ServerMessage::Welcome(_)));
        peer
    }

    /// A server whose first client was sent `Welcome` and has subscribed.
    pub(crate) async fn server(sim: &Sim) -> (Self, Subscribe) {
        Self::server_offering(sim, None).await
    }

    /// A server like [`Peer::server`] that is the second one of `sim`.
    pub(crate) async fn other_server(sim: &Sim) -> (Self, Subscribe) {
        let listener = Listener::bind(sim, &sim.other_host(), sim.other_address());
        subscriber(Self::accept_client(listener, None, FeatureSet::OF_SERVER).await)
    }

    /// A server like [`Peer::server`] that offers no features.
    pub(crate) async fn server_without_features(sim: &Sim) -> (Self, Subscribe) {
        subscriber(Self::accept_client(Listener::new(sim), None, FeatureSet::default()).await)
    }

    /// A server like [`Peer::server`] that offers `lanes`.
    pub(crate) async fn server_offering(sim: &Sim, lanes: Option<LaneOffer>) -> (Self, Subscribe) {
        subscriber(Self::accept_client(Listener::new(sim), lanes, FeatureSet::OF_SERVER).await)
    }

    /// An origin of shared versions that sent its first client `Welcome`; and the client's first message.
    pub(crate) async fn origin(sim: &Sim) -> (Self, ClientMessage) {
        let lanes = LaneOffer { lanes_max: 1, grant: LaneGrant::new([7; 32]) };
        let features = FeatureSet::OF_SERVER.with(Feature::Peers);
        Self::accept_client(Listener::new(sim), Some(lanes), features).await
    }

    /// A member's port, at the address and with the key of the second server of `sim`, whose first taker asked for a version.
    pub(crate) async fn holder(sim: &Sim) -> (Self, Subscribe) {
        let listener = Listener::bind(sim, &sim.other_host(), sim.other_address());
        subscriber(Self::accept_client(listener, None, FeatureSet::OF_SERVER.with(Feature::Peers)).await)
    }

    /// The next taker of a holder that has closed this connection.
    pub(crate) async fn next_taker(self) -> (Self, Subscribe) {
        let features = FeatureSet::OF_SERVER.with(Feature::Peers);
        subscriber(Self::accept_client(self.listener.unwrap(), None, features).await)
    }

    /// Accepts the next lane of the client; returns it with its first message.
    pub(crate) async fn accept_further_lane(&self) -> (Self, ClientMessage) {
        let mut lane = Self::accept(self.listener.clone().unwrap()).await;
        let message = lane.receive_from_client().await;
        (lane, message)
    }

    /// Closes this connection, as a restarting server does; returns the client's next connection.
    pub(crate) async fn reconnect(self) -> (Self, Subscribe) {
        subscriber(self.reconnect_with_any_message().await)
    }

    /// As [`reconnect`](Self::reconnect), for a client that need not subscribe: returns its first message.
    pub(crate) async fn reconnect_with_any_message(self) -> (Self, ClientMessage) {
        self.connection.close(CloseCode::ShuttingDown.code());
        Self::accept_client(self.listener.unwrap(), None, FeatureSet::OF_SERVER).await
    }

    async fn accept(listener: Listener) -> Self {
        let connection = listener.accept().await;
        let control = connection.accept_control().await;
        Self { connection, control, unread: vec![], listener: Some(listener) }
    }

    /// Accepts a client; returns it with its first message after `Welcome`.
    async fn accept_client(
        listener: Listener,
        lanes: Option<LaneOffer>,
        features: FeatureSet,
    ) -> (Self, ClientMessage) {
        let mut peer = Self::accept(listener).await;
        assert!(matches!(peer.receive_from_client().await, ClientMessage::Hello(_)));
        let agent = "hostile".into();
        let welcome = Welcome {
            revision: 1,
            agent,
            session: 1,
            subscriptions_max: 64,
            lanes,
            instance: INSTANCE,
            lane_addresses: vec![],
            features,
        };
        peer.send_to_client(ServerMessage::Welcome(welcome)).await;
        let first = peer.receive_from_client().await;
        (peer, first)
    }

    /// Finishes the sending direction of the control stream.
    pub(crate) fn finish_control(&mut self) {
        self.control.finish();
    }

    /// Stops the receiving direction of the control stream. Over TCP, which cannot do that, the peer stops reading.
    pub(crate) fn stop_receiving(&mut self) {
        self.control.stop();
    }

    pub(crate) async fn send_to_server(&mut self, message: ClientMessage) {
        self.send_bytes(&encode_client(message)).await;
    }

    pub(crate) async fn send_to_client(&mut self, message: ServerMessage) {
        self.send_bytes(&encode_server(message)).await;
    }

    /// Writes to the control stream.
    pub(crate) async fn send_bytes(&mut self, bytes: &[u8]) {
        self.control.write(bytes).await;
    }

    pub(crate) async fn receive_from_server(&mut self) -> ServerMessage {
        ServerMessage::decode(&self.receive_frame().await).unwrap()
    }

    /// Waits for bytes or the end of the control stream; returns whether it ended without any.
    pub(crate) async fn receives_nothing(&mut self) -> bool {
        self.unread.is_empty() && self.control.read().await.is_none()
    }

    pub(crate) async fn receive_from_client(&mut self) -> ClientMessage {
        ClientMessage::decode(&self.receive_frame().await).unwrap()
    }

    async fn receive_frame(&mut self) -> Vec<u8> {
        let prefix = self.receive_bytes(4).await;
        let length = decode_frame_length(prefix.try_into().unwrap()).unwrap();
        self.receive_bytes(length).await
    }

    async fn receive_bytes(&mut self, bytes: usize) -> Vec<u8> {
        while self.unread.len() < bytes {
            let more = self.control.read().await;
            self.unread.extend(more.expect("the control stream continues"));
        }
        self.unread.drain(..bytes).collect()
    }

    /// Sends `parts` as one data stream.
    pub(crate) async fn send_stream(&self, parts: &[&[u8]]) {
        let Some(mut stream) = self.connection.open_data().await else { return };
        for part in parts {
            stream.write(part).await;
        }
        stream.finish();
    }

    /// Checks that the tested side sent nothing more before it closed the connection.
    pub(crate) async fn assert_received_nothing(&mut self) {
        assert!(self.unread.is_empty() && self.control.read().await.is_none(), "it sent a message");
        assert!(self.connection.accept_data().await.is_none(), "it opened a stream");
    }

    /// Waits until the tested side closes the connection, and returns the code and text.
    pub(crate) async fn wait_for_close(&self) -> (Option<CloseCode>, String) {
        self.connection.wait_for_close().await
    }
}

fn subscriber((peer, first): (Peer, ClientMessage)) -> (Peer, Subscribe) {
    match first {
        ClientMessage::Subscribe(subscribe) => (peer, subscribe),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn hello() -> Hello {
    Hello {
        revision_min: 1,
        revision_max: 1,
        agent: "raw".into(),
        codecs: CodecSet::all(),
        token: Some(token()),
        features: FeatureSet::default(),
    }
}

pub(crate) fn subscribe(id: u32, credit: u32) -> ClientMessage {
    ClientMessage::Subscribe(Subscribe::latest(SubscriptionId(id), topic("t"), credit))
}
