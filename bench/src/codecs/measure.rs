//! Measures every codec on every chunk, in turn.

use super::content::Content;
use crate::{cells::Cells, table::Row};
use anyhow::{Result, ensure};
use std::time::Instant;
use tensor_relay_protocol::{
    BitPlanesOn, Codec, CodecId, CodecPath, Context, Dtype, codec, worthwhile_bytes,
};

/// The chunks of one dtype, and their bases, if any.
pub(super) struct Job<'a> {
    pub(super) dtype: Dtype,
    chunks: Vec<&'a [u8]>,
    bases: Option<Vec<&'a [u8]>>,
}

/// A codec to measure.
pub(super) struct Subject {
    name: String,
    codec: &'static dyn Codec,
}

/// The size of the zeros of [`Subject::applies`]: large compared with a codec's tables.
const ZEROS_BYTES: usize = 4096;

impl<'a> Job<'a> {
    pub(super) fn new(content: &'a Content, base: Option<&'a Content>, dtype: Dtype) -> Self {
        Self { dtype, chunks: content.chunks(dtype), bases: base.map(|base| base.chunks(dtype)) }
    }

    /// A job of `chunks` without bases.
    #[cfg(test)]
    pub(super) fn of(dtype: Dtype, chunks: Vec<&'a [u8]>) -> Self {
        Self { dtype, chunks, bases: None }
    }

    /// The number of chunks.
    pub(super) fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// The number of raw bytes of all chunks.
    pub(super) fn bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.len() as u64).sum()
    }

    /// The bytes of one chunk.
    pub(super) fn chunk(&self, chunk: usize) -> &'a [u8] {
        self.chunks[chunk]
    }

    /// The dtype and the base with which `chunk` is encoded.
    pub(super) fn context(&self, chunk: usize) -> Context<'_> {
        Context { dtype: self.dtype, base: self.bases.as_ref().map(|bases| bases[chunk]) }
    }
}

impl Subject {
    /// Whether the codec supports the dtype of `job`, and has a base if it needs one: whether it encodes zeros.
    fn applies(&self, job: &Job<'_>) -> bool {
        let zeros = [0; ZEROS_BYTES];
        let context = Context { dtype: job.dtype, base: job.bases.as_ref().map(|_| &zeros[..]) };
        self.codec.encode(context, &zeros, &mut [0; 2 * ZEROS_BYTES]).is_some()
    }

    /// Every codec of this build, raw first.
    pub(super) fn codecs() -> Vec<Self> {
        let subject = |id: &CodecId| Self { name: id.name().into(), codec: codec(*id) };
        CodecId::ALL.iter().map(subject).collect()
    }

    /// `bitplanes` with each set of SIMD instructions that this processor supports.
    pub(super) fn paths() -> impl Iterator<Item = Self> {
        CodecPath::all().map(|path| Self {
            name: format!("bitplanes on {}", path.name()),
            // One for each set of instructions, for the duration of the program.
            codec: Box::leak(Box::new(BitPlanesOn(path))),
        })
    }
}

/// Measures all `subjects` in turn, `rounds` times, and returns a row for each. The rates are compared with those of the
/// first. A codec that does not support the dtype or lacks a base has no numbers.
///
/// # Errors
/// When a codec does not restore the bytes that it encoded.
pub(super) fn measure(job: &Job<'_>, subjects: &[Subject], rounds: u32) -> Result<Vec<Row>> {
    let mut buffers = Buffers::new(job);
    let mut times = vec![vec![ChunkTimes::NONE; job.chunk_count()]; subjects.len()];
    for _ in 0..rounds {
        for (subject, times) in subjects.iter().zip(&mut times) {
            buffers.run_pass(job, subject, times)?;
        }
    }
    let memcpy_s = times.first().map(|times| total_seconds(times)).unwrap_or_default();
    Ok(subjects
        .iter()
        .zip(&times)
        .map(|(subject, times)| row(subject, job, times, memcpy_s))
        .collect())
}

/// The buffers that all codecs use in turn.
struct Buffers {
    /// An encoding of each chunk.
    encoded: Vec<Vec<u8>>,
    /// The decoded bytes.
    decoded: Vec<u8>,
}

