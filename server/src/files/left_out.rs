//! What is not served though it lies beside what is.

use std::fmt;

/// Something that does not travel, and why. Whoever serves the files should be told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// The file, the archive's entry or the metadata key.
    pub name: String,
    /// Why it stays behind.
    pub reason: LeftOutReason,
}

/// Why something does not travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeftOutReason {
    /// A hidden file.
    Hidden,
    /// A folder in the folder.
    Folder,
    /// A pipe, a device, or a link that leads nowhere.
    NoFile,
    /// A name that receivers would not write.
    Name,
    /// A link to a file outside of the folder.
    LeadsOut,
    /// A file that models do not consist of, as far as its name tells.
    NotOfModel,
    /// Weights in a format that is not served.
    OtherFormat,
    /// Weights that the index does not name.
    NotInIndex,
    /// Weights beside `model.safetensors`.
    BesideModel,
    /// It does not fit with the other files beside the weights.
    NoRoom,
    /// An entry of an archive that is no array.
    NoArray,
    /// A metadata key on which the files of weights do not agree.
    Metadata,
}

impl LeftOut {
    pub(super) fn new(name: String, reason: LeftOutReason) -> Self {
        Self { name, reason }
    }
}

impl fmt::Display for LeftOutReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hidden => "hidden",
            Self::Folder => "a folder",
            Self::NoFile => "no regular file",
            Self::Name => "a name that receivers do not write",
            Self::LeadsOut => "a link that leads out of the folder",
            Self::NotOfModel => "not known as a file of models",
            Self::OtherFormat => "weights in another format",
            Self::NotInIndex => "weights that the index does not name",
            Self::BesideModel => "weights beside model.safetensors",
            Self::NoRoom => "too large beside the weights, which may have 64 MiB of other files with them",
            Self::NoArray => "an entry that is no array",
            Self::Metadata => "metadata that is not the same in all files",
        })
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.reason)
    }
}
