//! [`Offer`]: a topic that is served from files, and republished when they are replaced.

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
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use tensor_relay_device::Lock;
use tensor_relay_server::{
    Epoch, FileError, FileWatch, FolderRules, MISSED_GENERATIONS_KEY, Observation, Publisher, Server, Topic,
    VersionDigest, VersionId, epoch_of,
};

/// The longest wait before files that could not be published are read again, unless they change or polls are rarer.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// A topic and its served files.
pub(crate) struct Offer {
    source: Source,
    watch: Option<Watch>,
}

/// The files of a topic, and the publisher of their versions.
struct Source {
    publisher: Publisher,
    loader: Loader,
    path: PathBuf,
    /// The digest of the published version.
    digest: VersionDigest,
    /// Numbers the versions of watched files.
    ledger: Option<Arc<Ledger>>,
}

/// An offer whose first version is not yet published.
pub(crate) struct LoadedOffer {
    offer: Offer,
    first: Loaded,
}

/// Detects when the files of a topic are replaced, and logs each problem with them once.
struct Watch {
    topic: Topic,
    files: Arc<Lock<FileWatch>>,
    /// Why there is nothing to serve, so that each reason is logged once.
    missing: Option<String>,
    /// The last logged error of publishing the files.
    last_error: Option<String>,
    /// The wait after the last failed attempt to publish the files, and its end; until then, the same files are not
    /// read again.
    retry: Option<(Duration, Instant)>,
    /// Whether missed generations were logged since the last version.
    is_missed_logged: bool,
}

/// A published version.
#[derive(Debug, Clone)]
pub(crate) struct Published {
    pub(crate) id: VersionId,
    pub(crate) tensors: usize,
    pub(crate) payload_bytes: u64,
    /// The names of its files.
    pub(crate) files: Vec<String>,
    /// The number of generations of the files that were detected before this version but never published.
    pub(crate) missed: u64,
}

impl Offer {
    /// Creates the offer of `topic`, and loads its first version from the files at `path`.
    ///
    /// Without a ledger, the epoch is derived from the content, so that a server restarted with the same files offers
    /// the same version. With a ledger (`--watch`), an epoch has several versions, and the ledger supplies epoch and
    /// number.
    pub(crate) async fn load(
        server: &Server,
        args: &ServeArgs,
        loader: &Loader,
        (topic, path): (&Topic, &Path),
        ledger: Option<&Arc<Ledger>>,
    ) -> anyhow::Result<LoadedOffer> {
        // The watch is created before the files are opened, so that no change in between is missed.
        let watch = match ledger {
            Some(_) => Some(Watch::begin(topic, path, loader.rules).await?),
            None => None,
        };
        let loaded = loader.load(path, watch.as_ref().map(|watch| &watch.files)).await?;
        let recorded = ledger.and_then(|ledger| ledger.epoch_and_version(topic, loaded.digest));
        let epoch = match (ledger, recorded) {
            (None, _) => epoch_of(loaded.digest),
            (Some(_), Some((epoch, _))) => epoch,
            (Some(_), None) => Epoch(rand::random()),
        };
        let mut publisher = server.publisher_with(topic.clone(), Some(epoch), args.topic_options())?;
        if let Some((_, version)) = recorded {
            publisher.continue_at(version);
        }
        let (loader, digest, ledger) = (loader.clone(), loaded.digest, ledger.cloned());
        let source = Source { publisher, loader, path: path.into(), digest, ledger };
        Ok(LoadedOffer { offer: Self { source, watch }, first: loaded })
    }

    /// Whether replaced files are published.
    pub(crate) fn is_watched(&self) -> bool {
        self.watch.is_some()
    }

    /// Waits until borrowed files can no longer be read, and ends the topic, because without `--watch` no version can
    /// follow. Until the offer is dropped, new subscribers receive the error of the lost files. Never returns for
    /// staged files: these are lost only with their GPU, which ends the server.
    pub(crate) async fn end_when_lost(&self) {
        let Source { publisher, path, loader, .. } = &self.source;
        if loader.hold != HoldArg::Borrow {
            return std::future::pending().await;
        }
        publisher.lost().await;
        publisher.withdraw_keeping_name();
        let (topic, path) = (publisher.topic(), path.display());
        tracing::error!(
            "{topic}: {path} was changed in place while it was being served, so the topic ends, with an error for its \
             present and future subscribers. Start the server again to serve the new content. To replace files, rename \
             new ones over them, or serve with --watch or --hold stage."
        );
    }

