//! The way of files into a version: read or lent, and uploaded where a GPU is to hold them.

use crate::{args::Hold, units};
use anyhow::Context;
use std::{
    path::Path,
    time::{Duration, Instant},
};
use tensor_relay_device::Device;
use tensor_relay_server::{Borrowed, FileError, Held, Staged, Staging, TensorFiles, VersionDigest};

/// How the files of all topics are loaded. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Loader {
    pub(super) staging: Staging,
    pub(super) hold: Hold,
    /// Where tensors are uploaded to.
    pub(super) device: Option<Device>,
    /// What bounds the memory that they take there, for errors.
    pub(super) limit_hint: String,
}

/// Files that were read, or are ready to be.
pub(super) struct Loaded {
    pub(super) version: Held,
    pub(super) digest: VersionDigest,
}

/// Files as they are before any upload.
enum Read {
    Staged(Staged),
    Borrowed(Borrowed),
}

impl Loader {
    /// Opens and reads files off the executor, uploads them, and says what took how long and what stays behind.
    pub(super) async fn load(&self, path: &Path) -> anyhow::Result<Loaded> {
        let began = Instant::now();
        let (read, left_out) = self.read(path).await?;
        let times = format!("read in {}", units::time(began.elapsed()));
        let (loaded, uploaded) = self.hold(path, read).await?;
        let times = match (&self.device, uploaded) {
            (Some(device), Some(took)) => {
                format!("{times}, uploaded to {} in {}", device.name(), units::time(took))
            }
            _ => times,
        };
        let (manifest, path) = (loaded.version.manifest(), path.display());
        let tensors = units::count(manifest.tensors().len(), "tensor");
        eprintln!("{path}: {tensors}, {}, {times}", units::bytes(manifest.payload_bytes()));
        if !left_out.is_empty() {
            eprintln!("{path}: not served: {}", left_out.join(", "));
        }
        Ok(loaded)
    }

    /// Reads files, and what of them is not served.
    async fn read(&self, path: &Path) -> anyhow::Result<(Read, Vec<String>)> {
        let (path, staging, hold) = (path.to_owned(), self.staging.clone(), self.hold);
        let read = move || -> Result<(Read, Vec<String>), FileError> {
            let files = TensorFiles::open(&path)?;
            let left_out = files.left_out().iter();
            let left_out = left_out.map(|left| format!("{} ({})", left.name, left.reason)).collect();
            let read = match hold {
                Hold::Stage => Read::Staged(files.stage(&staging)?),
                Hold::Borrow => Read::Borrowed(files.borrow(&staging)?),
            };
            Ok((read, left_out))
        };
        Ok(tokio::task::spawn_blocking(read).await??)
    }

    /// What was read as a version, and how long its upload took if there was one: its memory here is then given back.
    async fn hold(&self, path: &Path, read: Read) -> anyhow::Result<(Loaded, Option<Duration>)> {
        match (read, &self.device) {
            (Read::Borrowed(borrowed), _) => {
                let digest = borrowed.digest().expect("files are hashed when they are borrowed");
                Ok((Loaded { digest, version: borrowed.into() }, None))
            }
            (Read::Staged(staged), None) => {
                Ok((Loaded { digest: staged.digest(), version: staged.into() }, None))
            }
            (Read::Staged(staged), Some(device)) => {
                let (digest, began) = (staged.digest(), Instant::now());
                let uploaded = staged.onto(device).await;
                let failed =
                    || format!("cannot upload {} to {}{}", path.display(), device.name(), self.limit_hint);
                let version = uploaded.with_context(failed)?;
                self.staging.release_cached();
                Ok((Loaded { version, digest }, Some(began.elapsed())))
            }
        }
    }
}
