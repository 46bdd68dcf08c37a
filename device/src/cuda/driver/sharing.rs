//! The driver calls for sharing device memory between processes. A driver may lack any of these functions; the error
//! then names the missing one.

use std::{
    ffi::c_void,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr,
};

use cudarc::driver::sys::{
    CUdevice, CUipcMem_flags, CUipcMemHandle, CUmemAccess_flags, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation,
    CUmemLocation_st__bindgen_ty_1, CUmemLocationType, CUstream, CUuuid,
};

use super::Driver;
use crate::cuda::{device_uuid::DeviceUuid, error::CudaError};

/// A handle of CUDA IPC.
pub(in crate::cuda) type IpcHandle = [u8; 64];

/// Physical device memory without an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) struct Physical(CUmemGenericAllocationHandle);

/// Finds an optional function, or returns an error that names it.
macro_rules! function {
    ($driver:ident, $name:ident) => {
        $driver.symbols.$name.ok_or(CudaError::NoSymbol { symbol: stringify!($name) })
    };
}

impl Driver {
    /// The UUID of the device.
    pub(in crate::cuda) fn uuid(&self, device: CUdevice) -> Result<DeviceUuid, CudaError> {
        let query = function!(self, cuDeviceGetUuid_v2)?;
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: the driver writes sixteen bytes to a local.
        let code = unsafe { query(&raw mut uuid, device) };
        self.check("cuDeviceGetUuid_v2", code)?;
        Ok(DeviceUuid::new(uuid.bytes.map(|byte| byte as u8)))
    }

    /// The start and length of the allocation that contains an address.
    pub(in crate::cuda) fn allocation_of(&self, address: u64) -> Result<(u64, u64), CudaError> {
        let query = function!(self, cuMemGetAddressRange_v2)?;
        let (mut start, mut len) = (0, 0);
        // SAFETY: the driver checks the address, and writes two numbers to locals.
        let code = unsafe { query(&raw mut start, &raw mut len, address) };
        self.check("cuMemGetAddressRange_v2", code)?;
        Ok((start, len as u64))
    }

