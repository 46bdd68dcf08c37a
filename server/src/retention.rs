//! [`Retention`]: which versions a topic retains, and the place of each reader in mode `every`.
//!
//! Pure: no clock, no lock, no waiting. [`topic`](crate::topic) adds the lock and waits.

use std::collections::BTreeMap;
use tensor_relay_protocol::Seq;

/// The limits of a topic's retention. Its newest version always stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keep {
    /// The maximum number of versions, the newest included. Default 1; 0 means 1.
    pub versions: u32,
    /// The maximum size of all payloads together, if there are several versions. Default: no bound.
    pub bytes: u64,
}

impl Default for Keep {
    fn default() -> Self {
        Self { versions: 1, bytes: u64::MAX }
    }
}

/// Identifies a reader of one topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ReaderId(u64);

/// Retention is full: these readers still need the oldest versions.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full(pub(crate) Vec<ReaderId>);

/// The retained versions of a topic, and the places of its readers in mode `every`.
#[derive(Debug)]
pub(crate) struct Retention<T> {
    keep: Keep,
    versions: BTreeMap<Seq, Kept<T>>,
    bytes: u64,
    next: Seq,
    /// The first version that each reader has not acknowledged.
    readers: BTreeMap<ReaderId, Seq>,
    readers_ever: u64,
}

#[derive(Debug)]
struct Kept<T> {
    item: T,
    bytes: u64,
}

impl<T> Default for Retention<T> {
    fn default() -> Self {
        Self {
            keep: Keep::default(),
            versions: BTreeMap::new(),
            bytes: 0,
            next: Seq::FIRST,
            readers: BTreeMap::new(),
            readers_ever: 0,
        }
    }
}

impl<T> Retention<T> {
    /// Changes the limits, from the next publish on.
    pub(crate) fn set_keep(&mut self, keep: Keep) {
        self.keep = keep;
    }

    /// Adds a version; returns those that leave retention for it, oldest first.
    ///
    /// # Errors
    /// [`Full`] while a version that would have to leave is not acknowledged by all readers. Nothing changes then.
    pub(crate) fn push(&mut self, item: T, bytes: u64) -> Result<(Seq, Vec<T>), (T, Full)> {
        let first = self.first_to_stay(bytes);
        let blockers = |(reader, at): (&ReaderId, &Seq)| {
            let needs_leaving_version = *at < first && self.versions.range(*at..first).next().is_some();
            needs_leaving_version.then_some(*reader)
        };
        let waiting: Vec<ReaderId> = self.readers.iter().filter_map(blockers).collect();
        if !waiting.is_empty() {
            return Err((item, Full(waiting)));
        }
        let staying = self.versions.split_off(&first);
        let left = std::mem::replace(&mut self.versions, staying);
        self.bytes -= left.values().map(|kept| kept.bytes).sum::<u64>();
        let seq = self.next;
        self.next = seq.next();
        self.bytes += bytes;
        self.versions.insert(seq, Kept { item, bytes });
        Ok((seq, left.into_values().map(|kept| kept.item).collect()))
    }

    /// Removes the oldest versions beyond `keep` that no reader needs.
    pub(crate) fn trim(&mut self, keep: Keep) -> Vec<T> {
        let limits = std::mem::replace(&mut self.keep, keep);
        let newest = self.versions.last_key_value().map(|(seq, kept)| (*seq, kept.bytes));
        let first = newest.map_or(self.next, |(newest, bytes)| self.first_to_stay_before(newest, bytes));
        self.keep = limits;
        let needed = self.readers.values().min().copied().unwrap_or(first);
        let staying = self.versions.split_off(&first.min(needed));
        let left = std::mem::replace(&mut self.versions, staying);
        self.bytes -= left.values().map(|kept| kept.bytes).sum::<u64>();
        left.into_values().map(|kept| kept.item).collect()
    }

    /// Withdraws one version, if it is still retained. Readers do not receive it.
    pub(crate) fn withdraw(&mut self, seq: Seq) -> Option<T> {
        let kept = self.versions.remove(&seq)?;
        self.bytes -= kept.bytes;
        Some(kept.item)
    }

    /// Withdraws all versions.
    pub(crate) fn clear(&mut self) -> Vec<T> {
        self.bytes = 0;
        std::mem::take(&mut self.versions).into_values().map(|kept| kept.item).collect()
    }

    /// The newest version.
    pub(crate) fn newest(&self) -> Option<(Seq, &T)> {
        self.versions.last_key_value().map(|(seq, kept)| (*seq, &kept.item))
    }

    /// The oldest version from `seq` on.
    pub(crate) fn first_from(&self, seq: Seq) -> Option<(Seq, &T)> {
        self.versions.range(seq..).next().map(|(seq, kept)| (*seq, &kept.item))
    }

