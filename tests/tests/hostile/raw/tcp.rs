//! Raw TCP connections: TLS and segments (PROTOCOL.md §10.7).

use super::End;
use std::{
    future::poll_fn,
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};
use tensor_relay_protocol::CloseCode;
use tensor_relay_tests::{pair::Sim, simnet::Host};
use tensor_relay_transport::{ByteStream, Network, StreamListener};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    sync::{Mutex as AsyncMutex, mpsc, watch},
    time::interval,
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

const CONTROL: u8 = 1;
const DATA: u8 = 2;
const RESET: u8 = 3;
const STOP: u8 = 4;
const CLOSE: u8 = 5;
const PING: u8 = 6;
const PONG: u8 = 7;

const FIRST: u8 = 1;
const LAST: u8 = 2;

const SEGMENT_BYTES_MAX: usize = 64 << 10;

type Pieces = mpsc::UnboundedReceiver<Vec<u8>>;

/// A connection. Dropping the last clone and the last stream closes it with code 0, as quinn does.
#[derive(Clone)]
pub(crate) struct Connection(Arc<Shared>);

struct Shared {
    segments: mpsc::UnboundedSender<Vec<u8>>,
    /// The incoming control stream, until it is taken.
    control: Mutex<Option<Pieces>>,
    arrived: AsyncMutex<mpsc::UnboundedReceiver<Pieces>>,
    end: Arc<watch::Sender<Option<End>>>,
    is_read: watch::Sender<bool>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = self.segments.send(close_segment(0));
    }
}

/// Waits for clients.
#[derive(Clone)]
pub(super) struct Listener {
    streams: Arc<dyn StreamListener>,
    tls: TlsAcceptor,
}

impl Listener {
    pub(super) fn new(host: &Host, address: SocketAddr, tls: rustls::ServerConfig) -> Self {
        let streams = host.listen(address).unwrap();
        Self { streams: streams.into(), tls: Arc::new(tls).into() }
    }

    pub(super) async fn accept(&self) -> Connection {
        let (stream, _) = poll_fn(|context| self.streams.poll_accept(context)).await.unwrap();
        Connection::start(self.tls.accept(stream).await.unwrap())
    }
}

impl Connection {
    pub(crate) async fn connect(sim: &Sim, number: u8, tls: rustls::ClientConfig) -> Self {
        let host = sim.client_host(number);
        let stream: Box<dyn ByteStream> = host
            .connect(Ipv4Addr::UNSPECIFIED.into(), sim.server_address(), None)
            .await
            .unwrap();
        let name = "tensor-relay".try_into().unwrap();
        Self::start(TlsConnector::from(Arc::new(tls)).connect(name, stream).await.unwrap())
    }

    fn start(stream: impl AsyncRead + AsyncWrite + Send + 'static) -> Self {
        let (reader, writer) = tokio::io::split(stream);
        let (segments, queue) = mpsc::unbounded_channel();
        let (control_pieces, control) = mpsc::unbounded_channel();
        let (streams, arrived) = mpsc::unbounded_channel();
        let (end, is_read) = (Arc::new(watch::Sender::new(None)), watch::Sender::new(true));
        tokio::spawn(write(writer, queue));
        let incoming = Incoming { control: Some(control_pieces), streams, current: None };
        let (ended, pongs, may_read) = (Arc::clone(&end), segments.downgrade(), is_read.subscribe());
        tokio::spawn(async move {
            let found = read(reader, incoming, pongs, may_read).await.unwrap_or_else(|error| {
                let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
                match tls {
                    Some(rustls::Error::AlertReceived(_)) => End::Alert,
                    _ => End::Other(error.to_string()),
                }
            });
            set_end(&ended, found);
        });
        let (control, arrived) = (Mutex::new(Some(control)), AsyncMutex::new(arrived));
        Self(Arc::new(Shared { segments, control, arrived, end, is_read }))
    }

    /// The incoming control stream, once.
    pub(super) fn take_control(&self) -> Pieces {
        self.0.control.lock().unwrap().take().unwrap()
    }

    pub(super) fn send_control(&self, bytes: &[u8]) {
        for part in bytes.chunks(SEGMENT_BYTES_MAX) {
            self.send(segment(CONTROL, 0, part));
        }
    }

    pub(super) fn finish_control(&self) {
        self.send(segment(CONTROL, LAST, b""));
    }

    /// Reads nothing more: TCP cannot stop one direction of the control stream.
    pub(super) fn stop_reading(&self) {
        self.0.is_read.send_replace(false);
    }

    pub(super) async fn accept_data(&self) -> Option<Pieces> {
        self.0.arrived.lock().await.recv().await
    }

    pub(super) fn close(&self, code: u32) {
        self.send(close_segment(code));
        set_end(&self.0.end, End::Other("closed by this end".into()));
    }

