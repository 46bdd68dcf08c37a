//! The TLS 1.3 record layer (RFC 8446 §5), with the keys negotiated by rustls. No I/O.
//!
//! rustls 0.23 allocates for each record and copies it two or three times. Here a chunk is encrypted from its source
//! memory and decrypted into its destination. The wire format is the same: the peer may use rustls.
//!
//! After the handshake, only data, key updates and alerts are accepted. Other messages, such as session tickets, are
//! refused, since no server of this protocol sends them.
//!
//! Uses no other file of this project: tests/fuzz builds it alone.

use aws_lc_rs::{
    aead::{AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey},
    error::Unspecified,
};
use rustls::{AlertDescription, ConnectionTrafficSecrets, ExtractedSecrets, kernel::KernelConnection};
use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

/// The maximum number of content bytes in a record.
pub(crate) const CONTENT_BYTES_MAX: usize = 16 << 10;

/// The maximum number of records per key. AES-GCM is safe for 2^24.5 full records, 362 GiB (RFC 8446 §5.5); ChaCha20
/// has no such limit, but a new key costs little.
pub(crate) const RECORDS_PER_KEY_MAX: u64 = 1 << 24;

pub(super) const HEADER_BYTES: usize = 5;

const TAG_BYTES: usize = 16;

/// The overhead of a record: header, content type and tag.
const ADDED_BYTES: usize = HEADER_BYTES + 1 + TAG_BYTES;

/// The maximum number of bytes after the header of a record.
const BODY_BYTES_MAX: usize = CONTENT_BYTES_MAX + 256;

/// The maximum number of consecutive records without data, as in rustls. More of them are meant to waste processor
/// time.
const EMPTY_RECORDS_MAX: u32 = 32;

/// The version in the header of every record.
const VERSION: u16 = 0x0303;

const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const DATA: u8 = 23;

/// A key update without its last byte, `request_update`.
const KEY_UPDATE: [u8; 4] = [24, 0, 0, 1];

/// Derives the keys for key updates.
pub(crate) trait NextSecrets: Send {
    fn next_sealing(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error>;

    fn next_opening(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error>;
}

impl<Data: Send> NextSecrets for KernelConnection<Data> {
    fn next_sealing(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        self.update_tx_secret().map(|(_, secrets)| secrets)
    }

    fn next_opening(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        self.update_rx_secret().map(|(_, secrets)| secrets)
    }
}

/// Why no more records can be sent or received.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum RecordError {
    #[error(
        "it sent a TLS record of type {kind} and version {version:#06x}; only {DATA} and {VERSION:#06x} are allowed"
    )]
    Header { kind: u8, version: u16 },
    #[error("it sent a TLS record of {0} bytes, which is not a valid length")]
    Length(usize),
    #[error("a TLS record cannot be decrypted: its bytes were changed in transit")]
    Decrypt,
    #[error("it sent a TLS record whose content has the invalid type {0}")]
    Content(u8),
    #[error(
        "it sent a TLS message of type {0} after the handshake, or a part of one; only key updates are allowed"
    )]
    Message(u8),
    #[error("it sent more than {EMPTY_RECORDS_MAX} consecutive TLS records without data")]
    NoData,
    #[error("it ended TLS with the alert {0:?}")]
    Alert(AlertDescription),
    #[error("TLS has no more keys: {0}")]
    Keys(rustls::Error),
}

impl RecordError {
    /// The alert for the peer; `None` if the peer sent one.
    pub(crate) fn alert(&self) -> Option<AlertDescription> {
        match self {
            Self::Header { .. } | Self::Content(_) | Self::Message(_) | Self::NoData => {
                Some(AlertDescription::UnexpectedMessage)
            }
            Self::Length(_) => Some(AlertDescription::RecordOverflow),
            Self::Decrypt => Some(AlertDescription::BadRecordMac),
            Self::Keys(_) => Some(AlertDescription::InternalError),
            Self::Alert(_) => None,
        }
    }
}

/// Creates both directions of a connection from the `secrets` of its handshake. A key encrypts at most
/// `records_per_key` records.
pub(crate) fn records(
    secrets: ExtractedSecrets,
    next: impl NextSecrets + 'static,
    records_per_key: u64,
) -> Result<(Sealer, Opener), RecordError> {
    let shared = Arc::new(Shared { next: Mutex::new(Box::new(next)), must_update: AtomicBool::new(false) });
    let sealer = Sealer { key: Key::new(secrets.tx)?, shared: Arc::clone(&shared), records_per_key };
    Ok((sealer, Opener { key: Key::new(secrets.rx)?, shared, empty_records: 0 }))
}

/// The state shared by both directions.
struct Shared {
    next: Mutex<Box<dyn NextSecrets>>,
    /// Whether the peer requested a key update that was not sent yet. It is sent before the next record; one update
    /// answers several requests.
    must_update: AtomicBool,
}