    /// Every retained version, oldest first.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (Seq, &T)> {
        self.versions.iter().map(|(seq, kept)| (*seq, &kept.item))
    }

    /// The position of the oldest retained version, or of the next one.
    pub(crate) fn oldest(&self) -> Seq {
        self.versions.first_key_value().map_or(self.next, |(seq, _)| *seq)
    }

    /// The position of the next version.
    pub(crate) fn next(&self) -> Seq {
        self.next
    }

    /// Adds a reader that needs every version from `from` on.
    pub(crate) fn join(&mut self, from: Seq) -> ReaderId {
        let reader = ReaderId(self.readers_ever);
        self.readers_ever += 1;
        self.readers.insert(reader, from);
        reader
    }

    /// Removes a reader that left or was evicted; returns whether it was there.
    pub(crate) fn leave(&mut self, reader: ReaderId) -> bool {
        self.readers.remove(&reader).is_some()
    }

    /// The first version that a reader has not acknowledged; `None` for one that left.
    pub(crate) fn place(&self, reader: ReaderId) -> Option<Seq> {
        self.readers.get(&reader).copied()
    }

    /// Records that a reader acknowledged all versions up to `seq`.
    pub(crate) fn acknowledge(&mut self, reader: ReaderId, seq: Seq) {
        self.advance(reader, seq.next());
    }

    /// Records that a reader acknowledged all versions before `seq`.
    pub(crate) fn advance(&mut self, reader: ReaderId, seq: Seq) {
        if let Some(place) = self.readers.get_mut(&reader) {
            *place = (*place).max(seq);
        }
    }

    /// The number of retained versions before `seq` that a reader has not acknowledged, without those in `given_up`.
    /// Removes from these what the reader has passed.
    pub(crate) fn unacknowledged(&self, reader: ReaderId, seq: Seq, given_up: &mut Vec<Seq>) -> usize {
        let place = self.place(reader).unwrap_or(seq).min(seq);
        given_up.retain(|given_up| *given_up >= place);
        let versions = self.versions.range(place..seq);
        versions.filter(|(seq, _)| !given_up.contains(seq)).count()
    }

    /// Whether a version is retained, and stays when one of `bytes` is added.
    pub(crate) fn will_stay(&self, seq: Seq, bytes: u64) -> bool {
        seq >= self.first_to_stay(bytes) && self.versions.contains_key(&seq)
    }

    /// The oldest version that stays when one of `bytes` is added.
    fn first_to_stay(&self, bytes: u64) -> Seq {
        self.first_to_stay_before(self.next, bytes)
    }

    /// The oldest version that stays beside one of `bytes` at `newest`.
    fn first_to_stay_before(&self, newest: Seq, bytes: u64) -> Seq {
        let others_max = (self.keep.versions.max(1) - 1) as usize;
        let mut remaining = self.keep.bytes.saturating_sub(bytes);
        let mut stay = newest;
        for (seq, kept) in self.versions.range(..newest).rev().take(others_max) {
            let Some(rest) = remaining.checked_sub(kept.bytes) else { break };
            (remaining, stay) = (rest, *seq);
        }
        stay
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn new_retention(versions: u32, bytes: u64) -> Retention<u64> {
        let mut retention = Retention::default();
        retention.set_keep(Keep { versions, bytes });
        retention
    }

    fn items(retention: &Retention<u64>) -> Vec<u64> {
        retention.iter().map(|(_, item)| *item).collect()
    }

    #[test]
    fn without_readers_the_newest_stay() {
        let mut retention = new_retention(2, u64::MAX);
        assert!(retention.push(1, 10).unwrap().1.is_empty());
        assert!(retention.push(2, 10).unwrap().1.is_empty());
        assert_eq!(retention.push(3, 10).unwrap().1, [1]);
        assert_eq!(items(&retention), [2, 3]);
    }

    #[test]
    fn the_byte_limit_never_removes_the_newest() {
        let mut retention = new_retention(10, 100);
        for (item, bytes) in [(1, 40), (2, 40)] {
            retention.push(item, bytes).unwrap();
        }
        assert_eq!(retention.push(3, 30).unwrap().1, [1], "2 and 3 are 70 bytes");
        assert_eq!(retention.push(4, 1000).unwrap().1, [2, 3], "the newest stays, whatever its size");
        assert_eq!(items(&retention), [4]);
    }

    #[test]
    fn a_reader_holds_unacknowledged_versions() {
        let mut retention = new_retention(2, u64::MAX);
        let reader = retention.join(retention.next());
        let (first, _) = retention.push(1, 1).unwrap();
        retention.push(2, 1).unwrap();
        assert_eq!(retention.push(3, 1).unwrap_err(), (3, Full(vec![reader])));
        assert_eq!(items(&retention), [1, 2], "nothing changed");
        retention.acknowledge(reader, first);
        assert_eq!(retention.push(3, 1).unwrap().1, [1]);
        assert!(retention.leave(reader));
        assert_eq!(retention.push(4, 1).unwrap().1, [2], "a reader that left holds nothing");
        assert_eq!(retention.place(reader), None);
    }

    #[test]
    fn readers_skip_a_withdrawn_version() {
        let mut retention = new_retention(1, u64::MAX);
        let reader = retention.join(retention.next());
        let (seq, _) = retention.push(1, 1).unwrap();
        assert_eq!(retention.withdraw(seq), Some(1));
        assert_eq!(retention.withdraw(seq), None);
        let (next, _) = retention.push(2, 1).unwrap();
        assert_eq!(retention.first_from(seq), Some((next, &2)), "the reader continues with the next version");
        assert_eq!(retention.unacknowledged(reader, next.next(), &mut vec![]), 1);
    }

    #[test]
    fn trimming_spares_the_newest_and_what_readers_need() {
        let mut retention = new_retention(3, u64::MAX);
        let first = retention.next();
        (1..=3).for_each(|item| drop(retention.push(item, 10).unwrap()));
        let reader = retention.join(first);
        let keep = |versions, bytes| Keep { versions, bytes };
        assert!(retention.trim(keep(1, u64::MAX)).is_empty(), "the reader needs all");
        retention.acknowledge(reader, first);
        assert_eq!(retention.trim(keep(1, u64::MAX)), [1]);
        retention.leave(reader);
        assert_eq!((retention.trim(keep(3, 15)), items(&retention)), (vec![2], vec![3]));
        assert!(retention.trim(keep(1, 1)).is_empty(), "the newest stays, whatever its size");
        assert_eq!(retention.bytes, 10);
        retention.push(4, 10).unwrap();
        assert_eq!(items(&retention), [3, 4], "the limits of a push are as before");
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Push(u64),
        Join(u64),
        Acknowledge(usize, u64),
        Leave(usize),
        Withdraw(u64),
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0u64..50).prop_map(Step::Push),
            1 => (0u64..5).prop_map(Step::Join),
            4 => (any::<usize>(), 0u64..60).prop_map(|(reader, seq)| Step::Acknowledge(reader, seq)),
            1 => any::<usize>().prop_map(Step::Leave),
            1 => (0u64..60).prop_map(Step::Withdraw),
        ]
    }

    proptest! {
        /// For any order of events: versions that leave for a new one were acknowledged by all readers, and the bounds
        /// hold.
        #[test]
        fn no_reader_misses_a_version(
            keep in (1u32..5, prop::sample::select(vec![60u64, u64::MAX])),
            steps in prop::collection::vec(any_step(), 0..80),
        ) {
            let mut retention = new_retention(keep.0, keep.1);
            let mut readers: Vec<(ReaderId, u64)> = Vec::new();
            let mut sizes: Vec<u64> = Vec::new();
            for step in steps {
                match step {
                    Step::Push(bytes) => match retention.push(sizes.len() as u64, bytes) {
                        Ok((seq, left)) => {
                            prop_assert_eq!(seq, Seq(sizes.len() as u64));
                            sizes.push(bytes);
                            for item in left {
                                prop_assert!(readers.iter().all(|(_, place)| *place > item));
                            }
                        }
                        Err((_, Full(waiting))) => {
                            let oldest = items(&retention)[0];
                            prop_assert!(!waiting.is_empty());
                            for reader in waiting {
                                let place = readers.iter().find(|(id, _)| *id == reader).unwrap().1;
                                prop_assert!(place <= items(&retention).last().copied().unwrap());
                            }
                            prop_assert!(readers.iter().any(|(_, place)| *place <= oldest || *place < sizes.len() as u64));
                        }
                    },
                    Step::Join(back) => {
                        let from = (sizes.len() as u64).saturating_sub(back).max(retention.oldest().0);
                        readers.push((retention.join(Seq(from)), from));
                    }
                    Step::Acknowledge(which, seq) if !readers.is_empty() && seq < sizes.len() as u64 => {
                        let which = which % readers.len();
                        retention.acknowledge(readers[which].0, Seq(seq));
                        readers[which].1 = readers[which].1.max(seq + 1);
                    }
                    Step::Leave(which) if !readers.is_empty() => {
                        let (reader, _) = readers.swap_remove(which % readers.len());
                        prop_assert!(retention.leave(reader));
                    }
                    Step::Withdraw(seq) => { retention.withdraw(Seq(seq)); }
                    Step::Acknowledge(..) | Step::Leave(_) => {}
                }
                for (reader, place) in &readers {
                    prop_assert_eq!(retention.place(*reader), Some(Seq(*place)));
                }
                let kept = items(&retention);
                let bytes: u64 = kept.iter().map(|item| sizes[*item as usize]).sum();
                prop_assert_eq!(bytes, retention.bytes);
                prop_assert!(kept.len() <= keep.0 as usize);
                prop_assert!(kept.len() <= 1 || bytes <= keep.1);
            }
        }
    }
}
