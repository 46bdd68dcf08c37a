//! Files as tensors (FILES.md §13): the manifest entries that describe files, and the rules of file names.
//!
//! A snapshot of files is an ordinary snapshot. Manifest entries under reserved names describe how to turn it back into
//! files. They come from a peer, so every file name in them is checked before it becomes part of a path.

use crate::{Dtype, Epoch, NameError, Shape, Tensor, TensorName, TensorSpec, VersionDigest};
use std::fmt;

/// The prefix of metadata keys and tensor names that belong to tensor-relay.
pub const RESERVED_PREFIX: &str = "tensor-relay.";

/// The default file for weights that no index assigns to a file.
pub const WEIGHTS_DEFAULT: &str = "model.safetensors";

/// The extension of weights files.
pub const WEIGHTS_EXTENSION: &str = ".safetensors";

/// The extension of the index, which maps tensors to weights files.
pub const INDEX_EXTENSION: &str = ".safetensors.index.json";

/// The metadata key for the number of generations of watched files that were detected since the previous version but
/// not published.
pub const MISSED_GENERATIONS_KEY: &str = "tensor-relay.missed-generations";

const KIND_KEY: &str = "tensor-relay.kind";
const WEIGHTS_KEY: &str = "tensor-relay.weights";
const SIDE_FILE_PREFIX: &str = "tensor-relay.file:";

/// The kinds of files that tensors come from and can be written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FileKind {
    /// One safetensors file.
    Safetensors,
    /// A folder of safetensors files and their side files, as on Hugging Face.
    Directory,
}

impl FileKind {
    /// Every kind.
    pub const ALL: [Self; 2] = [Self::Safetensors, Self::Directory];

    /// The kind's name in manifests and output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Safetensors => "safetensors",
            Self::Directory => "directory",
        }
    }

    /// The file extension, with the dot; empty for folders.
    pub fn extension(self) -> &'static str {
        match self {
            Self::Safetensors => WEIGHTS_EXTENSION,
            Self::Directory => "",
        }
    }
}

impl fmt::Display for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The form of files that a manifest's tensors came from and can be written to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileForm {
    /// The kind of files.
    pub kind: FileKind,
    /// In a folder, the file for tensors that no index assigns to a file.
    pub weights: FileName,
}

impl FileForm {
    /// Files of `kind`, with default names.
    pub fn new(kind: FileKind) -> Self {
        Self { kind, weights: FileName(WEIGHTS_DEFAULT.into()) }
    }

    /// Reads the form from the metadata of a manifest. If the kind is absent or unknown, the form is one safetensors
    /// file.
    ///
    /// # Errors
    /// [`FileNameError`] when the metadata contains an invalid file name.
    pub fn of(metadata: &[(String, String)]) -> Result<Self, FileNameError> {
        let value = |key| metadata.iter().find(|(entry, _)| entry == key).map(|(_, value)| value.as_str());
        let kind = FileKind::ALL.into_iter().find(|kind| Some(kind.name()) == value(KIND_KEY));
        let form = Self::new(kind.unwrap_or(FileKind::Safetensors));
        match value(WEIGHTS_KEY) {
            Some(name) if form.kind == FileKind::Directory => {
                Ok(Self { weights: FileName::of_weights(name)?, ..form })
            }
            _ => Ok(form),
        }
    }

    /// The metadata entries that describe this form.
    pub fn metadata(&self) -> Vec<(String, String)> {
        let mut metadata = vec![(KIND_KEY.to_owned(), self.kind.name().to_owned())];
        if self.kind == FileKind::Directory && self.weights.as_str() != WEIGHTS_DEFAULT {
            metadata.push((WEIGHTS_KEY.to_owned(), self.weights.as_str().to_owned()));
        }
        metadata
    }

    /// The name of the side file whose bytes `tensor` holds; `None` for a tensor of the model.
    ///
    /// # Errors
    /// [`FileNameError`] when the file name is invalid, or the tensor is not a one-dimensional `u8` tensor.
    pub fn side_file(&self, tensor: &Tensor) -> Result<Option<FileName>, FileNameError> {
        let name = tensor.name.as_str().strip_prefix(SIDE_FILE_PREFIX);
        let Some(name) = name.filter(|_| self.kind == FileKind::Directory) else {
            return Ok(None);
        };
        let refuse = |why| FileNameError { name: name.into(), why };
        if tensor.dtype != Dtype::U8 || tensor.shape.dimensions().len() != 1 {
            return Err(refuse("it is not a one-dimensional u8 tensor"));
        }
        let name = FileName::new(name)?;
        match name.is_weights() {
            true => Err(refuse("a side file must not be a weights file")),
            false => Ok(Some(name)),
        }
    }
}

