//! Opens arbitrary TLS records, as a hostile peer can send them after the handshake. The first byte of the input
//! selects whether the other bytes are a raw record, or contents that the harness encrypts with the right key. Two tests
//! in `transport/src/lane/byte_stream/records/tests.rs` check the same with random input:
//! `hostile_bytes_are_records_or_errors` and `any_content_is_handled_or_refused`.

#![no_main]

#[allow(dead_code, reason = "only the opening half is used")]
#[path = "../../../transport/src/lane/byte_stream/records.rs"]
mod records;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use libfuzzer_sys::fuzz_target;
use records::{NextSecrets, Opened, Opener, RECORDS_PER_KEY_MAX, opened_bytes, record_bytes};
use rustls::{
    ConnectionTrafficSecrets, ExtractedSecrets,
    crypto::cipher::{AeadKey, Iv},
};

/// Returns the same key at each key update, so that the harness only has to restart the sequence number.
struct FixedSecrets;

fn secrets() -> ConnectionTrafficSecrets {
    ConnectionTrafficSecrets::Aes256Gcm { key: AeadKey::from([1; 32]), iv: Iv::from([0; 12]) }
}

impl NextSecrets for FixedSecrets {
    fn next_sealing(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        Ok(secrets())
    }

    fn next_opening(&mut self) -> Result<ConnectionTrafficSecrets, rustls::Error> {
        Ok(secrets())
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((mode, input)) = input.split_first() else { return };
    let extracted = ExtractedSecrets { tx: (0, secrets()), rx: (0, secrets()) };
    let Ok((_, opener)) = records::records(extracted, FixedSecrets, RECORDS_PER_KEY_MAX) else { return };
    match mode % 2 {
        0 => open_bytes(opener, &mut input.to_vec()),
        _ => open_contents(opener, input),
    }
});

/// Checks that a record that was not encrypted with the key is refused.
fn open_bytes(mut opener: Opener, wire: &mut [u8]) {
    if let Ok(Some(bytes)) = record_bytes(wire)
        && let Some(record) = wire.get_mut(..bytes)
    {
        assert!(opener.open(record).is_err());
    }
}

/// Encrypts contents from the input, and checks that the opened data equal the encrypted data. In the input, each
/// content has a length prefix, and ends with its type and padding.
fn open_contents(mut opener: Opener, mut input: &[u8]) {
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &[1; 32]).expect("a key of 32 bytes"));
    let mut sequence = 0u64;
    while let Some((length, rest)) = input.split_first() {
        let (inner, rest) = rest.split_at(usize::from(*length).min(rest.len()));
        input = rest;
        let mut record = seal(&key, sequence, inner);
        sequence += 1;
        let Ok(Some(bytes)) = record_bytes(&record) else { return };
        assert_eq!(bytes, record.len());
        let mut out = vec![0; opened_bytes(bytes)];
        let opened =
            if length % 2 == 0 { opener.open(&mut record) } else { opener.open_into(&record, &mut out) };
        let end = inner.iter().rposition(|byte| *byte != 0);
        match opened {
            Ok(Opened::Data(data)) => {
                assert!(end.is_some_and(|end| inner[end] == 23 && data == &inner[..end]))
            }
            Ok(Opened::NoData) if end.is_some_and(|end| inner[end] == 22) => sequence = 0,
            Ok(Opened::NoData) => {}
            Ok(Opened::Closed) | Err(_) => return,
        }
    }
}

fn seal(key: &LessSafeKey, sequence: u64, inner: &[u8]) -> Vec<u8> {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&sequence.to_be_bytes());
    let [high, low] = (inner.len() as u16 + 16).to_be_bytes();
    let header = [23, 3, 3, high, low];
    let mut body = inner.to_vec();
    let nonce = Nonce::assume_unique_for_key(nonce);
    key.seal_in_place_append_tag(nonce, Aad::from(header), &mut body)
        .expect("a short record");
    [&header[..], &body].concat()
}
