use super::{
    super::{segment::scratch_bytes, simd::Path},
    *,
};
use crate::Dtype;
use proptest::{prelude::*, test_runner::TestCaseError};

fn context(dtype: Dtype, base: &[u8]) -> Context<'_> {
    Context { dtype, base: Some(base) }
}

fn encoded(dtype: Dtype, base: &[u8], raw: &[u8]) -> Option<Vec<u8>> {
    let (mut out, mut tiles) = (vec![0xaa; raw.len()], [vec![], vec![]]);
    let bytes = Sparse::compare(context(dtype, base), raw, &mut out, |base, raw| {
        assert!(base.len() == raw.len() && raw.len() <= TILE_BYTES);
        tiles[0].extend_from_slice(base);
        tiles[1].extend_from_slice(raw);
    });
    assert!(base.starts_with(&tiles[0]) && raw.starts_with(&tiles[1]), "`on_tile` is called in order");
    out.truncate(bytes?);
    assert_eq!(tiles[1].len(), raw.len(), "`on_tile` receives every byte");
    Some(out)
}

/// Decodes into other memory and in place, and compares the results.
fn decoded(dtype: Dtype, base: &[u8], encoded: &[u8]) -> Result<Vec<u8>, DecodeError> {
    let mut raw = vec![0x55; base.len()];
    let outcome = Sparse.decode(context(dtype, base), encoded, &mut raw).map(|()| raw);
    let (mut in_place, mut copy, mut tiles) = (base.to_vec(), vec![0x55; base.len()], vec![]);
    let applied = Sparse::apply(dtype, encoded, &mut in_place, &mut copy, |tile| {
        assert!(tile.len() <= TILE_BYTES);
        tiles.extend_from_slice(tile);
    });
    assert_eq!(applied.map(|()| &in_place), outcome.as_ref().map_err(Clone::clone));
    assert!(
        outcome.is_err() || copy == in_place && tiles == copy,
        "`on_tile` receives every final byte once, in order"
    );
    outcome
}

/// `len` pseudo-random bytes, the same every time.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// PROTOCOL.md §8.7, the example.
#[test]
fn the_example_in_the_specification_is_encoded() {
    let base: Vec<u8> = (0..400u16).flat_map(|i| (0x3f80 + i).to_le_bytes()).chain([0xee]).collect();
    let mut raw = base.clone();
    for (element, value) in [(2, 0x3f83u16), (300, 0x3f80 + 299), (301, 0xbf80)] {
        raw[2 * element..2 * element + 2].copy_from_slice(&value.to_le_bytes());
    }
    raw[800] = 0xef;
    let expected = [
        &[0, 4, 0, 0, 0, 2, 255, 42, 0][..], // gaps: 2; 255 + 42; 0
        &[0, 3, 0, 0, 0, 2, 1, 0],           // differences: +1; -1; replaced
        &[0, 2, 0, 0, 0, 0x80, 0xbf],        // the value
        &[0xef],                             // the partial element at the end
    ]
    .concat();
    assert_eq!(encoded(Dtype::Bf16, &base, &raw).unwrap(), expected);
    assert_eq!(decoded(Dtype::Bf16, &base, &expected).unwrap(), raw);
}

#[test]
fn an_unchanged_chunk_is_a_few_bytes() {
    let base = noise(4 << 20);
    assert_eq!(encoded(Dtype::F32, &base, &base).unwrap().len(), 15);
    for (dtype, bytes) in [(Dtype::F32, 4 << 20), (Dtype::Bf16, 801), (Dtype::F64, 103)] {
        let base = &base[..bytes];
        assert_eq!(Some(Sparse::unchanged(dtype, base)), encoded(dtype, base, base), "{dtype}");
    }
}

#[test]
fn without_its_base_a_chunk_is_neither_encoded_nor_decoded() {
    let base = noise(1000);
    let delta = encoded(Dtype::Bf16, &base, &base).unwrap();
    for wrong in [None, Some(&base[1..])] {
        let context = Context { dtype: Dtype::Bf16, base: wrong };
        assert_eq!(Sparse.encode(context, &base, &mut [0; 1000]), None);
        let error = Sparse.decode(context, &delta, &mut [0; 1000]).unwrap_err();
        assert_eq!(error, DecodeError::NoBase { expected: 1000 });
    }
}

