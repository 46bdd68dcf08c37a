//! Files as topics: a file or folder is the same on the server and in a mirror.

use std::{
    fs,
    path::{Path, PathBuf},
};
use tensor_relay_client::Mirror;
use tensor_relay_server::{Server, TensorFiles};
use tensor_relay_tests::{
    pair::{client_config, server_config, simulate, topic},
    tensors,
};

/// Goal: a mirror's files equal the original files byte for byte.
/// Method: a safetensors file and two folders are staged, sent and mirrored; the mirror, staged, and the
/// original, borrowed, have the same digest.
#[test]
fn a_mirror_equals_the_served_files() {
    simulate(1, async |sim| {
        let home = tempfile::tempdir().unwrap();
        let server = sim.server(server_config());
        let client = sim.client(1, client_config()).await.unwrap();
        let mirror = Mirror::new(home.path().join("mirror"), None);
        for original in originals(home.path()) {
            let name = original.file_stem().unwrap().to_str().unwrap();
            publish(&server, name, &original).await;
            let snapshot = client.subscribe(&topic(name)).await.unwrap().next().await.unwrap();
            let copy = mirror.save(&tensors::on_host(&snapshot)).unwrap();
            assert_eq!(contents(&copy), contents(&original), "{name}");
            let again = TensorFiles::open(&copy).unwrap().stage(&server.staging()).unwrap();
            assert_eq!(again.manifest().digest(), snapshot.manifest().digest(), "{name}");
        }
    });
}

async fn publish(server: &Server, name: &str, path: &Path) {
    let files = TensorFiles::open(path).unwrap();
    assert_eq!(files.skipped(), []);
    let staged = files.stage(&server.staging()).unwrap();
    // The manifest and the bytes are the same, staged or borrowed.
    let borrowed = files.borrow(&server.staging()).unwrap();
    assert_eq!(borrowed.digest(), Some(staged.hash()));
    let mut publisher = server.publisher(topic(name)).unwrap();
    publisher.publish(staged, vec![]).await.unwrap();
}

/// Creates a safetensors file and two model folders in `home`.
fn originals(home: &Path) -> Vec<PathBuf> {
    let path = |name: &str| home.join(name);
    fs::write(path("file.safetensors"), weights(&["x", "y"])).unwrap();
    fs::create_dir(path("adapter")).unwrap();
    fs::write(path("adapter/adapter_model.safetensors"), weights(&["x"])).unwrap();
    fs::write(path("adapter/adapter_config.json"), "{}").unwrap();
    fs::create_dir(path("model")).unwrap();
    fs::write(path("model/model-1.safetensors"), weights(&["x", "z"])).unwrap();
    fs::write(path("model/model-2.safetensors"), weights(&["y"])).unwrap();
    let index = r#"{"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors", "z": "model-1.safetensors"}}"#;
    fs::write(path("model/model.safetensors.index.json"), index).unwrap();
    fs::write(path("model/tokenizer.json"), vec![b' '; 300_000]).unwrap();
    fs::write(path("model/vocab.txt"), "").unwrap();
    ["file.safetensors", "adapter", "model"].map(path).to_vec()
}

/// A safetensors file, written by the format's own library. Each tensor is larger than a chunk.
fn weights(names: &[&str]) -> Vec<u8> {
    let bytes: Vec<Vec<u8>> = names.iter().map(|name| name.repeat(100_000).into_bytes()).collect();
    let view =
        |bytes| safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![25_000], bytes).unwrap();
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    safetensors::serialize(names.iter().zip(bytes.iter().map(|bytes| view(bytes))), Some(metadata)).unwrap()
}

/// The files at or in `path` that are not hidden, with their bytes.
fn contents(path: &Path) -> Vec<(String, Vec<u8>)> {
    if path.is_file() {
        return vec![(String::new(), fs::read(path).unwrap())];
    }
    let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
    let named = entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.path()));
    let mut files: Vec<_> = named
        .filter(|(name, _)| !name.starts_with('.'))
        .map(|(name, path)| (name, fs::read(path).unwrap()))
        .collect();
    files.sort();
    files
}
