use super::*;
use crate::{Fingerprint, Identity, lane::Secured, tls};
use proptest::prelude::*;
use rustls::{
    SupportedCipherSuite,
    crypto::{
        CryptoProvider,
        aws_lc_rs::{self, cipher_suite},
        cipher::{AeadKey, Iv},
    },
};
use std::{io, sync::OnceLock};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

const SUITES: [SupportedCipherSuite; 3] = [
    cipher_suite::TLS13_AES_128_GCM_SHA256,
    cipher_suite::TLS13_AES_256_GCM_SHA384,
    cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
];

/// A sequence of numbered secrets. One peer's sealing secrets are the other's opening secrets.
struct Counted {
    sealing: u8,
    opening: u8,
}

fn counted(number: u8) -> ConnectionTrafficSecrets {
    ConnectionTrafficSecrets::Aes256Gcm { key: AeadKey::from([number; 32]), iv: Iv::from([number; 12]) }
}

impl NextSecrets for Counted {
    fn next_sealing(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        self.sealing = self.sealing.wrapping_add(2);
        Ok(counted(self.sealing))
    }

    fn next_opening(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        self.opening = self.opening.wrapping_add(2);
        Ok(counted(self.opening))
    }
}

/// Two connected peers.
pub(in super::super) fn pair(records_per_key: u64) -> [(Sealer, Opener); 2] {
    [(1, 2), (2, 1)].map(|(sealing, opening)| {
        let secrets = ExtractedSecrets { tx: (0, counted(sealing)), rx: (0, counted(opening)) };
        records(secrets, Counted { sealing, opening }, records_per_key).unwrap()
    })
}

fn seal(sealer: &mut Sealer, data: &[u8]) -> Vec<u8> {
    let mut out = vec![0; Sealer::sealed_bytes_max(data.len())];
    let sealed = sealer.seal(data, &mut out).unwrap();
    out.truncate(sealed);
    out
}

/// Encrypts a record with arbitrary content, type and padding.
fn forge(sealer: &mut Sealer, content: &[u8], kind: u8, padding: usize) -> Vec<u8> {
    let mut inner = content.to_vec();
    inner.push(kind);
    inner.resize(inner.len() + padding, 0);
    let last = inner.pop().unwrap();
    let mut out = vec![0; inner.len() + ADDED_BYTES];
    sealer.key.seal(last, &inner, &mut out).unwrap();
    out
}

/// The result of opening `wire`.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    data: Vec<u8>,
    is_closed: bool,
    /// The number of bytes after the last complete record.
    rest: usize,
}

/// Opens all of `wire`, in place or into another buffer.
fn open(opener: &mut Opener, wire: &mut [u8], in_place: bool) -> Result<Outcome, (Vec<u8>, RecordError)> {
    let (mut outcome, mut at) = (Outcome::default(), 0);
    loop {
        let bytes = record_bytes(&wire[at..]).map_err(|error| (outcome.data.clone(), error))?;
        let Some(record) = bytes.and_then(|bytes| wire[at..].get_mut(..bytes)) else {
            outcome.rest = wire.len() - at;
            return Ok(outcome);
        };
        at += record.len();
        let mut out = vec![0; opened_bytes(record.len())];
        let opened = if in_place { opener.open(record) } else { opener.open_into(record, &mut out) };
        match opened.map_err(|error| (outcome.data.clone(), error))? {
            Opened::Data(data) => outcome.data.extend_from_slice(data),
            Opened::NoData => {}
            Opened::Closed => outcome.is_closed = true,
        }
    }
}

