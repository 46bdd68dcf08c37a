//! Snapshots of every kind of files, written and read back.

use super::*;
use crate::FilesError;
use safetensors::SafeTensors;
use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    sync::Arc,
    time::{Duration, SystemTime},
};
use tensor_relay_protocol::{
    Dtype, Epoch, Limits, Manifest, Selection, Shape, TensorName, TensorSpec, Topic, Version,
    files::{FileForm, FileKind, FileName, side_file_spec},
};

/// A snapshot of topic `a/b` with these tensors and metadata.
fn snapshot(specs: Vec<(TensorSpec, Vec<u8>)>, metadata: Vec<(String, String)>) -> Snapshot {
    let (specs, bytes): (Vec<_>, Vec<_>) = specs.into_iter().unzip();
    let manifest = Manifest::layout(specs, metadata, 4096, &Limits::default()).unwrap();
    let mut payload = vec![0; manifest.payload_bytes() as usize];
    for (tensor, bytes) in manifest.tensors().iter().zip(bytes) {
        payload[tensor.offset() as usize..(tensor.offset() + tensor.byte_len()) as usize]
            .copy_from_slice(&bytes);
    }
    Snapshot {
        id: VersionId { topic: Topic::new("a/b").unwrap(), epoch: Epoch(1), version: Version(1) },
        selection: Arc::new(Selection::all(Arc::new(manifest))),
        payload: payload.into(),
        ..Snapshot::empty()
    }
}

fn with_id(mut snapshot: Snapshot, epoch: u64, version: u64) -> Snapshot {
    (snapshot.id.epoch, snapshot.id.version) = (Epoch(epoch), Version(version));
    snapshot
}

fn tensor(name: &str, bytes: &[u8]) -> (TensorSpec, Vec<u8>) {
    let shape = Shape::new(&[bytes.len() as u64]).unwrap();
    (TensorSpec::new(TensorName::new(name).unwrap(), Dtype::U8, shape), bytes.to_vec())
}

fn side_file(name: &str, bytes: &[u8]) -> (TensorSpec, Vec<u8>) {
    (side_file_spec(&FileName::new(name).unwrap(), bytes.len() as u64).unwrap(), bytes.to_vec())
}

fn metadata(kind: FileKind) -> Vec<(String, String)> {
    let mut metadata = FileForm::new(kind).metadata();
    metadata.insert(0, ("format".into(), "pt".into()));
    metadata
}

fn of_kind(kind: FileKind, tensors: Vec<(TensorSpec, Vec<u8>)>) -> Snapshot {
    snapshot(tensors, metadata(kind))
}

const INDEX: &str = r#"{"metadata": {"total_size": 5, "kept": 1}, "weight_map": {"x": "1.safetensors", "y": "2.safetensors", "z": "1.safetensors"}}"#;

fn model() -> Vec<(TensorSpec, Vec<u8>)> {
    vec![
        tensor("x", b"xx"),
        tensor("y", b"y"),
        tensor("z", b"zz"),
        side_file("model.safetensors.index.json", INDEX.as_bytes()),
        side_file("config.json", b"{}"),
    ]
}

/// All files below a folder with their content, and all links with their target.
fn tree(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = vec![];
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
            match fs::symlink_metadata(&path).unwrap() {
                m if m.is_dir() => folders.push(path),
                m if m.is_symlink() => {
                    found.push((name, fs::read_link(path).unwrap().into_os_string().into_encoded_bytes()));
                }
                _ => found.push((name, fs::read(path).unwrap())),
            }
        }
    }
    found.sort();
    found
}

fn names(folder: &Path) -> Vec<String> {
    tree(folder).into_iter().map(|(name, _)| name).collect()
}

#[test]
fn a_file_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    let mirror = Mirror::new(dir.path(), None);
    for bytes in [b"old", b"new"] {
        let path = mirror.save(&of_kind(FileKind::Safetensors, vec![tensor("x", bytes)])).unwrap();
        assert_eq!(path, dir.path().join("a/b.safetensors"));
        let file = fs::read(&path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&file).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap().len(), 1, "reserved keys are not written");
        assert_eq!(SafeTensors::deserialize(&file).unwrap().tensor("x").unwrap().data(), bytes);
    }
    mirror.save(&snapshot(vec![tensor("x", b"no file")], vec![])).unwrap();
    assert_eq!(names(dir.path()), ["a/b.safetensors"]);
}

