use std::{any::Any, ffi::c_void, fmt, sync::Arc};

use super::error::CudaError;

/// A caller's stream on which kernels use the tensors that are handed over, with its keeper.
///
/// Every holder of a clone may use the stream, even an engine's thread that handles a request after its caller gave up
/// ([`CudaError::NoAnswer`]). No thread here ever blocks on a caller's stream, and the stream waits for nothing that
/// was not requested.
#[derive(Clone)]
pub struct StreamHandle {
    raw: usize,
    /// Keeps the stream alive. Usually dropped by the engine's thread, so its destructor must not wait for a lock held
    /// by a caller of this engine. `None` for the default stream, which is never destroyed.
    _keeper: Option<Arc<dyn Any + Send + Sync>>,
}

impl StreamHandle {
    /// The legacy default stream of the device's primary context, on which kernels run that name no stream; PyTorch's
    /// default too.
    pub const LEGACY: Self = Self { raw: 1, _keeper: None };

    /// Wraps a stream handle: a `CUstream`, a `cudaStream_t`, or PyTorch's `stream.cuda_stream`. Null is the legacy
    /// default stream.
    ///
    /// Refuses the per-thread default stream (2), which is another one on the engine's thread.
    ///
    /// # Safety
    ///
    /// The handle is a stream of the device's primary context, and it is not destroyed while `keeper` lives.
    pub unsafe fn from_raw(handle: *mut c_void, keeper: impl Any + Send + Sync) -> Result<Self, CudaError> {
        match handle.expose_provenance() {
            PER_THREAD => Err(CudaError::PerThreadStream),
            raw => Ok(Self { raw, _keeper: Some(Arc::new(keeper)) }),
        }
    }

    pub(super) fn raw<T>(&self) -> *mut T {
        std::ptr::with_exposed_provenance_mut(self.raw)
    }
}

impl PartialEq for StreamHandle {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}

impl fmt::Debug for StreamHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamHandle({:#x})", self.raw)
    }
}

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_per_thread_stream_is_refused() {
        let from_raw = |address| {
            // SAFETY: nothing is done with the handle.
            unsafe { StreamHandle::from_raw(std::ptr::without_provenance_mut(address), ()) }
        };
        assert_eq!(from_raw(2), Err(CudaError::PerThreadStream));
        assert_eq!(from_raw(1), Ok(StreamHandle::LEGACY));
        assert!(from_raw(0).is_ok());
    }

    #[test]
    fn a_clone_keeps_what_keeps_the_stream() {
        let keeper = Arc::new(());
        // SAFETY: nothing is done with the handle.
        let stream =
            unsafe { StreamHandle::from_raw(std::ptr::without_provenance_mut(7), Arc::clone(&keeper)) };
        let clone = stream.clone().unwrap();
        drop(stream);
        assert_eq!(Arc::strong_count(&keeper), 2);
        drop(clone);
        assert_eq!(Arc::strong_count(&keeper), 1);
    }
}
