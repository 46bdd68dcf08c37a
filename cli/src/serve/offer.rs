//! A topic served from files: loaded, published, and republished when they are replaced.

use super::{
    ledger::Ledger,
    load::{Loaded, Loader},
};
use crate::{
    args::{HoldArg, ServeArgs},
    exit::message_of,
};
use std::{
    convert::Infallible,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tensor_relay_server::{
    Epoch, FileWatch, FolderRules, MISSED_GENERATIONS_KEY, Observation, Publisher, Server, Topic,
    VersionDigest, VersionId, epoch_of,
};

/// A topic and the files behind it.
pub(crate) struct Offer {
    source: Source,
    watch: Option<Watch>,
}

/// Files, and where their versions are published.
struct Source {
    publisher: Publisher,
    loader: Loader,
    path: PathBuf,
    /// The digest of the published version.
    digest: VersionDigest,
    /// Numbers its versions, if there may be several.
    ledger: Option<Arc<Mutex<Ledger>>>,
}

/// How a topic notices that its files are replaced.
struct Watch {
    topic: Topic,
    path: PathBuf,
    files: Arc<Mutex<FileWatch>>,
    /// Whether it was said that there are no files.
    missing: bool,
    /// The last error of the files.
    complaint: Option<String>,
    /// Whether missed generations were logged since the last version.
    missed_told: bool,
}

/// A published version.
#[derive(Debug, Clone)]
pub(crate) struct Published {
    pub(crate) id: VersionId,
    pub(crate) tensors: usize,
    pub(crate) payload_bytes: u64,
    /// The names of the files that it was read from.
    pub(crate) files: Vec<String>,
    /// How many generations of the files were seen before this one and never published.
    pub(crate) missed: u64,
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
            Some(_) => Some(Watch::begin(topic, path, loader.rules).await?),
            None => None,
        };
        let loaded = loader.load(path, watch.as_ref().map(|watch| &watch.files)).await?;
        let known = ledger.and_then(|ledger| locked(ledger).place(topic, loaded.digest));
        let epoch = match (ledger, known) {
            (None, _) => epoch_of(loaded.digest),
            (Some(_), Some((epoch, _))) => epoch,
            (Some(_), None) => Epoch(rand::random()),
        };
        let mut publisher = server.publisher_with(topic.clone(), Some(epoch), args.topic_options())?;
        if let Some((_, version)) = known {
            publisher.continue_at(version);
        }
        let (loader, digest, ledger) = (loader.clone(), loaded.digest, ledger.cloned());
        let mut source = Source { publisher, loader, path: path.into(), digest, ledger };
        let published = source.publish(loaded, 0).await?;
        Ok((Self { source, watch }, published))
    }

    /// Whether files that are replaced are published.
    pub(crate) fn is_watched(&self) -> bool {
        self.watch.is_some()
    }

    /// Waits until borrowed files cannot be read any more, and ends the topic: without --watch, nothing can follow. Whoever
    /// subscribes later is told as long as this lives. Of what was staged nothing is lost but with its GPU, which ends the
    /// server: subscribers wait for the next one.
    pub(crate) async fn end_when_lost(&self) {
        let Source { publisher, path, loader, .. } = &self.source;
        if loader.hold != HoldArg::Borrow {
            return std::future::pending().await;
        }
        publisher.lost().await;
        publisher.withdraw_for_good();
        let (topic, path) = (publisher.topic(), path.display());
        tracing::error!(
            "{topic}: {path} was changed in place while it was served from there, so the topic ends: its subscribers are \
             told, and those who come later too. Start the server again to serve what is there now; replace files by \
             renaming others over them, or serve with --watch or --hold stage."
        );
    }

    /// Looks at the files, and publishes what is new and complete. Waits, and goes on, when something is wrong with them.
    /// Looks on, every `interval`, while a version is read and waits for readers.
    pub(crate) async fn look(&mut self, interval: Duration) -> Option<Published> {
        let Self { source, watch: Some(watch) } = self else { return None };
        if watch.look().await != Observation::Changed {
            return None;
        }
        let (files, missed) = (Arc::clone(&watch.files), watch.missed().await);
        let published = tokio::select! {
            published = source.publish_anew(&files, missed) => published,
            never = watch.look_on(interval) => match never {},
        };
        match published {
            Ok(published) => {
                if published.is_some() {
                    watch.handle_published(missed).await;
                }
                published
            }
            Err(error) => {
                watch.handle_failure(&message_of(&error), source.publisher.is_lost()).await;
                None
            }
        }
    }
}

