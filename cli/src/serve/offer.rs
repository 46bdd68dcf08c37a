//! One topic that is served from files: loaded, published, and published anew when they are replaced.

use super::{
    ledger::Ledger,
    load::{Loaded, Loader},
};
use crate::{args::ServeArgs, exit::message_of};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};
use tensor_relay_server::{
    Epoch, FileWatch, Look, Publisher, Server, Topic, VersionDigest, VersionId, epoch_of,
};

/// A topic and the files behind it.
pub(crate) struct Offer {
    publisher: Publisher,
    loader: Loader,
    path: PathBuf,
    /// What is published now.
    digest: VersionDigest,
    watch: Option<Watch>,
}

/// How a topic notices that its files are replaced.
struct Watch {
    files: FileWatch,
    ledger: Arc<Mutex<Ledger>>,
    /// Whether it was said that there are no files.
    missing: bool,
    /// What was wrong with the files last.
    complaint: Option<String>,
}

impl Watch {
    /// Lets what could not be published count as new again; returns whether `complaint` is a new one.
    fn try_again(&mut self, complaint: &str) -> bool {
        self.files.forget();
        self.complaint
            .replace(complaint.to_owned())
            .is_none_or(|before| before != complaint)
    }

    /// Notes what is about to be published, off the executor.
    async fn note(&self, id: VersionId, digest: VersionDigest) -> anyhow::Result<()> {
        let ledger = Arc::clone(&self.ledger);
        let note = move || ledger.lock().unwrap_or_else(PoisonError::into_inner).note(&id, digest);
        tokio::task::spawn_blocking(note).await?
    }

    fn ledger(&self) -> std::sync::MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What was published.
#[derive(Debug, Clone)]
pub(crate) struct Published {
    pub(crate) id: VersionId,
    pub(crate) tensors: usize,
    pub(crate) payload_bytes: u64,
    /// The names of the files that it was read from.
    pub(crate) files: Vec<String>,
}

impl Offer {
    /// Publishes the first version of `topic` from what is at `path`.
    ///
    /// Its epoch follows from the content, so that a server that is restarted with the same files offers the same
    /// version. With --watch (which is with a ledger), where other content follows in the same epoch, the ledger says what
    /// it was.
    pub(crate) async fn begin(
        server: &Server,
        args: &ServeArgs,
        loader: &Loader,
        (topic, path): (&Topic, &Path),
        ledger: Option<&Arc<Mutex<Ledger>>>,
    ) -> anyhow::Result<(Self, Published)> {
        // Made before the files are opened, so that no change falls in between.
        let watch = match ledger {
            Some(ledger) => {
                let (path, rules) = (path.to_owned(), loader.rules);
                let files = tokio::task::spawn_blocking(move || FileWatch::new(&path, rules)).await?;
                Some(Watch { files, ledger: Arc::clone(ledger), missing: false, complaint: None })
            }
            None => None,
        };
        let loaded = loader.load(path).await?;
        let known = watch.as_ref().and_then(|watch| watch.ledger().place(topic, loaded.digest));
        let epoch = match (&watch, known) {
            (None, _) => epoch_of(loaded.digest),
            (Some(_), Some((epoch, _))) => epoch,
            (Some(_), None) => Epoch(rand::random()),
        };
        let mut publisher = server.publisher_with(topic.clone(), Some(epoch), args.topic_options())?;
        if let Some((_, version)) = known {
            publisher.continue_at(version);
        }
        let digest = loaded.digest;
        let mut offer = Self { publisher, loader: loader.clone(), path: path.into(), digest, watch };
        let published = offer.publish(loaded).await?;
        Ok((offer, published))
    }

    /// Looks at the files, and publishes what is new and complete. Waits, and goes on, when something is wrong with them.
    pub(crate) async fn look(&mut self) -> Option<Published> {
        if self.look_at_files().await != Look::Changed {
            return None;
        }
        match self.publish_anew().await {
            Ok(published) => published,
            Err(error) => {
                let (topic, error) = (self.publisher.topic(), message_of(&error));
                if self.watch.as_mut().is_some_and(|watch| watch.try_again(&error)) {
                    let then = "the version before stays on offer, and it is tried again";
                    tracing::warn!("{topic}: what replaced the files cannot be published; {then}: {error}");
                }
                None
            }
        }
    }

    async fn look_at_files(&mut self) -> Look {
        let Some(watch) = self.watch.take() else { return Look::Same };
        let mut files = watch.files;
        let looked = tokio::task::spawn_blocking(move || {
            let look = files.look();
            (files, look)
        });
        let Ok((files, look)) = looked.await else { return Look::Same };
        let missing = look == Look::Missing;
        if missing && !watch.missing {
            let (topic, path) = (self.publisher.topic(), self.path.display());
            tracing::warn!(
                "{topic}: there is nothing to serve at {path} any more; what was published stays on offer."
            );
        }
        self.watch = Some(Watch { files, missing, ..watch });
        look
    }

    async fn publish_anew(&mut self) -> anyhow::Result<Option<Published>> {
        let loaded = self.loader.load(&self.path).await?;
        if loaded.digest == self.digest {
            return Ok(None); // Touched, not changed.
        }
        let digest = loaded.digest;
        let published = self.publish(loaded).await?;
        self.digest = digest;
        Ok(Some(published))
    }

    async fn publish(&mut self, loaded: Loaded) -> anyhow::Result<Published> {
        let (files, manifest) = (loaded.names, loaded.version.manifest());
        let (tensors, payload_bytes) = (manifest.tensors().len(), manifest.payload_bytes());
        if let Some(watch) = &self.watch {
            watch.note(self.publisher.next_id(), loaded.digest).await?;
        }
        let publication = self.publisher.publish(loaded.version, vec![]).await?;
        if let Some(watch) = &mut self.watch {
            watch.complaint = None;
        }
        Ok(Published { id: publication.id().clone(), tensors, payload_bytes, files })
    }
}
