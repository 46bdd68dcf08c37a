//! Writes valid and invalid files of tensors, and compares them.

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File},
    io::Write,
    path::Path,
};
use tensor_relay_tests::processes::Home;

/// Every dtype of the format, the narrowest first.
const DTYPES: [Dtype; 22] = [
    Dtype::F4,
    Dtype::F6_E2M3,
    Dtype::F6_E3M2,
    Dtype::BOOL,
    Dtype::U8,
    Dtype::I8,
    Dtype::F8_E5M2,
    Dtype::F8_E4M3,
    Dtype::F8_E8M0,
    Dtype::F8_E4M3FNUZ,
    Dtype::F8_E5M2FNUZ,
    Dtype::I16,
    Dtype::U16,
    Dtype::F16,
    Dtype::BF16,
    Dtype::I32,
    Dtype::U32,
    Dtype::F32,
    Dtype::C64,
    Dtype::F64,
    Dtype::I64,
    Dtype::U64,
];

/// The number of tensors that [`write_everything`] writes.
pub(crate) const EVERYTHING_TENSORS: usize = DTYPES.len() + 4;

/// Writes a file with what the format allows: every dtype, a scalar, an empty tensor, a tensor of several chunks, names
/// in other scripts, and metadata.
pub(crate) fn write_everything(path: &Path) {
    let large = bytes(3 << 20, 99);
    let bodies: Vec<_> = DTYPES
        .iter()
        .zip(0..)
        .map(|(dtype, seed)| (*dtype, body(*dtype, seed)))
        .collect();
    let mut tensors: Vec<(String, TensorView<'_>)> = vec![];
    for (dtype, body) in &bodies {
        tensors.push((format!("layers.0.{dtype}"), view(*dtype, &[3, 8], body)));
    }
    tensors.push(("scalar".into(), view(Dtype::F32, &[], &large[..4])));
    tensors.push(("empty".into(), view(Dtype::I64, &[0, 7], &[])));
    tensors.push(("模型.وزن \"ü\" \\".into(), view(Dtype::BF16, &[1, 5, 1], &large[..10])));
    tensors.push(("large".into(), view(Dtype::F32, &[3 << 10, 1 << 8], &large)));
    let metadata = [("format", "pt"), ("Notiz", "größer"), ("", "")];
    let metadata = metadata.map(|(key, value)| (key.into(), value.into()));
    write(path, tensors, Some(HashMap::from(metadata)));
}

/// A new home with the model `w` of 1,000 incompressible bytes in it.
pub(crate) fn home_with_model() -> Home {
    let home = Home::new();
    write_noise(&home.path("w"), 1000, 1);
    home
}

/// Writes a file with one tensor `w` of `size` incompressible bytes.
pub(crate) fn write_noise(path: &Path, size: usize, seed: u64) {
    let body = bytes(size, seed);
    write(path, vec![("w".into(), view(Dtype::U8, &[size], &body))], None);
}

/// Writes a file with one tensor `w` of `elements` bf16 numbers with few distinct exponents, as weights have.
pub(crate) fn write_weights(path: &Path, elements: usize, seed: u64) {
    let mut body = bytes(2 * elements, seed);
    for high in body.iter_mut().skip(1).step_by(2) {
        *high = *high & 0x80 | 0x3c | high.trailing_zeros().min(3) as u8;
    }
    write(path, vec![("w".into(), view(Dtype::BF16, &[elements], &body))], None);
}

/// Writes a sparse file with one tensor `w` of `size` zeros, quickly at any size.
pub(crate) fn write_zeros(path: &Path, size: u64) {
    let json = format!(r#"{{"w":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}}}"#);
    let padded = json.len().next_multiple_of(8); // As the format's own writer pads it.
    let head = with_header(&format!("{json:padded$}"), &[]);
    fs::write(path, &head).unwrap();
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(head.len() as u64 + size).unwrap();
}

/// The size of the parameters of a [`write_sharded`] model.
pub(crate) const SHARDED_BYTES: usize = 4 * 300_000;

/// The files of a [`write_sharded`] model that are served.
pub(crate) const SHARDED_FILES: [&str; 6] = [
    "README.md",
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
];

/// Writes a model folder as Hugging Face distributes it: two shards with their index, other files that a server serves,
/// and some that it does not serve: a file of weights in another format, a hidden file and a folder.
pub(crate) fn write_sharded(folder: &Path, seed: u64) {
    fs::create_dir(folder).unwrap();
    let body = bytes(SHARDED_BYTES / 4, seed);
    let names = ["model.embed", "model.layers.0", "model.layers.1", "lm_head"];
    let mut weight_map = BTreeMap::new();
    for (shard, names) in SHARDED_FILES[2..4].iter().zip(names.chunks(2)) {
        let tensor = |name: &&str| ((*name).into(), view(Dtype::BF16, &[SHARDED_BYTES / 8], &body));
        let metadata = HashMap::from([("format".into(), "pt".into())]);
        write(&folder.join(shard), names.iter().map(tensor).collect(), Some(metadata));
        weight_map.extend(names.iter().map(|name| (*name, *shard)));
    }
    let index = json!({ "metadata": { "total_size": SHARDED_BYTES }, "weight_map": weight_map });
    let index = serde_json::to_string_pretty(&index).unwrap();
    for (name, text) in [
        (SHARDED_FILES[4], &*index),
        ("config.json", r#"{"architectures": ["Test"]}"#),
        ("tokenizer.json", r#"{"version": "1.0"}"#),
        ("README.md", "# A test\n"),
        ("pytorch_model.bin", "pickle"),
        (".gitattributes", "*.bin filter=lfs\n"),
    ] {
        fs::write(folder.join(name), text).unwrap();
    }
    fs::create_dir(folder.join("onnx")).unwrap();
}

/// Checks that two folders hold the same model, and that the index names the right shards.
#[track_caller]
pub(crate) fn assert_same_model(expected: &Path, found: &Path) {
    for name in SHARDED_FILES {
        match name.ends_with(".safetensors") {
            true => assert_same(&expected.join(name), &found.join(name)),
            false => {
                let read = |folder: &Path| fs::read(folder.join(name)).unwrap();
                assert!(read(expected) == read(found), "{name} differs");
            }
        }
    }
    let index: Value = serde_json::from_slice(&fs::read(found.join(SHARDED_FILES[4])).unwrap()).unwrap();
    for (tensor, shard) in index["weight_map"].as_object().unwrap() {
        let shard = fs::read(found.join(shard.as_str().unwrap())).unwrap();
        let shard = SafeTensors::deserialize(&shard).unwrap();
        assert!(shard.tensor(tensor).is_ok(), "the index misplaces {tensor}");
    }
}

/// Replaces the file at `path` atomically by the one that `write` writes, as users should replace served files.
pub(crate) fn replace(path: &Path, write: impl FnOnce(&Path)) {
    let aside = path.with_extension("new");
    write(&aside);
    fs::rename(&aside, path).unwrap();
}

/// The bytes of a safetensors file with this header, valid or not, followed by `data`.
pub(crate) fn with_header(json: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.write_all(json.as_bytes()).unwrap();
    file.write_all(data).unwrap();
    file
}

/// Checks that two files are equal, and reports what differs: the metadata, the names, dtypes, shapes or bytes of
/// tensors, or the order.
#[track_caller]
pub(crate) fn assert_same(expected: &Path, found: &Path) {
    let (expected, found) = (fs::read(expected).unwrap(), fs::read(found).unwrap());
    let bytes_match = expected == found;
    assert_eq!(metadata(&expected), metadata(&found));
    let (expected, found) =
        (SafeTensors::deserialize(&expected).unwrap(), SafeTensors::deserialize(&found).unwrap());
    let names = |file: &SafeTensors<'_>| {
        let mut names: Vec<String> = file.names().into_iter().map(Into::into).collect();
        names.sort();
        names
    };
    assert_eq!(names(&expected), names(&found));
    for (name, tensor) in expected.iter() {
        let other = found.tensor(name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (other.dtype(), other.shape()), "{name}");
        assert!(tensor.data() == other.data(), "the bytes of {name} differ");
    }
    assert!(bytes_match, "the tensors and metadata are equal, but not the bytes of the files");
}

fn metadata(file: &[u8]) -> BTreeMap<String, String> {
    let (_, header) = SafeTensors::read_metadata(file).unwrap();
    header.metadata().clone().unwrap_or_default().into_iter().collect()
}

fn write(path: &Path, tensors: Vec<(String, TensorView<'_>)>, metadata: Option<HashMap<String, String>>) {
    fs::write(path, safetensors::serialize(tensors, metadata).unwrap()).unwrap();
}

fn view<'a>(dtype: Dtype, shape: &[usize], body: &'a [u8]) -> TensorView<'a> {
    TensorView::new(dtype, shape.to_vec(), body).unwrap()
}

/// The bytes of 24 elements.
fn body(dtype: Dtype, seed: u64) -> Vec<u8> {
    let mut body = bytes(24 * dtype.bitsize() / 8, seed);
    if dtype == Dtype::BOOL {
        body.iter_mut().for_each(|byte| *byte &= 1);
    }
    body
}

fn bytes(size: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; size];
    tensor_relay_tests::tensors::write_content("bytes", seed, &mut bytes);
    bytes
}
