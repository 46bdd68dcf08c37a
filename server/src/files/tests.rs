//! Opening, staging and borrowing of every kind of files.

use super::*;
use crate::{Publishable, SourceError};
use bytes::Bytes;
use safetensors::{Dtype, tensor::TensorView};
use std::{collections::HashMap, sync::Arc};
use tensor_relay_device::HostMemory;
use tensor_relay_protocol::{ChunkIndex, CodecId, Limits};
use tensor_relay_transport::{Workers, egress::Encoder};

fn staging() -> Staging {
    Staging {
        memory: HostMemory::new(64 << 20),
        bases: Arc::default(),
        layouts: Arc::default(),
        chunk_bytes: 4096,
        limits: Limits::default(),
        workers: Workers::Inline,
    }
}

fn model_file() -> Vec<u8> {
    let data: Vec<u8> = (0..4000).map(|i| i as u8).collect();
    let tensors = [
        ("w", TensorView::new(Dtype::F32, vec![10, 100], &data).unwrap()),
        ("b", TensorView::new(Dtype::BF16, vec![3], &data[..6]).unwrap()),
        ("none", TensorView::new(Dtype::I64, vec![0, 7], &[]).unwrap()),
    ];
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize(tensors, Some(metadata)).unwrap()
}

/// A file with tensors of the given names. Each has 8 bytes, all equal to the first byte of its name.
fn shard(names: &[&str]) -> Vec<u8> {
    let bytes: Vec<_> = names.iter().map(|name| [name.as_bytes()[0]; 8]).collect();
    let views = bytes.iter().map(|bytes| TensorView::new(Dtype::F32, vec![2], bytes).unwrap());
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize(names.iter().zip(views), Some(metadata)).unwrap()
}

/// A folder with `files`, which is removed when the first value is dropped.
fn new_folder(files: &[(&str, &[u8])]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    let path = dir.path().to_owned();
    (dir, path)
}

fn error_for(files: &[(&str, &[u8])], path: &str) -> FileError {
    let (_dir, dir) = new_folder(files);
    TensorFiles::open(&dir.join(path)).unwrap_err()
}

/// The last chunk of a version, as a subscriber's transfer reads it.
async fn last_chunk(held: &Publishable) -> Result<Bytes, Arc<SourceError>> {
    let encoder = Encoder::new(0, None, Workers::Inline);
    let last = ChunkIndex(held.manifest().chunking().count() - 1);
    let encoded = encoder.encode(&held.payload, last, CodecId::Raw).await?;
    Ok(encoded.bytes)
}

/// The bytes of a tensor of a version, read in the same way.
async fn bytes_of(held: &Publishable, tensor: &str) -> Vec<u8> {
    let encoder = Encoder::new(0, None, Workers::Inline);
    let mut payload = vec![];
    for (chunk, _) in held.manifest().chunking().iter() {
        let encoded = encoder.encode(&held.payload, chunk, CodecId::Raw).await.unwrap();
        payload.extend_from_slice(&encoded.bytes);
    }
    let range = held.manifest().tensor(tensor).unwrap().range().unwrap();
    payload[range.start as usize..range.end as usize].to_vec()
}

fn names_of(files: &TensorFiles) -> Vec<&str> {
    files.specs().iter().map(|spec| spec.name.as_str()).collect()
}

#[test]
fn a_model_file_is_staged_with_its_metadata() {
    let (_dir, dir) = new_folder(&[("m.safetensors", &model_file())]);
    let path = dir.join("m.safetensors");
    let files = TensorFiles::open(&path).unwrap();
    assert_eq!((files.kind(), files.total_bytes()), (FileKind::Safetensors, 4006));
    let staged = files.stage(&staging()).unwrap();
    assert_eq!(staged.manifest().tensors().len(), 3);
    let kind = ("tensor-relay.kind".into(), "safetensors".into());
    assert_eq!(staged.manifest().metadata(), [("format".into(), "pt".into()), kind]);
    assert_eq!(staged.hash(), files.stage(&staging()).unwrap().hash());
}

