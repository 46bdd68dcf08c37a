//! Caches of inference engines, sent with a model and unpacked beside one.

use crate::{
    args::{SentCacheArgs, UnpackedCacheArgs},
    engine_facts::gather,
    units,
};
use serde_json::{Value, json};
use std::{path::Path, sync::Arc};
use tensor_relay_client::{UnpackError, Unpacked, unpack_engine_cache};
use tensor_relay_server::{EngineCache, Facts, FileError, PackedCache, TensorFiles};

/// The caches that are sent with each folder of a model, and the facts of this machine. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct SentCaches {
    caches: Arc<[EngineCache]>,
    facts: Facts,
}

impl SentCaches {
    /// Gathers the facts, if there is a cache.
    pub(crate) async fn new(args: &SentCacheArgs) -> anyhow::Result<Self> {
        match &args.engine_cache[..] {
            [] => Ok(Self::default()),
            caches => Ok(Self { caches: caches.into(), facts: gather(&args.engine_fact).await? }),
        }
    }

    /// Adds the caches to the files of a model. Reads them anew.
    pub(crate) fn add_to(&self, files: TensorFiles) -> Result<TensorFiles, FileError> {
        files.with_caches(&self.caches, &self.facts)
    }
}

/// The message about a cache that is sent.
pub(crate) fn message_of(packed: &PackedCache) -> String {
    let PackedCache { cache, files, bytes, left_out } = packed;
    let (name, folder) = (&cache.name, cache.folder.display());
    let size = format!("{}, {}", units::count(*files, "file"), units::bytes(*bytes));
    match &left_out[..] {
        [] => format!("sends the cache {name} of {folder}: {size}"),
        [first, ..] => format!(
            "sends the cache {name} of {folder}: {size}, without links, special files and names that are not portable \
             ({}, e.g. {})",
            left_out.len(),
            first.display()
        ),
    }
}

/// The caches that are unpacked with each version. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct UnpackedCaches {
    caches: Arc<[EngineCache]>,
    here: Facts,
}

/// What became of each cache of a version.
pub(crate) type Outcomes = Vec<(EngineCache, Result<Unpacked, UnpackError>)>;

impl UnpackedCaches {
    /// Gathers the facts, if there is a cache.
    pub(crate) async fn new(args: &UnpackedCacheArgs) -> anyhow::Result<Self> {
        match &args.engine_cache[..] {
            [] => Ok(Self::default()),
            caches => Ok(Self { caches: caches.into(), here: gather(&args.engine_fact).await? }),
        }
    }

    /// Unpacks those that came with the version at `path`. Blocks.
    pub(crate) fn unpack(&self, path: &Path) -> Outcomes {
        let unpack = |cache: &EngineCache| (cache.clone(), unpack_engine_cache(path, cache, &self.here));
        self.caches.iter().map(unpack).collect()
    }
}

/// Prints what became of the caches of a version.
pub(crate) fn report(outcomes: &Outcomes) {
    for (EngineCache { name, folder }, outcome) in outcomes {
        match outcome {
            Ok(Unpacked { new, kept }) => crate::log::message!(
                "the engine cache {name} is in {}: {} new, {kept} were there",
                folder.display(),
                units::count(*new, "file")
            ),
            Err(error) => crate::log::message!("warning: the engine cache {name} was not unpacked: {error}"),
        }
    }
}

/// What became of the caches of a version, by name.
pub(crate) fn as_object(outcomes: &Outcomes) -> Value {
    let object = |(cache, outcome): &(EngineCache, Result<Unpacked, UnpackError>)| {
        let (new, kept) = outcome.as_ref().map_or((0, 0), |unpacked| (unpacked.new, unpacked.kept));
        let reason = outcome.as_ref().err().map(ToString::to_string);
        let value = json!({ "folder": cache.folder, "new": new, "kept": kept, "reason": reason });
        (cache.name.to_string(), value)
    };
    outcomes.iter().map(object).collect::<serde_json::Map<_, _>>().into()
}
