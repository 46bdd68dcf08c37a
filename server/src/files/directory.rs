//! Folders in the layout of Hugging Face: weights in one or several files, and their side files.

use super::{
    Contents, FileError, FolderRules, SkipReason, SkippedEntry,
    folder::Folder,
    model_files::{is_model_file, is_other_format},
    read_safetensors,
    served::Stamp,
    source::Origin,
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ffi::OsStr,
    fs::Metadata,
    path::Path,
};
use tensor_relay_protocol::{
    engine_cache::{ARCHIVES_MAX_BYTES, is_archive},
    files::{FileForm, FileKind, FileName, INDEX_EXTENSION, WEIGHTS_DEFAULT, side_file_spec},
    safetensors::{INDEX_MAX_BYTES, WeightIndex},
};

/// The maximum size of all side files. The index of half a million tensors has 57 MiB, a tokenizer up to 20; far larger
/// files do not belong to a model.
const SIDE_FILES_MAX_BYTES: u64 = 128 << 20;

/// Reads the headers of the model's weights in a folder, and collects its side files.
pub(super) fn read(path: &Path, rules: FolderRules) -> Result<Contents, FileError> {
    let folder = Folder::open(path, rules)?;
    let listing = Listing::of(&folder)?;
    let index = listing.complete_index(&folder)?;
    let mut contents = Contents::new(FileForm::new(FileKind::Directory));
    contents.skipped = listing.skipped;
    let weights = choose_weights(path, listing.weights, index.as_ref(), &mut contents)?;
    read_weights(&folder, &weights, index.as_ref().map(|(_, index)| index), &mut contents)?;
    let served_index = match (index, &weights[..]) {
        (Some((name, index)), _) => match is_complete(&path.join(&name), &index, &weights, &contents)? {
            true => Some(name),
            false => {
                contents
                    .skipped
                    .push(SkippedEntry::new(name.to_string(), SkipReason::PartialIndex));
                push_new_index(name, &weights, &mut contents);
                None
            }
        },
        (None, [one]) => {
            contents.form.weights = one.clone();
            None
        }
        (None, _) => {
            let stem = WEIGHTS_DEFAULT.trim_end_matches(".safetensors");
            let name = FileName::new(&format!("{stem}{INDEX_EXTENSION}")).expect("a constant name");
            push_new_index(name, &weights, &mut contents);
            None
        }
    };
    push_side_files(&folder, served_index, listing.side_files, &mut contents)?;
    Ok(contents)
}

/// The files directly in a folder, by purpose. Sorted by name.
#[derive(Debug, Default)]
pub(super) struct Listing {
    pub(super) weights: Vec<FileName>,
    pub(super) indexes: Vec<FileName>,
    /// Links with names of weights or indexes that lead nowhere.
    lost: Vec<FileName>,
    side_files: Vec<FileName>,
    /// The stamps of all these files.
    pub(super) stamps: BTreeMap<FileName, Stamp>,
    skipped: Vec<SkippedEntry>,
}

impl Listing {
    pub(super) fn of(folder: &Folder) -> Result<Self, FileError> {
        let mut listing = Self::default();
        for name in folder.names()? {
            if let Err(reason) = listing.classify(&name, folder) {
                let name = name.to_string_lossy().into_owned();
                listing.skipped.push(SkippedEntry::new(name, reason));
            }
        }
        Ok(listing)
    }

    fn classify(&mut self, name: &OsStr, folder: &Folder) -> Result<(), SkipReason> {
        if name.as_encoded_bytes().starts_with(b".") {
            return Err(SkipReason::Hidden);
        }
        let parsed = name.to_str().and_then(|name| FileName::new(name).ok());
        let parsed = parsed.filter(|name| side_file_spec(name, 0).is_ok());
        let (metadata, is_reachable) = folder.look_up(name).inspect_err(|reason| {
            let lost = parsed.iter().filter(|name| name.is_weights() || name.is_index());
            self.lost.extend(lost.filter(|_| *reason == SkipReason::Dangling).cloned());
        })?;
        if !metadata.is_file() {
            return Err(not_a_file(&metadata));
        }
        let parsed = parsed.ok_or(SkipReason::Name)?;
        let list = match () {
            // Unreachable weights are listed, so that opening fails: without them, another model would be served.
            () if parsed.is_weights() => &mut self.weights,
            () if parsed.is_index() => &mut self.indexes,
            () if is_other_format(parsed.as_ref()) => return Err(SkipReason::OtherFormat),
            () if !folder.rules.all_files && !is_model_file(parsed.as_str()) => {
                return Err(SkipReason::NotOfModel);
            }
            () if !is_reachable => return Err(SkipReason::LeadsOut),
            () => &mut self.side_files,
        };
        list.push(parsed.clone());
        self.stamps.insert(parsed, Stamp::of(&metadata));
        Ok(())
    }

