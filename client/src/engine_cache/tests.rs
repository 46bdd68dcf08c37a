use super::*;
use std::os::unix::fs::symlink;
use tar::{Builder, Header};

/// A version with the archive of a cache, and the folder of an engine.
struct Case {
    dir: tempfile::TempDir,
    facts: Facts,
}

/// An entry of an archive: path, type and content.
type Item<'a> = (&'a [u8], EntryType, &'a [u8]);

impl Case {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("version")).unwrap();
        let mut facts = Facts::default();
        facts.set("gpu", "H100");
        Self { dir, facts }
    }

    fn cache(&self) -> EngineCache {
        EngineCache { name: "triton".parse().unwrap(), folder: self.dir.path().join("engine/cache") }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.cache().folder.join(path)
    }

    fn write_archive(&self, bytes: &[u8]) {
        fs::write(self.dir.path().join("version").join(self.cache().name.archive()), bytes).unwrap();
    }

    /// Writes an archive of `facts` and `items`, whose paths may be such as no sane writer makes.
    fn pack(&self, facts: &Facts, items: &[Item<'_>]) -> Vec<u8> {
        let mut archive = Builder::new(vec![]);
        let facts = facts.with_folder(&self.cache().folder).to_json();
        for (path, kind, content) in
            [(FACTS_ENTRY.as_bytes(), EntryType::Regular, &facts[..])].iter().chain(items)
        {
            let mut header = Header::new_gnu();
            header.as_old_mut().name[..path.len()].copy_from_slice(path);
            header.set_entry_type(*kind);
            header.set_size(content.len() as u64);
            header.set_mode(if content.starts_with(b"elf") { 0o4755 } else { 0o644 });
            header.set_mtime(1_000_000);
            if matches!(kind, EntryType::Symlink | EntryType::Link) {
                header.set_link_name("/etc/passwd").unwrap();
            }
            header.set_cksum();
            archive.append(&header, *content).unwrap();
        }
        let bytes = archive.into_inner().unwrap();
        self.write_archive(&bytes);
        bytes
    }

    fn unpack(&self) -> Result<Unpacked, UnpackError> {
        unpack_engine_cache(&self.dir.path().join("version"), &self.cache(), &self.facts)
    }

    /// The files of the engine's folder with their contents, sorted.
    fn files(&self) -> Vec<(String, String)> {
        let mut found = vec![];
        let mut folders = vec![self.cache().folder];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten() {
                let path = entry.unwrap().path();
                match path.symlink_metadata().unwrap().is_dir() {
                    true => folders.push(path),
                    false => {
                        let name = path.strip_prefix(self.cache().folder).unwrap().display().to_string();
                        found.push((name, fs::read_to_string(&path).unwrap_or_default()));
                    }
                }
            }
        }
        found.retain(|(name, _)| name != LOCK_NAME);
        found.sort();
        found
    }
}

const FILE: EntryType = EntryType::Regular;

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(name, text)| ((*name).into(), (*text).into())).collect()
}

/// Goal: entries that exist stay, others appear with their time and the right to execute, and a second call changes
/// nothing. Method: an engine's folder with one file of an entry, and a link in place of another entry.
#[test]
fn what_exists_stays() {
    let case = Case::new();
    let items: &[Item<'_>] = &[
        (b"k1/a.json", FILE, b"new"),
        (b"k1/b.so", FILE, b"elf"),
        (b"k2/x/c", FILE, b"c"),
        (b"k3/d", FILE, b"d"),
    ];
    case.pack(&case.facts, items);
    let outside = case.dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::create_dir_all(case.at("k1")).unwrap();
    fs::write(case.at("k1/a.json"), "old").unwrap();
    symlink(&outside, case.at("k3")).unwrap();
    assert_eq!(case.unpack().unwrap(), Unpacked { new: 2, kept: 2 });
    let expected = pairs(&[("k1/a.json", "old"), ("k1/b.so", "elf"), ("k2/x/c", "c"), ("k3", "")]);
    assert_eq!(case.files(), expected);
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0, "nothing is written through a link");
    let (so, json) = (fs::metadata(case.at("k1/b.so")).unwrap(), fs::metadata(case.at("k2/x/c")).unwrap());
    assert_eq!(
        (so.mode() & 0o7100, json.mode() & 0o7111),
        (0o100, 0),
        "executable, but not with its owner's rights"
    );
    assert_eq!(so.mtime(), 1_000_000);
    assert_eq!(case.unpack().unwrap(), Unpacked { new: 0, kept: 4 });
    assert_eq!(case.files(), expected);
    assert!(!case.at(STAGING_NAME).exists());
}

#[test]
fn a_cache_of_another_machine_is_refused_with_both_values() {
    let mut case = Case::new();
    case.pack(&case.facts, &[(b"k", FILE, b"x")]);
    case.facts.set("gpu", "H200");
    let refused = case.unpack().unwrap_err().to_string();
    assert_eq!(refused, "it was filled elsewhere: gpu: H100 there, H200 here");
    assert!(!case.cache().folder.exists());
    case.facts.set("gpu", "*");
    assert_eq!(case.unpack().unwrap().new, 1);
    let mut moved = case.cache();
    moved.folder = case.dir.path().join("elsewhere");
    let refused = unpack_engine_cache(&case.dir.path().join("version"), &moved, &case.facts).unwrap_err();
    assert!(refused.to_string().contains("folder: "), "{refused}");
    case.facts = Facts::default();
    assert!(
        case.unpack()
            .unwrap_err()
            .to_string()
            .contains("gpu: H100 there, not known here")
    );
}

