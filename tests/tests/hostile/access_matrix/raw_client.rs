//! A raw client that sends protocol messages over either transport, and records everything that it receives.

use super::credentials::ClientIdentity;
use crate::raw::{Connection, End, client_tls};
use rustls::{
    crypto::aws_lc_rs,
    sign::{CertifiedKey, SingleCertAndKey},
};
use std::{
    fmt,
    sync::{Arc, Mutex},
};
use tensor_relay_protocol::{ClientMessage, ServerMessage, decode_frame_length, encode_client};
use tensor_relay_tests::pair::Sim;
use tensor_relay_transport::Transport;
use tokio::{sync::mpsc, task::JoinSet};

/// Both transports.
pub(super) const TRANSPORTS: [Transport; 2] = [Transport::Quic, Transport::Tcp];

/// Everything that a client received from a server after the handshake.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Received {
    /// The bytes of the control stream.
    pub(super) control: Vec<u8>,
    /// The number of data streams.
    pub(super) streams: usize,
    /// The number of bytes on data streams.
    pub(super) data: usize,
    pub(super) end: Option<End>,
}

impl fmt::Debug for Received {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { streams, data, end, .. } = self;
        write!(f, "{:?}, {data} bytes in {streams} streams, {end:?}", self.messages())
    }
}

impl Received {
    /// The encoded messages, each with its length prefix.
    pub(super) fn frames(&self) -> Vec<&[u8]> {
        let (mut rest, mut frames) = (&self.control[..], vec![]);
        while let Some((prefix, body)) = rest.split_first_chunk() {
            let length = decode_frame_length(*prefix).unwrap();
            assert!(body.len() >= length, "the last message is incomplete");
            let (frame, next) = rest.split_at(4 + length);
            frames.push(frame);
            rest = next;
        }
        assert!(rest.is_empty(), "the last length prefix is incomplete");
        frames
    }

    pub(super) fn messages(&self) -> Vec<ServerMessage> {
        let frames = self.frames();
        frames.iter().map(|frame| ServerMessage::decode(&frame[4..]).unwrap()).collect()
    }

    /// Returns true if nothing was received except the end.
    pub(super) fn is_empty(&self) -> bool {
        self.control.is_empty() && self.streams == 0 && self.data == 0
    }
}

/// The TLS configuration of a client, optionally with a certificate.
pub(super) fn tls_of(identity: Option<&ClientIdentity>) -> rustls::ClientConfig {
    let mut tls = client_tls(aws_lc_rs::default_provider());
    if let Some(ClientIdentity { chain, key }) = identity {
        // The key need not match the certificate.
        let key = aws_lc_rs::sign::any_supported_type(key).unwrap();
        let certified = CertifiedKey::new(chain.clone(), key);
        tls.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(certified));
    }
    tls
}

/// A connected client. Its connection ends when it is dropped.
pub(super) struct RawClient {
    outgoing: mpsc::UnboundedSender<Vec<u8>>,
    received: Arc<Mutex<Received>>,
    _tasks: JoinSet<()>,
}

impl RawClient {
    /// Connects from the client host with this number, optionally with a certificate.
    pub(super) async fn new(
        sim: &Sim,
        number: u8,
        transport: Transport,
        identity: Option<&ClientIdentity>,
    ) -> Self {
        let connection = Connection::open_over(transport, sim, number, tls_of(identity)).await;
        let (outgoing, queue) = mpsc::unbounded_channel();
        let received = Arc::<Mutex<Received>>::default();
        let _tasks = record(&connection, queue, &received);
        Self { outgoing, received, _tasks }
    }

    pub(super) fn send(&self, message: ClientMessage) {
        self.send_bytes(encode_client(message));
    }

    /// Sends `bytes` on the control stream. Errors are ignored: the server may have closed the connection, as it
    /// should.
    pub(super) fn send_bytes(&self, bytes: Vec<u8>) {
        let _ = self.outgoing.send(bytes);
    }

    /// Everything that the client has received so far.
    pub(super) fn received(&self) -> Received {
        self.received.lock().unwrap().clone()
    }
}

/// Sends the bytes of `queue` on the control stream, and records everything in `received`.
fn record(
    connection: &Connection,
    mut queue: mpsc::UnboundedReceiver<Vec<u8>>,
    received: &Arc<Mutex<Received>>,
) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    let (control, record) = (connection.clone(), Arc::clone(received));
    tasks.spawn(async move {
        let Some(mut control) = control.open_control().await else { return };
        loop {
            tokio::select! {
                Some(bytes) = queue.recv() => control.write(&bytes).await,
                Some(bytes) = control.read() => record.lock().unwrap().control.extend(bytes),
                else => return,
            }
        }
    });
    let (data, record) = (connection.clone(), Arc::clone(received));
    tasks.spawn(async move {
        while let Some(mut stream) = data.accept_data().await {
            record.lock().unwrap().streams += 1;
            while let Some(bytes) = stream.read().await {
                record.lock().unwrap().data += bytes.len();
            }
        }
    });
    let (connection, record) = (connection.clone(), Arc::clone(received));
    tasks.spawn(async move {
        let end = connection.ended().await;
        record.lock().unwrap().end = Some(end);
    });
    tasks
}
