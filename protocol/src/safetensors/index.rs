//! The index of a model in several files, which maps tensors to files (`model.safetensors.index.json`).

use crate::files::{FileName, FileNameError};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The largest index accepted, in bytes: room for a million tensors.
pub const INDEX_MAX_BYTES: u64 = 128 << 20;

/// The map from tensor names to the weights files of a folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WeightIndex {
    files: BTreeMap<Box<str>, FileName>,
}

/// Why a text is not an index.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// An index above the size limit.
    #[error("it has {0} bytes, and at most {INDEX_MAX_BYTES} are allowed")]
    TooLarge(u64),
    /// A text that is not JSON, or has no `weight_map` from tensors to files.
    #[error("it is not valid: {0}")]
    Json(#[from] serde_json::Error),
    /// A file that is not a weights file in the same folder.
    #[error("its file for tensor {tensor:?} is invalid: {source}")]
    File {
        /// The tensor.
        tensor: Box<str>,
        /// The rule that the file's name breaks.
        source: FileNameError,
    },
}

/// The fields that are read; others are ignored.
#[derive(Deserialize)]
struct JsonIn {
    weight_map: BTreeMap<Box<str>, Box<str>>,
}

/// The fields that are written.
#[derive(Serialize)]
struct JsonOut<'a> {
    metadata: Totals,
    weight_map: BTreeMap<&'a str, &'a str>,
}

#[derive(Serialize)]
struct Totals {
    total_size: u64,
}

impl WeightIndex {
    /// Parses an index.
    ///
    /// # Errors
    /// [`IndexError`] when the index is invalid, or names a file that is not a weights file in the same folder.
    pub fn parse(bytes: &[u8]) -> Result<Self, IndexError> {
        if bytes.len() as u64 > INDEX_MAX_BYTES {
            return Err(IndexError::TooLarge(bytes.len() as u64));
        }
        let JsonIn { weight_map } = serde_json::from_slice(bytes)?;
        let checked = |(tensor, file): (Box<str>, Box<str>)| match FileName::of_weights(&file) {
            Ok(file) => Ok((tensor, file)),
            Err(source) => Err(IndexError::File { tensor, source }),
        };
        Ok(Self { files: weight_map.into_iter().map(checked).collect::<Result<_, _>>()? })
    }

    /// The index as JSON, formatted as by the reference tools. `total_bytes` is the total size of all tensors.
    pub fn to_json(&self, total_bytes: u64) -> Vec<u8> {
        let weight_map = self.files.iter().map(|(tensor, file)| (&**tensor, file.as_str())).collect();
        let out = JsonOut { metadata: Totals { total_size: total_bytes }, weight_map };
        serde_json::to_vec_pretty(&out).expect("strings and numbers are always valid JSON")
    }

    /// The file that contains `tensor`.
    pub fn file_of(&self, tensor: &str) -> Option<&FileName> {
        self.files.get(tensor)
    }

    /// The files that the index names.
    pub fn files(&self) -> BTreeSet<&FileName> {
        self.files.values().collect()
    }

    /// Every tensor with its file.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &FileName)> {
        self.files.iter().map(|(tensor, file)| (&**tensor, file))
    }
}

impl FromIterator<(Box<str>, FileName)> for WeightIndex {
    fn from_iter<I: IntoIterator<Item = (Box<str>, FileName)>>(tensors: I) -> Self {
        Self { files: tensors.into_iter().collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_written_index_is_parsed_back() {
        let text = r#"{"metadata": {"total_size": 8, "other": [1]}, "weight_map":
            {"b": "model-00001-of-00002.safetensors", "a": "model-00002-of-00002.safetensors"}}"#;
        let index = WeightIndex::parse(text.as_bytes()).unwrap();
        assert_eq!(index.file_of("b").unwrap().as_str(), "model-00001-of-00002.safetensors");
        assert_eq!((index.file_of("c"), index.files().len()), (None, 2));
        assert_eq!(WeightIndex::parse(&index.to_json(8)).unwrap(), index);
        let written = String::from_utf8(index.to_json(8)).unwrap();
        assert!(written.starts_with(
            "{\n  \"metadata\": {\n    \"total_size\": 8\n  },\n  \"weight_map\": {\n    \"a\": "
        ));
    }

    #[test]
    fn files_outside_the_folder_are_refused() {
        for file in ["../a.safetensors", "/a.safetensors", ".a.safetensors", "sub/a.safetensors", "a.bin", ""]
        {
            let text = format!(r#"{{"weight_map": {{"t": {file:?}}}}}"#);
            let error = WeightIndex::parse(text.as_bytes()).unwrap_err();
            assert!(matches!(error, IndexError::File { .. }), "{file}: {error}");
        }
        for text in ["", "[]", "{}", r#"{"weight_map": []}"#, r#"{"weight_map": {"a": 1}}"#] {
            assert!(matches!(WeightIndex::parse(text.as_bytes()), Err(IndexError::Json(_))), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..200), text in "[\\[\\]{}\":,a-z_]{0,80}") {
            let _ = WeightIndex::parse(&bytes);
            let _ = WeightIndex::parse(format!(r#"{{"weight_map":{text}"#).as_bytes());
        }
    }
}