/// The tensor that holds the bytes of a side file.
///
/// # Errors
/// [`NameError::TooLong`] when `name` is longer than 237 bytes: the tensor's name has a prefix of 18.
pub fn side_file_spec(name: &FileName, bytes: u64) -> Result<TensorSpec, NameError> {
    let name = TensorName::new(&format!("{SIDE_FILE_PREFIX}{name}"))?;
    let shape = Shape::new(&[bytes]).expect("one dimension cannot overflow");
    Ok(TensorSpec::new(name, Dtype::U8, shape))
}

/// The epoch of a topic whose first version has this digest: the same files have the same epoch after a restart, so
/// clients that hold them do not receive them again.
///
/// Only for topics whose content never changes. Otherwise a server that restarts with its original files would publish
/// them as version 1 of the same epoch, and a client that holds version 2 would not receive that older version.
pub fn epoch_of(digest: VersionDigest) -> Epoch {
    let [a, b, c, d, e, f, g, h, ..] = digest.0;
    Epoch(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
}

/// Whether a tensor name or metadata key belongs to tensor-relay.
pub fn is_reserved(name: &str) -> bool {
    name.starts_with(RESERVED_PREFIX)
}

/// The number of generations of watched files that were not published before a version, from the version's metadata; 0
/// without an entry.
pub fn missed_generations(metadata: &[(String, String)]) -> u64 {
    let entry = metadata.iter().find(|(key, _)| key == MISSED_GENERATIONS_KEY);
    entry.and_then(|(_, count)| count.parse().ok()).unwrap_or(0)
}

/// The metadata of a manifest without tensor-relay's own entries, which files do not contain.
pub fn without_reserved(metadata: &[(String, String)]) -> Vec<(String, String)> {
    metadata.iter().filter(|(key, _)| !is_reserved(key)).cloned().collect()
}

/// The name of one file in a folder. The file cannot lie outside the folder or be hidden, and printing the name cannot
/// send control sequences to a terminal.
///
/// One path segment of 1 to 255 bytes without control characters that does not begin with a dot.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileName(Box<str>);

/// A file name that is invalid, or not valid for its tensor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the file {name:?} is refused: {why}")]
pub struct FileNameError {
    /// The name.
    pub name: Box<str>,
    /// The rule that it breaks.
    pub why: &'static str,
}

impl FileName {
    /// Parses `name`.
    ///
    /// # Errors
    /// [`FileNameError`] names the rule that `name` breaks.
    pub fn new(name: &str) -> Result<Self, FileNameError> {
        let refuse = |why| Err(FileNameError { name: name.into(), why });
        match name {
            "" => refuse("it has no name"),
            _ if name.len() > 255 => refuse("its name is longer than 255 bytes"),
            _ if name.starts_with('.') => refuse("its name begins with a dot"),
            _ if name.contains('/') => refuse("its name contains a slash"),
            _ if name.contains(char::is_control) => refuse("its name has control characters"),
            _ => Ok(Self(name.into())),
        }
    }

    /// Parses the name of a weights file.
    ///
    /// # Errors
    /// [`FileNameError`] names the rule that `name` breaks: one of [`new`](Self::new), or that it ends with
    /// `.safetensors`.
    pub fn of_weights(name: &str) -> Result<Self, FileNameError> {
        let parsed = Self::new(name)?;
        match parsed.is_weights() {
            true => Ok(parsed),
            false => Err(FileNameError {
                name: name.into(),
                why: "the name of a weights file ends with .safetensors",
            }),
        }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this is the name of a weights file.
    pub fn is_weights(&self) -> bool {
        self.0.ends_with(WEIGHTS_EXTENSION)
    }

    /// Whether this is the name of an index of weights.
    pub fn is_index(&self) -> bool {
        self.0.ends_with(INDEX_EXTENSION)
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl AsRef<std::path::Path> for FileName {
    fn as_ref(&self) -> &std::path::Path {
        self.0.as_ref().as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limits, Manifest};
    use proptest::prelude::*;

    fn tensor(name: &str, dtype: Dtype, dimensions: &[u64]) -> Tensor {
        let spec = TensorSpec::new(TensorName::new(name).unwrap(), dtype, Shape::new(dimensions).unwrap());
        Manifest::layout(vec![spec], vec![], 4096, &Limits::default())
            .unwrap()
            .tensors()[0]
            .clone()
    }

    #[test]
    fn a_form_is_read_back_from_its_metadata() {
        for kind in FileKind::ALL {
            assert_eq!(FileForm::of(&FileForm::new(kind).metadata()), Ok(FileForm::new(kind)));
        }
        let adapter = FileName::of_weights("adapter_model.safetensors").unwrap();
        let form = FileForm { kind: FileKind::Directory, weights: adapter };
        assert_eq!(FileForm::of(&form.metadata()), Ok(form));
        assert_eq!(FileForm::of(&[]).unwrap().kind, FileKind::Safetensors);
        let later = [(KIND_KEY.to_owned(), "gguf".to_owned())];
        assert_eq!(FileForm::of(&later).unwrap().kind, FileKind::Safetensors);
    }

    #[test]
    fn reserved_metadata_is_not_written_into_files() {
        let mut metadata = FileForm::new(FileKind::Directory).metadata();
        metadata.push(("format".into(), "pt".into()));
        assert_eq!(without_reserved(&metadata), [("format".into(), "pt".into())]);
    }

    #[test]
    fn side_files_are_u8_tensors_in_folders() {
        let folder = FileForm::new(FileKind::Directory);
        let spec = side_file_spec(&FileName::new("config.json").unwrap(), 3).unwrap();
        let config = tensor(spec.name.as_str(), spec.dtype, spec.shape.dimensions());
        assert_eq!(folder.side_file(&config).unwrap().unwrap().as_str(), "config.json");
        assert_eq!(FileForm::new(FileKind::Safetensors).side_file(&config), Ok(None));
        assert_eq!(folder.side_file(&tensor("config.json", Dtype::U8, &[3])), Ok(None));
        for (name, dtype, dimensions) in [
            ("tensor-relay.file:a", Dtype::I8, &[3][..]),
            ("tensor-relay.file:a", Dtype::U8, &[3, 1]),
            ("tensor-relay.file:", Dtype::U8, &[3]),
            ("tensor-relay.file:../a", Dtype::U8, &[3]),
            ("tensor-relay.file:.bashrc", Dtype::U8, &[3]),
            ("tensor-relay.file:a.safetensors", Dtype::U8, &[3]),
        ] {
            assert!(folder.side_file(&tensor(name, dtype, dimensions)).is_err(), "{name}");
        }
        let long = FileName::new(&"a".repeat(255)).unwrap();
        assert_eq!(side_file_spec(&long, 1), Err(NameError::TooLong(273)));
    }

    #[test]
    fn an_epoch_is_the_first_eight_bytes_of_a_digest() {
        let digest = VersionDigest(std::array::from_fn(|i| i as u8));
        assert_eq!(epoch_of(digest), Epoch(0x0706_0504_0302_0100));
    }

    proptest! {
        /// A folder joined with any file name is the path of a file directly in that folder.
        #[test]
        fn a_file_stays_in_its_folder(name in "[a-z./\\\\\0-]{0,8}") {
            if let Ok(name) = FileName::new(&name) {
                let path = std::path::Path::new("/folder").join(&name);
                prop_assert_eq!(path.parent(), Some(std::path::Path::new("/folder")));
                prop_assert_eq!(path.file_name().and_then(|n| n.to_str()), Some(name.as_str()));
            }
        }

        #[test]
        fn any_metadata_is_survived(kind in any::<String>(), weights in any::<String>()) {
            let _ = FileForm::of(&[(KIND_KEY.into(), kind), (WEIGHTS_KEY.into(), weights.clone())]);
            let _ = FileForm::of(&[(KIND_KEY.into(), "directory".into()), (WEIGHTS_KEY.into(), weights)]);
        }
    }
}