fn any_data() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..100),
        (0..50_000usize).prop_map(|bytes| vec![0x5a; bytes]),
        Just(vec![0; CONTENT_BYTES_MAX]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// For any number of records per key.
    #[test]
    fn sealed_data_is_opened(
        sent in prop::collection::vec((any_data(), any::<bool>()), 0..8),
        records_per_key in 1u64..6,
    ) {
        let [(mut sealer, _), (_, mut opener)] = pair(records_per_key);
        for (data, in_place) in sent {
            let mut wire = seal(&mut sealer, &data);
            prop_assert_eq!(open(&mut opener, &mut wire, in_place), Ok(Outcome { data, ..Outcome::default() }));
        }
    }

    /// For any flipped bit: only the records before that bit are opened.
    #[test]
    fn a_flipped_bit_is_detected(
        data in prop::collection::vec(any::<u8>(), 1..40_000),
        at in any::<prop::sample::Index>(),
        bit in 0u32..8,
        in_place in any::<bool>(),
    ) {
        let [(mut sealer, _), (_, mut opener)] = pair(RECORDS_PER_KEY_MAX);
        let mut wire = seal(&mut sealer, &data);
        let at = at.index(wire.len());
        wire[at] ^= 1 << bit;
        let before = at / (CONTENT_BYTES_MAX + ADDED_BYTES) * CONTENT_BYTES_MAX;
        match open(&mut opener, &mut wire, in_place) {
            Err((outcome, _)) => prop_assert_eq!(&outcome[..], &data[..before]),
            Ok(outcome) => prop_assert!(outcome.data == data[..before] && outcome.rest > 0, "the rest is an incomplete record"),
        }
    }

    #[test]
    fn hostile_bytes_are_records_or_errors(mut wire in prop::collection::vec(any::<u8>(), 0..400), real in any::<bool>()) {
        let [_, (_, mut opener)] = pair(RECORDS_PER_KEY_MAX);
        if real && wire.len() > HEADER_BYTES {
            let body = (wire.len() - HEADER_BYTES) as u16;
            wire[..3].copy_from_slice(&[DATA, 3, 3]);
            wire[3..HEADER_BYTES].copy_from_slice(&body.to_be_bytes());
        }
        if let Ok(outcome) = open(&mut opener, &mut wire, true) {
            prop_assert!(outcome.data.is_empty() && outcome.rest == wire.len());
        }
    }

    /// For any content of a correctly sealed record.
    #[test]
    fn any_content_is_handled_or_refused(
        content in prop::collection::vec(any::<u8>(), 0..9),
        kind in prop_oneof![any::<u8>(), 20u8..25],
        padding in 0usize..20,
        in_place in any::<bool>(),
    ) {
        let [(mut sealer, _), (_, mut opener)] = pair(RECORDS_PER_KEY_MAX);
        let mut wire = forge(&mut sealer, &content, kind, padding);
        let outcome = open(&mut opener, &mut wire, in_place);
        match kind {
            DATA => prop_assert_eq!(outcome, Ok(Outcome { data: content, ..Outcome::default() })),
            ALERT if content.len() == 2 && [0, 90].contains(&content[1]) => {
                prop_assert_eq!(outcome.unwrap().is_closed, content[1] == 0);
            }
            HANDSHAKE if content == [24, 0, 0, 1, 0] || content == [24, 0, 0, 1, 1] => prop_assert!(outcome.is_ok()),
            _ => prop_assert!(outcome.is_err(), "{:?}", outcome),
        }
    }
}

#[test]
fn only_valid_headers_are_accepted() {
    for (header, expected) in [
        (&[23, 3, 3, 0][..], Ok(None)),
        (&[23, 3, 3, 0, 17], Ok(Some(22))),
        (&[23, 3, 3, 0, 16], Err(RecordError::Length(16))),
        (&[23, 3, 3, 0x41, 0], Ok(Some(5 + 16_640))),
        (&[23, 3, 3, 0x41, 1], Err(RecordError::Length(16_641))),
        (&[23, 3, 1, 0, 17], Err(RecordError::Header { kind: 23, version: 0x0301 })),
        (&[20, 3, 3, 0, 1], Err(RecordError::Header { kind: 20, version: 0x0303 })),
        (b"GET / HTTP/1.1", Err(RecordError::Header { kind: b'G', version: 0x4554 })),
    ] {
        assert_eq!(record_bytes(header), expected, "{header:?}");
    }
}

/// A record of valid length whose content is too long is refused.
#[test]
fn long_content_is_refused() {
    for (bytes, padding, is_fine) in
        [(CONTENT_BYTES_MAX, 0, true), (CONTENT_BYTES_MAX, 1, false), (7, 16_377, true)]
    {
        let [(mut sealer, _), (_, mut opener)] = pair(RECORDS_PER_KEY_MAX);
        let mut wire = forge(&mut sealer, &vec![1; bytes], DATA, padding);
        assert_eq!(open(&mut opener, &mut wire, true).is_ok(), is_fine, "{bytes} + {padding}");
    }
}

/// Session tickets, partial messages, unknown types and alerts.
#[test]
fn unexpected_records_are_refused() {
    for (content, kind, expected) in [
        (&[4, 0, 0, 9][..], HANDSHAKE, RecordError::Message(4)),
        (&[24, 0, 0, 1, 2], HANDSHAKE, RecordError::Message(24)),
        (&[24, 0, 0, 1], HANDSHAKE, RecordError::Message(24)),
        (&[24, 0, 0, 1, 0, 24, 0, 0, 1, 0], HANDSHAKE, RecordError::Message(24)),
        (&[], HANDSHAKE, RecordError::Message(0)),
        (&[2], ALERT, RecordError::Content(ALERT)),
        (&[2, 20], ALERT, RecordError::Alert(AlertDescription::BadRecordMac)),
        (&[1, 80], ALERT, RecordError::Alert(AlertDescription::InternalError)),
        (&[1], 20, RecordError::Content(20)),
        (&[], 0, RecordError::Content(0)),
    ] {
        let [(mut sealer, _), (_, mut opener)] = pair(RECORDS_PER_KEY_MAX);
        let mut wire = forge(&mut sealer, content, kind, 3);
        assert_eq!(open(&mut opener, &mut wire, true), Err((vec![], expected)), "{content:?} of {kind}");
    }
    let text = RecordError::Alert(AlertDescription::BadRecordMac).to_string();
    assert!(text.contains("BadRecordMac"), "{text}");
}