#[test]
fn a_folder_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    let mirror = Mirror::new(dir.path(), None);
    let path = mirror.save(&of_kind(FileKind::Directory, vec![tensor("old", b"o")])).unwrap();
    assert_eq!(names(&path), [".tensor-relay", "model.safetensors"]);
    mirror.save(&of_kind(FileKind::Directory, model())).unwrap();
    let index = "model.safetensors.index.json";
    assert_eq!(names(&path), [".tensor-relay", "1.safetensors", "2.safetensors", "config.json", index]);
    assert_eq!(fs::read_to_string(path.join(index)).unwrap(), INDEX, "byte for byte");
    let shard = fs::read(path.join("1.safetensors")).unwrap();
    let shard = SafeTensors::deserialize(&shard).unwrap();
    assert_eq!((shard.len(), shard.tensor("z").unwrap().data()), (2, &b"zz"[..]));
    assert_eq!(fs::read_dir(dir.path().join("a")).unwrap().count(), 1, "the predecessor is gone");
}

#[test]
fn the_index_of_a_partial_folder_lists_only_its_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let part = model()
        .into_iter()
        .filter(|(spec, _)| !["y", "z"].contains(&spec.name.as_str()));
    let mut part: Vec<_> = part.collect();
    part.push(tensor("unknown", b"u"));
    let path = Mirror::new(dir.path(), None).save(&of_kind(FileKind::Directory, part)).unwrap();
    let index = fs::read_to_string(path.join("model.safetensors.index.json")).unwrap();
    let expected = "{\n  \"metadata\": {\n    \"total_size\": 3\n  },\n  \"weight_map\": {\n    \"unknown\": \"model.safetensors\",\n    \"x\": \"1.safetensors\"\n  }\n}";
    assert_eq!(index, expected);
    assert!(!path.join("2.safetensors").exists());
}

#[test]
fn the_newest_versions_stay_and_the_link_points_to_the_last() {
    let dir = tempfile::tempdir().unwrap();
    let mirror = Mirror::new(dir.path(), Some(2));
    let folder = dir.path().join("a/b");
    let name = |epoch: u64, version: u64| format!("{version:020}-{epoch:016x}");
    for kind in [FileKind::Safetensors, FileKind::Directory] {
        let tensors = || if kind == FileKind::Directory { model() } else { vec![tensor("x", b"x")] };
        for (epoch, version) in [(9, 8), (9, 9), (9, 10), (3, 1)] {
            let path = mirror.save(&with_id(of_kind(kind, tensors()), epoch, version)).unwrap();
            let expected = folder.join(format!("{}{}", name(epoch, version), kind.extension()));
            assert_eq!(path, expected);
            let latest = folder.join(format!("latest{}", kind.extension()));
            assert_eq!(fs::canonicalize(latest).unwrap(), fs::canonicalize(path).unwrap());
        }
        let mut found: Vec<_> = fs::read_dir(&folder)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        found.sort();
        let latest = format!("latest{}", kind.extension());
        assert_eq!(found, [name(3, 1) + kind.extension(), name(9, 10) + kind.extension(), latest]);
        fs::write(folder.join("notes.txt"), "mine").unwrap();
        fs::remove_file(folder.join("notes.txt")).unwrap();
        if kind == FileKind::Safetensors {
            fs::remove_file(folder.join(name(9, 10) + ".safetensors")).unwrap();
            fs::remove_file(folder.join(name(3, 1) + ".safetensors")).unwrap();
        }
    }
    assert!(!folder.join("latest.safetensors").is_symlink(), "a dangling link is deleted");
}

