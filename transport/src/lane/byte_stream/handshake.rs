//! [`Secured`]: performs the TLS handshake with rustls, and extracts the keys for the [record layer](super::records).

use rustls::{
    ClientConfig, ServerConfig,
    client::{ClientConnectionData, UnbufferedClientConnection},
    pki_types::ServerName,
    server::{ServerConnectionData, UnbufferedServerConnection},
    unbuffered::{ConnectionState, EncodeError, EncodeTlsData, UnbufferedConnectionCommon, UnbufferedStatus},
};
use std::{io, ops::Deref, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::Instant,
};

use super::{
    Settings,
    records::{Opener, RECORDS_PER_KEY_MAX, RecordError, Sealer, records},
};
use crate::{ByteStream, ClientCertificate, StreamTuning, tls, unix::Descriptors};

/// The maximum number of buffered handshake bytes: more than the records of the longest message that rustls accepts, of
/// 64 KiB.
const BUFFERED_BYTES_MAX: usize = 128 << 10;

/// The maximum length of a record after its header: 2^14 bytes and the overhead of encryption.
const RECORD_BYTES_MAX: usize = (16 << 10) + 256;

/// A stream that may carry a lane: after its TLS handshake, with the keys for its records, or a Unix socket.
pub(crate) struct Secured<S> {
    pub(super) stream: S,
    /// The record layer; `None` without TLS.
    pub(super) records: Option<(Sealer, Opener)>,
    is_protocol_agreed: bool,
    peer_certificate: Option<ClientCertificate>,
    pub(super) descriptors: Option<Descriptors>,
    /// The time from the first sent message to the end of the handshake: a round trip, and computation at both ends.
    answer_time: Duration,
}