/// The number of consecutive empty records and key updates is bounded.
#[test]
fn too_many_records_without_data_are_refused() {
    for (content, kind) in [(&[][..], DATA), (&[24, 0, 0, 1, 0], HANDSHAKE), (&[1, 90], ALERT)] {
        let [(mut sealer, _), (_, mut opener)] = pair(RECORDS_PER_KEY_MAX);
        for round in 0..=EMPTY_RECORDS_MAX {
            let mut wire = forge(&mut sealer, content, kind, 0);
            let outcome = open(&mut opener, &mut wire, true);
            assert_eq!(outcome.is_ok(), round < EMPTY_RECORDS_MAX, "{kind}: {round}");
            if kind == HANDSHAKE {
                sealer.key = sealer.shared.next_key(|next| next.next_sealing()).unwrap();
            }
            if round == 5 {
                let mut data = seal(&mut sealer, b"data");
                assert!(open(&mut opener, &mut data, true).is_ok());
                opener.empty_records = round + 1;
            }
        }
    }
}

/// A key seals as many records as it may, the last of which updates it.
#[test]
fn a_key_is_updated_at_its_limit() {
    let [(mut sealer, _), _] = pair(4);
    let plain = seal(&mut sealer, b"x").len();
    let has_update: Vec<_> = (0..8).map(|_| seal(&mut sealer, b"x").len() > plain).collect();
    assert_eq!(has_update, [false, false, true, false, false, true, false, false]);
    // RFC 8446 §5.5: at most 2^24.5 full records with AES-GCM.
    const { assert!(RECORDS_PER_KEY_MAX <= 1 << 24) };
}

/// A requested key update is sent once, before the next data.
#[test]
fn a_requested_key_update_is_sent() {
    let [(mut requester, mut receiver), (mut sealer, mut opener)] = pair(RECORDS_PER_KEY_MAX);
    let fresh = seal(&mut sealer, b"x").len();
    let mut wire = [forge(&mut requester, &[24, 0, 0, 1, 1], HANDSHAKE, 0)].concat();
    requester.key = requester.shared.next_key(|next| next.next_sealing()).unwrap();
    wire.extend(forge(&mut requester, &[24, 0, 0, 1, 1], HANDSHAKE, 0));
    requester.key = requester.shared.next_key(|next| next.next_sealing()).unwrap();
    wire.extend(seal(&mut requester, b"data"));
    assert_eq!(open(&mut opener, &mut wire, false).unwrap().data, b"data");
    let (mut updated, after) = (seal(&mut sealer, b"y"), seal(&mut sealer, b"z"));
    assert_eq!((updated.len(), after.len()), (fresh + ADDED_BYTES + 5, fresh));
    receiver.key.sequence += 1; // Skips the record that measured the length.
    updated.extend(after);
    assert_eq!(open(&mut receiver, &mut updated, true).unwrap().data, b"yz");
}

/// A peer with this record layer, and its received bytes.
struct Ours {
    secured: Secured<DuplexStream>,
    wire: Vec<u8>,
}

impl Ours {
    fn records(&mut self) -> &mut (Sealer, Opener) {
        self.secured.records.as_mut().unwrap()
    }

    async fn send(&mut self, data: &[u8]) {
        let wire = seal(&mut self.records().0, data);
        self.secured.stream.write_all(&wire).await.unwrap();
    }

    async fn alert(&mut self, alert: AlertDescription) {
        let mut out = vec![0; Sealer::sealed_bytes_max(2)];
        let sealed = self.records().0.seal_alert(alert, &mut out).unwrap();
        self.secured.stream.write_all(&out[..sealed]).await.unwrap();
    }

    /// The data of the next record that has some, or `None` at the end of TLS.
    async fn next(&mut self) -> Result<Option<Vec<u8>>, RecordError> {
        loop {
            let bytes = record_bytes(&self.wire)?;
            let Some(bytes) = bytes.filter(|bytes| *bytes <= self.wire.len()) else {
                assert!(self.secured.stream.read_buf(&mut self.wire).await.unwrap() > 0, "the stream ended");
                continue;
            };
            let mut record: Vec<u8> = self.wire.drain(..bytes).collect();
            match self.records().1.open(&mut record)? {
                Opened::Data(data) => return Ok(Some(data.to_vec())),
                Opened::NoData => {}
                Opened::Closed => return Ok(None),
            }
        }
    }

