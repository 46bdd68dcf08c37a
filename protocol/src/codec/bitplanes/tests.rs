//! The properties of `BitPlanes` on every path that this machine supports, and the golden bytes of PROTOCOL.md §8.4.

use super::{
    block::{BLOCK_WORDS, Form},
    *,
};
use crate::Dtype;
use proptest::prelude::*;

fn context(dtype: Dtype) -> Context<'static> {
    Context { dtype, base: None }
}

/// Every dtype that has an exponent.
fn floats() -> Vec<Dtype> {
    Dtype::ALL
        .iter()
        .copied()
        .filter(|dtype| Layout::of(*dtype).is_some())
        .collect()
}

/// The encoding of `raw`; `None` if it does not fit. Checks that all paths agree and none writes beyond `room`.
fn encode(dtype: Dtype, raw: &[u8], room: usize) -> Option<Vec<u8>> {
    let on_path = |path| {
        let mut out = vec![0xaa; room + 100];
        let bytes = BitPlanesOn(path).encode(context(dtype), raw, &mut out[..room]);
        assert!(out[room..].iter().all(|byte| *byte == 0xaa), "{path:?} wrote beyond its room");
        out.truncate(bytes?);
        Some(out)
    };
    let portable = Path::all().last().and_then(on_path);
    for path in Path::all() {
        assert!(on_path(path) == portable, "{path:?} encodes {dtype} to other bytes");
    }
    portable
}

/// The bytes that `encoded` decodes to; `None` for an error. Checks that all paths agree.
fn decode(dtype: Dtype, encoded: &[u8], bytes: usize) -> Option<Vec<u8>> {
    let on_path = |path| {
        let mut raw = vec![0x55; bytes];
        BitPlanesOn(path).decode(context(dtype), encoded, &mut raw).ok()?;
        Some(raw)
    };
    let portable = Path::all().last().and_then(on_path);
    for path in Path::all() {
        assert!(on_path(path) == portable, "{path:?} decodes {dtype} to other bytes");
    }
    portable
}

/// A generator of pseudo-random numbers: xorshift64.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Words like weights: the further an exponent is from the most frequent one, the rarer it is. `spread` scales the
/// distances: 0 is a single exponent, 64 is noise.
fn weights(dtype: Dtype, words: usize, spread: u32, seed: u64) -> Vec<u8> {
    let bytes = Layout::of(dtype).unwrap().word_bytes();
    let exponent_bits = match dtype {
        Dtype::F64 | Dtype::C128 => 11,
        Dtype::F32 | Dtype::C64 | Dtype::Bf16 | Dtype::F8E8M0 => 8,
        Dtype::F16 | Dtype::C32 | Dtype::F8E5M2 | Dtype::F8E5M2Fnuz => 5,
        _ => 4,
    };
    let sign_bits = u32::from(dtype != Dtype::F8E8M0);
    let mantissa_bits = 8 * bytes as u32 - exponent_bits - sign_bits;
    let mut dice = Dice(seed | 1);
    let mut word = || {
        let noise = dice.roll() >> 3;
        let distance = u64::from((dice.roll() | 1 << 63).trailing_zeros() * spread / 8);
        let exponent = ((1u64 << exponent_bits) / 2).wrapping_sub(distance) & ((1 << exponent_bits) - 1);
        match spread {
            64 => noise,
            _ => {
                let sign = (noise >> 40 & 1) << (8 * bytes as u32 - 1);
                let mantissa = noise & ((1 << mantissa_bits) - 1);
                exponent << mantissa_bits | mantissa | if sign_bits == 1 { sign } else { 0 }
            }
        }
    };
    (0..words).flat_map(|_| word().to_le_bytes().into_iter().take(bytes)).collect()
}

#[test]
fn dtypes_without_an_exponent_are_not_coded() {
    let without = Dtype::ALL.iter().filter(|dtype| Layout::of(**dtype).is_none());
    for dtype in without {
        assert_eq!(encode(*dtype, &[0; 1000], 2000), None);
        assert_eq!(decode(*dtype, &encode(Dtype::Bf16, &[0; 1000], 2000).unwrap(), 1000), None);
    }
    assert_eq!(floats().len(), 15);
}