/// The size in bytes of the changes that this thread found last.
fn searched_bytes() -> usize {
    SEARCH.with_borrow(|Search { changes, .. }| {
        changes.gaps.len() + changes.differences.len() + changes.values.len()
    })
}

/// f32 weights under training: nearly every element changes. No delta is made, and the chunk is not searched.
#[test]
fn a_chunk_that_changed_everywhere_has_no_delta() {
    let base = noise(4 << 20);
    let raw: Vec<u8> = base.iter().map(|byte| byte.wrapping_add(1)).collect();
    for dtype in [Dtype::F32, Dtype::F64, Dtype::Bf16] {
        assert_eq!(encoded(dtype, &base, &raw), None);
    }
    assert!(searched_bytes() < 1 << 18, "only a sample was searched");
    assert!(encoded(Dtype::F32, &base, &base).is_some(), "the changes of an earlier chunk are cleared");
}

/// Only the sampled slices are unchanged: the search ends once it has found too many changes.
#[test]
fn a_sample_that_misleads_costs_bounded_memory() {
    let base = noise(1 << 20);
    let mut raw: Vec<u8> = base.iter().map(|byte| byte.wrapping_add(100)).collect();
    for at in (0..base.len()).step_by(base.len() / SLICES) {
        raw[at..at + SLICE_BYTES].copy_from_slice(&base[at..at + SLICE_BYTES]);
    }
    assert_eq!(encoded(Dtype::Bf16, &base, &raw), None);
    assert!(searched_bytes() < (1 << 20) + (1 << 16));
}

/// Forged sizes of gigabytes in short segments are refused before memory is allocated.
#[test]
fn a_forged_size_is_refused() {
    let huge = u32::MAX.to_le_bytes();
    let constant = [&[1][..], &huge, &[7], &[0, 0, 0, 0, 0], &[0, 0, 0, 0, 0]].concat();
    assert!(decoded(Dtype::U8, &[0; 100], &constant).is_err());
    let zstd = [&[2][..], &huge, &[1, 0, 0, 0], &[0], &[0, 0, 0, 0, 0], &[0, 0, 0, 0, 0]].concat();
    assert!(decoded(Dtype::U8, &[0; 100], &zstd).is_err());
    assert_eq!(scratch_bytes(), 0);
}

#[test]
fn contradictory_changes_are_refused() {
    let segment = |bytes: &[u8]| [&[0, bytes.len() as u8, 0, 0, 0], bytes].concat();
    let delta = |gaps: &[u8], differences: &[u8], values: &[u8]| {
        decoded(Dtype::Bf16, &[0; 20], &[segment(gaps), segment(differences), segment(values)].concat())
    };
    assert!(delta(&[9], &[2], &[]).is_ok(), "the last element");
    assert!(delta(&[10], &[2], &[]).is_err(), "the element behind the last");
    assert!(delta(&[255, 255, 0], &[2], &[]).is_err(), "far behind the last");
    assert!(delta(&[255], &[2], &[]).is_err(), "a gap that does not end");
    assert!(delta(&[1, 1], &[2], &[]).is_err(), "a gap without a change");
    assert!(delta(&[1], &[2, 2], &[]).is_err(), "a change without a gap");
    assert!(delta(&[1], &[0], &[]).is_err(), "a replaced element without its value");
    assert!(delta(&[1], &[0], &[1]).is_err(), "half a value");
    assert!(delta(&[1], &[2], &[1, 1]).is_err(), "a value without a replaced element");
    assert!(delta(&[1], &[0], &[1, 1, 1]).is_err(), "a value and a half");
}

/// PROTOCOL.md §8.7: a byte of 255 means that the gap continues, so a gap of exactly 255 elements ends with a 0.
#[test]
fn a_gap_of_255_or_more_continues_in_the_next_byte() {
    let base = noise(2000);
    for (gap, expected) in
        [(254, &[254, 1][..]), (255, &[255, 0, 1]), (256, &[255, 1, 1]), (510, &[255, 255, 0, 1])]
    {
        let mut raw = base.clone();
        for at in [gap, gap + 2] {
            raw[at] = raw[at].wrapping_add(1);
        }
        let delta = encoded(Dtype::U8, &base, &raw).unwrap();
        let gaps = [&[0, expected.len() as u8, 0, 0, 0], expected].concat();
        assert_eq!(delta[..gaps.len()], gaps, "{gap}");
        assert_eq!(decoded(Dtype::U8, &base, &delta).unwrap(), raw);
    }
}

