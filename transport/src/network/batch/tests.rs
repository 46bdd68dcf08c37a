use super::*;
use proptest::prelude::*;

/// A socket that accepts `room` calls, then returns `WouldBlock`.
#[derive(Debug, Default)]
struct Wire {
    room: usize,
    calls: Vec<(Option<EcnCodepoint>, usize, Vec<u8>)>,
}

impl Wire {
    fn with_room(room: usize) -> Self {
        Self { room, calls: vec![] }
    }

    fn send(&mut self, transmit: &Transmit<'_>) -> io::Result<()> {
        if self.room == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.room -= 1;
        let segment = transmit.segment_size.unwrap_or(transmit.contents.len());
        self.calls.push((transmit.ecn, segment, transmit.contents.to_vec()));
        Ok(())
    }

    /// The number and length of each datagram, as the kernel would split them.
    fn datagrams(&self) -> Vec<(u32, usize)> {
        let cut = |(_, segment, bytes): &(_, usize, Vec<u8>)| -> Vec<(u32, usize)> {
            bytes
                .chunks(*segment)
                .map(|datagram| (number_of(datagram), datagram.len()))
                .collect()
        };
        self.calls.iter().flat_map(cut).collect()
    }

    fn segments(&self) -> Vec<usize> {
        self.calls
            .iter()
            .map(|(_, segment, bytes)| bytes.len().div_ceil(*segment))
            .collect()
    }
}

fn number_of(datagram: &[u8]) -> u32 {
    u32::from_le_bytes(datagram[..4].try_into().expect("each datagram begins with its number"))
}

/// `count` datagrams of `segment` bytes, numbered from `first`; the last one of `last` bytes.
fn datagrams(first: u32, count: usize, segment: usize, last: usize) -> Vec<u8> {
    let mut bytes = vec![0; (count - 1) * segment + last];
    for (number, datagram) in (first..).zip(bytes.chunks_mut(segment)) {
        datagram[..4].copy_from_slice(&number.to_le_bytes());
    }
    bytes
}

fn transmit_of(contents: &[u8], segment: usize) -> Transmit<'_> {
    Transmit {
        destination: ([10, 0, 0, 1], 4747).into(),
        ecn: Some(EcnCodepoint::Ect0),
        contents,
        segment_size: (contents.len() > segment).then_some(segment),
        src_ip: None,
    }
}

const ETHERNET: usize = 1_472;
const BOUNDS: Bounds = Bounds { burst: QUINN_SEGMENTS, kernel: 64 };

/// Consecutive full bursts are sent in growing batches, up to the kernel's maximum.
#[test]
fn batches_of_a_long_burst_grow() {
    let (mut batch, mut wire) = (DatagramBatch::default(), Wire::with_room(usize::MAX));
    for round in 0..20 {
        let burst = datagrams(round * 10, 10, ETHERNET, ETHERNET);
        batch
            .take(&transmit_of(&burst, ETHERNET), BOUNDS, |t| wire.send(t))
            .expect("there is room");
    }
    assert_eq!(wire.segments(), [10, 20, 40, 44, 44], "and 42 are held");
    batch.flush(BOUNDS, |t| wire.send(t)).expect("there is room");
    assert_eq!(wire.datagrams().len(), 200);
    let burst = datagrams(200, 10, ETHERNET, ETHERNET);
    batch
        .take(&transmit_of(&burst, ETHERNET), BOUNDS, |t| wire.send(t))
        .expect("there is room");
    assert_eq!(wire.segments()[5..], [42, 10], "after a pause the first burst is sent immediately");
}

/// A transmit shorter than a burst is sent immediately, together with the held datagrams.
#[test]
fn short_transmits_are_sent_immediately() {
    let (mut batch, mut wire) = (DatagramBatch::default(), Wire::with_room(usize::MAX));
    let mut take = |first, count, last| {
        let bytes = datagrams(first, count, ETHERNET, last);
        batch
            .take(&transmit_of(&bytes, ETHERNET), BOUNDS, |t| wire.send(t))
            .expect("there is room");
        batch.is_empty()
    };
    assert!(take(0, 1, 60));
    assert!(take(1, 9, ETHERNET));
    assert!(take(10, 10, ETHERNET), "the first burst");
    assert!(!take(20, 10, ETHERNET));
    assert!(take(30, 1, 60), "one short datagram closes the batch");
    assert!(!take(31, 10, ETHERNET));
    assert!(take(41, 10, 700), "so does a burst whose last datagram is short");
    assert_eq!(wire.segments(), [1, 9, 10, 11, 20]);
}

/// The kernel splits by length, so no datagram may follow a short one; and a call has one ECN mark and one segment
/// size.
#[test]
fn different_datagrams_are_not_mixed() {
    let (mut batch, mut wire) = (DatagramBatch::default(), Wire::with_room(usize::MAX));
    let bursts: Vec<_> = (0..4).map(|round| datagrams(round * 10, 10, 1_200, 1_200)).collect();
    let mut take = |transmit: &Transmit<'_>| {
        batch.take(transmit, BOUNDS, |t| wire.send(t)).expect("there is room");
    };
    take(&transmit_of(&bursts[0], 1_200));
    take(&transmit_of(&bursts[1], 1_200));
    take(&Transmit { ecn: None, ..transmit_of(&bursts[2], 1_200) });
    let larger = datagrams(30, 1, ETHERNET, ETHERNET);
    take(&transmit_of(&larger, ETHERNET));
    assert_eq!(wire.segments(), [10, 10, 10, 1]);
    let marks: Vec<_> = wire.calls.iter().map(|call| call.0.is_some()).collect();
    assert_eq!(marks, [true, true, false, true]);
}

