//! Receives versions into the user's memory: in place, or by a copy once a version is complete.

mod on_device;

use crate::{
    BufferError, Buffers, DeviceError, Gap, Snapshot, Subscription, SubscriptionError,
    buffers::{Lender, Lent, Writing, copy_yielding, fit},
    command::Command,
    destination::Payload,
    snapshot_queue::{Found, SnapshotQueue},
};
use std::{fmt, future::pending, sync::Arc};
use tensor_relay_protocol::{Mode, SubscriptionId, TensorName, VersionId};
use tokio::sync::{mpsc, oneshot};

impl Snapshot {
    /// Copies tensors into the caller's memory, by name. A failed transfer yields no snapshot, so it cannot
    /// tear these buffers.
    ///
    /// All names and sizes are checked first, so that either every tensor is copied or none. The cost is memory for a
    /// second version, in the session, and one copy: about a second for 10 GB. [`Subscription::next_into`] avoids both
    /// costs, but is not atomic.
    ///
    /// ```no_run
    /// # async fn example(mut policy: tensor_relay_client::Subscription) -> Result<(), Box<dyn std::error::Error>> {
    /// let (mut weight, mut bias) = (vec![0; 1 << 20], vec![0; 1 << 10]);
    /// loop {
    ///     let snapshot = policy.next().await?;
    ///     snapshot.copy_into(&mut [("weight", &mut weight), ("bias", &mut bias)])?;
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`BufferError`] names the first buffer that does not fit. Nothing was copied then. A snapshot on a device is
    /// refused: copy the result of [`to_host`](Self::to_host).
    pub fn copy_into(&self, buffers: &mut [(&str, &mut [u8])]) -> Result<(), BufferError> {
        if let Some(device) = self.device() {
            return Err(BufferError::OnDevice { device: device.name().into() });
        }
        let fits = fit(&self.selection, buffers.iter().map(|(name, out)| (*name, out.len() as u64)))?;
        let bytes = fits.iter().zip(buffers.iter()).map(|(fit, (name, _))| {
            self.bytes_at(fit.tensor)
                .ok_or_else(|| BufferError::NotSelected { name: (*name).into() })
        });
        let bytes = bytes.collect::<Result<Vec<_>, _>>()?;
        for ((_, out), bytes) in buffers.iter_mut().zip(bytes) {
            bytes.copy_to(out);
        }
        Ok(())
    }
}

impl<B> Buffers<B> {
    /// Checks that a snapshot fits the buffers, whose lengths `len_bytes` returns. Buffers for tensors that share their
    /// bytes are allowed: each gets a copy.
    ///
    /// # Errors
    /// [`BufferError`] names the first mismatch.
    pub fn check(&self, snapshot: &Snapshot, len_bytes: impl Fn(&B) -> u64) -> Result<(), BufferError> {
        let sized = self.iter().map(|(name, buffer)| (name.as_str(), len_bytes(buffer)));
        self.expected().check(&snapshot.selection, sized).map(drop)
    }
}

impl<B: AsMut<[u8]> + Send> Buffers<B> {
    /// Copies the tensors of `snapshot` that have a buffer, all of them or none. If cancelled, or if a device fails, it
    /// leaves some of them copied.
    pub(crate) async fn copy_from(&mut self, snapshot: &Snapshot) -> Result<(), FillCause> {
        let (by_name, expected) = self.by_name_mut();
        let slices = by_name.iter_mut().map(|(name, buffer)| (name.as_str(), buffer.as_mut()));
        let slices: Vec<_> = slices.filter(|(name, _)| expected.wants(&snapshot.selection, name)).collect();
        let sized = slices.iter().map(|(name, out)| (*name, out.len() as u64));
        let fits = expected.fit(&snapshot.selection, sized)?;
        let source = snapshot.device_source()?;
        for ((_, out), fit) in slices.into_iter().zip(fits) {
            match &source {
                Some(source) => snapshot.read_all(&**source, fit.range, out).await?,
                None if out.is_empty() => {}
                None => copy_yielding(&snapshot.bytes_at(fit.tensor).expect("it fits"), out).await,
            }
        }
        Ok(())
    }
}