impl Buffers {
    fn new(job: &Job<'_>) -> Self {
        let longest = job.chunks.iter().map(|chunk| chunk.len()).max().unwrap_or(0);
        // Not zeros, so that the pages are allocated before the first measurement.
        let encoded = job.chunks.iter().map(|chunk| vec![1; chunk.len()]).collect();
        Self { encoded, decoded: vec![1; longest] }
    }

    /// Encodes all chunks, then decodes all. As at a sender and a receiver, the next chunk is not in the caches.
    fn run_pass(&mut self, job: &Job<'_>, subject: &Subject, times: &mut [ChunkTimes]) -> Result<()> {
        for (at, (raw, out)) in job.chunks.iter().zip(&mut self.encoded).enumerate() {
            let max = encoding_max(subject.codec.id(), raw.len());
            let begin = Instant::now();
            let bytes = subject.codec.encode(job.context(at), raw, &mut out[..max]);
            times[at].encode_s = times[at].encode_s.min(begin.elapsed().as_secs_f64());
            times[at].encoded_bytes = bytes;
            if bytes.is_none() {
                out.copy_from_slice(raw);
            }
        }
        for (at, (raw, encoded)) in job.chunks.iter().zip(&self.encoded).enumerate() {
            let decoded = &mut self.decoded[..raw.len()];
            let begin = Instant::now();
            match times[at].encoded_bytes {
                Some(bytes) => subject.codec.decode(job.context(at), &encoded[..bytes], decoded)?,
                None => decoded.copy_from_slice(encoded),
            }
            times[at].decode_s = times[at].decode_s.min(begin.elapsed().as_secs_f64());
            ensure!(decoded == *raw, "{} did not restore chunk {at}", subject.name);
        }
        Ok(())
    }
}

/// The maximum size of an encoding that is worthwhile.
fn encoding_max(id: CodecId, raw_bytes: usize) -> usize {
    match id {
        CodecId::Raw => raw_bytes,
        _ => worthwhile_bytes(raw_bytes),
    }
}

/// The shortest times of one codec for one chunk, and the size of its encoding.
#[derive(Debug, Clone, Copy)]
struct ChunkTimes {
    encode_s: f64,
    decode_s: f64,
    encoded_bytes: Option<usize>,
}

impl ChunkTimes {
    const NONE: Self = Self { encode_s: f64::INFINITY, decode_s: f64::INFINITY, encoded_bytes: None };
}

/// The seconds to encode, and to decode, all chunks.
fn total_seconds(times: &[ChunkTimes]) -> (f64, f64) {
    (times.iter().map(|chunk| chunk.encode_s).sum(), times.iter().map(|chunk| chunk.decode_s).sum())
}