/// Goal: a hostile archive writes nothing, neither outside the folder nor into it. Method: each kind of path and entry
/// after a good one, and archives that are cut or no archives.
#[test]
fn hostile_archives_write_nothing() {
    let case = Case::new();
    let long = [b'n'; 100];
    let hostile: &[Item<'_>] = &[
        (b"../escaped", FILE, b"x"),
        (b"/tmp/tensor-relay-escaped", FILE, b"x"),
        (b"a/../../escaped", FILE, b"x"),
        (b"a//b", FILE, b"x"),
        (b"bad\nname", FILE, b"x"),
        (b"bad\xff", FILE, b"x"),
        (b".tensor-relay.lock", FILE, b"x"),
        (b".tensor-relay.unpacking/x", FILE, b"x"),
        (b"link", EntryType::Symlink, b""),
        (b"link", EntryType::Link, b""),
        (b"pipe", EntryType::Fifo, b""),
        (b"device", EntryType::Char, b""),
        (b"folder", EntryType::Directory, b""),
        (b"sparse", EntryType::GNUSparse, b"x"),
        (b"good", FILE, b"twice"),
        (b"good/below", FILE, b"a file is no folder"),
        (b"", FILE, b"x"),
    ];
    for item in hostile {
        case.pack(&case.facts, &[(b"good", FILE, b"x"), *item]);
        let refused = case.unpack();
        assert!(refused.is_err(), "{item:?}: {refused:?}");
        assert_eq!(case.files(), [], "{item:?}");
    }
    for other in ["escaped", "engine/escaped", "version/escaped"] {
        assert!(!case.dir.path().join(other).exists());
    }
    let good = case.pack(&case.facts, &[(&long, FILE, b"x"), (b"last", FILE, &[7; 2_000])]);
    for cut in [0, 1, 511, 512, 700, 1_500, good.len() - 1_024 - 600] {
        case.write_archive(&good[..cut]);
        assert!(case.unpack().is_err(), "cut at {cut}");
        assert_eq!(case.files(), [], "cut at {cut}");
    }
    let mut no_facts = good.clone();
    no_facts.drain(..1_024);
    for wrong in [&no_facts[..], &[0xff; 4096], &[0; 1024]] {
        case.write_archive(wrong);
        assert!(matches!(case.unpack(), Err(UnpackError::Invalid(_))));
    }
    fs::remove_file(case.dir.path().join("version").join(case.cache().name.archive())).unwrap();
    assert!(matches!(case.unpack(), Err(UnpackError::Absent)));
    case.write_archive(&good);
    assert_eq!(case.unpack().unwrap().new, 2);
}

/// What a killed process left is deleted, and does not become part of the cache.
#[test]
fn leftovers_of_a_killed_process_are_deleted() {
    let case = Case::new();
    case.pack(&case.facts, &[(b"k/a", FILE, b"whole")]);
    fs::create_dir_all(case.at(STAGING_NAME).join("k")).unwrap();
    fs::write(case.at(STAGING_NAME).join("k/a"), "ha").unwrap();
    fs::write(case.at(STAGING_NAME).join("k/b"), "lf").unwrap();
    assert_eq!(case.unpack().unwrap(), Unpacked { new: 1, kept: 0 });
    assert_eq!(case.files(), pairs(&[("k/a", "whole")]));
}

/// Two processes that unpack into one folder do not disturb each other.
#[test]
fn concurrent_calls_wait_for_each_other() {
    let case = Case::new();
    let paths: Vec<String> = (0..200).map(|i| format!("k{}/f{i}", i % 7)).collect();
    let items: Vec<Item<'_>> = paths.iter().map(|path| (path.as_bytes(), FILE, &b"x"[..])).collect();
    case.pack(&case.facts, &items);
    let unpacked: Vec<Unpacked> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| case.unpack().unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(unpacked.iter().map(|unpacked| unpacked.new).sum::<usize>(), 200);
    assert_eq!(case.files().len(), 200);
}

#[test]
fn the_files_of_an_archive_are_merged_into_folders_that_appeared_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    for (path, text) in [("from/k/a", "new"), ("from/k/b", "new"), ("from/f/x/y", "new"), ("to/k/a", "old")] {
        fs::create_dir_all(dir.path().join(path).parent().unwrap()).unwrap();
        fs::write(dir.path().join(path), text).unwrap();
    }
    fs::write(to.join("f"), "a file").unwrap();
    assert_eq!(merge(&from, &to).unwrap(), 2);
    let read = |path: &str| fs::read_to_string(to.join(path)).unwrap();
    assert_eq!((read("k/a"), read("k/b"), read("f")), ("old".into(), "new".into(), "a file".into()));
}
