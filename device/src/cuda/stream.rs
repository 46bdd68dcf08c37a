use std::{any::Any, ffi::c_void, fmt, sync::Arc};

use super::error::CudaError;

/// A caller's stream, on which kernels use the tensors passed to an engine, and an object that keeps it alive.
///
/// Every holder of a clone may use the stream, even an engine's thread that handles a request after the caller has
/// stopped waiting ([`CudaError::NoAnswer`]). The engine's thread never blocks on a caller's stream, and makes the
/// stream wait only on request.
#[derive(Clone)]
pub struct StreamHandle {
    raw: usize,
    /// Keeps the stream alive. Usually dropped by the engine's thread, so its destructor must not wait for a lock held
    /// by a caller of this engine. `None` in [`LEGACY`](Self::LEGACY), which is never destroyed.
    _keeper: Option<Arc<dyn Any + Send + Sync>>,
}

impl StreamHandle {
    /// The legacy default stream of the device's primary context, used by kernels without a stream argument; PyTorch's
    /// default stream too.
    pub const LEGACY: Self = Self { raw: CU_STREAM_LEGACY, _keeper: None };

    /// Wraps a stream handle: a `CUstream`, a `cudaStream_t`, or PyTorch's `stream.cuda_stream`. Null is the legacy
    /// default stream.
    ///
    /// Refuses the per-thread default stream (2), which would be a different stream on the engine's thread.
    ///
    /// # Safety
    ///
    /// The handle is a stream of the device's primary context, and it is not destroyed while `keeper` lives.
    pub unsafe fn from_raw(handle: *mut c_void, keeper: impl Any + Send + Sync) -> Result<Self, CudaError> {
        match handle.expose_provenance() {
            CU_STREAM_PER_THREAD => Err(CudaError::PerThreadStream),
            0 => Ok(Self { raw: CU_STREAM_LEGACY, _keeper: Some(Arc::new(keeper)) }),
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

/// The driver's numbers of its two default streams.
const CU_STREAM_LEGACY: usize = 1;
const CU_STREAM_PER_THREAD: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_per_thread_stream_is_refused() {
        let from_raw = |address| {
            // SAFETY: the handle is never used.
            unsafe { StreamHandle::from_raw(std::ptr::without_provenance_mut(address), ()) }
        };
        assert_eq!(from_raw(2), Err(CudaError::PerThreadStream));
        assert_eq!(from_raw(1), Ok(StreamHandle::LEGACY));
        assert_eq!(from_raw(0), Ok(StreamHandle::LEGACY));
    }

    #[test]
    fn a_clone_holds_the_keeper() {
        let keeper = Arc::new(());
        // SAFETY: the handle is never used.
        let stream =
            unsafe { StreamHandle::from_raw(std::ptr::without_provenance_mut(7), Arc::clone(&keeper)) }
                .unwrap();
        let clone = stream.clone();
        drop(stream);
        assert_eq!(Arc::strong_count(&keeper), 2);
        drop(clone);
        assert_eq!(Arc::strong_count(&keeper), 1);
    }
}
