//! Loading files into a version: read or borrowed, and uploaded if a GPU is to hold them.

use crate::{args::HoldArg, offered, units};
use anyhow::Context;
use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tensor_relay_device::Device;
use tensor_relay_server::{
    Borrowed, FileError, FileWatch, FolderRules, Publishable, Staged, Staging, TensorFiles, VersionDigest,
};

/// How the files of all topics are loaded. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Loader {
    pub(super) staging: Staging,
    pub(super) hold: HoldArg,
    pub(super) rules: FolderRules,
    /// Where tensors are uploaded to.
    pub(super) device: Option<Device>,
    /// What bounds the memory that they take there, for errors.
    pub(super) limit_hint: String,
}

/// Files that were read, or are ready to be.
pub(super) struct Loaded {
    pub(super) version: Publishable,
    pub(super) digest: VersionDigest,
    /// The names of these files.
    pub(super) names: Vec<String>,
}

/// Files as they are before any upload.
struct Read {
    held: ReadTensors,
    names: Vec<String>,
    /// What people are told of them.
    told: Vec<String>,
}

enum ReadTensors {
    Staged(Staged),
    Borrowed(Borrowed),
}

impl Loader {
    /// Opens and reads files off the executor, uploads them, and says what took how long, what is served and what stays
    /// behind. `watch` is told what was opened.
    pub(super) async fn load(
        &self,
        path: &Path,
        watch: Option<&Arc<Mutex<FileWatch>>>,
    ) -> anyhow::Result<Loaded> {
        let began = Instant::now();
        let Read { held, names, told } = self.read(path, watch.cloned()).await?;
        let times = format!("read in {}", units::time(began.elapsed()));
        let (version, digest, uploaded) = self.hold(path, held).await?;
        let times = match (&self.device, uploaded) {
            (Some(device), Some(took)) => {
                format!("{times}, uploaded to {} in {}", device.name(), units::time(took))
            }
            _ => times,
        };
        let (manifest, path) = (version.manifest(), path.display());
        let tensors = units::count(manifest.tensors().len(), "tensor");
        crate::log::say!("{path}: {tensors}, {}, {times}", units::bytes(manifest.payload_bytes()));
        told.iter().for_each(|line| crate::log::say!("{line}"));
        Ok(Loaded { version, digest, names })
    }

    async fn read(&self, path: &Path, watch: Option<Arc<Mutex<FileWatch>>>) -> anyhow::Result<Read> {
        let (path, staging, hold, rules) = (path.to_owned(), self.staging.clone(), self.hold, self.rules);
        let read = move || -> Result<Read, FileError> {
            let files = TensorFiles::open_with(&path, rules)?;
            if let Some(watch) = watch {
                watch.lock().unwrap_or_else(PoisonError::into_inner).handle_opened(&files);
            }
            let held = match hold {
                HoldArg::Stage => ReadTensors::Staged(files.stage(&staging)?),
                HoldArg::Borrow => ReadTensors::Borrowed(files.borrow(&staging)?),
            };
            Ok(Read { held, names: files.names(), told: offered::lines(&files) })
        };
        Ok(tokio::task::spawn_blocking(read).await??)
    }

    /// What was read as a version, and how long its upload took if there was one: its memory here is then given back.
    async fn hold(
        &self,
        path: &Path,
        read: ReadTensors,
    ) -> anyhow::Result<(Publishable, VersionDigest, Option<Duration>)> {
        match (read, &self.device) {
            (ReadTensors::Borrowed(borrowed), _) => {
                let digest = borrowed.digest().expect("files are hashed when they are borrowed");
                Ok((borrowed.into(), digest, None))
            }
            (ReadTensors::Staged(staged), None) => {
                let digest = staged.digest();
                Ok((staged.into(), digest, None))
            }
            (ReadTensors::Staged(staged), Some(device)) => {
                let (digest, began) = (staged.digest(), Instant::now());
                let uploaded = staged.onto(device).await;
                let failed =
                    || format!("cannot upload {} to {}{}", path.display(), device.name(), self.limit_hint);
                let version = uploaded.with_context(failed)?;
                self.staging.release_cached();
                Ok((version, digest, Some(began.elapsed())))
            }
        }
    }
}