    pub(super) fn end(&self) -> Option<End> {
        self.0.end.borrow().clone()
    }

    pub(super) async fn closed(&self) -> End {
        let mut ends = self.0.end.subscribe();
        let end = ends.wait_for(Option::is_some).await.unwrap().clone();
        end.unwrap()
    }

    /// Fails only if the connection has ended, of which the caller learns by other means.
    fn send(&self, segment: Vec<u8>) {
        let _ = self.0.segments.send(segment);
    }
}

/// Records how a connection ended; only the first end is kept.
fn set_end(ends: &watch::Sender<Option<End>>, found: End) {
    ends.send_if_modified(|end| {
        let is_first = end.is_none();
        end.get_or_insert(found);
        is_first
    });
}

/// An outgoing data stream. Dropping it finishes it, as quinn does.
pub(crate) struct DataOut {
    connection: Connection,
    is_begun: bool,
    is_finished: bool,
}

impl DataOut {
    pub(super) fn open(connection: &Connection) -> Self {
        Self { connection: connection.clone(), is_begun: false, is_finished: false }
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(SEGMENT_BYTES_MAX) {
            self.send(part, 0);
        }
    }

    pub(super) fn finish(&mut self) {
        if !std::mem::replace(&mut self.is_finished, true) {
            self.send(b"", LAST);
        }
    }

    fn send(&mut self, bytes: &[u8], flags: u8) {
        let first = if std::mem::replace(&mut self.is_begun, true) { 0 } else { FIRST };
        self.connection.send(segment(DATA, first | flags, bytes));
    }
}

impl Drop for DataOut {
    fn drop(&mut self) {
        self.finish();
    }
}

fn segment(kind: u8, flags: u8, bytes: &[u8]) -> Vec<u8> {
    [&[kind, flags, 0, 0][..], &(bytes.len() as u32).to_le_bytes(), bytes].concat()
}

fn close_segment(code: u32) -> Vec<u8> {
    segment(CLOSE, 0, &code.to_le_bytes())
}

/// Writes segments, and a ping every three seconds, until a close is written or the connection is lost.
async fn write(mut writer: impl AsyncWrite + Unpin, mut queue: Pieces) {
    let mut pings = interval(Duration::from_secs(3));
    loop {
        let segment = tokio::select! {
            biased;
            Some(segment) = queue.recv() => segment,
            _ = pings.tick() => segment(PING, 0, &[0; 8]),
        };
        if writer.write_all(&segment).await.is_err() || writer.flush().await.is_err() {
            return;
        }
        if segment[0] == CLOSE {
            let _ = writer.shutdown().await;
            return;
        }
    }
}

/// The receivers of incoming segments.
struct Incoming {
    control: Option<mpsc::UnboundedSender<Vec<u8>>>,
    streams: mpsc::UnboundedSender<Pieces>,
    current: Option<mpsc::UnboundedSender<Vec<u8>>>,
}

/// Reads segments until the peer's close, while `may_read`.
async fn read(
    mut reader: impl AsyncRead + Unpin,
    mut incoming: Incoming,
    pongs: mpsc::WeakUnboundedSender<Vec<u8>>,
    mut may_read: watch::Receiver<bool>,
) -> io::Result<End> {
    loop {
        let mut head = [0; 8];
        reader.read_exact(&mut head).await?;
        let [kind, flags, _, _, length @ ..] = head;
        let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
        reader.read_exact(&mut bytes).await?;
        if may_read.wait_for(|may_read| *may_read).await.is_err() {
            std::future::pending::<()>().await;
        }
        match kind {
            CONTROL => {
                if let Some(control) = &incoming.control {
                    let _ = control.send(bytes);
                }
                if flags & LAST != 0 {
                    incoming.control = None;
                }
            }
            DATA => {
                if flags & FIRST != 0 {
                    let (pieces, stream) = mpsc::unbounded_channel();
                    let _ = incoming.streams.send(stream);
                    incoming.current = Some(pieces);
                }
                if let Some(current) = &incoming.current {
                    let _ = current.send(bytes);
                }
                if flags & LAST != 0 {
                    incoming.current = None;
                }
            }
            RESET => incoming.current = None,
            CLOSE => {
                let (code, text) = bytes.split_first_chunk().unwrap();
                let code = CloseCode::from_code(u64::from(u32::from_le_bytes(*code)));
                return Ok(End::Closed(code, String::from_utf8_lossy(text).into_owned()));
            }
            PING => {
                if let Some(segments) = pongs.upgrade() {
                    let _ = segments.send(segment(PONG, 0, &bytes));
                }
            }
            STOP | PONG => {}
            other => return Ok(End::Other(format!("a segment of kind {other}"))),
        }
    }
}