/// Encrypts records.
pub(crate) struct Sealer {
    key: Key,
    shared: Arc<Shared>,
    records_per_key: u64,
}

impl Sealer {
    /// The maximum length of output for `bytes`, with a key update before each record.
    pub(crate) const fn sealed_bytes_max(bytes: usize) -> usize {
        bytes + bytes.div_ceil(CONTENT_BYTES_MAX) * (2 * ADDED_BYTES + KEY_UPDATE.len() + 1)
    }

    /// Encrypts `data` into the front of `out`, which has room for [`sealed_bytes_max`](Self::sealed_bytes_max);
    /// returns the number of bytes written.
    pub(crate) fn seal(&mut self, data: &[u8], out: &mut [u8]) -> Result<usize, RecordError> {
        let mut filled = 0;
        for content in data.chunks(CONTENT_BYTES_MAX) {
            filled += self.update_key_if_due(&mut out[filled..])?;
            filled += self.key.seal(DATA, content, &mut out[filled..])?;
        }
        Ok(filled)
    }

    /// Encrypts an alert, which takes as much room as two bytes of data.
    pub(crate) fn seal_alert(
        &mut self,
        alert: AlertDescription,
        out: &mut [u8],
    ) -> Result<usize, RecordError> {
        let level = if alert == AlertDescription::CloseNotify { 1 } else { 2 };
        let filled = self.update_key_if_due(out)?;
        Ok(filled + self.key.seal(ALERT, &[level, alert.into()], &mut out[filled..])?)
    }

    /// Updates the key if it has reached its limit or the peer requested it. The update message is the old key's last
    /// record.
    fn update_key_if_due(&mut self, out: &mut [u8]) -> Result<usize, RecordError> {
        let is_requested = self.shared.must_update.swap(false, Ordering::Relaxed);
        if !is_requested && self.key.sequence + 1 < self.records_per_key {
            return Ok(0);
        }
        let [kind, a, b, c] = KEY_UPDATE;
        let filled = self.key.seal(HANDSHAKE, &[kind, a, b, c, 0], out)?;
        self.key = self.shared.next_key(|next| next.next_sealing())?;
        Ok(filled)
    }
}

/// Decrypts records.
pub(crate) struct Opener {
    key: Key,
    shared: Arc<Shared>,
    /// The number of consecutive records without data.
    empty_records: u32,
}

/// The content of a record.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Opened<T> {
    /// Authenticated data; never empty.
    Data(T),
    /// No data.
    NoData,
    /// The peer has closed TLS.
    Closed,
}

impl<T> Opened<T> {
    /// Maps the data.
    pub(crate) fn map<U>(self, change: impl FnOnce(T) -> U) -> Opened<U> {
        match self {
            Self::Data(data) => Opened::Data(change(data)),
            Self::NoData => Opened::NoData,
            Self::Closed => Opened::Closed,
        }
    }
}

/// The length of the record at the start of `wire`; `None` while its header is incomplete.
pub(crate) fn record_bytes(wire: &[u8]) -> Result<Option<usize>, RecordError> {
    let Some(&[kind, major, minor, high, low]) = wire.first_chunk() else { return Ok(None) };
    let (version, body) = (u16::from_be_bytes([major, minor]), usize::from(u16::from_be_bytes([high, low])));
    match () {
        () if (kind, version) != (DATA, VERSION) => Err(RecordError::Header { kind, version }),
        () if !(1 + TAG_BYTES..=BODY_BYTES_MAX).contains(&body) => Err(RecordError::Length(body)),
        () => Ok(Some(HEADER_BYTES + body)),
    }
}

/// The output length for decrypting a record of `record_len` bytes: content, type and padding.
pub(crate) fn opened_bytes(record_len: usize) -> usize {
    record_len - HEADER_BYTES - TAG_BYTES
}