/// Goal: a file whose tensors are cut is the same version staged and borrowed; what does not fit is named.
#[test]
fn a_split_file_is_one_version_however_it_is_read() {
    let (_dir, dir) = new_folder(&[("m.safetensors", &model_file())]);
    let split = |rule: &str| {
        TensorFiles::open(&dir.join("m.safetensors"))
            .unwrap()
            .split(&rule.parse().unwrap())
    };
    let files = split("w=1/3").unwrap();
    let (staged, borrowed) = (files.stage(&staging()).unwrap(), files.borrow(&staging()).unwrap());
    assert_eq!(staged.manifest().tensor("w").unwrap().ranges().count(), 3);
    assert_eq!(borrowed.digest(), Some(staged.hash()));
    let refused = split("w=2/3").unwrap_err().to_string();
    assert!(
        refused.contains("m.safetensors") && refused.contains("tensor w of shape [10, 100]"),
        "{refused}"
    );
}

#[test]
fn refused_broken_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.safetensors");
    let good = model_file();
    for (what, bytes) in [
        ("empty", vec![]),
        ("short", good[..7].to_vec()),
        ("cut header", good[..40].to_vec()),
        ("cut data", good[..good.len() - 1].to_vec()),
        ("longer", [&good[..], b"x"].concat()),
        ("a picture", b"\x89PNG\r\n\x1a\n0000000000000000".to_vec()),
        ("huge header", [&(1u64 << 62).to_le_bytes()[..], b"{}"].concat()),
    ] {
        fs::write(&path, bytes).unwrap();
        let error = TensorFiles::open(&path).unwrap_err();
        assert!(matches!(error, FileError::Format { .. }), "{what}: {error}");
        assert!(error.to_string().contains("m.safetensors"), "{error}");
    }
    let missing = TensorFiles::open(&dir.path().join("no")).unwrap_err();
    assert!(matches!(missing, FileError::Io { .. }));
    let device = TensorFiles::open("/dev/null".as_ref()).unwrap_err();
    assert!(matches!(device, FileError::NotAFile { .. }), "{device}");
}

#[test]
fn reserved_names_and_other_formats_are_refused() {
    let reserved = error_for(&[("m.safetensors", &shard(&["tensor-relay.file:a"]))], "m.safetensors");
    assert!(matches!(reserved, FileError::ReservedName { .. }), "{reserved}");
    for name in ["m.GGUF", "a.npy", "a.npz"] {
        let other = error_for(&[(name, b"other")], name);
        assert!(matches!(other, FileError::OtherFormat { .. }), "{other}");
    }
}

/// Staging and borrowing give the same version, for every kind of files.
#[test]
fn borrowed_and_staged_files_are_the_same_version() {
    let (_dir, dir) = new_folder(&[
        ("m.safetensors", &model_file()),
        ("n.safetensors", &shard(&["a", "c"])),
        ("config.json", b"{}"),
        ("empty.txt", b""),
    ]);
    for name in ["m.safetensors", ""] {
        let files = TensorFiles::open(&dir.join(name)).unwrap();
        let (staged, borrowed) = (files.stage(&staging()).unwrap(), files.borrow(&staging()).unwrap());
        assert_eq!(Some(staged.hash()), borrowed.digest(), "{name}");
        assert_eq!(staged.manifest(), borrowed.manifest(), "{name}");
    }
}