fn row(subject: &Subject, job: &Job<'_>, times: &[ChunkTimes], memcpy_s: (f64, f64)) -> Row {
    let ((encode, decode), (memcpy_encode, memcpy_decode)) = (total_seconds(times), memcpy_s);
    let gigabytes = job.bytes() as f64 / 1e9;
    let sizes = times.iter().zip(&job.chunks);
    let encoded_bytes: usize = sizes.map(|(chunk, raw)| chunk.encoded_bytes.unwrap_or(raw.len())).sum();
    let chunks_raw = times.iter().filter(|chunk| chunk.encoded_bytes.is_none()).count();
    let applies = subject.applies(job);
    let quotient = |a: f64, b: f64| (applies && b > 0.0).then(|| a / b);
    // Exact, so it is text with four digits, and no rounded number.
    let ratio = quotient(job.bytes() as f64, encoded_bytes as f64).map(|ratio| format!("{ratio:.4}"));
    let setting = Cells::of([("codec", subject.name.clone())]).and("ratio", ratio);
    let measured = Cells::default()
        .and("encoded_bytes", applies.then_some(encoded_bytes as f64))
        .and("chunks_raw", applies.then_some(chunks_raw as f64))
        .and("encode_gb_per_s", quotient(gigabytes, encode))
        .and("encode_of_memcpy", quotient(memcpy_encode, encode))
        .and("decode_gb_per_s", quotient(gigabytes, decode))
        .and("decode_of_memcpy", quotient(memcpy_decode, decode));
    Row::of(setting, [&measured])
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_protocol::DecodeError;

    /// A codec that does not restore the last byte.
    struct Forgetful;

    impl Codec for Forgetful {
        fn id(&self) -> CodecId {
            CodecId::Zstd
        }

        fn encode(&self, _: Context<'_>, _: &[u8], out: &mut [u8]) -> Option<usize> {
            out.first().map(|_| 1)
        }

        fn decode(&self, _: Context<'_>, _: &[u8], raw: &mut [u8]) -> Result<(), DecodeError> {
            raw.fill(5);
            raw.last_mut().into_iter().for_each(|byte| *byte = 0);
            Ok(())
        }
    }

    #[test]
    fn every_codec_is_measured_and_sizes_are_exact() {
        let (zeros, noise) = ([0; 5000], blake3::hash(b"noise"));
        let noise: Vec<u8> = noise.as_bytes().iter().copied().cycle().take(32).collect();
        let job = Job::of(Dtype::Bf16, vec![&zeros, &noise]);
        let mut subjects = Subject::codecs();
        subjects.extend(Subject::paths());
        let rows = measure(&job, &subjects, 2).unwrap();
        assert_eq!(rows.len(), CodecId::ALL.len() + CodecPath::all().count());
        let number = |row: &Row, name| row.measured.get(name).map(|summary| summary.median);
        let codec = |row: &Row| row.setting.get("codec").unwrap().clone();
        assert_eq!((codec(&rows[0]).as_str(), number(&rows[0], "encoded_bytes")), ("raw", Some(5032.0)));
        assert_eq!(
            (rows[0].setting.get("ratio").unwrap().as_str(), number(&rows[0], "encode_of_memcpy")),
            ("1.0000", Some(1.0))
        );
        let zstd = rows.iter().find(|row| codec(row) == "zstd").unwrap();
        assert_eq!(number(zstd, "chunks_raw"), Some(1.0), "noise stays raw");
        assert!((32.0..100.0).contains(&number(zstd, "encoded_bytes").unwrap()));
        for row in rows {
            let rates = number(&row, "encode_gb_per_s").zip(number(&row, "decode_gb_per_s"));
            match codec(&row).as_str() {
                "sparse" => assert_eq!((rates, row.setting.get("ratio")), (None, None), "there is no base"),
                _ => assert!(rates.is_some_and(|(encode, decode)| encode > 0.0 && decode > 0.0), "{row:?}"),
            }
        }
    }

    #[test]
    fn codecs_that_do_not_apply_have_no_numbers() {
        let noise = blake3::hash(b"noise");
        let codecs_with_numbers = |job: &Job<'_>| -> Vec<String> {
            let rows = measure(job, &Subject::codecs(), 1).unwrap();
            let numbered = rows.into_iter().filter(|row| row.setting.get("ratio").is_some());
            numbered.map(|row| row.setting.0[0].clone()).collect()
        };
        let integers = Job::of(Dtype::I8, vec![noise.as_bytes()]);
        assert_eq!(
            codecs_with_numbers(&integers),
            ["raw", "zstd", "planes"],
            "other values of the dtype could shrink"
        );
        let nothing = Job::of(Dtype::I8, vec![]);
        assert_eq!(codecs_with_numbers(&nothing), [""; 0], "no division by zero");
        let base =
            Job { bases: Some(vec![noise.as_bytes()]), ..Job::of(Dtype::Bf16, vec![noise.as_bytes()]) };
        assert_eq!(codecs_with_numbers(&base).len(), CodecId::ALL.len());
    }

    #[test]
    fn a_wrong_decoding_is_an_error() {
        let subject = Subject { name: "forgetful".into(), codec: &Forgetful };
        let chunk = [5; 100];
        let error = measure(&Job::of(Dtype::U8, vec![&chunk]), &[subject], 1).err().unwrap();
        assert!(error.to_string().contains("forgetful did not restore chunk 0"));
    }
}
