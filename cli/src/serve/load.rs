//! [`Loader`]: loads files as a version, staged or borrowed, and uploads it if a GPU is used.

use crate::{args::HoldArg, engine_caches::SentCaches, offered, units};
use anyhow::Context;
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use tensor_relay_device::{Device, Lock};
use tensor_relay_server::{
    Borrowed, FileError, FileWatch, FolderRules, Publishable, Splits, Staged, Staging, TensorFiles,
    VersionDigest,
};

/// The settings for loading the files of all topics. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Loader {
    pub(super) staging: Staging,
    pub(super) hold: HoldArg,
    pub(super) rules: FolderRules,
    pub(super) splits: Splits,
    pub(super) caches: SentCaches,
    /// The device to which tensors are uploaded.
    pub(super) device: Option<Device>,
    /// A hint about `--gpu-mem-limit` for errors; empty if the option is not set.
    pub(super) limit_hint: String,
}

/// A version that was loaded from files, ready to be published.
pub(super) struct Loaded {
    pub(super) version: Publishable,
    pub(super) digest: VersionDigest,
    /// The names of the files.
    pub(super) names: Vec<String>,
}

/// Files after reading, before any upload.
struct ReadFiles {
    tensors: ReadTensors,
    names: Vec<String>,
    /// Messages about the served and the skipped files.
    messages: Vec<String>,
}

enum ReadTensors {
    Staged(Staged, VersionDigest),
    Borrowed(Borrowed),
}

impl Loader {
    /// Opens and reads the files at `path` on a blocking thread, uploads them, and reports the durations, the served
    /// files and the skipped ones. Records the opened files in `watch`.
    pub(super) async fn load(
        &self,
        path: &Path,
        watch: Option<&Arc<Lock<FileWatch>>>,
    ) -> anyhow::Result<Loaded> {
        let began = Instant::now();
        let ReadFiles { tensors, names, messages } = self.read(path, watch.cloned()).await?;
        let times = format!("read in {}", units::time(began.elapsed()));
        let (version, digest, uploaded) = self.upload(path, tensors).await?;
        let times = match (&self.device, uploaded) {
            (Some(device), Some(took)) => {
                format!("{times}, uploaded to {} in {}", device.name(), units::time(took))
            }
            _ => times,
        };
        let (manifest, path) = (version.manifest(), path.display());
        let tensors = units::count(manifest.tensors().len(), "tensor");
        crate::log::message!("{path}: {tensors}, {}, {times}", units::bytes(manifest.payload_bytes()));
        messages.iter().for_each(|message| crate::log::message!("{message}"));
        Ok(Loaded { version, digest, names })
    }

    async fn read(&self, path: &Path, watch: Option<Arc<Lock<FileWatch>>>) -> anyhow::Result<ReadFiles> {
        let (path, staging, hold, rules) = (path.to_owned(), self.staging.clone(), self.hold, self.rules);
        let (splits, caches) = (self.splits.clone(), self.caches.clone());
        let read = move || -> Result<ReadFiles, FileError> {
            let files = caches.add_to(TensorFiles::open_with(&path, rules)?.split(&splits)?)?;
            if let Some(watch) = watch {
                watch.lock().handle_opened(&files);
            }
            let tensors = match hold {
                HoldArg::Stage => {
                    let staged = files.stage(&staging)?;
                    let digest = staged.hash();
                    ReadTensors::Staged(staged, digest)
                }
                HoldArg::Borrow => ReadTensors::Borrowed(files.borrow(&staging)?),
            };
            Ok(ReadFiles { tensors, names: files.names(), messages: offered::messages(&files) })
        };
        Ok(tokio::task::spawn_blocking(read).await??)
    }

    /// Makes a version of the tensors, and uploads it to the device, if one is used; returns the duration of the
    /// upload. After an upload, the staging memory is released.
    async fn upload(
        &self,
        path: &Path,
        tensors: ReadTensors,
    ) -> anyhow::Result<(Publishable, VersionDigest, Option<Duration>)> {
        match (tensors, &self.device) {
            (ReadTensors::Borrowed(borrowed), _) => {
                let digest = borrowed.digest().expect("files are hashed when they are borrowed");
                Ok((borrowed.into(), digest, None))
            }
            (ReadTensors::Staged(staged, digest), None) => Ok((staged.into(), digest, None)),
            (ReadTensors::Staged(staged, digest), Some(device)) => {
                let began = Instant::now();
                let uploaded = staged.onto(device).await;
                let message =
                    || format!("cannot upload {} to {}{}", path.display(), device.name(), self.limit_hint);
                let version = uploaded.with_context(message)?;
                self.staging.release_cached();
                Ok((version, digest, Some(began.elapsed())))
            }
        }
    }
}
