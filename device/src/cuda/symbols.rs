//! The first layer: the driver's functions, found once by name.
//!
//! cudarc finds each function at its first call, and panics if the driver lacks it. Here the probe finds all functions
//! before the first call, so that a missing one is an error with its name. Results are plain numbers: a newer driver's
//! code that is missing from cudarc's enum would be undefined behaviour as that enum.
//!
//! The signatures are NVIDIA's: the compiler compares each with cudarc's binding.

#![expect(non_snake_case, reason = "the driver's names")]

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys::{
    self, CUDA_MEMCPY2D, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUhostFn,
    CUipcMemHandle, CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemGenericAllocationHandle, CUmemcpyAttributes, CUresult, CUstream,
    CUstreamCaptureMode, CUstreamCaptureStatus, CUuuid,
};

/// A `CUresult` as a plain number, since cudarc's enum may lack it.
pub(super) type Code = u32;

macro_rules! symbols {
    (
        required { $( fn $name:ident($($argument:ident: $kind:ty),* $(,)?); )* }
        optional { $( fn $extra:ident($($extra_argument:ident: $extra_kind:ty),* $(,)?); )* }
        of_codes { $( fn $of_code:ident(code: Code, $text:ident: $text_kind:ty); )* }
    ) => {
        /// The functions of a loaded driver.
        pub(super) struct Symbols {
            $( pub(super) $name: unsafe extern "C" fn($($kind),*) -> Code, )*
            $( pub(super) $extra: Option<unsafe extern "C" fn($($extra_kind),*) -> Code>, )*
            $( pub(super) $of_code: unsafe extern "C" fn(Code, $text_kind) -> Code, )*
        }

        impl Symbols {
            /// Finds all functions in the driver's library, or returns the name of a missing required one.
            ///
            /// # Safety
            ///
            /// cudarc must have found the library: see `sys::is_culib_present`.
            pub(super) unsafe fn find() -> Result<Self, &'static str> {
                // SAFETY: the caller guarantees that the library was found, so this does not panic; loading it again
                // runs no other initialisers.
                let library = unsafe { sys::culib() };
                $(
                    // SAFETY: the function of this name has this signature: it is compared with cudarc's binding below,
                    // except for the result, which is an enum of `u32` there.
                    let $name = *unsafe { library.get(stringify!($name).as_bytes()) }
                        .map_err(|_| stringify!($name))?;
                )*
                $(
                    // SAFETY: as above; the parameter `code`, too, is an enum of `u32` there.
                    let $of_code = *unsafe { library.get(stringify!($of_code).as_bytes()) }
                        .map_err(|_| stringify!($of_code))?;
                )*
                $(
                    // SAFETY: as above.
                    let $extra = unsafe { library.get(stringify!($extra).as_bytes()) }.ok().map(|found| *found);
                )*
                Ok(Self { $($name,)* $($extra,)* $($of_code,)* })
            }
        }

        $( const _: unsafe fn($($kind),*) -> CUresult = sys::$name; )*
        $( const _: unsafe fn($($extra_kind),*) -> CUresult = sys::$extra; )*
        $( const _: unsafe fn(CUresult, $text_kind) -> CUresult = sys::$of_code; )*
    };
}

symbols! {
    required {
        fn cuInit(flags: c_uint);
        fn cuDriverGetVersion(version: *mut c_int);
        fn cuDeviceGetCount(count: *mut c_int);
        fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
        fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
        fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: CUdevice);
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
        fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
        fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
        fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
        fn cuCtxSetCurrent(context: CUcontext);
        fn cuStreamCreate(stream: *mut CUstream, flags: c_uint);
        fn cuStreamDestroy_v2(stream: CUstream);
        fn cuStreamQuery(stream: CUstream);
        fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
        fn cuEventCreate(event: *mut CUevent, flags: c_uint);
        fn cuEventDestroy_v2(event: CUevent);
        fn cuEventRecord(event: CUevent, stream: CUstream);
        fn cuEventQuery(event: CUevent);
        fn cuMemAlloc_v2(address: *mut CUdeviceptr, len: usize);
        fn cuMemFree_v2(address: CUdeviceptr);
        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        fn cuMemHostRegister_v2(start: *mut c_void, len: usize, flags: c_uint);
        fn cuMemHostUnregister(start: *mut c_void);
        fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, len: usize, stream: CUstream);
        fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, len: usize, stream: CUstream);
        fn cuMemcpy2DAsync_v2(copy: *const CUDA_MEMCPY2D, stream: CUstream);
        fn cuMemsetD8Async(address: CUdeviceptr, value: c_uchar, len: usize, stream: CUstream);
        fn cuLaunchHostFunc(stream: CUstream, function: CUhostFn, data: *mut c_void);
    }
    optional {
        fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
        fn cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
        fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
        fn cuMemGetAddressRange_v2(start: *mut CUdeviceptr, len: *mut usize, address: CUdeviceptr);
        fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, len: usize, stream: CUstream);
        fn cuMemcpyBatchAsync_v2(to: *mut CUdeviceptr, from: *mut CUdeviceptr, lens: *mut usize, count: usize,
            attributes: *mut CUmemcpyAttributes, first_indices: *mut usize, kinds: usize, stream: CUstream);
        fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle, start: CUdeviceptr);
        fn cuIpcOpenMemHandle_v2(start: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
        fn cuIpcCloseMemHandle(start: CUdeviceptr);
        fn cuMemGetAllocationGranularity(
            granularity: *mut usize,
            prop: *const CUmemAllocationProp,
            which: CUmemAllocationGranularity_flags,
        );
        fn cuMemCreate(
            handle: *mut CUmemGenericAllocationHandle,
            len: usize,
            prop: *const CUmemAllocationProp,
            flags: c_ulonglong,
        );
        fn cuMemRelease(handle: CUmemGenericAllocationHandle);
        fn cuMemExportToShareableHandle(
            shareable: *mut c_void,
            handle: CUmemGenericAllocationHandle,
            kind: CUmemAllocationHandleType,
            flags: c_ulonglong,
        );
        fn cuMemImportFromShareableHandle(
            handle: *mut CUmemGenericAllocationHandle,
            shareable: *mut c_void,
            kind: CUmemAllocationHandleType,
        );
        fn cuMemAddressReserve(
            address: *mut CUdeviceptr,
            len: usize,
            alignment: usize,
            hint: CUdeviceptr,
            flags: c_ulonglong,
        );
        fn cuMemAddressFree(address: CUdeviceptr, len: usize);
        fn cuMemMap(
            address: CUdeviceptr,
            len: usize,
            offset: usize,
            handle: CUmemGenericAllocationHandle,
            flags: c_ulonglong,
        );
        fn cuMemUnmap(address: CUdeviceptr, len: usize);
        fn cuMemSetAccess(address: CUdeviceptr, len: usize, desc: *const CUmemAccessDesc, count: usize);
    }
    of_codes {
        fn cuGetErrorName(code: Code, name: *mut *const c_char);
        fn cuGetErrorString(code: Code, text: *mut *const c_char);
    }
}