    async fn read_exact(&mut self, bytes: usize) -> Vec<u8> {
        let mut data = vec![];
        while data.len() < bytes {
            data.extend(self.next().await.unwrap().unwrap());
        }
        data
    }
}

/// Connects a peer with this record layer to one with rustls.
async fn with_rustls(suite: SupportedCipherSuite, ours_is_client: bool) -> (Ours, TlsStream<DuplexStream>) {
    let identity = Identity::ephemeral().unwrap();
    let provider = CryptoProvider { cipher_suites: vec![suite], ..aws_lc_rs::default_provider() };
    let mut server = rustls::ServerConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(identity.certificates(), identity.key())
        .unwrap();
    server.enable_secret_extraction = true;
    server.send_tls13_tickets = 0;
    server.alpn_protocols = vec![tensor_relay_protocol::ALPN.to_vec()];
    let rejected_key = Arc::new(OnceLock::new());
    let keys: [Fingerprint; 1] = [identity.fingerprint()];
    let client = Arc::new(tls::stream_client_config(&keys, None, rejected_key).unwrap());
    let (server, name) = (Arc::new(server), tls::SERVER_NAME.try_into().unwrap());
    let (near, far) = duplex(1 << 20);
    let (secured, peer) = if ours_is_client {
        let shaken =
            tokio::join!(Secured::connect(near, client, name), TlsAcceptor::from(server).accept(far));
        (shaken.0.unwrap(), TlsStream::from(shaken.1.unwrap()))
    } else {
        let connecting = TlsConnector::from(client).connect(name, far);
        let shaken = tokio::join!(Secured::accept(near, server), connecting);
        (shaken.0.unwrap(), TlsStream::from(shaken.1.unwrap()))
    };
    assert_eq!(peer.get_ref().1.negotiated_cipher_suite(), Some(suite));
    assert!(secured.is_protocol_agreed());
    (Ours { secured, wire: vec![] }, peer)
}

fn refresh(peer: &mut TlsStream<DuplexStream>) {
    match peer {
        TlsStream::Client(peer) => peer.get_mut().1.refresh_traffic_keys(),
        TlsStream::Server(peer) => peer.get_mut().1.refresh_traffic_keys(),
    }
    .unwrap();
}

fn on_both_sides(case: impl AsyncFn(Ours, TlsStream<DuplexStream>)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for suite in SUITES {
        for ours_is_client in [true, false] {
            runtime.block_on(async {
                let (ours, peer) = with_rustls(suite, ours_is_client).await;
                case(ours, peer).await;
            });
        }
    }
}

/// Goal: this record layer and rustls interoperate, with every cipher suite, across key updates of both peers.
#[test]
fn records_interoperate_with_rustls() {
    on_both_sides(async |mut ours, mut peer| {
        ours.records().0.records_per_key = 3;
        let long: Vec<u8> = (0..100_000u32).map(|number| number as u8).collect();
        for round in 0..4 {
            ours.send(&long).await;
            let mut received = vec![0; long.len()];
            peer.read_exact(&mut received).await.unwrap();
            assert!(received == long, "{round}");
            peer.write_all(&long).await.unwrap();
            peer.flush().await.unwrap();
            assert!(ours.read_exact(long.len()).await == long, "{round}");
            refresh(&mut peer); // It also requests an update.
        }
        peer.shutdown().await.unwrap();
        assert_eq!(ours.next().await, Ok(None), "the end of TLS");
        ours.alert(AlertDescription::CloseNotify).await;
        assert_eq!(peer.read(&mut [0]).await.unwrap(), 0, "a clean end");
    });
}

/// Goal: this record layer and rustls interpret each other's alerts. Method: send rustls an alert, then a modified
/// record, which it answers with an alert.
#[test]
fn alerts_interoperate_with_rustls() {
    on_both_sides(async |mut ours, mut peer| {
        ours.alert(AlertDescription::BadRecordMac).await;
        let error = peer.read(&mut [0]).await.unwrap_err();
        assert!(error.to_string().contains("BadRecordMac"), "{error}");
    });
    on_both_sides(async |mut ours, mut peer| {
        let mut wire = seal(&mut ours.records().0, b"data");
        wire[10] ^= 1;
        ours.secured.stream.write_all(&wire).await.unwrap();
        assert_eq!(peer.read(&mut [0]).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(ours.next().await, Err(RecordError::Alert(AlertDescription::BadRecordMac)));
    });
}