#[test]
fn only_a_mirrors_folders_are_replaced_or_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("a/b");
    let mirror = Mirror::new(dir.path(), None);
    let save = || mirror.save(&of_kind(FileKind::Directory, model()));
    fs::create_dir_all(&folder).unwrap();
    save().expect("an empty folder is replaced");
    fs::write(folder.join("notes.txt"), "mine").unwrap();
    let refused = save().unwrap_err();
    assert!(matches!(&refused, SaveError::NotOurs { path } if path.ends_with("notes.txt")), "{refused}");
    assert!(folder.join("config.json").exists() && folder.join("notes.txt").exists());
    assert_eq!(fs::read_dir(dir.path().join("a")).unwrap().count(), 1, "no temporary folder stays");

    fs::remove_dir_all(&folder).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    symlink(elsewhere.path(), &folder).unwrap();
    assert!(matches!(save(), Err(SaveError::NotOurs { .. })));

    let keeping = Mirror::new(dir.path().join("kept"), Some(1));
    let old = keeping.save(&with_id(of_kind(FileKind::Directory, model()), 1, 1)).unwrap();
    fs::write(old.join("notes.txt"), "mine").unwrap();
    keeping.save(&with_id(of_kind(FileKind::Directory, model()), 1, 2)).unwrap();
    assert!(old.join("notes.txt").exists() && old.join("config.json").exists());
    let link = dir.path().join("kept/a/b/latest");
    fs::remove_file(&link).unwrap();
    fs::write(&link, "mine").unwrap();
    let refused = keeping.save(&with_id(of_kind(FileKind::Directory, model()), 1, 3)).unwrap_err();
    assert!(matches!(refused, SaveError::NotOurs { .. }), "{refused}");
}

/// A hostile server tries every name that it can choose. Nothing outside the mirror's folder may change.
#[test]
fn hostile_names_do_not_leave_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    let inside = dir.path().join("in");
    let mirror = Mirror::new(&inside, None);
    let hostile_file = |name: &str| {
        let (mut spec, bytes) = tensor("x", b"evil");
        spec.name = TensorName::new(&format!("tensor-relay.file:{name}")).unwrap();
        of_kind(FileKind::Directory, vec![(spec, bytes)])
    };
    for name in
        ["../evil", "/tmp/evil", "sub/evil", ".bashrc", ".", "..", ".tensor-relay", "model.safetensors"]
    {
        let refused = mirror.save(&hostile_file(name)).unwrap_err();
        assert!(
            matches!(&refused, SaveError::Files { source: FilesError::Name(_), .. }),
            "{name}: {refused}"
        );
    }
    for file in ["../evil.safetensors", "/evil.safetensors", ".evil.safetensors", "config.json"] {
        let index = format!(r#"{{"weight_map": {{"x": "{file}"}}}}"#);
        let tensors = vec![tensor("x", b"evil"), side_file("model.safetensors.index.json", index.as_bytes())];
        let refused = mirror.save(&of_kind(FileKind::Directory, tensors)).unwrap_err();
        assert!(
            matches!(&refused, SaveError::Files { source: FilesError::Index { .. }, .. }),
            "{file}: {refused}"
        );
    }
    let mut weights = metadata(FileKind::Directory);
    weights.push(("tensor-relay.weights".into(), "../evil.safetensors".into()));
    assert!(mirror.save(&snapshot(vec![tensor("x", b"evil")], weights)).is_err());
    let two =
        vec![side_file("a.safetensors.index.json", b"{}"), side_file("b.safetensors.index.json", b"{}")];
    let refused = mirror.save(&of_kind(FileKind::Directory, two)).unwrap_err();
    assert!(matches!(refused, SaveError::Files { source: FilesError::TwoIndexes { .. }, .. }));
    let mut temporary = of_kind(FileKind::Directory, model());
    temporary.id.topic = Topic::new("a/.tensor-relay.x.part").unwrap();
    assert!(matches!(mirror.save(&temporary), Err(SaveError::Topic { .. })));
    assert!(names(dir.path()).is_empty());
}