    /// The index of the folder, if it has one.
    ///
    /// # Errors
    /// When a file that the model needs is missing: an index says which weights the model has; without one, a link that
    /// leads nowhere would be missing in silence.
    pub(super) fn complete_index(
        &self,
        folder: &Folder,
    ) -> Result<Option<(FileName, WeightIndex)>, FileError> {
        let index = read_index(folder, &self.indexes)?;
        let wanted = index.as_ref().map(|(_, index)| index.files());
        let is_needed =
            |file: &&FileName| file.is_index() || wanted.as_ref().is_none_or(|wanted| wanted.contains(file));
        if let Some(lost) = self.lost.iter().find(is_needed) {
            return Err(FileError::Dangling { path: folder.path.join(lost) });
        }
        let missing = wanted.iter().flatten().find(|file| !self.weights.contains(file));
        match (&index, missing) {
            (Some((name, _)), Some(missing)) => {
                Err(FileError::MissingShard { index: folder.path.join(name), shard: (*missing).clone() })
            }
            _ => Ok(index),
        }
    }
}

fn not_a_file(metadata: &Metadata) -> SkipReason {
    match metadata.is_dir() {
        true => SkipReason::Folder,
        false => SkipReason::NotAFile,
    }
}

/// The index of a folder, if it has one.
fn read_index(folder: &Folder, indexes: &[FileName]) -> Result<Option<(FileName, WeightIndex)>, FileError> {
    let name = match indexes {
        [] => return Ok(None),
        [name] => name,
        [first, second, ..] => {
            let (first, second) = (first.clone(), second.clone());
            return Err(FileError::TwoIndexes { path: folder.path.clone(), first, second });
        }
    };
    let file = folder.open_file(name)?;
    // One byte beyond the limit, so that the parser refuses a larger file.
    let bytes = file.read_prefix(INDEX_MAX_BYTES + 1)?;
    let index = WeightIndex::parse(&bytes).map_err(|source| FileError::Index { path: file.path, source })?;
    Ok(Some((name.clone(), index)))
}

/// The weights of the model: those named by the index, or `model.safetensors`, or all.
fn choose_weights(
    path: &Path,
    found: Vec<FileName>,
    index: Option<&(FileName, WeightIndex)>,
    contents: &mut Contents,
) -> Result<Vec<FileName>, FileError> {
    let default = found.iter().find(|name| name.as_str() == WEIGHTS_DEFAULT).cloned();
    let (wanted, reason) = match (index, &default) {
        (Some((name, index)), _) => {
            if index.files().is_empty() && !found.is_empty() {
                return Err(FileError::EmptyIndex { index: path.join(name) });
            }
            (index.files(), SkipReason::NotInIndex)
        }
        (None, Some(default)) => (BTreeSet::from([default]), SkipReason::BesideModel),
        (None, None) => (found.iter().collect(), SkipReason::BesideModel),
    };
    if wanted.is_empty() {
        return Err(FileError::NoWeights { path: path.into() });
    }
    let others = found.iter().filter(|name| !wanted.contains(name));
    contents
        .skipped
        .extend(others.map(|name| SkippedEntry::new(name.to_string(), reason)));
    Ok(wanted.into_iter().cloned().collect())
}

