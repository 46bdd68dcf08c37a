//! Device memory that processes share: the promises of CUDA's documentation, and the violations that are reported.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

use std::{
    env,
    ffi::c_void,
    io::{BufRead, BufReader, Write},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    ptr,
};

use cudarc::driver::sys::{
    CUipcMemHandle, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1,
    CUmemAllocationType, CUmemLocation, CUmemLocation_st__bindgen_ty_1, CUmemLocationType, CUresult, CUuuid,
};
use tensor_relay_tests::fake_cuda::{self, Installed, Library, Live, Turn};

use crate::calls::{Answer, Current, call, create_stream, device_memory_of};

const MIB: usize = 1 << 20;
const INVALID_VALUE: Answer = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
const FILE_DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

fn exclusive_fake() -> Turn {
    fake_cuda::load().exclusive()
}

fn ipc_handle(address: u64) -> Answer<CUipcMemHandle> {
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    call!(cuIpcGetMemHandle(&raw mut handle, address)).map(|()| handle)
}

fn open(handle: CUipcMemHandle) -> Answer<u64> {
    let mut address = 0;
    call!(cuIpcOpenMemHandle_v2(&raw mut address, handle, 1)).map(|()| address)
}

fn read(address: u64, bytes: usize) -> Vec<u8> {
    let mut copied = vec![0; bytes];
    call!(cuMemcpyDtoH_v2(copied.as_mut_ptr().cast(), address, bytes)).unwrap();
    copied
}

fn location(device: i32) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        __bindgen_anon_1: CUmemLocation_st__bindgen_ty_1 { id: device },
    }
}

fn prop_of(shareable: CUmemAllocationHandleType) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: shareable,
        location: location(0),
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn granularity() -> usize {
    let mut granularity = 0;
    let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    let prop = prop_of(FILE_DESCRIPTOR);
    call!(cuMemGetAllocationGranularity(&raw mut granularity, &raw const prop, minimum)).unwrap();
    granularity
}

fn create_physical(bytes: usize, shareable: CUmemAllocationHandleType) -> Answer<u64> {
    let (mut handle, prop) = (0, prop_of(shareable));
    call!(cuMemCreate(&raw mut handle, bytes, &raw const prop, 0)).map(|()| handle)
}

fn descriptor_of(handle: u64) -> Answer<OwnedFd> {
    let mut fd = -1;
    let to: *mut i32 = &raw mut fd;
    call!(cuMemExportToShareableHandle(to.cast(), handle, FILE_DESCRIPTOR, 0))?;
    // SAFETY: the driver has opened the descriptor for this test, which closes it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn import(fd: i32) -> Answer<u64> {
    let mut handle = 0;
    let number: *mut c_void = ptr::without_provenance_mut(fd as usize);
    call!(cuMemImportFromShareableHandle(&raw mut handle, number, FILE_DESCRIPTOR)).map(|()| handle)
}

/// Maps physical memory, readable and writable by the device.
fn mapped(handle: u64, bytes: usize) -> u64 {
    let mut address = 0;
    call!(cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0)).unwrap();
    call!(cuMemMap(address, bytes, 0, handle, 0)).unwrap();
    assert_eq!(call!(cuMemsetD8_v2(address, 1, 1)), INVALID_VALUE, "access is not allowed yet");
    let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let desc = CUmemAccessDesc { location: location(0), flags };
    call!(cuMemSetAccess(address, bytes, &raw const desc, 1)).unwrap();
    address
}

fn unmap(address: u64, bytes: usize) {
    call!(cuMemUnmap(address, bytes)).unwrap();
    call!(cuMemAddressFree(address, bytes)).unwrap();
}

