//! [`GpuCopies`]: copies of versions on GPUs, for clients of this host.

use super::{LOANS_MAX, Taker, made_once::MadeOnce};
use crate::{
    gauge::{Counted, Gauge},
    retained::Retained,
};
use rustix::fs::fstat;
use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tensor_relay_device::{
    Lifeline, OnDevice,
    cuda::{
        CudaMemory,
        share::{Exported, ExportedCopy, ShareError},
    },
    descriptors_are_scarce,
};
use tensor_relay_protocol::{Lending, LentOnGpu, NotLent, VersionDigest, WantedGpu, sidecar::IpcHandle};
use tensor_relay_transport::sending::Loan;
use tokio::{sync::oneshot, time::timeout};

/// The most copies at once: each takes as much of a GPU's memory as its version.
const COPIES_MAX: u64 = 8;

/// The most copies for a session at once, whose subscriptions may all be about to copy.
const COPIES_OF_SESSION_MAX: u64 = 4;

/// The time for a copy, after which the client gets the version otherwise. It takes a millisecond for each GiB, and may
/// wait for a stream of the publisher.
const COPY_TIMEOUT: Duration = Duration::from_secs(5);

/// The copies of versions on GPUs for clients of this host.
///
/// Who imports GPU memory can write to it, and CUDA has no way to forbid that. So a client gets a copy of its own, made
/// within the GPU, and copies it in turn into memory of its own, in a thousandth of the time that chunks take. Where
/// the server shares GPU memory, clients of its own user have one [copy in common](SharedOnGpu), and use that. No copy
/// is ever read by the server. It is freed when the last process that can have it has closed its end of the
/// [`Lifeline`].
#[derive(Debug)]
pub(super) struct GpuCopies {
    /// Whether clients may have a copy in common.
    are_shared: bool,
    copies: Gauge,
    bytes: AtomicU64,
    has_warned: AtomicBool,
}

/// The copy of a version on its GPU that clients of one user have in common, made when the first one needs it. It lives
/// as long as the version, and as anybody has it.
#[derive(Debug, Default)]
pub(super) struct SharedOnGpu(MadeOnce<Arc<GpuCopy>>);

impl GpuCopies {
    pub(super) fn new(are_shared: bool) -> Self {
        Self {
            are_shared,
            copies: Gauge::default(),
            bytes: AtomicU64::new(0),
            has_warned: AtomicBool::new(false),
        }
    }

    /// The bytes of all copies.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Lends `taker` a copy of a version, if that lies on the wanted GPU.
    ///
    /// # Errors
    /// [`NotLent`]; the reason of the driver is in the log.
    pub(super) async fn lend(
        self: &Arc<Self>,
        version: &Arc<Retained>,
        on_device: &OnDevice,
        wanted: WantedGpu,
        digest: VersionDigest,
        taker: &Taker,
    ) -> Result<Loan, NotLent> {
        let gpu = wanted.device;
        if on_device.device().uuid().map(|uuid| uuid.bytes()) != Some(gpu.0) {
            return Err(NotLent::OtherGpu);
        }
        let (lifeline, taken) = Lifeline::new().map_err(|_| NotLent::NoDescriptors)?;
        let inode = fstat(&taken).map_err(|_| NotLent::NoDescriptors)?.st_ino;
        if descriptors_are_scarce(&taken) {
            return Err(NotLent::NoDescriptors);
        }
        let in_place = wanted.in_place && self.are_shared && taker.is_trusted;
        let (loans, loans_max) = match in_place {
            true => (&taker.loans.maps, LOANS_MAX),
            false => (&taker.loans.copies, COPIES_OF_SESSION_MAX),
        };
        let counted = loans.count();
        if loans.get() > loans_max {
            return Err(NotLent::GpuFull);
        }
        let copy = match in_place {
            // By descriptor alone: memory of a handle would end with the server.
            true => {
                let shared = &version.copies.get().on_gpu.0;
                Arc::clone(shared.get(|| self.copy(version, on_device, false)).await?)
            }
            false => self.copy(version, on_device, taker.is_trusted).await?,
        };
        let (handle, descriptor) = match &copy.exported {
            Exported::Fd(memory) => (None, Some(memory.fd.try_clone().map_err(|_| NotLent::NoDescriptors)?)),
            Exported::Ipc(memory) => (Some(IpcHandle(memory.handle)), None),
        };
        let buffer_bytes = copy.memory.len_bytes();
        tokio::spawn(hold(GpuLoan { lifeline, _copy: copy, _counted: counted }));
        let lent = LentOnGpu { inode, gpu, buffer_bytes, handle, digest, in_place };
        let descriptors: Vec<OwnedFd> = [Some(taken), descriptor].into_iter().flatten().collect();
        Ok(Loan { lending: Lending::Gpu(lent), descriptors })
    }

