use super::*;
use std::os::unix::fs::{MetadataExt, symlink};
use tar::{Builder, EntryType, Header};

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

    fn archive(&self) -> PathBuf {
        self.dir.path().join("version").join(self.cache().name.archive())
    }

    fn write_archive(&self, bytes: &[u8]) {
        fs::write(self.archive(), bytes).unwrap();
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
    fs::remove_file(case.archive()).unwrap();
    assert!(matches!(case.unpack(), Err(UnpackError::Absent)));
    case.write_archive(&good);
    assert_eq!(case.unpack().unwrap().new, 2);
}

/// Goal: no archive makes the receiver read much of it before a check, and none has entries that receivers understand
/// differently. Method: tar's entries about other entries: a path of GNU's that is long, longer than allowed, cut, and
/// without a file; others; and an archive above the limit, which takes no room on disk.
#[test]
fn entries_about_entries_are_bounded() {
    let case = Case::new();
    let (long, longer) = ([vec![b'd'; 200], b"/k\0".to_vec()].concat(), vec![b'd'; (64 << 10) + 1]);
    let pack = |items: &[Item<'_>]| case.pack(&case.facts, items);
    let refused = |reason: &str| {
        let refused = case.unpack().unwrap_err().to_string();
        assert!(refused.contains(reason), "{refused}");
        assert_eq!(case.files(), []);
    };
    pack(&[(b"././@LongLink", EntryType::GNULongName, &longer), (b"k", FILE, b"x")]);
    refused("it has a path of 65537 bytes");
    pack(&[(b"good", FILE, b"x"), (b"././@LongLink", EntryType::GNULongName, &long)]);
    refused("it ends before a file");
    for kind in [EntryType::XHeader, EntryType::XGlobalHeader, EntryType::GNULongLink, EntryType::GNULongName]
    {
        pack(&[(b"././@LongLink", EntryType::GNULongName, &long), (b"about", kind, b"16 path=../../x\n")]);
        refused("is not a regular file");
    }
    for kind in [EntryType::XHeader, EntryType::XGlobalHeader, EntryType::GNULongLink] {
        pack(&[(b"about", kind, b"9 path=x\n"), (b"k", FILE, b"x")]);
        refused("\"about\" is not a regular file");
    }
    let good = pack(&[(b"././@LongLink", EntryType::GNULongName, &long), (b"cut", FILE, b"x")]);
    case.write_archive(&good[..1_024 + 512 + 100]);
    assert!(matches!(case.unpack(), Err(UnpackError::Invalid(_))));
    case.write_archive(&good);
    let archive = case.archive();
    File::options()
        .write(true)
        .open(&archive)
        .unwrap()
        .set_len(ARCHIVES_MAX_BYTES + 1)
        .unwrap();
    refused("4294967297 bytes, more than 4294967296");
    case.write_archive(&good);
    assert_eq!(case.unpack().unwrap(), Unpacked { new: 1, kept: 0 });
    assert_eq!(case.files(), pairs(&[(&format!("{}/k", "d".repeat(200)), "x")]));
}

/// An archive that the system does not open is not one that the version lacks.
#[test]
fn an_archive_that_cannot_be_opened_is_not_absent() {
    let case = Case::new();
    assert!(matches!(case.unpack(), Err(UnpackError::Absent)));
    symlink("elsewhere", case.archive()).unwrap();
    let Err(UnpackError::Io { path, source }) = case.unpack() else { panic!("it is a link") };
    assert_eq!((path, source.raw_os_error()), (case.archive(), Some(Errno::LOOP.raw_os_error())));
}

/// Goal: whoever is neither the user nor root does not decide what an engine runs. Method: in place of the engine's
/// folder a link, with and without a slash behind it, and a folder of another user, which only root can make.
#[test]
fn a_folder_of_others_is_refused() {
    let case = Case::new();
    case.pack(&case.facts, &[(b"k", FILE, b"x")]);
    let (version, outside) = (case.dir.path().join("version"), case.dir.path().join("outside"));
    fs::create_dir(case.dir.path().join("engine")).unwrap();
    fs::create_dir(&outside).unwrap();
    symlink(&outside, case.cache().folder).unwrap();
    for folder in [case.cache().folder, case.at("")] {
        let refused = unpack_engine_cache(&version, &EngineCache { folder, ..case.cache() }, &case.facts);
        assert!(matches!(refused, Err(UnpackError::Link(_))), "{refused:?}");
    }
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    fs::remove_file(case.cache().folder).unwrap();
    fs::create_dir(case.cache().folder).unwrap();
    if std::os::unix::fs::chown(case.cache().folder, Some(12_345), None).is_ok() {
        assert!(matches!(case.unpack(), Err(UnpackError::Stranger { uid: 12_345, .. })));
        assert_eq!(case.files(), []);
        std::os::unix::fs::chown(case.cache().folder, Some(0), None).unwrap();
    }
    assert_eq!(case.unpack().unwrap().new, 1);
}

/// Goal: nothing is written through a link that takes a folder's place after it was looked at. Method: the engine's
/// folder and that for unpacking are swapped between the steps.
#[test]
fn a_swap_leads_nowhere_else() {
    let dir = tempfile::tempdir().unwrap();
    let [at, moved, outside] = ["engine", "moved", "outside"].map(|name| dir.path().join(name));
    fs::create_dir(&outside).unwrap();
    let folder = Folder::of_engine(&at).unwrap();
    fs::rename(&at, &moved).unwrap();
    symlink(&outside, &at).unwrap();
    let staging = Staging::new(&folder).unwrap();
    fs::rename(moved.join(STAGING_NAME), moved.join("x")).unwrap();
    symlink(&outside, moved.join(STAGING_NAME)).unwrap();
    fs::create_dir(staging.folder.at("k")).unwrap();
    fs::write(staging.folder.at("k/a"), "a").unwrap();
    assert_eq!(merge(&staging.folder, &folder).unwrap(), 0);
    drop((lock(&folder, LOCK_TIMEOUT).unwrap(), staging));
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    assert_eq!(fs::read_to_string(moved.join("k/a")).unwrap(), "a");
    assert!(moved.join(LOCK_NAME).exists() && !moved.join(STAGING_NAME).is_symlink());
}

/// A process that does not end does not stop others for ever.
#[test]
fn the_wait_for_another_process_ends() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::of_engine(dir.path()).unwrap();
    let held = lock(&folder, Duration::ZERO).unwrap();
    let late = lock(&folder, Duration::from_millis(50)).unwrap_err();
    assert_eq!(late.kind(), io::ErrorKind::TimedOut);
    assert!(late.to_string().contains("for more than 50ms (.tensor-relay.lock)"), "{late}");
    drop(held);
    lock(&folder, Duration::ZERO).unwrap();
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
    let unpacked: Vec<Unpacked> = thread::scope(|scope| {
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
    let open = |path: &Path| Folder::open(path).unwrap().unwrap();
    assert_eq!(merge(&open(&from), &open(&to)).unwrap(), 2);
    let read = |path: &str| fs::read_to_string(to.join(path)).unwrap();
    assert_eq!((read("k/a"), read("k/b"), read("f")), ("old".into(), "new".into(), "a file".into()));
}