/// Goal: the next save deletes temporary files of killed processes of this machine, but none that is still being
/// written.
#[test]
fn files_of_killed_processes_are_deleted_immediately() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("a");
    let mirror = Mirror::new(dir.path(), None);
    let path = mirror.save(&of_kind(FileKind::Directory, model())).unwrap();
    let left = |name: &str| folder.join(format!("{}{name}.part", temporary::prefix()));
    fs::rename(&path, left("folder")).unwrap();
    fs::create_dir(left("empty")).unwrap();
    mirror.save(&of_kind(FileKind::Directory, model())).unwrap();
    fs::rename(&path, left("written")).unwrap();
    let writing = File::open(left("written").join(".tensor-relay")).unwrap();
    for name in ["file", "locked"] {
        fs::write(left(name), "half").unwrap();
    }
    let locked = File::open(left("locked")).unwrap();
    for file in [&writing, &locked] {
        file.lock().unwrap();
    }
    mirror.save(&of_kind(FileKind::Safetensors, vec![tensor("x", b"x")])).unwrap();
    assert!(left("written").join("config.json").exists() && left("locked").exists());
    drop((writing, locked));
    mirror.save(&of_kind(FileKind::Safetensors, vec![tensor("x", b"x")])).unwrap();
    assert_eq!(names(&folder), ["b.safetensors"]);
}

/// Goal: concurrent writers in one folder do not delete each other's files. Method: several threads save files and
/// folders, under the same and other names, and sweep before each.
#[test]
fn concurrent_saves_do_not_delete_each_others_files() {
    let dir = tempfile::tempdir().unwrap();
    let save = |kind, topic: &str, rounds| {
        for _ in 0..rounds {
            let mut snapshot = of_kind(kind, model());
            snapshot.id.topic = Topic::new(topic).unwrap();
            Mirror::new(dir.path(), None).save(&snapshot).unwrap();
        }
    };
    std::thread::scope(|scope| {
        for topic in ["a/b", "a/b", "a/c", "a/d"] {
            scope.spawn(|| save(FileKind::Safetensors, topic, 100));
        }
        for topic in ["a/e", "a/f"] {
            scope.spawn(|| save(FileKind::Directory, topic, 30));
        }
    });
    let left = names(&dir.path().join("a"));
    assert!(left.iter().all(|name| !name.ends_with(".part")), "{left:?}");
}

#[test]
fn files_of_killed_processes_are_deleted_after_an_hour() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("a");
    let mirror = Mirror::new(dir.path(), None);
    let path = mirror.save(&of_kind(FileKind::Directory, model())).unwrap();
    let old = SystemTime::now() - Duration::from_secs(2 * 3_600);
    let age = |path: &Path| File::open(path).unwrap().set_modified(old).unwrap();
    let left = |name: &str| folder.join(format!(".tensor-relay.{name}.part"));
    fs::rename(&path, left("folder")).unwrap();
    for name in ["old", "young", "locked"] {
        fs::write(left(name), "half").unwrap();
    }
    fs::write(folder.join("precious.part"), "mine").unwrap();
    fs::create_dir(left("mine")).unwrap();
    fs::write(left("mine").join("precious"), "mine").unwrap();
    let locked = File::open(left("locked")).unwrap();
    locked.lock().unwrap();
    for path in ["folder", "old", "locked", "mine"].map(left) {
        age(&path);
    }
    age(&folder.join("precious.part"));
    mirror.save(&of_kind(FileKind::Safetensors, vec![tensor("x", b"x")])).unwrap();
    let found = names(&folder);
    let expected = [
        ".tensor-relay.locked.part",
        ".tensor-relay.mine.part/precious",
        ".tensor-relay.young.part",
        "b.safetensors",
        "precious.part",
    ];
    assert_eq!(found, expected);
}

/// A server chooses the names of topics, which an existing link must not lead out of the folder.
#[test]
fn a_link_in_the_path_is_not_followed() {
    let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    symlink(elsewhere.path(), dir.path().join("a")).unwrap();
    for keep in [None, Some(2)] {
        let refused = Mirror::new(dir.path(), keep).save(&snapshot(vec![tensor("w", b"abc")], vec![]));
        assert!(matches!(refused, Err(SaveError::NotOurs { path }) if path.ends_with("a")));
    }
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
}