    /// The files of a watched topic, to be polled.
    pub(crate) fn files(&self) -> Option<WatchedFiles> {
        let watch = self.watch.as_ref()?;
        let is_silent = watch.retry.is_some_and(|(_, at)| Instant::now() < at);
        Some(WatchedFiles { files: Arc::clone(&watch.files), is_silent })
    }

    /// Handles a poll of the files; returns whether their content is new and complete, so that it should be published.
    pub(crate) fn handle_polled(&mut self, polled: Polled) -> bool {
        let Self { source, watch: Some(watch) } = self else { return false };
        let before = watch.missing.clone();
        let observation = watch.handle_polled(polled);
        if watch.missing != before {
            source.publisher.set_problem(watch.missing.clone());
        }
        observation == Observation::Changed
    }

    /// Publishes the files. Errors are logged, and a later poll tries again. While a version is read and while its
    /// publish waits for readers, the files are polled every `interval`, to count missed generations.
    pub(crate) async fn publish_files(&mut self, interval: Duration) -> Option<Published> {
        let Self { source, watch: Some(watch) } = self else { return None };
        let (files, missed) = (Arc::clone(&watch.files), watch.missed().await);
        let published = tokio::select! {
            published = source.republish(&files, missed) => published,
            never = watch.count_missed(interval) => match never {},
        };
        match published {
            Ok(published) => {
                watch.handle_read();
                source.publisher.set_problem(None);
                if published.is_some() {
                    watch.handle_published(missed).await;
                }
                published
            }
            Err(error) => {
                let error = message_of(&error);
                watch.handle_failure(&error, source.publisher.is_lost(), interval).await;
                source.publisher.set_problem(Some(error));
                None
            }
        }
    }
}

/// The files of a topic, to be polled.
pub(crate) struct WatchedFiles {
    files: Arc<Lock<FileWatch>>,
    /// Whether changes are only counted: the time to publish the files again has not come.
    is_silent: bool,
}

/// The result of polling the files of a topic.
#[derive(Debug)]
pub(crate) struct Polled {
    /// What the poll reported; `None` if it was silent.
    observation: Option<Observation>,
    /// Why there is nothing to serve.
    missing: Option<String>,
    /// Whether a silent poll found other files.
    is_changed: bool,
    missed: u64,
}

impl WatchedFiles {
    /// Polls the files once. Blocks on the file system.
    pub(crate) fn poll(&self) -> Polled {
        let mut files = self.files.lock();
        let (observation, is_changed) = match self.is_silent {
            true => (None, files.poll_silently()),
            false => (Some(files.poll()), false),
        };
        let missing = files.problem().filter(|_| observation == Some(Observation::Missing));
        let missing = missing.map(|problem| missing_files(files.path(), problem));
        Polled { observation, missing, is_changed, missed: files.missed() }
    }
}

/// The message that there is nothing to serve at `path`, and why.
fn missing_files(path: &Path, problem: &FileError) -> String {
    let shown = path.display();
    match problem {
        FileError::Io { path: missing, source }
            if missing == path && source.kind() == io::ErrorKind::NotFound =>
        {
            format!("there is nothing to serve at {shown} any more: put a file or a folder there")
        }
        problem => format!("{shown} cannot be served any more: {problem}"),
    }
}

impl LoadedOffer {
    /// Publishes the first version.
    pub(crate) async fn publish(self) -> anyhow::Result<(Offer, Published)> {
        let Self { mut offer, first } = self;
        let published = offer.source.publish(first, 0).await?;
        Ok((offer, published))
    }
}

impl Source {
    /// Loads and publishes the files, unless their content is unchanged.
    async fn republish(
        &mut self,
        watch: &Arc<Lock<FileWatch>>,
        missed: u64,
    ) -> anyhow::Result<Option<Published>> {
        let loaded = self.loader.load(&self.path, Some(watch)).await?;
        if loaded.digest == self.digest && !self.publisher.is_lost() {
            return Ok(None); // The files were rewritten with equal content.
        }
        let digest = loaded.digest;
        let published = self.publish(loaded, missed).await?;
        self.digest = digest;
        Ok(Some(published))
    }