impl Opener {
    /// Decrypts a complete `record`, of the length given by [`record_bytes`], in place.
    pub(crate) fn open<'a>(&mut self, record: &'a mut [u8]) -> Result<Opened<&'a [u8]>, RecordError> {
        let (header, body) = record.split_at_mut(HEADER_BYTES);
        let (nonce, aad) = (self.key.next_nonce(), Aad::from(&*header));
        let opened = self.key.key.open_in_place(nonce, aad, body);
        let opened = opened.map_err(|Unspecified| RecordError::Decrypt)?;
        self.take(opened)
    }

    /// Decrypts a complete `record` into `out`, of the length given by [`opened_bytes`]. On failure, the content of
    /// `out` is not authenticated.
    pub(crate) fn open_into<'a>(
        &mut self,
        record: &[u8],
        out: &'a mut [u8],
    ) -> Result<Opened<&'a [u8]>, RecordError> {
        let (header, body) = record.split_at(HEADER_BYTES);
        let (cipher, tag) = body.split_at(body.len() - TAG_BYTES);
        let (nonce, aad) = (self.key.next_nonce(), Aad::from(header));
        let opened = self.key.key.open_separate_gather(nonce, aad, cipher, tag, out);
        opened.map_err(|Unspecified| RecordError::Decrypt)?;
        self.take(out)
    }

    /// Parses a decrypted, authenticated record: content, type and padding zeros.
    fn take<'a>(&mut self, opened: &'a [u8]) -> Result<Opened<&'a [u8]>, RecordError> {
        if opened.len() > CONTENT_BYTES_MAX + 1 {
            return Err(RecordError::Length(opened.len()));
        }
        let kind = opened.iter().rposition(|byte| *byte != 0).ok_or(RecordError::Content(0))?;
        let content = &opened[..kind];
        match opened[kind] {
            DATA if !content.is_empty() => {
                self.empty_records = 0;
                return Ok(Opened::Data(content));
            }
            DATA => {}
            HANDSHAKE => self.handle_message(content)?,
            ALERT => match content {
                [_, alert] => match AlertDescription::from(*alert) {
                    AlertDescription::CloseNotify => return Ok(Opened::Closed),
                    AlertDescription::UserCanceled => {} // A close_notify follows.
                    alert => return Err(RecordError::Alert(alert)),
                },
                _ => return Err(RecordError::Content(ALERT)),
            },
            other => return Err(RecordError::Content(other)),
        }
        self.empty_records += 1;
        if self.empty_records > EMPTY_RECORDS_MAX {
            return Err(RecordError::NoData);
        }
        Ok(Opened::NoData)
    }

    /// Handles a key update. It must be complete and alone in its record, since the next record has another key.
    fn handle_message(&mut self, message: &[u8]) -> Result<(), RecordError> {
        match message.strip_prefix(&KEY_UPDATE) {
            Some(&[request @ (0 | 1)]) => {
                self.key = self.shared.next_key(|next| next.next_opening())?;
                if request == 1 {
                    self.shared.must_update.store(true, Ordering::Relaxed);
                }
                Ok(())
            }
            _ => Err(RecordError::Message(message.first().copied().unwrap_or_default())),
        }
    }
}

impl Shared {
    fn next_key(
        &self,
        next: impl FnOnce(&mut dyn NextSecrets) -> Result<ConnectionTrafficSecrets, rustls::Error>,
    ) -> Result<Key, RecordError> {
        let secrets = next(&mut **self.next.lock().unwrap_or_else(PoisonError::into_inner));
        Key::new((0, secrets.map_err(RecordError::Keys)?))
    }
}

/// The key of one direction. Keys and secrets are zeroed on drop, by AWS-LC and rustls.
struct Key {
    key: LessSafeKey,
    iv: [u8; 12],
    sequence: u64,
}

impl Key {
    fn new((sequence, secrets): (u64, ConnectionTrafficSecrets)) -> Result<Self, RecordError> {
        let not_offered =
            || RecordError::Keys(rustls::Error::General("a cipher suite that is not offered".into()));
        let (algorithm, key, iv) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return Err(not_offered()),
        };
        let key = UnboundKey::new(algorithm, key.as_ref()).map_err(|Unspecified| not_offered())?;
        let iv = iv.as_ref().try_into().map_err(|_| not_offered())?;
        Ok(Self { key: LessSafeKey::new(key), iv, sequence })
    }

    /// Takes the nonce of the next record (RFC 8446 §5.3). Sequence numbers cannot wrap: a sender updates its key long
    /// before that, and a receiver would need millennia.
    fn next_nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, digit) in nonce[4..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= digit;
        }
        self.sequence += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Encrypts one record, with at most [`CONTENT_BYTES_MAX`] of `content`.
    fn seal(&mut self, kind: u8, content: &[u8], out: &mut [u8]) -> Result<usize, RecordError> {
        let [major, minor] = VERSION.to_be_bytes();
        let [high, low] = ((content.len() + 1 + TAG_BYTES) as u16).to_be_bytes();
        let header = [DATA, major, minor, high, low];
        let (front, rest) = out[..content.len() + ADDED_BYTES].split_at_mut(HEADER_BYTES);
        front.copy_from_slice(&header);
        let (cipher, tail) = rest.split_at_mut(content.len());
        let (nonce, aad) = (self.next_nonce(), Aad::from(header));
        let sealed = self.key.seal_out_of_place_scatter(nonce, aad, content, cipher, &[kind], tail);
        sealed.map_err(|Unspecified| RecordError::Keys(rustls::Error::EncryptError))?;
        Ok(content.len() + ADDED_BYTES)
    }
}

#[cfg(test)]
pub(super) mod tests;