    /// Copies a version within its GPU.
    async fn copy(
        self: &Arc<Self>,
        version: &Arc<Retained>,
        on_device: &OnDevice,
        may_use_handle: bool,
    ) -> Result<Arc<GpuCopy>, NotLent> {
        let counted = Arc::new(self.copies.count());
        if self.copies.get() > COPIES_MAX {
            return Err(NotLent::GpuFull);
        }
        let copying = timeout(COPY_TIMEOUT, copy(version, on_device, may_use_handle, &counted)).await;
        let copied = copying.unwrap_or_else(|_| Err(late(on_device)));
        let copied = copied.map_err(|error| self.refuse(on_device, &error))?;
        let ExportedCopy { exported, memory, why_no_descriptor } = copied;
        if let Some(why) = why_no_descriptor {
            tracing::debug!(%why, "GPU memory is lent by a handle of CUDA IPC.");
        }
        self.bytes.fetch_add(memory.len_bytes(), Ordering::Relaxed);
        Ok(Arc::new(GpuCopy { exported, memory, copies: Arc::clone(self), _counted: counted }))
    }

    /// Logs why a version is not copied, the first time as a warning.
    fn refuse(&self, on_device: &OnDevice, error: &ShareError) -> NotLent {
        const TEXT: &str = "A version on a GPU cannot be copied there for a process of this host, which gets it from host \
                            memory.";
        let device = on_device.device().name();
        match self.has_warned.swap(true, Ordering::Relaxed) {
            false => tracing::warn!(device, %error, "{TEXT}"),
            true => tracing::debug!(device, %error, "{TEXT}"),
        }
        if error.is_full() { NotLent::GpuFull } else { NotLent::NoGpuMemory }
    }
}

/// Copies a version within its device. A copy that nobody waits for any more is freed as soon as it has ended, and counts
/// until then; one that is late until the device ends it.
async fn copy(
    version: &Arc<Retained>,
    on_device: &OnDevice,
    may_use_handle: bool,
    counted: &Arc<Counted>,
) -> Result<ExportedCopy, ShareError> {
    let (kept, exporting, stopped) = (Arc::clone(version), on_device.clone(), late(on_device));
    let counted = Arc::clone(counted);
    let (copied, end) = oneshot::channel();
    // Not one of the threads for hashing and encoding: it waits for the device.
    tokio::task::spawn_blocking(move || {
        let copy = exporting.export_copy(may_use_handle, counted);
        drop(exporting);
        if let Err(error) = &copy
            && error.may_still_copy()
            && kept.payload.source().may_change()
        {
            std::mem::forget(kept); // The device may still read its publisher's memory: it is never reported as released.
        }
        drop(copied.send(copy));
    });
    end.await.unwrap_or(Err(stopped))
}

fn late(on_device: &OnDevice) -> ShareError {
    ShareError::CopyTimedOut { device: on_device.device().name().into(), waited: COPY_TIMEOUT }
}

/// A copy of a version. It is freed when this is dropped.
#[derive(Debug)]
struct GpuCopy {
    exported: Exported,
    memory: Arc<CudaMemory>,
    copies: Arc<GpuCopies>,
    _counted: Arc<Counted>,
}

impl Drop for GpuCopy {
    fn drop(&mut self) {
        self.copies.bytes.fetch_sub(self.memory.len_bytes(), Ordering::Relaxed);
    }
}

/// A loan of a copy. The fields are dropped in order: a client whose lifeline is whole after it has copied out of the
/// memory has copied what was there.
#[derive(Debug)]
struct GpuLoan {
    lifeline: Lifeline,
    _copy: Arc<GpuCopy>,
    _counted: Counted,
}

/// Holds a loan until no process has the other end of its lifeline.
async fn hold(loan: GpuLoan) {
    loan.lifeline.ended().await;
}