/// PROTOCOL.md §8.7: a difference from -128 to 127 fits its byte; otherwise the element is replaced.
#[test]
fn an_element_whose_difference_exceeds_a_byte_is_replaced() {
    let base = noise(2000);
    for (difference, expected) in [(1, 2), (-1, 1), (127, 254), (-128, 255), (128, 0), (-129, 0)] {
        let mut raw = base.clone();
        let element = i32::from_le_bytes([base[0], base[1], base[2], base[3]]).wrapping_add(difference);
        raw[..4].copy_from_slice(&element.to_le_bytes());
        let delta = encoded(Dtype::I32, &base, &raw).unwrap();
        assert_eq!(delta[..12], [1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, expected], "{difference}");
        assert_eq!(decoded(Dtype::I32, &base, &delta).unwrap(), raw);
    }
}

#[test]
fn a_delta_is_at_most_half_as_long_as_its_chunk() {
    let (base, other) = (vec![0; 8000], noise(8000));
    for (replaced, expected) in [(497, Some(3993)), (498, None)] {
        let mut raw = base.clone();
        for element in (1..2 * replaced).step_by(2) {
            raw[8 * element..][..8].copy_from_slice(&other[8 * element..][..8]);
        }
        let delta = encoded(Dtype::F64, &base, &raw);
        assert_eq!(delta.as_ref().map(Vec::len), expected, "{replaced} of 1000");
        assert!(delta.is_none_or(|delta| decoded(Dtype::F64, &base, &delta).unwrap() == raw));
    }
}

/// A tenth of all bytes change, by random differences: the delta is a quarter of the chunk, and the sample predicts it.
#[test]
fn a_chunk_that_changed_by_a_tenth_has_a_delta() {
    let (base, random) = (noise(200_000), noise(400_000));
    let mut raw = base.clone();
    for (byte, (chance, value)) in raw.iter_mut().zip(random[200_000..].iter().zip(&random[1..])) {
        if *chance < 25 {
            *byte = *value;
        }
    }
    let delta = encoded(Dtype::U8, &base, &raw).unwrap();
    assert!(delta.len() < 50_000, "{}", delta.len());
    assert_eq!(decoded(Dtype::U8, &base, &delta).unwrap(), raw);
}

#[test]
fn a_change_among_zeros_is_found() {
    let base = vec![0; 100_000];
    for at in [0, 63, 64, 50_000, 99_999] {
        let mut raw = base.clone();
        raw[at] = 1;
        let delta = encoded(Dtype::Bf16, &base, &raw).unwrap();
        assert_eq!(decoded(Dtype::Bf16, &base, &delta).unwrap(), raw, "{at}");
    }
}

/// The delta ends with the bytes of the partial element: one byte less or more is an error.
#[test]
fn a_tail_of_another_length_is_refused() {
    let base = noise(103);
    let delta = Sparse::unchanged(Dtype::F64, &base);
    assert!(decoded(Dtype::F64, &base, &delta[..delta.len() - 1]).is_err());
    assert!(decoded(Dtype::F64, &base, &[&delta[..], &[0]].concat()).is_err());
}

/// Every third element changed, over many tiles: gaps and differences are constant segments.
#[test]
fn dense_changes_over_many_tiles_are_constant_segments() {
    for (dtype, width) in [(Dtype::I8, 1), (Dtype::F16, 2), (Dtype::C64, 4), (Dtype::F64, 8)] {
        let base = noise(100_000);
        let mut raw = base.clone();
        for element in raw.chunks_exact_mut(width).skip(2).step_by(3) {
            element[0] ^= 1;
        }
        let delta = encoded(dtype, &base, &raw).unwrap();
        assert_eq!(decoded(dtype, &base, &delta).unwrap(), raw);
        assert_eq!(delta[..6], [&[1][..], &(100_000 / width as u32 / 3).to_le_bytes(), &[2]].concat());
    }
}