#[test]
fn a_device_has_one_uuid_in_all_processes() {
    let fake = exclusive_fake();
    fake.reset_with(2, 1 << 20);
    let _current = Current::new(0);
    let uuid_of = |device| {
        let mut uuid = CUuuid { bytes: [0; 16] };
        call!(cuDeviceGetUuid_v2(&raw mut uuid, device)).map(|()| uuid.bytes)
    };
    let second = uuid_of(1).unwrap();
    assert_ne!(uuid_of(0).unwrap(), second);
    assert_eq!(uuid_of(2), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    fake.set_first_device(1);
    assert_eq!(uuid_of(0).unwrap(), second, "CUDA_VISIBLE_DEVICES changes numbers, but not UUIDs");
}

#[test]
fn only_memory_of_cu_mem_alloc_has_an_ipc_handle() {
    let fake = exclusive_fake();
    let _current = Current::new(0);
    let (memory, stream) = (device_memory_of(1, 5000), create_stream());
    let handle = ipc_handle(memory).unwrap();
    assert_eq!(ipc_handle(memory).unwrap().reserved, handle.reserved);
    assert_eq!(read(memory, 5000), [1; 5000], "the export changes neither bytes nor address");
    assert_eq!(
        open(handle),
        Err(CUresult::CUDA_ERROR_INVALID_CONTEXT),
        "a process cannot open its own handle"
    );
    assert_eq!(open(CUipcMemHandle { reserved: [7; 64] }).map(drop), INVALID_VALUE);

    let mut pooled = 0;
    call!(cuMemAllocAsync(&raw mut pooled, 5000, stream)).unwrap();
    assert_eq!(ipc_handle(pooled).map(drop), INVALID_VALUE);
    let bytes = granularity();
    let physical = create_physical(bytes, FILE_DESCRIPTOR).unwrap();
    let virtual_memory = mapped(physical, bytes);
    assert_eq!(ipc_handle(virtual_memory).map(drop), INVALID_VALUE);
    fake.set_shareable(false, true);
    assert_eq!(ipc_handle(memory).map(drop), INVALID_VALUE);

    unmap(virtual_memory, bytes);
    call!(cuMemRelease(physical)).unwrap();
    call!(cuMemFreeAsync(pooled, stream)).unwrap();
    call!(cuStreamSynchronize(stream)).unwrap();
    call!(cuStreamDestroy_v2(stream)).unwrap();
    call!(cuMemFree_v2(memory)).unwrap();
    assert_eq!(fake.live(), Live { contexts: 1, ..Live::default() });
    assert_eq!(fake.violations(), [""; 0]);
}

#[test]
fn physical_memory_lasts_as_long_as_its_last_handle_or_mapping() {
    let fake = exclusive_fake();
    let _current = Current::new(0);
    let bytes = 2 * granularity();
    let first = create_physical(bytes, FILE_DESCRIPTOR).unwrap();
    let address = mapped(first, bytes);
    let fd = descriptor_of(first).unwrap();
    call!(cuMemRelease(first)).unwrap();
    call!(cuMemsetD8_v2(address, 0x77, bytes)).unwrap();
    let second = import(fd.as_raw_fd()).unwrap();
    drop(fd);
    let again = mapped(second, bytes);
    call!(cuMemRelease(second)).unwrap();
    assert_ne!(again, address);
    unmap(address, bytes);
    assert_eq!(read(again, bytes), vec![0x77; bytes]);
    call!(cuMemsetD8_v2(again, 0x78, 1)).unwrap();
    assert_eq!(read(again, 2), [0x78, 0x77]);
    unmap(again, bytes);
    assert_eq!(fake.live(), Live { contexts: 1, ..Live::default() });
    assert_eq!(fake.violations(), [""; 0]);
}

#[test]
fn invalid_mappings_and_exports_are_refused() {
    let fake = exclusive_fake();
    let _current = Current::new(0);
    let bytes = granularity();
    assert_eq!(create_physical(bytes + 1, FILE_DESCRIPTOR).map(drop), INVALID_VALUE);
    assert_eq!(create_physical(2 << 30, FILE_DESCRIPTOR), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    let private = create_physical(bytes, CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE).unwrap();
    assert_eq!(descriptor_of(private).map(drop), INVALID_VALUE);
    let null = std::fs::File::open("/dev/null").unwrap();
    assert_eq!(import(null.as_raw_fd()).map(drop), INVALID_VALUE);

    let mut address = 0;
    call!(cuMemAddressReserve(&raw mut address, 2 * bytes, 0, 0, 0)).unwrap();
    assert_eq!(
        call!(cuMemMap(address, 2 * bytes, 0, private, 0)),
        INVALID_VALUE,
        "the mapping is longer than the memory"
    );
    call!(cuMemMap(address, bytes, 0, private, 0)).unwrap();
    assert_eq!(
        call!(cuMemMap(address, bytes, 0, private, 0)),
        INVALID_VALUE,
        "the address is mapped already"
    );
    call!(cuMemUnmap(address, bytes)).unwrap();
    call!(cuMemAddressFree(address, 2 * bytes)).unwrap();
    call!(cuMemRelease(private)).unwrap();
    fake.set_shareable(true, false);
    assert_eq!(create_physical(bytes, FILE_DESCRIPTOR), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    assert_eq!(fake.live(), Live { contexts: 1, ..Live::default() });
    assert_eq!(fake.violations(), [""; 0]);
}

#[test]
fn illegal_uses_of_mappings_are_violations() {
    let fake = exclusive_fake();
    let _current = Current::new(0);
    let bytes = granularity();
    let handle = create_physical(bytes, FILE_DESCRIPTOR).unwrap();
    let address = mapped(handle, bytes);
    for (result, words) in [
        (call!(cuMemFree_v2(address)), "which is not the address of device memory"),
        (call!(cuIpcCloseMemHandle(address)), "but was not opened"),
        (call!(cuMemAddressFree(address, bytes)), "that are mapped"),
        (call!(cuMemUnmap(address, 2 * bytes)), "but were not mapped as one range"),
        (call!(cuMemRelease(handle + 1)), "an invalid handle"),
    ] {
        assert_eq!(result, INVALID_VALUE);
        let violations = fake.violations();
        assert!(violations.iter().any(|violation| violation.contains(words)), "{words}: {violations:?}");
    }
    unmap(address, bytes);
    call!(cuMemRelease(handle)).unwrap();
    assert_eq!(fake.violations().len(), 5);
}

/// The environment variable that makes this test binary a neighbour: the second process.
const NEIGHBOUR: &str = "FAKE_CUDA_NEIGHBOUR";
/// The start of the neighbour's answer.
const ANSWER: &str = "neighbour answers: ";

/// The neighbour's program: opens a handle from stdin twice, checks the memory's bytes, overwrites the first byte, and
/// prints the result. After the next line from stdin, it closes the memory three times, which is once too often.
#[test]
fn neighbour() {
    if env::var_os(NEIGHBOUR).is_none() {
        return;
    }
    let current = Current::new(0);
    let mut lines = std::io::stdin().lines();
    let hex = lines.next().unwrap().unwrap();
    let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap() as i8;
    let handle = CUipcMemHandle { reserved: std::array::from_fn(byte) };
    match open(handle) {
        Err(error) => println!("{ANSWER}{error:?}"),
        Ok(address) => {
            assert_eq!(open(handle), Ok(address), "the second opening is only counted");
            let bytes = read(address, MIB);
            call!(cuMemsetD8_v2(address, 0x99, 1)).unwrap();
            println!("{ANSWER}{}", bytes.iter().all(|byte| *byte == 0x42));
            lines.next();
            call!(cuIpcCloseMemHandle(address)).unwrap();
            assert_eq!(read(address, MIB).len(), MIB, "the second opening keeps the memory open");
            call!(cuIpcCloseMemHandle(address)).unwrap();
            assert_eq!(call!(cuIpcCloseMemHandle(address)), INVALID_VALUE);
        }
    }
    drop(current);
}

/// The test's handle to the neighbour.
struct Neighbour {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    installed: Installed,
}

impl Neighbour {
    /// Starts the process with a handle, and returns its answer.
    fn open(handle: CUipcMemHandle) -> (Self, String) {
        let installed = Installed::new(Library::Fake);
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["--exact", "sharing::neighbour", "--nocapture", "--test-threads=1"])
            .envs(installed.environment())
            .env(NEIGHBOUR, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut input = process.stdin.take().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let hex: String = handle.reserved.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
        writeln!(input, "{hex}").unwrap();
        let mut line = String::new();
        while !line.contains(ANSWER) {
            line.clear();
            assert!(output.read_line(&mut line).unwrap() > 0, "the process has ended");
        }
        let answer = line.split_once(ANSWER).unwrap().1.trim_end().to_owned();
        (Self { process, input, output, installed }, answer)
    }

    /// Makes the process close the handle and exit. Returns the violations that its driver reported.
    fn close(mut self) -> Vec<String> {
        writeln!(self.input).unwrap();
        while self.output.read_line(&mut String::new()).unwrap() > 0 {}
        assert!(self.process.wait().unwrap().success());
        self.installed.report().violations
    }
}

#[test]
fn two_processes_share_the_same_bytes() {
    let fake = exclusive_fake();
    let _current = Current::new(0);
    let memory = device_memory_of(0x42, MIB);
    let (neighbour, answer) = Neighbour::open(ipc_handle(memory).unwrap());
    assert_eq!(answer, "true");
    assert_eq!(read(memory, 2), [0x99, 0x42], "the neighbour's write is visible");
    let violations = neighbour.close();
    assert!(violations.len() == 1 && violations[0].contains("closed twice"), "{violations:?}");
    call!(cuMemFree_v2(memory)).unwrap();
    assert_eq!(fake.violations(), [""; 0]);
}

#[test]
fn freeing_memory_that_another_process_has_open_is_a_violation() {
    let fake = exclusive_fake();
    let _current = Current::new(0);
    let memory = device_memory_of(0x42, MIB);
    let handle = ipc_handle(memory).unwrap();
    let (neighbour, _) = Neighbour::open(handle);
    assert_eq!(call!(cuMemFree_v2(memory)), INVALID_VALUE);
    let violations = fake.violations();
    assert!(
        violations.len() == 1 && violations[0].contains("while another process has it open"),
        "{violations:?}"
    );
    drop(neighbour.close());
    let (mut late, answer) = Neighbour::open(handle);
    assert_eq!(answer, "CUDA_ERROR_INVALID_VALUE", "a handle of freed memory cannot be opened");
    assert!(late.process.wait().unwrap().success());
}
