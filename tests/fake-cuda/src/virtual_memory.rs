use std::{
    collections::BTreeMap,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::fs::{CWD, fstat, readlinkat};

use crate::{
    backing::Backing,
    device::Device,
    memory::{Freed, unused_address},
    status::{Answer, Status},
};

/// The granularity of sizes and addresses: 2 MiB, as on current devices.
pub(crate) const GRANULARITY: usize = 2 << 20;

/// The objects of the virtual memory API: handles of physical memory, and reserved address ranges.
#[derive(Debug, Default)]
pub(crate) struct VirtualMemory {
    handles: BTreeMap<u64, Arc<Physical>>,
    reserved: BTreeMap<u64, Reserved>,
}

/// Physical memory, which exists while it has a handle or a mapping. Other processes can share it through its file.
#[derive(Debug)]
struct Physical {
    device: usize,
    bytes: usize,
    file: OwnedFd,
    /// Whether the memory may be exported.
    shareable: bool,
    /// Whether another process allocated the memory.
    imported: bool,
}

/// A reserved address range and its mappings.
#[derive(Debug)]
struct Reserved {
    bytes: usize,
    mapped: BTreeMap<u64, Arc<Physical>>,
}

impl VirtualMemory {
    /// Allocates physical memory of a device: `cuMemCreate`.
    pub(crate) fn create(
        &mut self,
        handle: u64,
        devices: &mut [Device],
        (device, number): (usize, usize),
        bytes: usize,
        shareable: bool,
    ) -> Answer {
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(Status::INVALID_VALUE);
        }
        devices[device].memory.take(bytes)?;
        let file = Backing::fresh_file(&format!("{PHYSICAL}{number}"), bytes)?;
        let physical = Physical { device, bytes, file, shareable, imported: false };
        self.handles.insert(handle, Arc::new(physical));
        Ok(())
    }

    /// Releases a handle: `cuMemRelease`.
    pub(crate) fn release(&mut self, handle: u64, devices: &mut [Device]) -> Answer {
        let physical = self.handles.remove(&handle).ok_or(Status::INVALID_VALUE)?;
        drop_reference(physical, devices);
        Ok(())
    }

    /// Returns the file from which another process can import the memory: `cuMemExportToShareableHandle`.
    pub(crate) fn export(&self, handle: u64) -> Answer<OwnedFd> {
        let physical = self.handles.get(&handle).ok_or(Status::INVALID_VALUE)?;
        if !physical.shareable {
            return Err(Status::INVALID_VALUE);
        }
        physical.file.try_clone().map_err(|_| Status::OUT_OF_MEMORY)
    }

    /// Imports memory from an exported file, which the caller keeps: `cuMemImportFromShareableHandle`. `device_of` maps
    /// a machine-wide device number to an index.
    pub(crate) fn import(
        &mut self,
        handle: u64,
        file: BorrowedFd<'_>,
        device_of: impl FnOnce(usize) -> Option<usize>,
    ) -> Answer {
        let number = number_in(file).ok_or(Status::INVALID_VALUE)?;
        let device = device_of(number).ok_or(Status::INVALID_DEVICE)?;
        let bytes = fstat(file).map_err(|_| Status::INVALID_VALUE)?.st_size.unsigned_abs() as usize;
        let file = file.try_clone_to_owned().map_err(|_| Status::OUT_OF_MEMORY)?;
        let physical = Physical { device, bytes, file, shareable: true, imported: true };
        self.handles.insert(handle, Arc::new(physical));
        Ok(())
    }

    /// Reserves addresses: `cuMemAddressReserve`.
    pub(crate) fn reserve(&mut self, bytes: usize) -> Answer<u64> {
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(Status::INVALID_VALUE);
        }
        if bytes > ADDRESSES_BYTES {
            return Err(Status::OUT_OF_MEMORY);
        }
        let address = unused_address(bytes, GRANULARITY);
        self.reserved.insert(address, Reserved { bytes, mapped: BTreeMap::new() });
        Ok(address)
    }

    /// Frees reserved addresses, which must have no mappings: `cuMemAddressFree`.
    pub(crate) fn free(&mut self, address: u64, bytes: usize) -> Answer {
        let is_free = |reserved: &Reserved| reserved.bytes == bytes && reserved.mapped.is_empty();
        if !self.reserved.get(&address).is_some_and(is_free) {
            return Err(Status::INVALID_VALUE);
        }
        self.reserved.remove(&address);
        Ok(())
    }

    /// Maps physical memory to reserved addresses: `cuMemMap`.
    pub(crate) fn map(&mut self, devices: &mut [Device], address: u64, bytes: usize, handle: u64) -> Answer {
        let physical = self.handles.get(&handle).ok_or(Status::INVALID_VALUE)?.clone();
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || bytes > physical.bytes {
            return Err(Status::INVALID_VALUE);
        }
        let reserved = self.reserved_at(address, bytes)?;
        let memory = &mut devices[physical.device].memory;
        if memory.has_block_between(address, address + bytes as u64) {
            return Err(Status::INVALID_VALUE);
        }
        let file = physical.file.try_clone().map_err(|_| Status::OUT_OF_MEMORY)?;
        memory.map(address, bytes, Backing::of(file, bytes)?);
        reserved.mapped.insert(address, physical);
        Ok(())
    }

    /// The index of the device whose memory is mapped at an address.
    pub(crate) fn device_at(&mut self, address: u64, bytes: usize) -> Answer<usize> {
        let reserved = self.reserved_at(address, bytes)?;
        let physical = reserved.mapped.get(&address).ok_or(Status::INVALID_VALUE)?;
        Ok(physical.device)
    }

    /// Removes a mapping: `cuMemUnmap`. Returns whether the mapping was in use.
    pub(crate) fn unmap(&mut self, devices: &mut [Device], address: u64, bytes: usize) -> Answer<Freed> {
        let device = self.device_at(address, bytes)?;
        let freed = devices[device].memory.unmap(address, bytes)?;
        if let Some(physical) = self.reserved_at(address, bytes)?.mapped.remove(&address) {
            drop_reference(physical, devices);
        }
        Ok(freed)
    }

    /// The number of handles and reserved ranges.
    pub(crate) fn count(&self) -> usize {
        self.handles.len() + self.reserved.len()
    }

    fn reserved_at(&mut self, address: u64, bytes: usize) -> Answer<&mut Reserved> {
        let before = self.reserved.range_mut(..=address).next_back();
        let (start, reserved) = before.ok_or(Status::INVALID_VALUE)?;
        let offset = (address - start) as usize;
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= reserved.bytes);
        if fits { Ok(reserved) } else { Err(Status::INVALID_VALUE) }
    }
}

/// Returns the memory to its device if this is the last reference.
fn drop_reference(physical: Arc<Physical>, devices: &mut [Device]) {
    if let Some(Physical { device, bytes, imported: false, .. }) = Arc::into_inner(physical)
        && let Some(device) = devices.get_mut(device)
    {
        device.memory.used_bytes -= bytes;
    }
}

/// The machine-wide device number in the name of an exported file; `None` for other files.
fn number_in(file: BorrowedFd<'_>) -> Option<usize> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let name = readlinkat(CWD, path, Vec::new()).ok()?;
    let name = name.to_str().ok()?.strip_prefix("/memfd:")?.strip_suffix(" (deleted)")?;
    name.strip_prefix(PHYSICAL)?.parse().ok()
}

/// The prefix of the names of files with physical memory; the machine-wide number of the device follows.
const PHYSICAL: &str = "fake-cuda-physical-";
/// The largest range that can be reserved.
const ADDRESSES_BYTES: usize = 1 << 47;
