//! [`Follower`]: receives, saves and reports the versions of one topic, and runs the command of `--exec` after each.

use super::{
    Connected, NothingSelected, hook,
    report::{self, LaneReport},
};
use crate::{
    admin::FollowedTopic,
    args::{OnGap, SubscribeArgs},
    bar::{self, Bar},
    engine_caches::{self, Outcomes, UnpackedCaches},
    output,
    sharing::SharedTopic,
};
use std::{path::PathBuf, sync::Arc, time::Duration};
use tensor_relay_client::{
    ClientError, EndReason, Glob, Mirror, Mode, Request, Snapshot, StatusReader, Subscription,
    SubscriptionError, Topic,
};

/// The maximum number of tensors named as examples in an error.
const EXAMPLES_MAX: usize = 3;

/// The time that `subscribe` waits for a topic before it prints a message about that.
const WAITING_MESSAGE_DELAY: Duration = Duration::from_secs(1);

/// A subscription, and the outputs of its versions.
pub(crate) struct Follower {
    args: Arc<SubscribeArgs>,
    subscription: Subscription,
    mirror: Option<Arc<Mirror>>,
    caches: UnpackedCaches,
    bar: Bar,
    lanes: LaneReport,
    followed: FollowedTopic,
    shared: Option<SharedTopic>,
    status: StatusReader,
}

impl Follower {
    /// Subscribes to `topic`. A progress bar is shown only if the topic `is_alone`, i.e. no other topic is followed.
    pub(crate) async fn begin(
        args: &Arc<SubscribeArgs>,
        (client, consumer, sharing, caches): Connected<'_>,
        topic: Topic,
        is_alone: bool,
    ) -> Result<Self, ClientError> {
        let followed = consumer.follow(&topic);
        let lanes = LaneReport::new(client); // Before the first byte is received, because it counts from now on.
        let shared = sharing.topic(&topic);
        let subscription = client.subscribe_to(request(args, topic)).await?;
        let mirror = args.out.as_ref().map(|dir| Arc::new(Mirror::new(dir, args.keep)));
        let bar = Bar::new(is_alone && !args.quiet && !args.json);
        let (args, status, caches) = (Arc::clone(args), client.status_reader(), caches.clone());
        Ok(Self { args, subscription, mirror, caches, bar, lanes, followed, shared, status })
    }

    /// Receives versions until the topic ends or an error occurs.
    pub(crate) async fn run(mut self) -> anyhow::Result<()> {
        let mut has_received = false;
        loop {
            let next = self.next().await;
            if let Err(SubscriptionError::Ended { reason, .. }) = &next
                && let Some(shared) = self.shared.take()
            {
                shared.end(*reason);
            }
            let snapshot = match next {
                Err(SubscriptionError::Ended { reason: EndReason::TopicEnded, .. }) if has_received => {
                    return Ok(());
                }
                Err(SubscriptionError::Gap(gap)) if self.args.on_gap == OnGap::Continue => {
                    report::gap(self.args.json, &gap)?;
                    continue;
                }
                Err(error @ SubscriptionError::NoRoomOnDevice { .. })
                    if self.args.device.gpu_mem_limit.is_some() =>
                {
                    let no_room = format!("no room{}", self.args.device.limit_hint());
                    return Err(anyhow::Error::new(error).context(no_room));
                }
                other => other?,
            };
            has_received = true;
            self.check_selection(&snapshot)?;
            if let Some(shared) = &mut self.shared {
                shared.offer(&snapshot).await?;
            }
            let lanes = self.lanes.read(); // Before saving, during which the next version may be received.
            let path = self.save(&snapshot).await?;
            let caches = self.unpack_caches(path.clone()).await?;
            engine_caches::report(&caches);
            let (id, skipped) = (snapshot.id(), snapshot.skipped());
            self.followed
                .committed(id, snapshot.payload_bytes(), skipped, &snapshot.receipt());
            let must_be_read = self.must_be_read();
            let saved = report::Saved { path: path.as_deref(), caches: &caches };
            report::committed(self.args.json, must_be_read, &snapshot, &saved, &lanes)?;
            report::sources(&snapshot, &self.status);
            if must_be_read {
                output::written().await?;
            }
            if let Some(command) = &self.args.exec {
                match hook::run(command, snapshot.id(), path.as_deref(), self.args.json).await {
                    Err(error) if self.args.once => return Err(error.into()),
                    // Only a warning: the version was received, and the command may succeed for the next one.
                    Err(error) => crate::log::message!("warning: {error}"),
                    Ok(()) => {}
                }
            }
            drop(snapshot);
            if self.args.once {
                self.subscription.acknowledge();
                return Ok(());
            }
        }
    }