    /// Publishes a version, whose metadata contains the number of `missed` generations.
    async fn publish(&mut self, loaded: Loaded, missed: u64) -> anyhow::Result<Published> {
        let (files, manifest) = (loaded.names, loaded.version.manifest());
        let (tensors, payload_bytes) = (manifest.tensors().len(), manifest.payload_bytes());
        self.record(loaded.digest).await?;
        let metadata = (missed > 0).then(|| (MISSED_GENERATIONS_KEY.to_owned(), missed.to_string()));
        let publication = self.publisher.publish(loaded.version, metadata.into_iter().collect()).await?;
        Ok(Published { id: publication.id().clone(), tensors, payload_bytes, files, missed })
    }

    /// Records the next version in the ledger.
    async fn record(&self, digest: VersionDigest) -> anyhow::Result<()> {
        match &self.ledger {
            Some(ledger) => ledger.record(self.publisher.next_id(), digest).await,
            None => Ok(()),
        }
    }
}

impl Watch {
    async fn begin(topic: &Topic, path: &Path, rules: FolderRules) -> anyhow::Result<Self> {
        let watched = path.to_owned();
        let files = tokio::task::spawn_blocking(move || FileWatch::new(&watched, rules)).await?;
        Ok(Self {
            topic: topic.clone(),
            files: Arc::new(Lock::new(files)),
            missing: None,
            last_error: None,
            retry: None,
            is_missed_logged: false,
        })
    }

    /// Handles a poll; returns what it reported.
    fn handle_polled(&mut self, polled: Polled) -> Observation {
        let Polled { observation, missing, is_changed, missed } = polled;
        if is_changed {
            self.retry = None; // Other files may be published at once.
        }
        let Some(observation) = observation else { return Observation::Settling };
        if let Some(missing) = &missing
            && self.missing.as_ref() != Some(missing)
        {
            tracing::warn!("{}: {missing}. The published version stays on offer.", self.topic);
        }
        self.missing = missing;
        self.log_missed(missed);
        observation
    }

    /// Counts missed generations every `interval` until the future is dropped. New content is published by a later
    /// poll.
    async fn count_missed(&mut self, interval: Duration) -> Infallible {
        loop {
            tokio::time::sleep(interval).await;
            let poll = |files: &mut FileWatch| {
                files.poll_silently();
                files.missed()
            };
            if let Some(missed) = self.with_files(poll).await {
                self.log_missed(missed);
            }
        }
    }

    async fn missed(&self) -> u64 {
        self.with_files(|files| files.missed()).await.unwrap_or(0)
    }

    /// Logs missed generations, once for each version.
    fn log_missed(&mut self, missed: u64) {
        if missed > 0 && !std::mem::replace(&mut self.is_missed_logged, true) {
            tracing::warn!(
                "{}: files were replaced before they could be published, so subscribers in mode `every` miss them. The \
                 next version reports how many. Replace files less often, check them more often (--watch-interval), or \
                 retain more versions for slow readers (--keep-versions).",
                self.topic
            );
        }
    }

    /// Handles the success of reading the files, whether or not their content is new.
    fn handle_read(&mut self) {
        (self.last_error, self.retry) = (None, None);
    }

    async fn handle_published(&mut self, missed: u64) {
        self.is_missed_logged = false;
        self.with_files(move |files| files.handle_reported(missed)).await;
    }

    /// Resets the watch, so that a later poll tries to publish the files again, and logs the error unless it equals the
    /// last logged one. The waits double from `interval` on, because each attempt may read all of a large model.
    async fn handle_failure(&mut self, error: &str, is_lost: bool, interval: Duration) {
        self.with_files(FileWatch::reset).await;
        let wait = self.retry.map_or(interval, |(wait, _)| wait * 2).min(RETRY_MAX.max(interval));
        self.retry = Some((wait, Instant::now() + wait));
        if self.last_error.replace(error.to_owned()).is_none_or(|last| last != error) {
            let consequence = match is_lost {
                true => "nothing is on offer until a later attempt succeeds",
                false => "the previous version stays on offer until a later attempt succeeds",
            };
            tracing::warn!("{}: the new files cannot be published, and {consequence}: {error}", self.topic);
        }
    }

    /// Runs `act` on the file watch, on a blocking thread. `None` if the thread panics or the runtime shuts down.
    async fn with_files<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut FileWatch) -> T + Send + 'static,
    ) -> Option<T> {
        let files = Arc::clone(&self.files);
        tokio::task::spawn_blocking(move || act(&mut files.lock())).await.ok()
    }
}