impl Subscription {
    /// Waits for the next version like [`next`](Self::next), and receives it directly into `buffers`, without memory
    /// for a second version and without a copy. Nothing is written to the buffers between two calls.
    ///
    /// **It is not atomic.** Bytes are written as they arrive, before the version is complete and verified. After
    /// success the buffers hold the complete, verified version, as a snapshot would. After a failure they may hold some
    /// bytes of the version, verified or not, beside old content: then [`FillError::torn`] names the version. Let
    /// nothing read the buffers during the call, and use [`Snapshot::copy_into`] where the old version must survive a
    /// failure.
    ///
    /// Selected tensors without a buffer are received and discarded, so select only those with buffers
    /// ([`Buffers::selection`]). Tensors that share their bytes (tied weights) have one buffer, under either name.
    ///
    /// The session does not wait for buffers. A version that began to arrive before this call is received into the
    /// session's memory, and copied once it is complete ([`Filled::was_copied`]); one that does not fit the buffers is
    /// received there and [refused](FillError::refused). So in mode `latest`, a consumer that is slower than its
    /// publisher mostly gets copies; in mode `every`, a [window](crate::Request::window) of 1 delays the next version
    /// until it is requested. After a lost connection the transfer resumes in the same buffers.
    ///
    /// If this is cancelled, no version is lost, but the buffers are: they are dropped once nothing writes to them. To
    /// do other work while waiting, keep the future and poll it by reference; to end the call and keep the buffers, use
    /// [`next_into_until`](Self::next_into_until).
    ///
    /// # Errors
    /// [`FillError`], which contains the buffers. After an error that is not [final](FillError::is_final), call again.
    pub async fn next_into<B>(&mut self, buffers: Buffers<B>) -> Result<Filled<B>, FillError<B>>
    where
        B: AsMut<[u8]> + Send + 'static,
    {
        self.next_into_until(buffers, pending()).await
    }

    /// [`next_into`](Self::next_into) that ends when `stop` does, e.g. a timeout, with [`FillCause::Stopped`]. The
    /// buffers are then returned when nothing writes to them any more. A version that was being received into them is
    /// [torn](FillError::torn) there, and not lost: it is received again into the session's memory, and copied by the
    /// next call. A version that is being copied when `stop` ends is delivered.
    ///
    /// # Errors
    /// As [`next_into`](Self::next_into).
    pub async fn next_into_until<B>(
        &mut self,
        buffers: Buffers<B>,
        stop: impl Future<Output = ()> + Send,
    ) -> Result<Filled<B>, FillError<B>>
    where
        B: AsMut<[u8]> + Send + 'static,
    {
        let (lent, lender) = buffers.lend();
        let (mut taken, mut buffers) = match self.receive_into(lent, lender, stop).await? {
            Received::InPlace(filled) => return Ok(filled),
            Received::Elsewhere(taken, buffers) => (taken, buffers),
        };
        if let Some(version) = &taken.version
            && let Err(cause) = buffers.copy_from(version).await
        {
            // Mismatches were detected before anything was copied.
            let torn = matches!(cause, FillCause::Device(_)).then(|| version.id.clone());
            let refused = matches!(cause, FillCause::Buffers(_)).then(|| version.id.clone());
            return Err(FillError { cause, torn, refused, buffers, withheld: vec![] });
        }
        let (version, gap) = self.finish_taken(&mut taken);
        Ok(Filled { version, gap, copied: true, buffers })
    }

    /// Drops a version that did not fit ([`FillError::refused`]) and would otherwise stay queued. In mode `every` this
    /// acknowledges the version.
    pub fn discard(&mut self, refused: &VersionId) {
        if self.queue.discard(refused) {
            self.taken = (self.mode == Mode::Every).then(|| refused.clone());
        }
    }