#[tokio::test]
async fn a_folder_is_served_with_its_side_files() {
    let index = br#"{"metadata": {"total_size": 24}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}}"#;
    let large = vec![0; (128 << 20) - index.len() - 1];
    let (_dir, dir) = new_folder(&[
        ("1.safetensors", &shard(&["a", "c"])),
        ("2.safetensors", &shard(&["b"])),
        ("consolidated.safetensors", &shard(&["x"])),
        ("model.safetensors.index.json", index),
        ("config.json", b"{}"),
        ("large.json", &large),
        ("pytorch_model.bin", b"pickle"),
        ("pytorch_model.bin.index.json", b"{}"),
        (".hidden", b""),
    ]);
    fs::create_dir(dir.join("onnx")).unwrap();
    let files = TensorFiles::open(&dir).unwrap();
    let index_name = "tensor-relay.file:model.safetensors.index.json";
    assert_eq!(names_of(&files), ["a", "c", "b", index_name, "tensor-relay.file:config.json"]);
    let mut skipped: Vec<String> = files.skipped().iter().map(SkippedEntry::to_string).collect();
    skipped.sort();
    let expected = [
        ".hidden (hidden)",
        "consolidated.safetensors (weights that the index does not name)",
        "large.json (too large: at most 128 MiB of files other than weights are served)",
        "onnx (a folder)",
        "pytorch_model.bin (weights in another format)",
        "pytorch_model.bin.index.json (weights in another format)",
    ];
    assert_eq!(skipped, expected);
    let held = Publishable::from(files.borrow(&staging()).unwrap());
    assert_eq!(bytes_of(&held, "b").await, b"bbbbbbbb");
    assert_eq!(bytes_of(&held, index_name).await, index);
    let metadata = [("format".into(), "pt".into()), ("tensor-relay.kind".into(), "directory".into())];
    assert_eq!(held.manifest().metadata(), metadata);
}

