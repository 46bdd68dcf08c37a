//! [`SkippedEntry`]: an entry next to served files that is not served.

/// An entry that is not served, and why. Report it to the operator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} ({reason})")]
pub struct SkippedEntry {
    /// The file or the metadata key.
    pub name: String,
    /// The reason.
    pub reason: SkipReason,
}

/// Why an entry is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SkipReason {
    /// It is hidden.
    #[error("hidden")]
    Hidden,
    /// It is a folder.
    #[error("a folder")]
    Folder,
    /// It is a pipe or a device.
    #[error("not a regular file")]
    NotAFile,
    /// It is a link whose target is missing.
    #[error("a link that leads nowhere")]
    Dangling,
    /// Receivers would refuse its name.
    #[error("a name that receivers refuse to write")]
    Name,
    /// It is a link to a file outside the folder.
    #[error("a link that leads out of the folder")]
    LeadsOut,
    /// By its name, it does not belong to a model.
    #[error("not a known model file")]
    NotOfModel,
    /// It has weights in a format that is not served.
    #[error("weights in another format")]
    OtherFormat,
    /// It has weights that the index does not name.
    #[error("weights that the index does not name")]
    NotInIndex,
    /// It is a tensor of which the index names the copy in another file.
    #[error("a copy: the index names another file for this tensor")]
    OtherCopy,
    /// It is an index that does not name all tensors of its files. A complete one is served in its place.
    #[error("it does not name all tensors of its files: a complete index is served in its place")]
    PartialIndex,
    /// It has weights in addition to `model.safetensors`.
    #[error("weights beside model.safetensors")]
    BesideModel,
    /// It exceeds the maximum size of all side files.
    #[error("too large: at most 128 MiB of files other than weights are served")]
    NoRoom,
    /// It is a metadata key whose values in the files of weights differ.
    #[error("metadata that is not the same in all files")]
    Metadata,
}

impl SkippedEntry {
    pub(super) fn new(name: String, reason: SkipReason) -> Self {
        Self { name, reason }
    }
}
