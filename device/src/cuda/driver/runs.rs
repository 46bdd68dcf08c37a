//! Strided copies within the device.

use std::ptr;

use cudarc::driver::sys::{CUDA_MEMCPY2D, CUmemorytype_enum::CU_MEMORYTYPE_DEVICE, CUstream};

use super::{Driver, Piece};
use crate::cuda::error::DriverError;

/// A copy of `count` runs of `run_bytes` each between two addresses of the device, at equal distances at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) struct Runs {
    pub(in crate::cuda) to: u64,
    pub(in crate::cuda) from: u64,
    pub(in crate::cuda) run_bytes: usize,
    pub(in crate::cuda) count: usize,
    pub(in crate::cuda) to_stride: usize,
    pub(in crate::cuda) from_stride: usize,
}

/// The largest stride that every device copies (`CU_DEVICE_ATTRIBUTE_MAX_PITCH` of all that are known).
pub(in crate::cuda) const STRIDE_MAX_BYTES: u64 = i32::MAX as u64;

impl Runs {
    /// The run with this number.
    pub(in crate::cuda) fn piece(&self, number: usize) -> Piece {
        let [to, from] = [self.to_stride, self.from_stride].map(|stride| (number * stride) as u64);
        Piece { to: self.to + to, from: self.from + from, len: self.run_bytes }
    }
}

impl Driver {
    /// Submits a copy of runs within the device, on the stream. A device with a smaller largest stride refuses it as an
    /// [invalid value](super::INVALID_VALUE); then nothing was submitted.
    ///
    /// # Safety
    ///
    /// Until the copy has ended, nobody frees the memory at both ends, or touches it but for other work of the stream.
    /// `stream` lives.
    pub(in crate::cuda) unsafe fn copy_runs(&self, runs: Runs, stream: CUstream) -> Result<(), DriverError> {
        let Runs { to, from, run_bytes, count, to_stride, from_stride } = runs;
        let copy = CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: CU_MEMORYTYPE_DEVICE,
            srcHost: ptr::null(),
            srcDevice: from,
            srcArray: ptr::null_mut(),
            srcPitch: from_stride,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: CU_MEMORYTYPE_DEVICE,
            dstHost: ptr::null_mut(),
            dstDevice: to,
            dstArray: ptr::null_mut(),
            dstPitch: to_stride,
            WidthInBytes: run_bytes,
            Height: count,
        };
        // SAFETY: the driver reads the local before it returns; for the copy, the caller's promise.
        let code = unsafe { (self.symbols.cuMemcpy2DAsync_v2)(&raw const copy, stream) };
        self.check("cuMemcpy2DAsync_v2", code)
    }
}
