//! One attempt to decode arbitrary bytes, and the properties that must hold.
//!
//! The fuzz target `tests/fuzz/fuzz_targets/decode.rs` includes this file, so it depends on the protocol only.

use tensor_relay_protocol::{BitPlanesOn, Codec, CodecId, CodecPath, Context, DecodeError, Dtype, codec};

/// The number of guard bytes on each side of a decoded chunk, which must not change.
const GUARD_BYTES: usize = 64;
const GUARD: u8 = 0x5a;

/// The inputs of a receiver's decoder.
pub(crate) struct Attempt<'a> {
    pub(crate) codec: CodecId,
    pub(crate) dtype: Dtype,
    pub(crate) base: Option<&'a [u8]>,
    pub(crate) encoded: &'a [u8],
    pub(crate) raw_bytes: usize,
}

impl Attempt<'_> {
    /// Decodes twice, with different initial memory and different bytes after the input, and once with each of
    /// the processor's other instruction sets. All results must agree.
    ///
    /// # Panics
    /// If a byte outside the chunk was written, if decoding succeeded without writing every byte of the chunk, if the
    /// outcome depends on memory after the encoded bytes, or if it differs between instruction sets.
    pub(crate) fn run(&self) -> Result<Vec<u8>, DecodeError> {
        let default = codec(self.codec);
        let (first, second) = (self.decode_over(0x00, default), self.decode_over(0xff, default));
        assert!(
            first == second,
            "the outcome depends on old bytes of the chunk or on bytes after the input: {}",
            self.describe()
        );
        for path in self.other_paths() {
            let other = self.decode_over(0xff, &BitPlanesOn(path));
            assert!(first == other, "{} has another outcome: {}", path.name(), self.describe());
        }
        first
    }

    /// The codec's implementations for other instruction sets than the default; only bit planes have several.
    fn other_paths(&self) -> impl Iterator<Item = CodecPath> {
        let has_several = self.codec == CodecId::BitPlanes;
        CodecPath::all().skip(1).filter(move |_| has_several)
    }

    /// Decodes into memory filled with `fill`, with bytes of `fill` after the input.
    fn decode_over(&self, fill: u8, decoder: &dyn Codec) -> Result<Vec<u8>, DecodeError> {
        let input = [self.encoded, &[fill; GUARD_BYTES]].concat();
        let mut memory = vec![GUARD; self.raw_bytes + 2 * GUARD_BYTES];
        let chunk = GUARD_BYTES..GUARD_BYTES + self.raw_bytes;
        memory[chunk.clone()].fill(fill);
        let context = Context { dtype: self.dtype, base: self.base };
        let outcome = decoder.decode(context, &input[..self.encoded.len()], &mut memory[chunk.clone()]);
        let (before, after) = (&memory[..chunk.start], &memory[chunk.end..]);
        assert!(
            before.iter().chain(after).all(|byte| *byte == GUARD),
            "the decoder wrote outside the chunk: {}",
            self.describe()
        );
        outcome.map(|()| memory[chunk].to_vec())
    }

    fn describe(&self) -> String {
        let Self { codec, dtype, encoded, raw_bytes, .. } = self;
        let base_bytes = self.base.map(<[u8]>::len);
        let encoded_bytes = encoded.len();
        format!("{codec:?}, {dtype}, raw {raw_bytes} bytes, encoded {encoded_bytes}, base {base_bytes:?}")
    }
}

/// Runs an attempt that is derived from arbitrary bytes: the first four select the dtype, the base and the length of
/// the chunk; the others are the encoded bytes.
pub(crate) fn decode_any(codec: CodecId, data: &[u8]) {
    let Some(([dtype, base, low, high], encoded)) = data.split_first_chunk() else { return };
    let raw_bytes = usize::from(u16::from_le_bytes([*low, *high]));
    let dtype = Dtype::ALL[usize::from(*dtype) % Dtype::ALL.len()];
    let content: Vec<u8> = (0..raw_bytes).map(|at| (at / 2) as u8 ^ base).collect();
    let base = (base % 4 != 0).then_some(&content[..]);
    let _ = Attempt { codec, dtype, base, encoded, raw_bytes }.run();
}