/// quinn batches ten segments of any size. Jumbo segments are sent as equal batches within the kernel's bound.
#[test]
fn jumbo_bursts_are_split_and_not_held() {
    let (mut batch, mut wire) = (DatagramBatch::default(), Wire::with_room(usize::MAX));
    for (segment, expected) in [(8_972, vec![5, 5]), (65_000, vec![1; 10])] {
        let burst = datagrams(0, 10, segment, segment);
        batch
            .take(&transmit_of(&burst, segment), BOUNDS, |t| wire.send(t))
            .expect("there is room");
        assert!(batch.is_empty());
        assert_eq!(
            std::mem::take(&mut wire.calls)
                .iter()
                .map(|c| c.2.len() / segment)
                .collect::<Vec<_>>(),
            expected
        );
    }
}

/// Bursts fill system calls, unless they would be too short for other peers.
#[test]
fn bursts_fit_system_calls() {
    assert_eq!([1_200, 1_472, 6_550].map(burst_of), [None; 3], "ten fit one call");
    assert_eq!([6_551, 8_972, 13_101].map(burst_of), [Some(9), Some(7), Some(5)]);
    assert_eq!([16_000, 65_000].map(burst_of), [None; 2], "smaller segments would suffer");
}

/// Without segmentation offload, even if only from some time on, each datagram is a system call.
#[test]
fn without_offload_no_datagram_is_held() {
    let (mut batch, mut wire) = (DatagramBatch::default(), Wire::with_room(usize::MAX));
    for round in 0..3 {
        let burst = datagrams(round * 10, 10, ETHERNET, ETHERNET);
        let kernel = if round == 2 { 1 } else { 64 };
        let bounds = Bounds { kernel, ..BOUNDS };
        batch
            .take(&transmit_of(&burst, ETHERNET), bounds, |t| wire.send(t))
            .expect("there is room");
    }
    assert_eq!(wire.segments(), [vec![10], vec![1; 20]].concat());
    assert!(batch.is_empty());
}

#[derive(Debug, Clone)]
enum Step {
    /// `count` datagrams of one of three sizes, the last one shorter by `short`.
    Burst {
        count: usize,
        size: usize,
        short: usize,
        marked: bool,
    },
    Flush,
    /// The socket accepts this many more calls.
    Room(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let burst = (1usize..=10, 0usize..3, 0usize..1_000, prop::bool::weighted(0.9));
    let burst = burst.prop_map(|(count, size, short, marked)| Step::Burst { count, size, short, marked });
    let full = Just(Step::Burst { count: 10, size: 0, short: 0, marked: true });
    let step =
        prop_oneof![6 => full, 3 => burst, 1 => Just(Step::Flush), 3 => (0usize..4).prop_map(Step::Room)];
    prop::collection::vec(step, 1..80)
}

proptest! {
    /// For any transmits and any blocking of the socket: every accepted datagram is sent once, in order and complete;
    /// every call is within the kernel's bounds; and no part of a refused transmit is sent.
    #[test]
    fn every_datagram_once_and_in_order(
        steps in steps(),
        kernel in prop::sample::select(vec![1, 7, 16, 64]),
        burst in prop::sample::select(vec![5, 7, 10]),
    ) {
        let bounds = Bounds { burst, kernel };
        let (mut batch, mut wire) = (DatagramBatch::default(), Wire::with_room(2));
        let mut taken = Vec::new();
        for step in steps {
            match step {
                Step::Room(more) => wire.room += more,
                Step::Flush => drop(batch.flush(bounds, |t| wire.send(t))),
                Step::Burst { count, size, short, marked } => {
                    let segment = [ETHERNET, 1_200, 8_972][size];
                    let bytes = datagrams(taken.len() as u32, count, segment, segment - short);
                    let ecn = marked.then_some(EcnCodepoint::Ect0);
                    let transmit = Transmit { ecn, ..transmit_of(&bytes, segment) };
                    let result = batch.take(&transmit, bounds, |t| wire.send(t));
                    if result.is_ok() {
                        let lengths = bytes.chunks(segment).map(<[u8]>::len);
                        taken.extend((taken.len() as u32..).zip(lengths));
                    }
                }
            }
            let left = wire.datagrams();
            prop_assert_eq!(&left[..], &taken[..left.len()]);
        }
        wire.room = usize::MAX;
        batch.flush(bounds, |t| wire.send(t)).expect("there is room");
        prop_assert_eq!(wire.datagrams(), taken);
        prop_assert!(batch.is_empty());
        for (_, segment, bytes) in &wire.calls {
            prop_assert!(bytes.len() <= BATCH_MAX_BYTES && bytes.len().div_ceil(*segment) <= kernel);
        }
    }

    /// A batch that is too large is split into equal parts of full segments within the bounds.
    #[test]
    fn large_batches_are_split_equally(segment in 1_200usize..=65_000, segments in 1usize..=64, last in 1usize..=65_000, max in 1usize..=64) {
        let bytes = (segments - 1) * segment + last.min(segment);
        let part = equal_batch_bytes(bytes, segment, max);
        prop_assert!(part <= BATCH_MAX_BYTES && part.is_multiple_of(segment) && part > 0 && part / segment <= max);
    }
}
