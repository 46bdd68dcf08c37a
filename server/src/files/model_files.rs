//! The side files of models, by name, in the layout of Hugging Face; and the archives of caches of engines.

use std::path::Path;
use tensor_relay_protocol::engine_cache::is_archive;

/// Extensions of weights and of training state, which are never side files.
const OTHER_FORMATS: &[&str] = &[
    "bin",
    "ckpt",
    "ggml",
    "gguf",
    "h5",
    "mlmodel",
    "msgpack",
    "npy",
    "npz",
    "onnx",
    "onnx_data",
    "ot",
    "pb",
    "pickle",
    "pkl",
    "pt",
    "pth",
    "safetensors",
    "tflite",
];

/// The extension of a weight index in PyTorch's format.
const OTHER_INDEX: &str = ".bin.index.json";

/// Extensions of configurations, tokenizers (SentencePiece, BPE, tiktoken), chat templates, model cards and code.
const EXTENSIONS: &[&str] = &["bpe", "codes", "jinja", "json", "md", "model", "py", "spm", "tiktoken"];

/// Prefixes of vocabularies and legal texts that end with `.txt` or have no extension, in lower case.
const TEXTS: &[&str] = &[
    "added_tokens",
    "copying",
    "dict",
    "licence",
    "license",
    "merges",
    "model_license",
    "notice",
    "readme",
    "requirements",
    "third_party_notice",
    "use_policy",
    "vocab",
];

/// The prefix of a tokenizer's name that ends with its version (`tokenizer.model.v3`).
const TOKENIZER: &str = "tokenizer.model.";

/// Whether `path` has an extension of weights or training state.
pub(super) fn is_other_format(path: &Path) -> bool {
    let is_index = path.to_str().is_some_and(|path| path.ends_with(OTHER_INDEX));
    is_index || OTHER_FORMATS.contains(&&*extension_of(path))
}

/// Whether a file of this name belongs to a model.
pub(super) fn is_model_file(name: &str) -> bool {
    let extension = extension_of(name.as_ref());
    let has_prefix = |text: &&str| name.to_ascii_lowercase().starts_with(text);
    match &*extension {
        extension if EXTENSIONS.contains(&extension) => true,
        "" | "txt" => TEXTS.iter().any(has_prefix),
        _ => name.starts_with(TOKENIZER) || is_archive(name),
    }
}

fn extension_of(path: &Path) -> String {
    path.extension()
        .and_then(|extension| extension.to_str())
        .unwrap_or_default()
        .to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_models_are_recognised_by_name() {
        for name in [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer.model",
            "tokenizer.model.v3",
            "spiece.model",
            "qwen.tiktoken",
            "vocab.txt",
            "vocab.bpe",
            "bpe.codes",
            "merges.txt",
            "source.spm",
            "chat_template.jinja",
            "modeling_chatglm.py",
            "README.md",
            "LICENSE",
            "LICENSE.txt",
            "LICENSE-MODEL",
            "MODEL_LICENSE",
            "Notice.txt",
            "USE_POLICY.md",
            "vllm.engine-cache.tar",
        ] {
            assert!(is_model_file(name), "{name}");
        }
        for name in [
            "id_rsa",
            "id_rsa.pub",
            "passwords.txt",
            "shadow",
            "server.key",
            "license.key",
            "train.jsonl",
            "data.csv",
            "backup.tar.gz",
            "events.out.tfevents.1",
            "authorized_keys",
        ] {
            assert!(!is_model_file(name), "{name}");
        }
    }
}
