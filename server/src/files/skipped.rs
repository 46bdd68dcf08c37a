//! [`SkippedEntry`]: an entry next to served files that is not served.

use std::fmt;

/// An entry that is not served, and why. Report it to the operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SkippedEntry {
    /// The file, the archive's entry or the metadata key.
    pub name: String,
    /// The reason.
    pub reason: SkipReason,
}

/// Why an entry is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SkipReason {
    /// It is hidden.
    Hidden,
    /// It is a folder.
    Folder,
    /// It is a pipe or a device.
    NotAFile,
    /// It is a link whose target is missing.
    Dangling,
    /// Receivers would refuse its name.
    Name,
    /// It is a link to a file outside the folder.
    LeadsOut,
    /// By its name, it does not belong to a model.
    NotOfModel,
    /// It has weights in a format that is not served.
    OtherFormat,
    /// It has weights that the index does not name.
    NotInIndex,
    /// It has weights in addition to `model.safetensors`.
    BesideModel,
    /// It exceeds the maximum size of all side files.
    NoRoom,
    /// It is an archive entry without an array.
    NotAnArray,
    /// It is a metadata key whose values in the files of weights differ.
    Metadata,
}

impl SkippedEntry {
    pub(super) fn new(name: String, reason: SkipReason) -> Self {
        Self { name, reason }
    }
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hidden => "hidden",
            Self::Folder => "a folder",
            Self::NotAFile => "not a regular file",
            Self::Dangling => "a link that leads nowhere",
            Self::Name => "a name that receivers refuse to write",
            Self::LeadsOut => "a link that leads out of the folder",
            Self::NotOfModel => "not a known model file",
            Self::OtherFormat => "weights in another format",
            Self::NotInIndex => "weights that the index does not name",
            Self::BesideModel => "weights beside model.safetensors",
            Self::NoRoom => "too large: at most 64 MiB of files other than weights are served",
            Self::NotAnArray => "an entry that is not an array",
            Self::Metadata => "metadata that is not the same in all files",
        })
    }
}

impl fmt::Display for SkippedEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.reason)
    }
}