    /// Lends buffers until the next version is received, in them or elsewhere, or `stop` ends.
    async fn receive_into<B>(
        &mut self,
        lent: Lent,
        lender: Lender<B>,
        stop: impl Future<Output = ()>,
    ) -> Result<Received<B>, FillError<B>> {
        self.acknowledge();
        let writing = lender.writing();
        let lent_buffers = LentBuffers::new(self, lent);
        let found = tokio::select! {
            biased;
            found = self.next_version() => found.map_err(FillCause::from),
            () = stop => Err(FillCause::Stopped),
        };
        let found = match found {
            Ok(taken) => {
                drop(lent_buffers);
                Ok(taken)
            }
            // A version may have been completed in the buffers meanwhile.
            Err(cause) => lent_buffers.take_back().await.ok_or(cause),
        };
        let mut taken = match found {
            Ok(taken) => taken,
            Err(cause) => {
                let (buffers, withheld) = lender.reclaim().await;
                let torn = writing.version();
                return Err(FillError { cause, torn, refused: None, buffers, withheld });
            }
        };
        if taken.is_in(&writing) {
            let (version, gap) = self.finish_taken(&mut taken);
            let (buffers, _) = lender.reclaim().await; // Without a wait: a committed version has no copy in flight.
            return Ok(Received::InPlace(Filled { version, gap, copied: false, buffers }));
        }
        let (buffers, withheld) = lender.reclaim().await;
        match withheld.is_empty() {
            true => Ok(Received::Elsewhere(taken, buffers)),
            false => {
                let cause = BufferError::Withheld { name: withheld[0].as_str().into() }.into();
                Err(FillError { cause, torn: writing.version(), refused: None, buffers, withheld })
            }
        }
    }

    /// Completes the delivery of a `taken` version: returns it without its payload, and its gap. The payload is dropped,
    /// which gives the buffers back.
    fn finish_taken(&mut self, taken: &mut Taken) -> (Box<Snapshot>, Option<Box<Gap>>) {
        let version = taken.version.take().expect("a version is finished once");
        self.taken = (self.mode == Mode::Every).then(|| version.id.clone());
        (Box::new(Snapshot { payload: Payload::EMPTY, ..*version }), taken.gap.take())
    }

    /// Waits for the next version, in the buffers or elsewhere, and the gap before it. Cancel safe.
    async fn next_version(&self) -> Result<Taken, SubscriptionError> {
        let mut taken = Taken { version: None, gap: None, queue: Arc::clone(&self.queue) };
        loop {
            match self.queue.take(true) {
                Found::Snapshot(version) => {
                    taken.version = Some(version);
                    return Ok(taken);
                }
                Found::Gap(gap) => taken.gap = Some(gap),
                Found::Failure(error) => return Err(error),
                Found::Ended(error) => {
                    taken.gap = None; // Nothing follows a final error.
                    return Err(error);
                }
                Found::Unknown { waiting_since: Some(since) } => self.wait_for_topic(since).await,
                Found::Nothing | Found::Unknown { waiting_since: None } | Found::NotYet => {
                    self.queue.changed().await;
                }
            }
        }
    }
}

/// A version, and the buffers that were lent for it.
enum Received<B> {
    /// In the buffers.
    InPlace(Filled<B>),
    /// In other memory: the version began to arrive before the buffers were lent, or does not fit them.
    Elsewhere(Taken, Buffers<B>),
}

/// Buffers lent to the session. Dropping this takes them back, without a wait for their last writers.
struct LentBuffers {
    id: SubscriptionId,
    commands: mpsc::UnboundedSender<Command>,
    queue: Arc<SnapshotQueue>,
    writing: Arc<Writing>,
}

impl LentBuffers {
    fn new(subscription: &Subscription, lent: Lent) -> Self {
        let lent_buffers = Self {
            id: subscription.handle.id,
            commands: subscription.handle.commands.clone(),
            queue: Arc::clone(&subscription.queue),
            writing: Arc::clone(&lent.writing),
        };
        // If the session has ended, the buffers are returned immediately, and the queue has the reason.
        let _ = lent_buffers.commands.send(Command::LendBuffers(lent_buffers.id, lent));
        lent_buffers
    }

    /// Takes the buffers back. Afterwards no further chunk is received into them. Returns the version in them, if one
    /// was completed before.
    async fn take_back(self) -> Option<Taken> {
        let (done, taken_back) = oneshot::channel();
        let _ = self.commands.send(Command::TakeBackBuffers(self.id, done));
        let _ = taken_back.await; // Without an answer, the session has ended.
        let (version, gap) = self.queue.take_if(|version| version.payload.is_in(&self.writing))?;
        Some(Taken { version: Some(version), gap, queue: Arc::clone(&self.queue) })
    }
}

