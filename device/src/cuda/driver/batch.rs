//! Several copies in one driver call, which drivers of CUDA 13 and later have.

use cudarc::driver::sys::{
    CUmemLocation, CUmemLocation_st__bindgen_ty_1, CUmemLocationType, CUmemcpyAttributes,
    CUmemcpySrcAccessOrder, CUstream,
};

use super::Driver;
use crate::cuda::error::CudaError;

/// A copy between two addresses, of the device or of page-locked host memory.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Piece {
    pub(in crate::cuda) to: u64,
    pub(in crate::cuda) from: u64,
    pub(in crate::cuda) len: usize,
}

impl Driver {
    /// Submits copies, none of which is empty, in one call. They begin after the stream's earlier work, in any order, so
    /// where they overlap the bytes are unspecified. After an error some may have been submitted.
    ///
    /// # Safety
    ///
    /// As for `copy_out`, `copy_in` or `copy_within`, for each piece, after an error too. `stream` lives, and is not a
    /// default stream.
    pub(in crate::cuda) unsafe fn copy_batch(
        &self,
        pieces: &[Piece],
        stream: CUstream,
    ) -> Result<(), CudaError> {
        let symbol = "cuMemcpyBatchAsync_v2";
        let copy = self.symbols.cuMemcpyBatchAsync_v2.ok_or(CudaError::NoSymbol { symbol })?;
        let mut to: Vec<u64> = pieces.iter().map(|piece| piece.to).collect();
        let mut from: Vec<u64> = pieces.iter().map(|piece| piece.from).collect();
        let mut lens: Vec<usize> = pieces.iter().map(|piece| piece.len).collect();
        let (mut attributes, mut first) = (IN_STREAM_ORDER, 0); // Of all copies from the first on.
        let (to, from, lens) = (to.as_mut_ptr(), from.as_mut_ptr(), lens.as_mut_ptr());
        let count = pieces.len();
        // SAFETY: the arrays have `count` elements each, and there is one attribute with its index; the driver only reads
        // them, before it returns. For the copies, the caller's promise.
        let code = unsafe { copy(to, from, lens, count, &raw mut attributes, &raw mut first, 1, stream) };
        Ok(self.check(symbol, code)?)
    }
}

/// The attributes of copies that access their sources in the order of the stream, as all other copies do. The places are
/// only hints for managed memory.
const IN_STREAM_ORDER: CUmemcpyAttributes = CUmemcpyAttributes {
    srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
    srcLocHint: NO_HINT,
    dstLocHint: NO_HINT,
    flags: 0,
};

const NO_HINT: CUmemLocation = CUmemLocation {
    type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID,
    __bindgen_anon_1: CUmemLocation_st__bindgen_ty_1 { id: 0 },
};