#[cfg(test)]
impl<S> Secured<S> {
    /// A stream with these keys, without a handshake.
    pub(super) fn with_keys(stream: S, records: (Sealer, Opener)) -> Self {
        Self {
            stream,
            records: Some(records),
            is_protocol_agreed: true,
            peer_certificate: None,
            descriptors: None,
            answer_time: Duration::ZERO,
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Secured<S> {
    /// Performs a client's handshake. An error of TLS contains a [`rustls::Error`].
    pub(crate) async fn connect(
        stream: S,
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
    ) -> io::Result<Self> {
        Self::over(stream, UnbufferedClientConnection::new(config, name).map_err(tls_error)?).await
    }

    /// Performs a server's handshake.
    pub(crate) async fn accept(stream: S, config: Arc<ServerConfig>) -> io::Result<Self> {
        Self::over(stream, UnbufferedServerConnection::new(config).map_err(tls_error)?).await
    }

    /// Whether ALPN selected this protocol.
    pub(crate) fn is_protocol_agreed(&self) -> bool {
        self.is_protocol_agreed
    }

    /// The peer's certificate. The peer proved possession of its key.
    pub(crate) fn peer_certificate(&self) -> Option<ClientCertificate> {
        self.peer_certificate.clone()
    }

    async fn over(mut stream: S, mut connection: impl RustlsConnection) -> io::Result<Self> {
        let (mut incoming, mut out) = (vec![], vec![]);
        let mut sent_at = None; // Not the time of connecting: a client's first message may follow long after.
        while let Step::Read = advance(&mut stream, &mut connection, &mut incoming, &mut out).await? {
            if !out.is_empty() {
                sent_at.get_or_insert_with(Instant::now);
                out.clear();
            }
            read_record(&mut stream, &mut incoming).await?;
        }
        let answer_time = sent_at.map_or(Duration::ZERO, |sent_at| sent_at.elapsed());
        let (is_protocol_agreed, certificates) =
            (tls::is_protocol_agreed(&connection), connection.peer_certificates());
        let peer_certificate = certificates.and_then(ClientCertificate::new);
        let records = Some(connection.into_records().map_err(tls_error)?);
        Ok(Self { stream, records, is_protocol_agreed, peer_certificate, descriptors: None, answer_time })
    }
}

impl Secured<Box<dyn ByteStream>> {
    /// A Unix socket, which has no handshake: the kernel protects its bytes and knows the peer's user.
    pub(crate) fn plain(stream: Box<dyn ByteStream>) -> Self {
        let descriptors = stream.local().map(|(_, descriptors)| descriptors);
        Self {
            stream,
            records: None,
            is_protocol_agreed: true,
            peer_certificate: None,
            descriptors,
            answer_time: Duration::ZERO,
        }
    }

    /// Tunes the stream by the measured answer time and the lane's idle timeout.
    pub(crate) fn tune(&self, settings: Settings) {
        let idle_timeout = settings.idle_timeout;
        self.stream.tune(StreamTuning { answer_time: self.answer_time, idle_timeout });
    }
}

/// Performs the next step and writes its output, including the alert if the handshake failed.
async fn advance(
    stream: &mut (impl AsyncWrite + Unpin),
    connection: &mut impl RustlsConnection,
    incoming: &mut Vec<u8>,
    out: &mut Vec<u8>,
) -> io::Result<Step> {
    let next = step(connection, incoming, out);
    if let Err(error) = next {
        encode_alert(connection, incoming, out);
        let _ = stream.write_all(out).await;
        let _ = stream.shutdown().await;
        return Err(tls_error(error));
    }
    stream.write_all(out).await?;
    stream.flush().await?;
    next.map_err(tls_error)
}

/// Reads exactly one record, because records after the handshake must not be passed to rustls.
async fn read_record(stream: &mut (impl AsyncRead + Unpin), incoming: &mut Vec<u8>) -> io::Result<()> {
    let mut header = [0; 5];
    stream.read_exact(&mut header).await?;
    let bytes = usize::from(u16::from_be_bytes([header[3], header[4]]));
    if bytes > RECORD_BYTES_MAX || incoming.len() + bytes > BUFFERED_BYTES_MAX {
        return Err(tls_error(rustls::InvalidMessage::MessageTooLarge.into()));
    }
    incoming.extend_from_slice(&header);
    let start = incoming.len();
    incoming.resize(start + bytes, 0);
    stream.read_exact(&mut incoming[start..]).await?;
    Ok(())
}

fn tls_error(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// The next step of a handshake, once its output is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Another record is needed.
    Read,
    /// The handshake is complete.
    Finish,
}

/// Processes received bytes and appends the output to `out`.
fn step(
    connection: &mut impl RustlsConnection,
    incoming: &mut Vec<u8>,
    out: &mut Vec<u8>,
) -> Result<Step, rustls::Error> {
    loop {
        let UnbufferedStatus { discard, state } = connection.process(incoming);
        let wants_more = match state {
            Ok(ConnectionState::EncodeTlsData(mut record)) => encode(&mut record, out).map(|()| false),
            Ok(ConnectionState::TransmitTlsData(written)) => {
                written.done();
                Ok(false)
            }
            Ok(ConnectionState::BlockedHandshake | ConnectionState::WriteTraffic(_)) => Ok(true),
            Ok(_) => Err(rustls::Error::General("data or a close arrived during the handshake".into())),
            Err(error) => Err(error),
        };
        incoming.drain(..discard);
        match (wants_more?, connection.is_handshaking()) {
            (true, false) => return Ok(Step::Finish),
            (true, true) => return Ok(Step::Read),
            (false, _) => {}
        }
    }
}

/// Encodes the alert for a record that was refused, if there is one. rustls returns it before it reads its input, which it
/// must not read again: it would panic, as it has recorded parts of the refused message.
fn encode_alert(connection: &mut impl RustlsConnection, incoming: &mut [u8], out: &mut Vec<u8>) {
    if connection.wants_write()
        && let Ok(ConnectionState::EncodeTlsData(mut record)) = connection.process(incoming).state
    {
        let _ = encode(&mut record, out); // Without the alert, the peer sees that the connection is closed.
    }
}

fn encode<Data>(record: &mut EncodeTlsData<'_, Data>, out: &mut Vec<u8>) -> Result<(), rustls::Error> {
    let start = out.len();
    if let Err(EncodeError::InsufficientSize(short)) = record.encode(&mut []) {
        out.resize(start + short.required_size, 0);
    }
    let encoded = record.encode(&mut out[start..]);
    encoded.map(drop).map_err(|error| rustls::Error::General(error.to_string()))
}

/// A rustls connection of either role, during the handshake.
trait RustlsConnection: Deref<Target = UnbufferedConnectionCommon<Self::Data>> {
    type Data;

    fn process<'c, 'i>(&'c mut self, incoming: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data>;

    fn into_records(self) -> Result<(Sealer, Opener), rustls::Error>;
}

impl RustlsConnection for UnbufferedClientConnection {
    type Data = ClientConnectionData;

    fn process<'c, 'i>(&'c mut self, incoming: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }

    fn into_records(self) -> Result<(Sealer, Opener), rustls::Error> {
        let (secrets, next) = self.dangerous_into_kernel_connection()?;
        records(secrets, next, RECORDS_PER_KEY_MAX).map_err(record_error)
    }
}

impl RustlsConnection for UnbufferedServerConnection {
    type Data = ServerConnectionData;

    fn process<'c, 'i>(&'c mut self, incoming: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }

    fn into_records(self) -> Result<(Sealer, Opener), rustls::Error> {
        let (secrets, next) = self.dangerous_into_kernel_connection()?;
        records(secrets, next, RECORDS_PER_KEY_MAX).map_err(record_error)
    }
}

fn record_error(error: RecordError) -> rustls::Error {
    rustls::Error::General(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a stranger's handshake takes bounded memory. Method: a header that announces too long a record, and one that
    /// exceeds the buffer; both are refused before a byte of the record.
    #[tokio::test]
    async fn long_handshakes_are_refused_at_the_header() {
        for (buffered, bytes, kind) in [
            (0, RECORD_BYTES_MAX, io::ErrorKind::UnexpectedEof),
            (0, RECORD_BYTES_MAX + 1, io::ErrorKind::InvalidData),
            (BUFFERED_BYTES_MAX - 100, 100, io::ErrorKind::UnexpectedEof),
            (BUFFERED_BYTES_MAX - 100, 101, io::ErrorKind::InvalidData),
        ] {
            let header = [&[0x16, 3, 1][..], &(bytes as u16).to_be_bytes()].concat();
            let error = read_record(&mut &header[..], &mut vec![0; buffered]).await.unwrap_err();
            assert_eq!(error.kind(), kind, "{buffered} {bytes}");
        }
    }
}