#[tokio::test]
async fn a_folder_without_an_index_keeps_its_file_names() {
    let (_dir, dir) = new_folder(&[("adapter_model.safetensors", &shard(&["a"]))]);
    let one = TensorFiles::open(&dir).unwrap();
    let weights = ("tensor-relay.weights".into(), "adapter_model.safetensors".into());
    assert_eq!(one.metadata().last(), Some(&weights));
    fs::write(dir.join("other.safetensors"), shard(&["b"])).unwrap();
    let two = TensorFiles::open(&dir).unwrap();
    let index_name = "tensor-relay.file:model.safetensors.index.json";
    assert_eq!(names_of(&two), ["a", "b", index_name]);
    let index = bytes_of(&two.borrow(&staging()).unwrap().into(), index_name).await;
    assert!(String::from_utf8(index).unwrap().contains(r#""b": "other.safetensors""#));
    fs::write(dir.join("model.safetensors"), shard(&["a"])).unwrap();
    let model = TensorFiles::open(&dir).unwrap();
    assert_eq!((names_of(&model), model.skipped().len()), (vec!["a"], 2));
}

#[test]
fn inconsistent_folders_are_refused() {
    let a = shard(&["a"]);
    let index = |map: &str| format!(r#"{{"weight_map": {map}}}"#).into_bytes();
    let name = "model.safetensors.index.json";
    let both = index(r#"{"a": "1.safetensors", "b": "2.safetensors"}"#);
    let error = error_for(&[("1.safetensors", &a), (name, &both)], "");
    assert!(matches!(&error, FileError::MissingShard { shard, .. } if shard.as_str() == "2.safetensors"));
    let error = error_for(&[("1.safetensors", &a), ("2.safetensors", &a), (name, &both)], "");
    assert!(matches!(&error, FileError::MissingTensor { tensor, .. } if tensor == "b"), "{error}");
    let error = error_for(&[("1.safetensors", &a), ("2.safetensors", &a)], "");
    assert!(matches!(&error, FileError::Twice { tensor, .. } if tensor == "a"), "{error}");
    assert!(error.to_string().contains("1.safetensors") && error.to_string().contains("2.safetensors"));
    let one = index(r#"{"a": "1.safetensors", "b": "1.safetensors"}"#);
    let error = error_for(&[("1.safetensors", &a), (name, &one)], "");
    assert!(matches!(&error, FileError::MissingTensor { tensor, .. } if tensor == "b"), "{error}");
    let only_a = index(r#"{"a": "1.safetensors"}"#);
    let error =
        error_for(&[("1.safetensors", &a), (name, &only_a), ("x.safetensors.index.json", &only_a)], "");
    assert!(matches!(error, FileError::TwoIndexes { .. }), "{error}");
    let error = error_for(&[("1.safetensors", &a), (name, b"{")], "");
    assert!(matches!(error, FileError::Index { .. }), "{error}");
    let error = error_for(&[("config.json", b"{}"), ("pytorch_model.bin", b"")], "");
    assert!(matches!(error, FileError::NoWeights { .. }), "{error}");
}

/// Goal: published models whose index and shards disagree are served as the index says, and nothing is lost in silence.
/// Method: a shard with a stale copy of a tensor that the index places in another file, and with one outside the index.
#[tokio::test]
async fn an_index_decides_between_copies_and_is_completed() {
    let name = "model.safetensors.index.json";
    let index = br#"{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}"#;
    let (one, two) = (shard(&["a"]), shard(&["a", "b"]));
    let (_dir, dir) = new_folder(&[("1.safetensors", &one), ("2.safetensors", &two), (name, index)]);
    let files = TensorFiles::open(&dir).unwrap();
    assert_eq!(names_of(&files), ["a", "b", &format!("tensor-relay.file:{name}")]);
    let skipped: Vec<String> = files.skipped().iter().map(ToString::to_string).collect();
    assert_eq!(skipped, ["a of 2.safetensors (a copy: the index names another file for this tensor)"]);
    fs::write(dir.join("2.safetensors"), shard(&["b", "c"])).unwrap();
    let files = TensorFiles::open(&dir).unwrap();
    assert_eq!((names_of(&files).len(), files.skipped().len()), (4, 1));
    let served =
        bytes_of(&files.borrow(&staging()).unwrap().into(), &format!("tensor-relay.file:{name}")).await;
    assert!(String::from_utf8(served).unwrap().contains(r#""c": "2.safetensors""#));
}

/// A file changed in place is never sent, even if its size and time are unchanged.
#[tokio::test]
async fn a_change_during_a_transfer_fails_with_the_file_name() {
    let (_dir, dir) = new_folder(&[("a.safetensors", &shard(&["a"])), ("b.safetensors", &shard(&["b"]))]);
    let held = Publishable::from(TensorFiles::open(&dir).unwrap().borrow(&staging()).unwrap());
    last_chunk(&held).await.unwrap();
    let path = dir.join("b.safetensors");
    let replaced = dir.join("replaced");
    fs::copy(&path, &replaced).unwrap();
    fs::rename(&replaced, &path).unwrap();
    last_chunk(&held).await.expect("a file that lost its name is unchanged");
    let held = Publishable::from(TensorFiles::open(&dir).unwrap().borrow(&staging()).unwrap());
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 8).unwrap();
    let shrunk = last_chunk(&held).await.unwrap_err();
    assert!(matches!(&*shrunk, SourceError::Changed { path } if path.ends_with("b.safetensors")), "{shrunk}");
    fs::write(&path, shard(&["z"])).unwrap();
    file.set_modified(modified).unwrap();
    let torn = last_chunk(&held).await.unwrap_err();
    assert!(matches!(&*torn, SourceError::Changed { .. }), "{torn}");
}

#[test]
fn a_change_after_opening_fails() {
    let (_dir, dir) = new_folder(&[("m.safetensors", &model_file())]);
    let path = dir.join("m.safetensors");
    let files = TensorFiles::open(&path).unwrap();
    let mut longer = model_file();
    longer.push(0);
    fs::write(&path, longer).unwrap();
    assert!(matches!(files.stage(&staging()), Err(FileError::Changed { .. })));
    assert!(matches!(files.borrow(&staging()), Err(FileError::Changed { .. })));
}