/// Opens every file of weights and adds its tensors, without those of which the index names the copy in another file:
/// loaders take that one, and shards that were made from others keep old copies. Metadata common to all files becomes
/// the version's.
fn read_weights(
    folder: &Folder,
    weights: &[FileName],
    index: Option<&WeightIndex>,
    contents: &mut Contents,
) -> Result<(), FileError> {
    let mut common: Option<Vec<(String, String)>> = None;
    let mut keys = BTreeSet::new();
    for name in weights {
        let file = folder.open_file(name)?;
        let is_elsewhere =
            |tensor: &str| index.and_then(|index| index.file_of(tensor)).is_some_and(|file| file != name);
        let metadata = read_safetensors(file, contents, |tensor| match is_elsewhere(tensor) {
            true => Some(SkippedEntry::new(format!("{tensor} of {name}"), SkipReason::OtherCopy)),
            false => None,
        })?;
        keys.extend(metadata.iter().map(|(key, _)| key.clone()));
        common = Some(match common {
            None => metadata,
            Some(before) => before.into_iter().filter(|entry| metadata.contains(entry)).collect(),
        });
    }
    contents.metadata = common.unwrap_or_default();
    for (key, _) in &contents.metadata {
        keys.remove(key);
    }
    contents
        .skipped
        .extend(keys.into_iter().map(|key| SkippedEntry::new(key, SkipReason::Metadata)));
    check_unique(contents)
}

/// Checks that each tensor is in one file only.
fn check_unique(contents: &Contents) -> Result<(), FileError> {
    let mut seen = HashMap::with_capacity(contents.specs.len());
    for (tensor, file) in contents.in_files() {
        if let Some(first) = seen.insert(tensor, file) {
            let path = |file: usize| contents.files[file].path.clone();
            let tensor = tensor.to_owned();
            return Err(FileError::Twice { tensor, first: path(first), second: path(file) });
        }
    }
    Ok(())
}

/// Whether the index names every tensor. Tensors that it does not name are served all the same, in their files.
///
/// # Errors
/// When it names one that its file does not have.
fn is_complete(
    path: &Path,
    index: &WeightIndex,
    weights: &[FileName],
    contents: &Contents,
) -> Result<bool, FileError> {
    let found: HashMap<&str, &FileName> =
        contents.in_files().map(|(tensor, file)| (tensor, &weights[file])).collect();
    match index.tensors().find(|(tensor, _)| !found.contains_key(tensor)) {
        None => Ok(found.len() == index.tensors().count()),
        Some((tensor, shard)) => {
            let (shard, tensor) = (shard.clone(), tensor.to_owned());
            Err(FileError::MissingTensor { index: path.into(), shard, tensor })
        }
    }
}

/// Adds an index for several files without a complete one: with it a mirror has the same files of weights, and they can
/// be loaded.
fn push_new_index(name: FileName, weights: &[FileName], contents: &mut Contents) {
    let entries = contents.in_files().map(|(tensor, file)| (tensor.into(), weights[file].clone()));
    let index: WeightIndex = entries.collect();
    let json = index.to_json(contents.total_bytes());
    let spec =
        side_file_spec(&name, json.len() as u64).expect("a name in the listing or a short constant one");
    contents.push(spec, Origin::Memory(json.into()));
}

/// Adds the side files, the index first, then in order of their names. Skips each one that, with those added before it,
/// exceeds the maximum size: that of archives of caches, which a receiver of such a folder serves on, or of all others.
fn push_side_files(
    folder: &Folder,
    index: Option<FileName>,
    names: Vec<FileName>,
    contents: &mut Contents,
) -> Result<(), FileError> {
    let (mut side_file_room, mut archive_room) = (SIDE_FILES_MAX_BYTES, ARCHIVES_MAX_BYTES);
    for name in index.into_iter().chain(names) {
        let file = folder.open_file(&name)?;
        let bytes = file.len_bytes();
        let room = match is_archive(name.as_str()) {
            true => &mut archive_room,
            false => &mut side_file_room,
        };
        if bytes > *room {
            contents.skipped.push(SkippedEntry::new(name.to_string(), SkipReason::NoRoom));
            continue;
        }
        *room -= bytes;
        let spec = side_file_spec(&name, bytes)
            .map_err(|source| FileError::Name { path: file.path.clone(), source })?;
        contents.push(spec, Origin::File(contents.files.len(), 0));
        contents.files.push(file);
    }
    Ok(())
}
