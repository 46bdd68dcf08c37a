//! [`Room`]: which files give way to a new one, and when.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// The file of a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    pub(super) written: SystemTime,
}

/// The files that give way to a new one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Room {
    /// Those that have to be deleted before it is written.
    pub(super) before: Vec<Entry>,
    /// Those that stay until it is complete.
    pub(super) after: Vec<Entry>,
    /// Whether its topic has no file while it is written, although it had one.
    pub(super) leaves_none: bool,
}

impl Room {
    /// Makes room for a file of `bytes` at `path`, in the folder of its topic, beside the `entries`, the oldest first.
    /// The oldest of the topic beyond `versions_max` give way when the new one is complete; if the files would exceed
    /// `bytes_max` meanwhile, these and then the oldest of all give way before.
    pub(super) fn make(
        entries: Vec<Entry>,
        (path, bytes): (&Path, u64),
        versions_max: usize,
        bytes_max: u64,
    ) -> Self {
        let is_of_topic = |entry: &Entry| entry.path.parent() == path.parent() && entry.path != path;
        let mut used: u64 = entries.iter().map(|entry| entry.bytes).sum();
        let of_topic = entries.iter().filter(|entry| is_of_topic(entry)).count();
        let mut surplus = (of_topic + 1).saturating_sub(versions_max);
        let (after, others): (Vec<_>, Vec<_>) = entries.into_iter().partition(|entry| {
            let gives_way = surplus > 0 && is_of_topic(entry);
            surplus -= usize::from(gives_way);
            gives_way
        });
        let (mut after, mut others, mut before) = (VecDeque::from(after), others.into_iter(), vec![]);
        while used.saturating_add(bytes) > bytes_max
            && let Some(entry) = after.pop_front().or_else(|| others.next())
        {
            used -= entry.bytes;
            before.push(entry);
        }
        let gone = before.iter().filter(|entry| is_of_topic(entry)).count();
        Self { before, after: after.into(), leaves_none: of_topic > 0 && gone == of_topic }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of 10 bytes, the oldest first.
    fn entries(names: &[&str]) -> Vec<Entry> {
        let entry = |name: &&str| Entry { path: name.into(), bytes: 10, written: SystemTime::UNIX_EPOCH };
        names.iter().map(entry).collect()
    }

    /// What gives way to `a/new`, of 10 bytes, before and after it is written.
    fn room(names: &[&str], versions_max: usize, bytes_max: u64) -> (Vec<Entry>, Vec<Entry>, bool) {
        let room = Room::make(entries(names), (Path::new("a/new"), 10), versions_max, bytes_max);
        (room.before, room.after, room.leaves_none)
    }

    #[test]
    fn with_room_for_both_the_old_one_stays_until_the_new_one_is_complete() {
        assert_eq!(room(&["a/1"], 1, 20), (vec![], entries(&["a/1"]), false));
        assert_eq!(room(&["a/1", "b/1", "a/2"], 2, 40), (vec![], entries(&["a/1"]), false));
        assert_eq!(room(&["a/1"], 2, 20), (vec![], vec![], false));
        assert_eq!(room(&["a/new"], 1, 20), (vec![], vec![], false), "it is replaced");
    }

    #[test]
    fn without_room_the_surplus_gives_way_first_and_then_the_oldest() {
        assert_eq!(room(&["a/1"], 1, 19), (entries(&["a/1"]), vec![], true));
        assert_eq!(room(&["b/1", "a/1", "a/2"], 2, 30), (entries(&["a/1"]), vec![], false));
        assert_eq!(room(&["b/1", "a/1", "a/2"], 2, 20), (entries(&["a/1", "b/1"]), vec![], false));
        assert_eq!(room(&["b/1"], 1, 10), (entries(&["b/1"]), vec![], false), "its topic had none");
    }
}