    async fn next(&mut self) -> Result<Snapshot, SubscriptionError> {
        let progress = self.subscription.progress_reader();
        let topic = self.subscription.topic().clone();
        let message = async {
            tokio::time::sleep(WAITING_MESSAGE_DELAY).await;
            if progress().version == 0 {
                crate::log::message!(
                    "waiting for topic {topic}: it does not exist yet, or has no version that matches --from"
                );
            }
            std::future::pending().await
        };
        let snapshot = async {
            tokio::select! {
                snapshot = self.subscription.next() => snapshot,
                never = message => never,
            }
        };
        bar::while_running(&mut self.bar, &progress, snapshot).await
    }

    /// Whether the version's line on stdout is part of its delivery, so that the version waits for it: the only line, or
    /// one of the objects by which a program follows every version. Other lines are dropped if nobody reads them.
    fn must_be_read(&self) -> bool {
        self.args.once || self.args.json && Mode::from(self.args.mode) == Mode::Every
    }

    /// Refuses a version of which no tensor is selected, or none by the glob of a box: most likely a pattern is mistyped,
    /// and saving the version would replace a good file by an empty one, or by one that is not cut.
    fn check_selection(&self, snapshot: &Snapshot) -> Result<(), NothingSelected> {
        let (select, all) = (&self.args.select, snapshot.manifest().tensors());
        let is_found = |globs: &[&Glob]| {
            all.iter()
                .any(|tensor| globs.iter().any(|glob| glob.matches(tensor.name.as_str())))
        };
        let select = (!select.is_empty()).then(|| select.iter().collect());
        let boxes = self.args.boxes.iter().map(|each| vec![&each.tensors]);
        let missing = select.into_iter().chain(boxes).find(|globs: &Vec<&Glob>| !is_found(globs));
        let Some(missing) = missing.filter(|_| !all.is_empty()) else { return Ok(()) };
        let globs: Vec<&str> = missing.into_iter().map(Glob::as_str).collect();
        let examples: Vec<&str> = all.iter().take(EXAMPLES_MAX).map(|tensor| tensor.name.as_str()).collect();
        let (id, globs, examples) = (snapshot.id().clone(), globs.join(","), examples.join(", "));
        Err(NothingSelected { id, globs, examples })
    }

    /// Writes the snapshot below the output folder, on a blocking thread. Tensors on a device are copied to host memory
    /// first.
    async fn save(&self, snapshot: &Snapshot) -> anyhow::Result<Option<PathBuf>> {
        let Some(mirror) = self.mirror.clone() else { return Ok(None) };
        let snapshot = snapshot.to_host().await?;
        Ok(Some(tokio::task::spawn_blocking(move || mirror.save(&snapshot)).await??))
    }

    /// Unpacks the caches of engines of the version that was saved to `path`, on a blocking thread.
    async fn unpack_caches(&self, path: Option<PathBuf>) -> anyhow::Result<Outcomes> {
        let Some(path) = path else { return Ok(vec![]) };
        let caches = self.caches.clone();
        Ok(tokio::task::spawn_blocking(move || caches.unpack(&path)).await?)
    }
}

fn request(args: &SubscribeArgs, topic: Topic) -> Request {
    let mut request = match args.mode.into() {
        Mode::Every => Request::every(topic),
        _ => Request::latest(topic),
    };
    if let Some(start) = args.from {
        request = request.from(start);
    }
    if let Some(reader) = &args.reader {
        request = request.reader(reader.clone());
    }
    if let Some(codec) = args.codec.fixed() {
        request = request.codec(codec);
    }
    request
        .select(args.select.iter().cloned())
        .boxes(args.boxes.iter().cloned())
        .window(args.window)
        .preempt(args.preempt)
}