impl Source {
    async fn publish_anew(
        &mut self,
        watch: &Arc<Mutex<FileWatch>>,
        missed: u64,
    ) -> anyhow::Result<Option<Published>> {
        let loaded = self.loader.load(&self.path, Some(watch)).await?;
        if loaded.digest == self.digest && !self.publisher.is_lost() {
            return Ok(None); // Touched, not changed.
        }
        let digest = loaded.digest;
        let published = self.publish(loaded, missed).await?;
        self.digest = digest;
        Ok(Some(published))
    }

    /// Publishes, and tells those who receive it what was `missed` before it.
    async fn publish(&mut self, loaded: Loaded, missed: u64) -> anyhow::Result<Published> {
        let (files, manifest) = (loaded.names, loaded.version.manifest());
        let (tensors, payload_bytes) = (manifest.tensors().len(), manifest.payload_bytes());
        self.note(loaded.digest).await?;
        let metadata = (missed > 0).then(|| (MISSED_GENERATIONS_KEY.to_owned(), missed.to_string()));
        let publication = self.publisher.publish(loaded.version, metadata.into_iter().collect()).await?;
        Ok(Published { id: publication.id().clone(), tensors, payload_bytes, files, missed })
    }

    /// Notes what is about to be published, off the executor.
    async fn note(&self, digest: VersionDigest) -> anyhow::Result<()> {
        let Some(ledger) = self.ledger.clone() else { return Ok(()) };
        let id = self.publisher.next_id();
        tokio::task::spawn_blocking(move || locked(&ledger).note(&id, digest)).await?
    }
}

impl Watch {
    async fn begin(topic: &Topic, path: &Path, rules: FolderRules) -> anyhow::Result<Self> {
        let watched = path.to_owned();
        let files = tokio::task::spawn_blocking(move || FileWatch::new(&watched, rules)).await?;
        Ok(Self {
            topic: topic.clone(),
            path: path.into(),
            files: Arc::new(Mutex::new(files)),
            missing: false,
            complaint: None,
            missed_told: false,
        })
    }

    async fn look(&mut self) -> Observation {
        let looked = self.with_files(|files| (files.look(), files.missed())).await;
        let Some((look, missed)) = looked else { return Observation::Same };
        let missing = look == Observation::Missing;
        if missing && !self.missing {
            let (topic, path) = (&self.topic, self.path.display());
            tracing::warn!(
                "{topic}: there is nothing to serve at {path} any more; what was published stays on offer."
            );
        }
        self.missing = missing;
        self.tell_missed(missed);
        look
    }

    /// Looks for as long as it is not dropped, and leaves what is new to a later look.
    async fn look_on(&mut self, interval: Duration) -> Infallible {
        loop {
            tokio::time::sleep(interval).await;
            let glance = |files: &mut FileWatch| {
                files.glance();
                files.missed()
            };
            if let Some(missed) = self.with_files(glance).await {
                self.tell_missed(missed);
            }
        }
    }

    async fn missed(&self) -> u64 {
        self.with_files(|files| files.missed()).await.unwrap_or(0)
    }

    /// Says once for each version that there were others before it.
    fn tell_missed(&mut self, missed: u64) {
        if missed > 0 && !std::mem::replace(&mut self.missed_told, true) {
            tracing::warn!(
                "{}: files were replaced before they could be published, and subscribers in mode every miss them. The \
                 next version says how many; replace them less often, look more often (--watch-interval), or retain more \
                 versions for readers that are slow (--keep-versions).",
                self.topic
            );
        }
    }

    async fn handle_published(&mut self, missed: u64) {
        self.complaint = None;
        self.missed_told = false;
        self.with_files(move |files| files.told(missed)).await;
    }

    /// Lets what could not be published count as new again; says why it could not, if that was not said before.
    async fn handle_failure(&mut self, error: &str, is_lost: bool) {
        self.with_files(FileWatch::forget).await;
        if self.complaint.replace(error.to_owned()).is_none_or(|before| before != error) {
            let then = match is_lost {
                true => "nothing is on offer until it can, and it is tried again",
                false => "the version before stays on offer, and it is tried again",
            };
            tracing::warn!("{}: what replaced the files cannot be published; {then}: {error}", self.topic);
        }
    }

    /// Does something with the watch off the executor.
    async fn with_files<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut FileWatch) -> T + Send + 'static,
    ) -> Option<T> {
        let files = Arc::clone(&self.files);
        tokio::task::spawn_blocking(move || act(&mut locked(&files))).await.ok()
    }
}

fn locked<T>(shared: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
