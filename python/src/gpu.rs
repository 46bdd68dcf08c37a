//! The GPUs of a relay or a client: each opened when the first tensor needs it.

pub(crate) mod copies;

use crate::errors::Kind;
use pyo3::prelude::*;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tensor_relay_device::{
    AllocError, Capacity, Device,
    cuda::{self, CudaEngine, CudaError, CudaOptions},
};

/// The settings for GPUs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuOptions {
    /// The maximum memory of each GPU for versions.
    pub(crate) memory_bytes: Option<u64>,
    /// The page-locked host memory of each GPU, which chunks pass through.
    pub(crate) pinned_bytes: u64,
    /// The length of chunks.
    pub(crate) chunk_bytes: u32,
}

/// The GPUs of one relay or client.
#[derive(Debug)]
pub(crate) struct Gpus {
    capacity: Capacity,
    memory_bytes: Option<u64>,
    open: Mutex<BTreeMap<usize, Opened>>,
}

/// An open GPU.
#[derive(Debug, Clone)]
pub(crate) struct Opened {
    pub(crate) device: Device,
    /// The stream that libraries make wait for the tensors that they export, as a DLPack stream number
    /// ([`CudaEngine::intake`]).
    pub(crate) intake: usize,
}

/// Why a GPU cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GpuError {
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("{0}; a smaller `pinned_bytes` needs less")]
    Pinned(#[from] AllocError),
}

/// The granularity of slots: each begins on a page.
const PAGE_BYTES: u64 = 4096;

/// The minimum number of slots: one chunk is copied while the other is sent or received.
const SLOTS_MIN: u64 = 2;

/// The time that the interpreter's exit waits until the GPUs are released. A copy takes milliseconds, and the driver
/// frees the process's remaining memory.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(200);

impl Gpus {
    /// A set without an open GPU yet.
    ///
    /// # Errors
    /// `RequestError` for too little page-locked memory.
    pub(crate) fn new(py: Python<'_>, options: GpuOptions) -> PyResult<Self> {
        let GpuOptions { memory_bytes, pinned_bytes, chunk_bytes } = options;
        let stride_bytes = u64::from(chunk_bytes).next_multiple_of(PAGE_BYTES);
        let slots = pinned_bytes / stride_bytes;
        if slots < SLOTS_MIN {
            let message = format!(
                "pinned_bytes is {pinned_bytes}, but must hold two chunks of {chunk_bytes} bytes, one to be copied while the \
                 other is sent or received: set it to {} or more",
                SLOTS_MIN * stride_bytes
            );
            return Err(Kind::Request.raise(py, message));
        }
        let capacity = Capacity { slots: slots as usize, slot_bytes: chunk_bytes as usize };
        Ok(Self { capacity, memory_bytes, open: Mutex::default() })
    }

    /// The GPU with this number, opened if it is not open yet: opening takes up to a second, without the GIL.
    pub(crate) fn opened(&self, py: Python<'_>, ordinal: usize) -> Result<Opened, GpuError> {
        // A version has thousands of tensors: releasing the GIL for each would let other threads run each time.
        let opened = self.open.try_lock().ok().and_then(|open| open.get(&ordinal).cloned());
        opened.map_or_else(|| py.detach(|| self.open_if_needed(ordinal)), Ok)
    }

    /// The device of [`opened`](Self::opened), for callers that do not import tensors.
    pub(crate) fn device(&self, py: Python<'_>, ordinal: usize) -> Result<Device, GpuError> {
        Ok(self.opened(py, ordinal)?.device)
    }

    fn open_if_needed(&self, ordinal: usize) -> Result<Opened, GpuError> {
        let mut open = self.open();
        if let Some(opened) = open.get(&ordinal) {
            return Ok(opened.clone());
        }
        let options = CudaOptions { memory_limit_bytes: self.memory_bytes, ..CudaOptions::default() };
        let engine = CudaEngine::open(ordinal, options)?;
        let intake = engine.intake()?;
        let device = Device::new(engine, self.capacity)?;
        let Capacity { slots, slot_bytes } = self.capacity;
        tracing::info!("Opened {}, with {slots} page-locked slots of {slot_bytes} bytes.", device.name());
        let opened = Opened { device, intake };
        open.insert(ordinal, opened.clone());
        Ok(opened)
    }

    /// Releases all GPUs. Tensors that still lie on a GPU keep it open.
    pub(crate) fn close(&self, py: Python<'_>) {
        // Without the GIL: another thread may be opening a GPU, which takes up to a second.
        py.detach(|| {
            let open = std::mem::take(&mut *self.open());
            drop(open); // Without the lock.
        });
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<usize, Opened>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The engine of a GPU.
///
/// # Panics
/// If the device was not opened by [`Gpus`].
pub(crate) fn engine(device: &Device) -> &Arc<CudaEngine> {
    device.engine().expect("`Gpus` opens only CUDA devices")
}

/// The number in `cuda:N`; `None` for `cpu`.
///
/// # Errors
/// `RequestError` for anything else.
pub(crate) fn parse_device(py: Python<'_>, name: &str) -> PyResult<Option<usize>> {
    let number = name.strip_prefix("cuda:").filter(|digits| !digits.starts_with('+'));
    match (name, number.and_then(|digits| digits.parse().ok())) {
        ("cpu", _) => Ok(None),
        (_, Some(ordinal)) => Ok(Some(ordinal)),
        _ => {
            let message = format!("device is {name:?}, but must be \"cpu\", or \"cuda:N\" for GPU N");
            Err(Kind::Request.raise(py, message))
        }
    }
}

/// Waits briefly, at the interpreter's exit, until opened GPUs are released. A timeout is not logged: logging has
/// ended.
pub(crate) fn close_all() {
    let _ = cuda::all_closed(RELEASE_TIMEOUT);
}

impl GpuError {
    /// The exception for the user whose call needed the GPU.
    pub(crate) fn raise(&self, py: Python<'_>) -> PyErr {
        match self {
            Self::Cuda(_) => Kind::Other.raise(py, self),
            Self::Pinned(_) => Kind::NoRoom.raise(py, self),
        }
    }
}
