use super::{super::segment::scratch_bytes, *};
use proptest::prelude::*;

fn encoded(dtype: Dtype, raw: &[u8]) -> Vec<u8> {
    let mut out = vec![0xaa; raw.len() + 100];
    let bytes = Planes.encode(Context { dtype, base: None }, raw, &mut out).unwrap();
    out.truncate(bytes);
    out
}

fn decoded(dtype: Dtype, encoded: &[u8], len: usize) -> Result<Vec<u8>, DecodeError> {
    let mut raw = vec![0x55; len];
    Planes.decode(Context { dtype, base: None }, encoded, &mut raw).map(|()| raw)
}

/// PROTOCOL.md §8.6, the example.
#[test]
fn the_example_in_the_specification_is_encoded() {
    let raw = [0x3f80u16, 0xbf80, 0x3f81, 0x3fff].map(u16::to_le_bytes).concat();
    let raw = [&raw[..], &[0xee]].concat();
    let expected = [
        &[0, 4, 0, 0, 0, 0x00, 0x01, 0x02, 0xfe][..], // mantissa and sign
        &[1, 4, 0, 0, 0, 0x7f],                       // exponent
        &[0xee],                                      // the partial element at the end
    ]
    .concat();
    assert_eq!(encoded(Dtype::Bf16, &raw), expected);
    assert_eq!(decoded(Dtype::Bf16, &expected, 9).unwrap(), raw);

    let integers =
        [&[0, 4, 0, 0, 0, 0x80, 0x80, 0x81, 0xff][..], &[0, 4, 0, 0, 0, 0x3f, 0xbf, 0x3f, 0x3f], &[0xee]];
    assert_eq!(encoded(Dtype::I16, &raw), integers.concat(), "only floats are rotated");
}

/// Rotation separates sign and exponent; integers are not rotated.
#[test]
fn every_float_is_rotated() {
    use Dtype::{Bf16, C32, C64, C128, F16, F32, F64, I16, I32, I64, U16, U32, U64};
    let floats = [(F16, 2), (Bf16, 2), (C32, 2), (F32, 4), (C64, 4), (F64, 8), (C128, 8)];
    let integers = [(I16, 2), (U16, 2), (I32, 4), (U32, 4), (I64, 8), (U64, 8)];
    for (dtype, width) in floats.into_iter().chain(integers) {
        let mut raw = vec![0; 8 * width];
        for (element, high) in raw.chunks_mut(width).zip([0x3f, 0xbf].into_iter().cycle()) {
            element[width - 1] = high;
        }
        let is_constant = encoded(dtype, &raw).ends_with(&[1, 8, 0, 0, 0, 0x7e]);
        assert_eq!(is_constant, floats.contains(&(dtype, width)), "{dtype}");
    }
}

/// A plane's size depends on its own entropy alone: here one plane of 2 bits per byte, and one of random bytes.
#[test]
fn each_plane_has_its_own_form() {
    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 16
    };
    let raw: Vec<u8> = (0..1 << 18).flat_map(|_| [random() as u8, 1 << (random() % 4)]).collect();
    let bytes = encoded(Dtype::I16, &raw);
    assert_eq!(bytes[0], 0, "random bytes are copied");
    let ideal = (1 << 18) + (1 << 16);
    assert!((ideal..ideal + ideal / 50).contains(&bytes.len()), "{} of at least {ideal}", bytes.len());
    assert_eq!(decoded(Dtype::I16, &bytes, raw.len()).unwrap(), raw);
}

#[test]
fn incompressible_bytes_are_not_encoded() {
    let raw: Vec<u8> = (0..=255).collect();
    for dtype in Dtype::ALL {
        let context = Context { dtype: *dtype, base: None };
        assert_eq!(Planes.encode(context, &raw, &mut [0; 256]), None, "{dtype}");
    }
}

/// Forged sizes of gigabytes in short segments are refused before memory is allocated.
#[test]
fn a_forged_size_is_refused() {
    let huge = u32::MAX.to_le_bytes();
    assert!(decoded(Dtype::U8, &[&[1][..], &huge, &[7]].concat(), 100).is_err());
    assert!(decoded(Dtype::U8, &[&[2][..], &huge, &[1, 0, 0, 0], &[0]].concat(), 100).is_err());
    assert!(decoded(Dtype::U8, &[&[0][..], &huge, &[0; 100]].concat(), 100).is_err());
    assert!(scratch_bytes() <= 100);
}

/// Bytes of every dtype and length; some planes are constant, some have few values and some are random.
fn chunks() -> impl Strategy<Value = (Dtype, Vec<u8>)> {
    let byte = prop_oneof![Just(0u8..1), Just(0..4), Just(0..255)];
    let kinds = prop::collection::vec(byte, 1..9);
    let len = prop_oneof![0usize..40, 0usize..9000];
    (0..Dtype::ALL.len(), kinds, len, any::<u64>()).prop_map(|(dtype, kinds, len, seed)| {
        let mut state = seed | 1;
        let raw = (0..len).map(|at| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let kind = &kinds[at % kinds.len()];
            kind.start + (state >> 40) as u8 % (kind.end - kind.start)
        });
        (Dtype::ALL[dtype], raw.collect())
    })
}

proptest! {
    #[test]
    fn round_trip((dtype, raw) in chunks()) {
        let bytes = encoded(dtype, &raw);
        prop_assert_eq!(decoded(dtype, &bytes, raw.len()).unwrap(), raw);
    }

    #[test]
    fn a_changed_byte_is_survived((dtype, raw) in chunks(), at: prop::sample::Index, value: u8) {
        let mut bytes = encoded(dtype, &raw);
        let at = at.index(bytes.len());
        bytes[at] = value;
        let _ = decoded(dtype, &bytes, raw.len());
    }

    #[test]
    fn another_length_is_refused((dtype, raw) in chunks(), at: prop::sample::Index) {
        let mut bytes = encoded(dtype, &raw);
        prop_assert!(decoded(dtype, &bytes[..at.index(bytes.len())], raw.len()).is_err());
        bytes.push(0);
        prop_assert!(decoded(dtype, &bytes, raw.len()).is_err());
    }
}