    /// The IPC handle of the allocation that begins at an address.
    pub(in crate::cuda) fn ipc_handle(&self, start: u64) -> Result<IpcHandle, CudaError> {
        let query = function!(self, cuIpcGetMemHandle)?;
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the driver checks the address, and writes 64 bytes to a local.
        let code = unsafe { query(&raw mut handle, start) };
        self.check("cuIpcGetMemHandle", code)?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    /// Maps another process's allocation and returns its address.
    pub(in crate::cuda) fn open_ipc(&self, handle: &IpcHandle) -> Result<u64, CudaError> {
        let open = function!(self, cuIpcOpenMemHandle_v2)?;
        let handle = CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
        let flags = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut start = 0;
        // SAFETY: the driver checks the handle, which may have any bytes, and writes one address to a local.
        let code = unsafe { open(&raw mut start, handle, flags) };
        self.check("cuIpcOpenMemHandle_v2", code)?;
        Ok(start)
    }

    /// Undoes `open_ipc`.
    ///
    /// # Safety
    ///
    /// Nobody in this process uses the memory any more.
    pub(in crate::cuda) unsafe fn close_ipc(&self, start: u64) -> Result<(), CudaError> {
        let close = function!(self, cuIpcCloseMemHandle)?;
        // SAFETY: the caller's promise.
        let code = unsafe { close(start) };
        Ok(self.check("cuIpcCloseMemHandle", code)?)
    }

    /// The granularity of physical memory and mappings, in bytes.
    pub(in crate::cuda) fn granularity(&self, device: CUdevice) -> Result<usize, CudaError> {
        let query = function!(self, cuMemGetAllocationGranularity)?;
        let which = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let (prop, mut granularity) = (prop(device), 0);
        // SAFETY: the driver reads the properties and writes one number, both locals.
        let code = unsafe { query(&raw mut granularity, &raw const prop, which) };
        self.check("cuMemGetAllocationGranularity", code)?;
        Ok(granularity.max(1))
    }

    /// Allocates physical memory that can be shared as a file descriptor.
    pub(in crate::cuda) fn create_physical(
        &self,
        device: CUdevice,
        len: usize,
    ) -> Result<Physical, CudaError> {
        let create = function!(self, cuMemCreate)?;
        let (prop, mut handle) = (prop(device), 0);
        // SAFETY: the driver reads the properties and writes one handle, both locals.
        let code = unsafe { create(&raw mut handle, len, &raw const prop, 0) };
        self.check("cuMemCreate", code)?;
        Ok(Physical(handle))
    }

    /// Releases the handle of physical memory. The memory stays allocated while it is mapped or a file descriptor
    /// refers to it.
    pub(in crate::cuda) fn release_physical(&self, physical: Physical) -> Result<(), CudaError> {
        let release = function!(self, cuMemRelease)?;
        // SAFETY: only the handle is released, and mapped memory stays mapped.
        let code = unsafe { release(physical.0) };
        Ok(self.check("cuMemRelease", code)?)
    }

    /// Exports physical memory as a file descriptor for another process.
    pub(in crate::cuda) fn export_physical(&self, physical: Physical) -> Result<OwnedFd, CudaError> {
        let export = function!(self, cuMemExportToShareableHandle)?;
        let mut fd: RawFd = -1;
        let to_fd: *mut RawFd = &raw mut fd;
        // SAFETY: for this kind of handle the driver writes one file descriptor, to a local.
        let code = unsafe { export(to_fd.cast(), physical.0, FILE_DESCRIPTOR, 0) };
        self.check("cuMemExportToShareableHandle", code)?;
        // SAFETY: the driver has opened the descriptor for the caller, which must close it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Imports physical memory from another process's file descriptor, which the caller keeps.
    pub(in crate::cuda) fn import_physical(&self, fd: BorrowedFd<'_>) -> Result<Physical, CudaError> {
        let import = function!(self, cuMemImportFromShareableHandle)?;
        // CUDA takes the descriptor's number as a pointer argument.
        let fd_as_pointer: *mut c_void = ptr::without_provenance_mut(fd.as_raw_fd().unsigned_abs() as usize);
        let mut handle = 0;
        // SAFETY: the driver checks the descriptor, which is open, and writes one handle to a local.
        let code = unsafe { import(&raw mut handle, fd_as_pointer, FILE_DESCRIPTOR) };
        self.check("cuMemImportFromShareableHandle", code)?;
        Ok(Physical(handle))
    }

    /// Reserves addresses for a mapping.
    pub(in crate::cuda) fn reserve(&self, len: usize) -> Result<u64, CudaError> {
        let reserve = function!(self, cuMemAddressReserve)?;
        let mut address = 0;
        // SAFETY: the driver writes one address to a local.
        let code = unsafe { reserve(&raw mut address, len, 0, 0, 0) };
        self.check("cuMemAddressReserve", code)?;
        Ok(address)
    }

    /// Frees reserved addresses.
    ///
    /// # Safety
    ///
    /// The range is a whole reservation, to which nothing is mapped, and which nobody uses.
    pub(in crate::cuda) unsafe fn unreserve(&self, address: u64, len: usize) -> Result<(), CudaError> {
        let free = function!(self, cuMemAddressFree)?;
        // SAFETY: the caller's promise.
        let code = unsafe { free(address, len) };
        Ok(self.check("cuMemAddressFree", code)?)
    }

    /// Maps the first `len` bytes of physical memory at `address`.
    ///
    /// # Safety
    ///
    /// The range is reserved by the caller, and nothing is mapped there.
    pub(in crate::cuda) unsafe fn map(
        &self,
        address: u64,
        len: usize,
        physical: Physical,
    ) -> Result<(), CudaError> {
        let map = function!(self, cuMemMap)?;
        // SAFETY: the caller's promise; the driver checks that the memory has `len` bytes.
        let code = unsafe { map(address, len, 0, physical.0, 0) };
        Ok(self.check("cuMemMap", code)?)
    }

    /// Undoes `map`.
    ///
    /// # Safety
    ///
    /// Nobody in this process uses the memory any more.
    pub(in crate::cuda) unsafe fn unmap(&self, address: u64, len: usize) -> Result<(), CudaError> {
        let unmap = function!(self, cuMemUnmap)?;
        // SAFETY: the caller's promise.
        let code = unsafe { unmap(address, len) };
        Ok(self.check("cuMemUnmap", code)?)
    }

    /// Grants the device read and write access to a mapping.
    pub(in crate::cuda) fn allow(&self, address: u64, len: usize, device: CUdevice) -> Result<(), CudaError> {
        let set_access = function!(self, cuMemSetAccess)?;
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let desc = CUmemAccessDesc { location: location(device), flags };
        // SAFETY: the driver checks the addresses, and reads one description from a local.
        let code = unsafe { set_access(address, len, &raw const desc, 1) };
        Ok(self.check("cuMemSetAccess", code)?)
    }

    /// Submits a copy within the device, on the stream.
    ///
    /// # Safety
    ///
    /// Until the copy has ended, both ranges lie in device memory that nobody frees. `stream` lives.
    pub(in crate::cuda) unsafe fn copy_within(
        &self,
        to: u64,
        from: u64,
        len: usize,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        let copy = function!(self, cuMemcpyDtoDAsync_v2)?;
        // SAFETY: the caller's promise.
        let code = unsafe { copy(to, from, len, stream) };
        Ok(self.check("cuMemcpyDtoDAsync_v2", code)?)
    }
}

const FILE_DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// The properties of ordinary device memory that can be shared as a file descriptor.
fn prop(device: CUdevice) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: FILE_DESCRIPTOR,
        location: location(device),
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn location(device: CUdevice) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        __bindgen_anon_1: CUmemLocation_st__bindgen_ty_1 { id: device },
    }
}
