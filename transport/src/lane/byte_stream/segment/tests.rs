use super::*;
use proptest::prelude::*;

/// Parses `bytes` in pieces of these `lengths`. Returns the segments, and then either the error or the number of bytes
/// of an incomplete last segment.
fn read_all(mut bytes: &[u8], lengths: Vec<usize>) -> (Vec<Segment>, Result<usize, SegmentError>) {
    let (mut assembler, mut segments) = (Assembler::default(), vec![]);
    for length in lengths.into_iter().cycle() {
        let (mut piece, rest) = bytes.split_at(length.min(bytes.len()));
        bytes = rest;
        while !piece.is_empty() {
            match assembler.take(&mut piece, None) {
                Ok(Some(Received::Segment(segment))) => segments.push(segment),
                Ok(other) => assert_eq!(other, None, "no memory is lent"),
                Err(error) => return (segments, Err(error)),
            }
        }
        if bytes.is_empty() {
            break;
        }
    }
    let filled = assembler.body.as_ref().map_or(0, |body| body.filled);
    (segments, Ok(assembler.header_filled + filled))
}

fn encoded(segments: &[Segment]) -> Vec<u8> {
    let parts = segments.iter().cloned().map(Segment::encode);
    parts.flat_map(|(header, bytes)| [&header[..], &bytes].concat()).collect()
}

fn any_bytes() -> impl Strategy<Value = Bytes> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..100).prop_map(Bytes::from),
        (0..=SEGMENT_BYTES_MAX).prop_map(|bytes| Bytes::from(vec![0x5a; bytes])),
    ]
}

fn any_segments() -> impl Strategy<Value = Vec<Segment>> {
    let segment = prop_oneof![
        (any_bytes(), any::<bool>()).prop_map(|(bytes, last)| Segment::Control { bytes, last }),
        (any_bytes(), any::<bool>(), any::<bool>()).prop_map(|(bytes, first, last)| Segment::Data {
            bytes,
            first,
            last
        }),
        Just(Segment::Reset),
        any::<u64>().prop_map(|stream| Segment::Stop { stream }),
        (any::<u32>(), prop::collection::vec(any::<char>(), 0..2_000))
            .prop_map(|(code, text)| Segment::close(code, &String::from_iter(text))),
        any::<u64>().prop_map(|number| Segment::Ping { number }),
        any::<u64>().prop_map(|number| Segment::Pong { number }),
    ];
    prop::collection::vec(segment, 0..12)
}

proptest! {
    #[test]
    fn any_split_of_the_bytes_gives_the_same_segments(
        segments in any_segments(),
        lengths in prop::collection::vec(1usize..100_000, 1..8),
    ) {
        prop_assert_eq!(read_all(&encoded(&segments), lengths), (segments, Ok(0)));
    }

    /// Long data is split into several segments: the first begins the stream, and the last ends it.
    #[test]
    fn long_data_is_split_into_segments(
        length in 0..5 * SEGMENT_BYTES_MAX, first in any::<bool>(), last in any::<bool>(),
    ) {
        let all = Bytes::from_iter((0..length).map(|byte| (byte / 251) as u8));
        let mut rest = Segment::Data { bytes: all.clone(), first, last };
        let mut segments: Vec<Segment> = std::iter::from_fn(|| rest.split_front()).collect();
        segments.push(rest);
        prop_assert_eq!(segments.len(), length.div_ceil(SEGMENT_BYTES_MAX).max(1));
        let (read, _) = read_all(&encoded(&segments), vec![usize::MAX]);
        prop_assert_eq!(&read, &segments);
        let end = read.len() - 1;
        let mut joined = vec![];
        for (number, segment) in read.into_iter().enumerate() {
            let Segment::Data { bytes, first: begins, last: ends } = segment else { panic!() };
            prop_assert_eq!((begins, ends), (first && number == 0, last && number == end));
            joined.extend_from_slice(&bytes);
        }
        prop_assert!(joined == all);
    }

    /// From truncated bytes, only the complete segments are returned.
    #[test]
    fn a_truncated_segment_is_not_returned(segments in any_segments(), cut in any::<prop::sample::Index>()) {
        prop_assume!(!segments.is_empty());
        let all = encoded(&segments);
        let (read, _) = read_all(&all[..cut.index(all.len())], vec![usize::MAX]);
        prop_assert!(read.len() < segments.len());
        prop_assert_eq!(&read[..], &segments[..read.len()]);
    }

    #[test]
    fn hostile_bytes_are_segments_or_errors(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let (read, _) = read_all(&bytes, vec![7]);
        prop_assert!(encoded(&read).len() <= bytes.len());
    }

    /// Only headers that an encoder can write are accepted.
    #[test]
    fn only_valid_headers_are_accepted(kind in 0u8..9, flags in 0u8..5, reserved in 0u16..2, length in prop_oneof![
        0u32..20, 1_020u32..1_040, 65_530u32..65_540, any::<u32>()
    ]) {
        let mut header = [kind, flags, 0, 0, 0, 0, 0, 0];
        header[2..4].copy_from_slice(&reserved.to_le_bytes());
        header[4..].copy_from_slice(&length.to_le_bytes());
        let allowed = match kind {
            1 => [0, 2].contains(&flags) && length <= 65_536,
            2 => flags < 4 && length <= 65_536,
            3 => flags == 0 && length == 0,
            4 | 6 | 7 => flags == 0 && length == 8,
            5 => flags == 0 && (4..=1_028).contains(&length),
            _ => false,
        };
        prop_assert_eq!(Header::decode(header).is_ok(), allowed && reserved == 0);
    }
}

/// PROTOCOL.md §10.7: the golden bytes of each kind.
#[test]
fn segments_have_the_golden_bytes() {
    let bytes = |text: &'static str| Bytes::from_static(text.as_bytes());
    let hex = |segment: Segment| {
        let (header, bytes) = segment.encode();
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        format!("{} {}", hex(&header), hex(&bytes)).trim_end().to_owned()
    };
    for (segment, golden) in [
        (Segment::Control { bytes: bytes("abc"), last: false }, "0100000003000000 616263"),
        (Segment::Control { bytes: bytes(""), last: true }, "0102000000000000"),
        (Segment::Data { bytes: bytes("abc"), first: true, last: false }, "0201000003000000 616263"),
        (Segment::Data { bytes: bytes("d"), first: false, last: true }, "0202000001000000 64"),
        (Segment::Reset, "0300000000000000"),
        (Segment::Stop { stream: 258 }, "0400000008000000 0201000000000000"),
        (Segment::close(17, "no"), "0500000006000000 110000006e6f"),
        (Segment::Ping { number: 7 }, "0600000008000000 0700000000000000"),
        (Segment::Pong { number: 7 }, "0700000008000000 0700000000000000"),
    ] {
        assert_eq!(hex(segment.clone()), golden, "{segment:?}");
        assert_eq!(read_all(&encoded(std::slice::from_ref(&segment)), vec![3]).0, [segment]);
    }
}