impl Drop for LentBuffers {
    fn drop(&mut self) {
        let (done, _) = oneshot::channel();
        let _ = self.commands.send(Command::TakeBackBuffers(self.id, done));
    }
}

/// A version taken from its queue, if there is one yet, and the gap before it. Dropping this puts both back.
struct Taken {
    version: Option<Box<Snapshot>>,
    gap: Option<Box<Gap>>,
    queue: Arc<SnapshotQueue>,
}

impl Taken {
    fn is_in(&self, writing: &Arc<Writing>) -> bool {
        self.version.as_ref().is_some_and(|version| version.payload.is_in(writing))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if self.version.is_some() || self.gap.is_some() {
            self.queue.put_back(self.version.take(), self.gap.take());
        }
    }
}

/// A complete, verified version in the user's own memory.
#[derive(Debug)]
pub struct Filled<B> {
    version: Box<Snapshot>,
    gap: Option<Box<Gap>>,
    copied: bool,
    buffers: Buffers<B>,
}

impl<B> Filled<B> {
    /// The version, without its tensors.
    pub fn version(&self) -> &Snapshot {
        &self.version
    }

    /// In mode `every`: the versions that are missing before this one.
    pub fn gap(&self) -> Option<&Gap> {
        self.gap.as_deref()
    }

    /// Whether it was received in other memory and copied, because its transfer began before the buffers
    /// were lent.
    pub fn was_copied(&self) -> bool {
        self.copied
    }

    /// The filled buffers.
    pub fn buffers(&self) -> &Buffers<B> {
        &self.buffers
    }

    /// Returns the filled buffers, which may be lent to the next call.
    pub fn into_buffers(self) -> Buffers<B> {
        self.buffers
    }
}

/// The error of a receive into buffers, with the buffers.
pub struct FillError<B> {
    /// The cause.
    pub cause: FillCause,
    /// The version that was being written: the buffers may hold a mix of its bytes, verified or not, and old content.
    /// `None`: the buffers are unchanged.
    pub torn: Option<VersionId>,
    /// The version that does not fit the buffers. It stays queued until it is delivered,
    /// [discarded](Subscription::discard) or, in mode `latest`, replaced by a newer one.
    pub refused: Option<VersionId>,
    /// The lent buffers, except the withheld ones.
    pub buffers: Buffers<B>,
    /// The tensors whose buffers are not returned; always empty on the host. On a device that failed or hangs, a copy
    /// may still write to them; their memory is freed when that copy has ended.
    pub withheld: Vec<TensorName>,
}

/// Why buffers were not filled.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FillCause {
    /// No version was received.
    #[error(transparent)]
    Subscription(#[from] SubscriptionError),
    /// A version was received, but does not fit. It stays queued for a call with other buffers, or for
    /// [`Subscription::next`]. A call with the same buffers fails again unless the version is
    /// [discarded](Subscription::discard).
    #[error(transparent)]
    Buffers(#[from] BufferError),
    /// A version was received, but a device failed to copy it. It stays queued, as after [`Buffers`](Self::Buffers).
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The call was stopped before a version was complete.
    #[error("the call was stopped before a version was complete")]
    Stopped,
}

impl<B> FillError<B> {
    /// Whether the subscription has ended. After an error that is not final, call again.
    pub fn is_final(&self) -> bool {
        match &self.cause {
            FillCause::Subscription(error) => error.is_final(),
            FillCause::Buffers(_) | FillCause::Device(_) | FillCause::Stopped => false,
        }
    }
}

impl<B> fmt::Display for FillError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.torn {
            None => write!(f, "{}; the buffers are unchanged", self.cause),
            Some(id) => write!(
                f,
                "{}; the buffers are torn: they may hold a part of {id}, so fill them anew before they are used",
                self.cause
            ),
        }
    }
}

impl<B> fmt::Debug for FillError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FillError")
            .field("cause", &self.cause)
            .field("torn", &self.torn)
            .field("withheld", &self.withheld)
            .finish_non_exhaustive()
    }
}

impl<B> std::error::Error for FillError<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.cause)
    }
}