/// A base and a later version: up to 60 bytes have changed bits.
fn versions() -> impl Strategy<Value = (Dtype, Vec<u8>, Vec<u8>)> {
    let change = (any::<prop::sample::Index>(), any::<u8>());
    let len = prop_oneof![0usize..3000, 0usize..100_000];
    (0..Dtype::ALL.len(), len, prop::collection::vec(change, 0..60)).prop_map(|(dtype, len, changes)| {
        let base = noise(len);
        let mut raw = base.clone();
        for (at, byte) in changes.iter().filter(|_| len > 0) {
            raw[at.index(len)] ^= byte;
        }
        (Dtype::ALL[dtype], base, raw)
    })
}

/// The end of a case without a delta, which small versions alone may be: 60 changes of at most 10 bytes fit half of 1300.
fn may_not_shrink(raw: &[u8]) -> Result<(), TestCaseError> {
    prop_assert!(raw.len() < 1300);
    Ok(())
}

/// The indexes of the differing elements, found on this path.
fn differing<const W: usize>(path: Path, base: &[u8], raw: &[u8]) -> Vec<usize> {
    let mut search = Differing::default();
    let elements = search.elements::<W>(path, base, raw);
    elements.iter().map(|element| usize::from(*element)).collect()
}

/// The reference implementation of the search.
fn differing_reference(width: usize, base: &[u8], raw: &[u8]) -> Vec<usize> {
    let elements = base.chunks(width).zip(raw.chunks(width)).enumerate();
    elements.filter(|(_, (base, raw))| base != raw).map(|(at, _)| at).collect()
}

#[test]
fn in_a_tile_that_differs_everywhere_all_elements_are_found() {
    let (base, raw) = ([1; TILE_BYTES], [2; TILE_BYTES]);
    for path in Path::all() {
        assert!(differing::<1>(path, &base, &raw).into_iter().eq(0..TILE_BYTES), "{}", path.name());
        assert!(differing::<8>(path, &base, &raw).into_iter().eq(0..TILE_BYTES / 8), "{}", path.name());
        assert_eq!(differing::<2>(path, &base, &base), [0; 0], "{}", path.name());
    }
}

proptest! {
    /// Every path finds all differing elements at every width, and nothing else.
    #[test]
    fn all_paths_find_the_same(
        groups in 1usize..=TILE_BYTES / 256,
        touched in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..400),
    ) {
        let base = noise(groups * 256);
        let mut raw = base.clone();
        for (at, bits) in touched {
            raw[at.index(base.len())] ^= bits;
        }
        for path in Path::all() {
            prop_assert_eq!(differing::<1>(path, &base, &raw), differing_reference(1, &base, &raw));
            prop_assert_eq!(differing::<2>(path, &base, &raw), differing_reference(2, &base, &raw));
            prop_assert_eq!(differing::<4>(path, &base, &raw), differing_reference(4, &base, &raw));
            prop_assert_eq!(differing::<8>(path, &base, &raw), differing_reference(8, &base, &raw));
        }
    }

    #[test]
    fn round_trip((dtype, base, raw) in versions()) {
        let Some(delta) = encoded(dtype, &base, &raw) else { return may_not_shrink(&raw) };
        prop_assert_eq!(decoded(dtype, &base, &delta).unwrap(), raw);
    }

    /// A delta on the wrong base causes an error, or other bytes, which the chunk's hash reveals.
    #[test]
    fn a_wrong_base_is_survived((dtype, base, raw) in versions(), other: u8) {
        let Some(delta) = encoded(dtype, &base, &raw) else { return may_not_shrink(&raw) };
        let _ = decoded(dtype, &vec![other; base.len()], &delta); // Compares two ways.
    }

    #[test]
    fn a_changed_byte_is_survived((dtype, base, raw) in versions(), at: prop::sample::Index, value: u8) {
        let Some(mut delta) = encoded(dtype, &base, &raw) else { return may_not_shrink(&raw) };
        let at = at.index(delta.len());
        delta[at] = value;
        let _ = decoded(dtype, &base, &delta);
    }

    #[test]
    fn a_truncated_delta_is_refused((dtype, base, raw) in versions(), at: prop::sample::Index) {
        let Some(delta) = encoded(dtype, &base, &raw) else { return may_not_shrink(&raw) };
        prop_assert!(decoded(dtype, &base, &delta[..at.index(delta.len())]).is_err());
    }

    #[test]
    fn any_bytes_are_survived(delta in prop::collection::vec(any::<u8>(), 0..300), len in 0usize..5000, dtype in 0..Dtype::ALL.len()) {
        let _ = decoded(Dtype::ALL[dtype], &vec![0; len], &delta);
    }
}
