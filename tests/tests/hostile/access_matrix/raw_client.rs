//! A raw client that sends protocol messages over either transport, and records everything that it receives.

use super::credentials::ClientIdentity;
use crate::raw::{client_tls, connect_with_tls};
use quinn::ConnectionError;
use rustls::{
    crypto::aws_lc_rs,
    sign::{CertifiedKey, SingleCertAndKey},
};
use std::{
    fmt, io,
    net::Ipv4Addr,
    sync::{Arc, Mutex},
    time::Duration,
};
use tensor_relay_protocol::{ClientMessage, CloseCode, ServerMessage, decode_frame_length, encode_client};
use tensor_relay_tests::pair::Sim;
use tensor_relay_transport::{ByteStream, Network};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf},
    sync::mpsc,
    task::JoinSet,
    time::interval,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

/// Both transports.
pub(super) const TRANSPORTS: [TransportKind; 2] = [TransportKind::Quic, TransportKind::Tcp];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TransportKind {
    Quic,
    Tcp,
}

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

/// How a server ended a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    Closed(Option<CloseCode>, String),
    /// TLS failed.
    Alert,
    Other(String),
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

/// A connected client. Its connection ends when it is dropped.
pub(super) struct RawClient {
    outgoing: mpsc::UnboundedSender<Vec<u8>>,
    received: Arc<Mutex<Received>>,
    _endpoint: Option<quinn::Endpoint>,
    _tasks: JoinSet<()>,
}

impl RawClient {
    /// Connects from the client host with this number, optionally with a certificate.
    pub(super) async fn new(
        sim: &Sim,
        number: u8,
        transport: TransportKind,
        identity: Option<&ClientIdentity>,
    ) -> Self {
        let mut tls = client_tls(aws_lc_rs::default_provider());
        if let Some(ClientIdentity { chain, key }) = identity {
            // The key need not match the certificate.
            let key = aws_lc_rs::sign::any_supported_type(key).unwrap();
            let certified = CertifiedKey::new(chain.clone(), key);
            tls.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(certified));
        }
        let (outgoing, queue) = mpsc::unbounded_channel();
        let (received, mut tasks) = (Arc::<Mutex<Received>>::default(), JoinSet::new());
        let endpoint = match transport {
            TransportKind::Quic => {
                let (endpoint, connection) = connect_with_tls(sim, number, tls).await;
                start_quic(&mut tasks, connection, queue, &received);
                Some(endpoint)
            }
            TransportKind::Tcp => {
                let host = sim.client_host(number);
                let stream = host.connect(Ipv4Addr::UNSPECIFIED.into(), sim.server_address()).await.unwrap();
                let name = "tensor-relay".try_into().unwrap();
                let stream = TlsConnector::from(Arc::new(tls)).connect(name, stream).await.unwrap();
                start_tcp(&mut tasks, stream, queue, &received);
                None
            }
        };
        Self { outgoing, received, _endpoint: endpoint, _tasks: tasks }
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

fn start_quic(
    tasks: &mut JoinSet<()>,
    connection: quinn::Connection,
    mut queue: mpsc::UnboundedReceiver<Vec<u8>>,
    received: &Arc<Mutex<Received>>,
) {
    let (control, record) = (connection.clone(), Arc::clone(received));
    tasks.spawn(async move {
        let Ok((mut out, mut incoming)) = control.open_bi().await else { return };
        let sending = async {
            while let Some(bytes) = queue.recv().await {
                let _ = out.write_all(&bytes).await;
            }
        };
        let receiving = async {
            let mut buffer = [0; 4096];
            while let Ok(Some(bytes)) = incoming.read(&mut buffer).await {
                record.lock().unwrap().control.extend_from_slice(&buffer[..bytes]);
            }
        };
        tokio::join!(sending, receiving);
    });
    let (data, record) = (connection.clone(), Arc::clone(received));
    tasks.spawn(async move {
        while let Ok(mut stream) = data.accept_uni().await {
            record.lock().unwrap().streams += 1;
            let mut buffer = [0; 4096];
            while let Ok(Some(bytes)) = stream.read(&mut buffer).await {
                record.lock().unwrap().data += bytes;
            }
        }
    });
    let record = Arc::clone(received);
    tasks.spawn(async move {
        let end = match connection.closed().await {
            ConnectionError::ApplicationClosed(close) => {
                let text = String::from_utf8_lossy(&close.reason).into_owned();
                End::Closed(CloseCode::from_code(close.error_code.into_inner()), text)
            }
            // RFC 9001 §4.8: a TLS alert and 0x100.
            ConnectionError::ConnectionClosed(close)
                if (0x100..0x200).contains(&u64::from(close.error_code)) =>
            {
                End::Alert
            }
            other => End::Other(other.to_string()),
        };
        record.lock().unwrap().end = Some(end);
    });
}

type Stream = TlsStream<Box<dyn ByteStream>>;

/// Sends and receives segments (PROTOCOL.md §10.7).
fn start_tcp(
    tasks: &mut JoinSet<()>,
    stream: Stream,
    queue: mpsc::UnboundedReceiver<Vec<u8>>,
    received: &Arc<Mutex<Received>>,
) {
    let (reader, writer) = tokio::io::split(stream);
    let (pongs, answers) = mpsc::unbounded_channel();
    tasks.spawn(send_segments(writer, queue, answers));
    let record = Arc::clone(received);
    tasks.spawn(async move {
        let end = match receive_segments(reader, &record, &pongs).await {
            Ok(end) => end,
            Err(error) => {
                let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
                match tls {
                    Some(rustls::Error::AlertReceived(_)) => End::Alert,
                    _ => End::Other(error.to_string()),
                }
            }
        };
        record.lock().unwrap().end = Some(end);
    });
}

async fn send_segments(
    mut writer: WriteHalf<Stream>,
    mut queue: mpsc::UnboundedReceiver<Vec<u8>>,
    mut pongs: mpsc::UnboundedReceiver<Vec<u8>>,
) {
    let mut pinging = interval(Duration::from_secs(3));
    loop {
        let (kind, bytes) = tokio::select! {
            Some(bytes) = queue.recv() => (1, bytes),
            Some(number) = pongs.recv() => (7, number),
            _ = pinging.tick() => (6, vec![0; 8]),
        };
        let head = [&[kind, 0, 0, 0][..], &(bytes.len() as u32).to_le_bytes()].concat();
        if writer.write_all(&[head, bytes].concat()).await.is_err() || writer.flush().await.is_err() {
            return;
        }
    }
}

async fn receive_segments(
    mut reader: ReadHalf<Stream>,
    received: &Mutex<Received>,
    pongs: &mpsc::UnboundedSender<Vec<u8>>,
) -> io::Result<End> {
    loop {
        let mut head = [0; 8];
        reader.read_exact(&mut head).await?;
        let [kind, flags, _, _, length @ ..] = head;
        let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
        reader.read_exact(&mut bytes).await?;
        let mut received = received.lock().unwrap();
        match kind {
            1 => received.control.extend_from_slice(&bytes),
            2 => {
                received.streams += usize::from(flags & 1);
                received.data += bytes.len();
            }
            5 => {
                let (code, text) = bytes.split_first_chunk().unwrap();
                let code = CloseCode::from_code(u64::from(u32::from_le_bytes(*code)));
                return Ok(End::Closed(code, String::from_utf8_lossy(text).into_owned()));
            }
            6 => drop(pongs.send(bytes)),
            3 | 7 => {}
            other => return Ok(End::Other(format!("a segment of kind {other}"))),
        }
    }
}