/// PROTOCOL.md §8.4, example, and one vector for each layout: dtype, raw bytes, encoded bytes.
#[test]
fn golden_vectors() {
    let unhex = |text: &str| -> Vec<u8> {
        (0..text.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
            .collect()
    };
    for line in include_str!("../../../vectors/bitplanes.hex").lines() {
        let [name, raw, encoded] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let dtype = *Dtype::ALL.iter().find(|dtype| dtype.name() == name).unwrap();
        let (raw, encoded) = (unhex(raw), unhex(encoded));
        assert_eq!(encode(dtype, &raw, raw.len() + 5), Some(encoded.clone()), "{dtype}");
        assert_eq!(decode(dtype, &encoded, raw.len()), Some(raw), "{dtype}");
    }
}

/// Chunks of many blocks: weights in more blocks than one sample covers, then noise, then a single exponent and a
/// partial group.
#[test]
fn long_chunks_use_every_form() {
    for dtype in floats() {
        let mut raw = weights(dtype, 9 * BLOCK_WORDS, 8, 1);
        raw.extend(weights(dtype, 9 * BLOCK_WORDS, 64, 2));
        raw.extend(weights(dtype, 9 * BLOCK_WORDS + 77, 0, 3));
        let encoded = encode(dtype, &raw, raw.len()).unwrap();
        assert_eq!(decode(dtype, &encoded, raw.len()).as_ref(), Some(&raw), "{dtype}");
        let layout = Layout::of(dtype).unwrap();
        let first = Form::from_code(encoded[LENGTH_BYTES]).unwrap();
        assert!(matches!(first, Form::Levels { reuses_table: false, .. }), "{dtype}: {first:?}");
        let constant = encode(dtype, &weights(dtype, 1000, 0, 4), 1 << 16).unwrap();
        assert_eq!(constant[LENGTH_BYTES], Form::Constant.code());
        let uncoded = 1000 * layout.rest_bytes() + 16 * layout.low_bits.group_bytes();
        assert_eq!(constant.len(), LENGTH_BYTES + 2 + uncoded);
    }
}

/// Blocks that share a sample share a table, which is sent once. A reference to a table that was not sent is an error.
#[test]
fn a_table_is_sent_once() {
    let block = weights(Dtype::Bf16, BLOCK_WORDS, 8, 6);
    let mut encoded = encode(Dtype::Bf16, &block.repeat(8), 8 * block.len()).unwrap();
    let levels = usize::from(encoded[LENGTH_BYTES]);
    assert!((2..=4).contains(&levels));
    // Eight equal blocks and one table: the blocks have equal sizes.
    assert_eq!((encoded.len() - LENGTH_BYTES - 3 * levels) % 8, 0);
    encoded[LENGTH_BYTES] |= 0x80;
    assert_eq!(decode(Dtype::Bf16, &encoded, 8 * block.len()), None);
}

/// Encoded sizes are near the entropy, and noise costs one more byte per block.
#[test]
fn encoded_sizes_are_near_the_entropy() {
    let words = 8 * BLOCK_WORDS;
    let weights_of = |spread| weights(Dtype::Bf16, words, spread, 5);
    // A word's exponent is at distance n with probability 2^-(n+1): in most words it takes two bits, in most others four.
    let encoded = encode(Dtype::Bf16, &weights_of(8), 4 * words).unwrap().len() as f64;
    let bits = encoded * 8.0 / words as f64;
    assert!((10.2..10.4).contains(&bits), "{bits} bits for each word");
    let noise = encode(Dtype::Bf16, &weights_of(64), 4 * words).unwrap();
    assert_eq!(noise.len(), LENGTH_BYTES + 2 * words + 8);
    assert_eq!(encode(Dtype::Bf16, &weights_of(64), 2 * words), None);
}

proptest! {
    /// Any dtype, any length, every path: decoding reverses encoding, and refuses truncation and other lengths.
    #[test]
    fn round_trip(
        dtype in 0..floats().len(), words in 0usize..2000, odd in 0usize..8, spread in 0u32..=24, seed: u64,
        cut: prop::sample::Index,
    ) {
        let dtype = floats()[dtype];
        let mut raw = weights(dtype, words, spread, seed);
        raw.extend_from_slice(&seed.to_le_bytes()[..odd]);
        let encoded = encode(dtype, &raw, 2 * raw.len() + 100).unwrap();
        prop_assert!(encoded.len() <= raw.len() + LENGTH_BYTES + 1);
        prop_assert_eq!(decode(dtype, &encoded, raw.len()), Some(raw.clone()));
        prop_assert_eq!(decode(dtype, &encoded[..cut.index(encoded.len())], raw.len()), None);
        prop_assert_eq!(decode(dtype, &encoded, raw.len() + 1), None);
        let longer = [&encoded[..], &[0]].concat();
        prop_assert_eq!(decode(dtype, &longer, raw.len()), None);
        prop_assert_eq!(encode(dtype, &raw, encoded.len()), Some(encoded.clone()));
        prop_assert_eq!(encode(dtype, &raw, encoded.len() - 1), None);
    }

    /// Any bytes after a valid length: no panic, and all paths agree.
    #[test]
    fn any_bytes_are_survived(
        dtype in 0..floats().len(), form in 0u8..6, bytes in prop::collection::vec(any::<u8>(), 0..600), len in 0usize..400,
    ) {
        let encoded = [&(len as u32).to_le_bytes()[..], &[form], &bytes].concat();
        decode(floats()[dtype], &encoded, len);
    }

    /// An encoding with one changed byte, which may be in a count, a mask, a table or a form: the likeliest hostile input.
    #[test]
    fn a_changed_byte_is_survived(
        dtype in 0..floats().len(), words in 100usize..2000, spread in 0u32..=24, at: prop::sample::Index, value: u8,
    ) {
        let dtype = floats()[dtype];
        let raw = weights(dtype, words, spread, u64::from(value) + 1);
        let mut encoded = encode(dtype, &raw, 2 * raw.len() + 100).unwrap();
        let at = at.index(encoded.len());
        encoded[at] = value;
        decode(dtype, &encoded, raw.len());
    }
}
