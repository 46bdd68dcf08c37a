//! Goal: for any bytes, a decoder returns a chunk or an error. It neither panics nor writes outside the chunk, succeeds
//! only if it wrote every byte, and takes little memory, whatever lengths the bytes claim.
//!
//! Method: random chunks are encoded by every codec, mutated as by a hostile sender ([`mutation`]), and decoded between
//! guard bytes ([`decoder`]); so are random bytes. Everything is derived from a seed and a case number. On Linux, the
//! peak of the process's resident memory is checked at the end.
//!
//! Runs are short by default: `TENSOR_RELAY_FUZZ_SECONDS=600` spends that time on each decoder, with new cases if
//! `TENSOR_RELAY_FUZZ_SEED` is new. A failure prints the seed and the case; `TENSOR_RELAY_FUZZ_CASE` starts at that
//! case. `tests/fuzz/run` makes the checks of [`decoder`] guided by coverage.

mod chunk;
mod decoder;
mod memory;
mod mutation;
mod sidecar;

use self::{
    chunk::Chunk,
    decoder::{Attempt, decode_any},
    mutation::mutate,
};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{
    env,
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
    time::{Duration, Instant},
};
use tensor_relay_protocol::{CodecId, DecodeError};

/// The number of cases of a short run, for each decoder: a few seconds in a debug build.
const CASES: u64 = 1000;

/// The number of mutated encodings of each chunk.
const ATTEMPTS: usize = 32;

/// The most memory that a whole run may add. A decoder's memory is about the size of a chunk.
const MEMORY_BYTES_MAX: u64 = 64 << 20;

/// Runs all decoders at once, each on a thread of its own.
#[test]
fn decoders_survive_any_bytes() {
    let before = memory::peak_bytes();
    let fuzzers = CodecId::ALL.iter().map(|id| (*id, thread::spawn(|| fuzz(*id))));
    for (id, fuzzer) in fuzzers.collect::<Vec<_>>() {
        let tally = fuzzer.join().unwrap();
        println!("{}: {tally:?}", id.name());
        assert!(tally.decoded > 0 && tally.refused > 0, "{}: both outcomes occur", id.name());
    }
    let taken = memory::peak_bytes().saturating_sub(before);
    assert!(taken < MEMORY_BYTES_MAX, "{taken} bytes were taken, for chunks of less than 400,000 bytes");
}

/// The numbers of cases and of the outcomes of mutated encodings.
#[derive(Debug, Default)]
struct Tally {
    cases: u64,
    decoded: u64,
    refused: u64,
}

fn fuzz(id: CodecId) -> Tally {
    let seconds: Option<u64> = setting("TENSOR_RELAY_FUZZ_SECONDS");
    let seed = setting("TENSOR_RELAY_FUZZ_SEED").unwrap_or(1);
    let first = setting("TENSOR_RELAY_FUZZ_CASE").unwrap_or(0);
    let begun = Instant::now();
    let is_over = |cases| match seconds {
        Some(seconds) => begun.elapsed() >= Duration::from_secs(seconds),
        None => cases >= CASES,
    };
    let mut tally = Tally::default();
    while !is_over(tally.cases) {
        let case = first + tally.cases;
        let name = id.name();
        catch_unwind(AssertUnwindSafe(|| run_case(id, seed, case, &mut tally))).unwrap_or_else(|_| {
            panic!("{name}: run it again with TENSOR_RELAY_FUZZ_SEED={seed} TENSOR_RELAY_FUZZ_CASE={case}")
        });
        tally.cases += 1;
    }
    tally
}

fn setting(name: &str) -> Option<u64> {
    env::var(name).ok().map(|value| value.parse().expect(name))
}

fn run_case(id: CodecId, seed: u64, case: u64, tally: &mut Tally) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ (case << 16) ^ (u64::from(id.code()) << 8));
    decode_any(id, &(0..rng.random_range(0..300)).map(|_| rng.random()).collect::<Vec<u8>>());
    let chunk = Chunk::random(&mut rng);
    let Some(encoded) = chunk.encode(id) else { return };
    let donor = Chunk::random(&mut rng).encode(id).unwrap_or_default();
    let intact = Attempt {
        codec: id,
        dtype: chunk.dtype,
        base: Some(&chunk.base),
        encoded: &encoded,
        raw_bytes: chunk.raw.len(),
    };
    assert!(intact.run().as_ref() == Ok(&chunk.raw), "an intact encoding decodes to the chunk");
    for _ in 0..ATTEMPTS {
        let mut bytes = encoded.clone();
        mutate(&mut rng, &mut bytes, &donor);
        match decode_mutated(&mut rng, &intact, &bytes) {
            Ok(_) => tally.decoded += 1,
            Err(_) => tally.refused += 1,
        }
    }
}

/// Decodes the mutated bytes `encoded` with the other inputs of `intact`. In three tenths of the calls, one of those
/// inputs is changed as well: the length of the chunk is random, or the base is missing or too short.
fn decode_mutated(rng: &mut impl Rng, intact: &Attempt<'_>, encoded: &[u8]) -> Result<Vec<u8>, DecodeError> {
    let mut attempt = Attempt { encoded, ..*intact };
    match rng.random_range(0..10) {
        0 => attempt.raw_bytes = rng.random_range(0..2 * intact.raw_bytes + 2),
        1 => attempt.base = None,
        2 => attempt.base = intact.base.map(|base| &base[base.len() / 2..]),
        _ => {}
    }
    attempt.run()
}
