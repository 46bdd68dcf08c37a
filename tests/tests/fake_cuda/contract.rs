//! The promises of CUDA's documentation on which this project relies.

use std::{
    env,
    ffi::CStr,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use cudarc::driver::sys::{self, CUresult};
use tensor_relay_tests::fake_cuda::{self, Turn};

use crate::calls::{
    Answer, Block, Current, PageLocked, call, copy_rows, create_blocking_stream, create_event, create_stream,
    device_memory, device_memory_of, function, launch, recorded,
};

const MIB: usize = 1 << 20;
const NOT_READY: Answer = Err(CUresult::CUDA_ERROR_NOT_READY);

/// Exclusive use of the fake driver; `None` if `CUDA_CONTRACT=real` selects the real driver.
fn exclusive_driver() -> Option<Turn> {
    let is_real = env::var_os("CUDA_CONTRACT").is_some_and(|value| value == "real");
    (!is_real).then(|| fake_cuda::load().exclusive())
}

/// Frees a test's objects, and checks that the fake driver reports no violation.
fn clean_up(driver: Option<&Turn>, free: impl FnOnce()) {
    free();
    if let Some(fake) = driver {
        assert_eq!(fake.violations(), [""; 0]);
    }
}

#[test]
fn a_device_reports_its_attributes() {
    let _driver = exclusive_driver();
    let current = Current::new(0);
    let (mut devices, mut version, mut total_bytes, mut free_bytes, mut total_again) = (0, 0, 0, 0, 0);
    call!(cuDeviceGetCount(&raw mut devices)).unwrap();
    call!(cuDriverGetVersion(&raw mut version)).unwrap();
    call!(cuDeviceTotalMem_v2(&raw mut total_bytes, current.device)).unwrap();
    call!(cuMemGetInfo_v2(&raw mut free_bytes, &raw mut total_again)).unwrap();
    assert!(devices >= 1 && version >= 12000, "{devices} devices, version {version}");
    assert!(total_bytes > 0 && free_bytes <= total_bytes && total_again <= total_bytes);

    let mut name = [0_u8; 64];
    call!(cuDeviceGetName(name.as_mut_ptr().cast(), 64, current.device)).unwrap();
    assert!(name[0] != 0 && name.contains(&0));
    let mut id = [0_u8; 13];
    call!(cuDeviceGetPCIBusId(id.as_mut_ptr().cast(), 13, current.device)).unwrap();
    assert_eq!([id[4], id[7], id[10], id[12]], *b"::.\0", "{}", String::from_utf8_lossy(&id));
    assert_eq!(
        call!(cuDeviceGet(&mut 0, devices)),
        Err(CUresult::CUDA_ERROR_INVALID_DEVICE),
        "devices are counted from zero"
    );
}

#[test]
fn bytes_survive_a_round_trip() {
    let driver = exclusive_driver();
    let _current = Current::new(0);
    let stream = create_stream();
    for bytes in [1, 4095, MIB + 17] {
        let (from, to) = (PageLocked::new(0x11, bytes), PageLocked::new(0, bytes));
        let memory = device_memory(bytes);
        call!(cuMemcpyHtoDAsync_v2(memory, from.address(), bytes, stream)).unwrap();
        call!(cuMemcpyDtoHAsync_v2(to.address(), memory, bytes, stream)).unwrap();
        call!(cuStreamSynchronize(stream)).unwrap();
        assert_eq!(to.read(), from.read());
        call!(cuMemFree_v2(memory)).unwrap();
        from.free().unwrap();
        to.free().unwrap();
    }
    clean_up(driver.as_ref(), || call!(cuStreamDestroy_v2(stream)).unwrap());
}

/// One call copies from the host, within the device and to the host, after the stream's earlier work. Drivers older than
/// CUDA 13 lack it.
#[test]
fn a_batch_copies_in_all_directions() {
    let driver = exclusive_driver();
    let _current = Current::new(0);
    let has_batches = function::<unsafe extern "C" fn()>("cuMemcpyBatchAsync_v2").is_some();
    if !has_batches {
        println!("skipped: the driver has no cuMemcpyBatchAsync_v2");
        return;
    }
    let stream = create_stream();
    let (host, memory) = (PageLocked::new(0x11, 300), device_memory_of(0x22, 300));
    let address = host.address().expose_provenance() as u64;
    let copy = |pieces: [(u64, u64); 3], stream| {
        let (mut to, mut from, mut lens) =
            (pieces.map(|piece| piece.0), pieces.map(|piece| piece.1), [100; 3]);
        let no_hint = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID,
            __bindgen_anon_1: sys::CUmemLocation_st__bindgen_ty_1 { id: 0 },
        };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: no_hint,
            dstLocHint: no_hint,
            flags: 0,
        };
        let (to, from, lens, mut first) = (to.as_mut_ptr(), from.as_mut_ptr(), lens.as_mut_ptr(), 0);
        call!(cuMemcpyBatchAsync_v2(to, from, lens, 3, &raw mut attributes, &raw mut first, 1, stream))
    };
    call!(cuMemsetD8Async(memory + 200, 0x33, 100, stream)).unwrap();
    let pieces = [(memory, address), (memory + 100, memory + 200), (address + 100, memory + 200)];
    copy(pieces, stream).unwrap();
    call!(cuStreamSynchronize(stream)).unwrap();
    assert_eq!(host.read(), [[0x11; 100], [0x33; 100], [0x11; 100]].concat());
    let mut bytes = [0_u8; 300];
    call!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), memory, 300)).unwrap();
    assert_eq!(bytes[..], [[0x11; 100], [0x33; 100], [0x33; 100]].concat());
    assert!(copy(pieces, ptr::null_mut()).is_err(), "not on the default stream");
    clean_up(driver.as_ref(), || {
        call!(cuMemFree_v2(memory)).unwrap();
        host.free().unwrap();
        call!(cuStreamDestroy_v2(stream)).unwrap();
    });
}

/// A copy of rows within the device changes no byte between them, and is refused if a row does not fit its pitch.
#[test]
fn rows_are_copied_within_the_device() {
    let driver = exclusive_driver();
    let _current = Current::new(0);
    let stream = create_stream();
    let (from, to) = (device_memory_of(0x11, 60), device_memory_of(0x22, 100));
    let copy =
        |height, from_pitch, to_pitch| copy_rows([to + 5, to_pitch], [from, from_pitch], [7, height], stream);
    copy(3, 7, 31).unwrap();
    call!(cuStreamSynchronize(stream)).unwrap();
    let mut bytes = [0_u8; 100];
    call!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), to, 100)).unwrap();
    let row = |start: usize| start..start + 7;
    let expected =
        |at| if [5, 36, 67].into_iter().any(|start| row(start).contains(&at)) { 0x11 } else { 0x22 };
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
    for (height, from_pitch, to_pitch) in [(3, 6, 31), (3, 7, 6), (3, 7, 1 << 31)] {
        assert_eq!(copy(height, from_pitch, to_pitch), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    }
    clean_up(driver.as_ref(), || {
        call!(cuMemFree_v2(from)).unwrap();
        call!(cuMemFree_v2(to)).unwrap();
        call!(cuStreamDestroy_v2(stream)).unwrap();
    });
}

#[test]
fn pageable_memory_may_be_reused_when_the_call_returns() {
    let driver = exclusive_driver();
    let _current = Current::new(0);
    let stream = create_stream();
    let memory = device_memory(MIB);
    let mut bytes = vec![0x33_u8; MIB];
    call!(cuMemcpyHtoDAsync_v2(memory, bytes.as_ptr().cast(), MIB, stream)).unwrap();
    bytes.fill(0);
    // Synchronous copies use the default stream, which does not wait for `stream`.
    call!(cuStreamSynchronize(stream)).unwrap();
    call!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), memory, MIB)).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0x33));
    call!(cuMemcpyHtoD_v2(memory, vec![0x44_u8; MIB].as_ptr().cast(), MIB)).unwrap();
    call!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), memory, MIB)).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0x44));
    clean_up(driver.as_ref(), || {
        call!(cuMemFree_v2(memory)).unwrap();
        call!(cuStreamDestroy_v2(stream)).unwrap();
    });
}

#[test]
fn registered_memory_is_page_locked_until_it_is_unregistered() {
    let driver = exclusive_driver();
    let _current = Current::new(0);
    let stream = create_stream();
    let memory = device_memory_of(0x55, MIB);
    let mut owned = vec![0_u8; MIB];
    let start = owned.as_mut_ptr();
    let registered = |start: *mut u8| call!(cuMemHostRegister_v2(start.cast(), MIB, 0));
    registered(start).unwrap();
    assert_eq!(registered(start), Err(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED));

    let block = Block::in_stream(stream);
    call!(cuMemcpyDtoHAsync_v2(start.cast(), memory, MIB, stream)).unwrap();
    assert_eq!(
        call!(cuStreamQuery(stream)),
        NOT_READY,
        "the call does not wait for earlier work of the stream"
    );
    block.lift();
    call!(cuStreamSynchronize(stream)).unwrap();
    call!(cuMemHostUnregister(start.cast())).unwrap();
    assert!(owned.iter().all(|byte| *byte == 0x55));
    clean_up(driver.as_ref(), || {
        call!(cuMemFree_v2(memory)).unwrap();
        call!(cuStreamDestroy_v2(stream)).unwrap();
    });
}

#[test]
fn copies_of_page_locked_memory_do_not_wait() {
    let driver = exclusive_driver();
    let _current = Current::new(0);
    let stream = create_stream();
    let (host, memory) = (PageLocked::new(1, MIB), device_memory_of(2, MIB));
    let block = Block::in_stream(stream);
    call!(cuMemcpyDtoHAsync_v2(host.address(), memory, MIB, stream)).unwrap();
    let done = recorded(stream);
    assert_eq!(call!(cuEventQuery(done)), NOT_READY);
    assert_eq!(call!(cuStreamQuery(stream)), NOT_READY);
    block.lift();
    call!(cuEventSynchronize(done)).unwrap();
    assert_eq!(call!(cuEventQuery(done)), Ok(()));
    assert!(host.read().iter().all(|byte| *byte == 2));
    clean_up(driver.as_ref(), || {
        call!(cuEventDestroy_v2(done)).unwrap();
        host.free().unwrap();
        call!(cuMemFree_v2(memory)).unwrap();
        call!(cuStreamDestroy_v2(stream)).unwrap();
    });
}

#[test]
fn invalid_ranges_and_sizes_are_refused() {
    let driver = exclusive_driver();
    let _current = Current::new(0);
    let memory = device_memory(MIB);
    let mut bytes = vec![0_u8; 2 * MIB];
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(call!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), memory, 4 * MIB)), invalid);
    assert_eq!(call!(cuMemcpyHtoD_v2(0x10, bytes.as_ptr().cast(), 1)), invalid);
    assert_eq!(call!(cuMemAlloc_v2(&mut 0, 0)), invalid);
    assert_eq!(call!(cuMemAlloc_v2(&mut 0, 1 << 50)), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    clean_up(driver.as_ref(), || call!(cuMemFree_v2(memory)).unwrap());
}

#[test]
fn an_event_is_complete_until_it_is_recorded_and_then_waits_for_earlier_work() {
    let driver = exclusive_driver();
    let _current = Current::new(0);
    let (first, second) = (create_stream(), create_stream());
    let event = create_event();
    assert_eq!(call!(cuEventQuery(event)), Ok(()), "nothing was recorded");

    let block = Block::in_stream(first);
    call!(cuEventRecord(event, first)).unwrap();
    call!(cuStreamWaitEvent(second, event, 0)).unwrap();
    // A wait refers to the event's latest record at the time of the call, even if the event is recorded again or
    // destroyed.
    let later = Block::in_stream(first);
    call!(cuEventRecord(event, first)).unwrap();
    call!(cuEventDestroy_v2(event)).unwrap();
    assert_eq!(call!(cuStreamQuery(second)), NOT_READY);
    block.lift();
    call!(cuStreamSynchronize(second)).unwrap();
    assert_eq!(call!(cuStreamQuery(first)), NOT_READY);
    later.lift();
    call!(cuStreamSynchronize(first)).unwrap();
    clean_up(driver.as_ref(), || {
        call!(cuStreamDestroy_v2(first)).unwrap();
        call!(cuStreamDestroy_v2(second)).unwrap();
    });
}

#[test]
fn host_functions_run_in_order_and_on_another_thread() {
    let driver = exclusive_driver();
    let _current = Current::new(0);
    let stream = create_stream();
    let (sender, order) = mpsc::channel();
    for number in 0..3 {
        let sender = sender.clone();
        launch(stream, move || sender.send((number, thread::current().id())).unwrap());
    }
    call!(cuStreamSynchronize(stream)).unwrap();
    drop(sender);
    let called: Vec<_> = order.iter().collect();
    assert_eq!(called.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(called.iter().all(|(_, thread)| *thread != thread::current().id()));
    clean_up(driver.as_ref(), || call!(cuStreamDestroy_v2(stream)).unwrap());
}

#[test]
fn the_legacy_default_stream_and_blocking_streams_wait_for_each_other() {
    let driver = exclusive_driver();
    let _current = Current::new(0);
    let (blocking, non_blocking) = (create_blocking_stream(), create_stream());
    for default in [0, 1] {
        let default = ptr::without_provenance_mut(default);
        let block = Block::in_stream(blocking);
        launch(default, || {});
        assert_eq!(call!(cuStreamQuery(default)), NOT_READY, "the default stream waits for blocking streams");
        block.lift();
        call!(cuStreamSynchronize(default)).unwrap();

        let block = Block::in_stream(default);
        launch(blocking, || {});
        launch(non_blocking, || {});
        call!(cuStreamSynchronize(non_blocking)).unwrap();
        assert_eq!(call!(cuStreamQuery(blocking)), NOT_READY, "blocking streams wait for the default stream");
        block.lift();
        call!(cuStreamSynchronize(blocking)).unwrap();
    }
    clean_up(driver.as_ref(), || {
        call!(cuStreamDestroy_v2(blocking)).unwrap();
        call!(cuStreamDestroy_v2(non_blocking)).unwrap();
    });
}

#[test]
fn each_thread_has_its_own_default_stream() {
    let driver = exclusive_driver();
    let current = Current::new(0);
    let per_thread = ptr::without_provenance_mut(2);
    let block = Block::in_stream(per_thread);
    let context = current.context.addr();
    let other = thread::spawn(move || {
        call!(cuCtxSetCurrent(ptr::with_exposed_provenance_mut(context))).unwrap();
        let stream = ptr::without_provenance_mut(2);
        launch(stream, || {});
        call!(cuStreamSynchronize(stream))
    });
    assert_eq!(other.join().unwrap(), Ok(()));
    assert_eq!(call!(cuStreamQuery(per_thread)), NOT_READY);
    block.lift();
    call!(cuStreamSynchronize(per_thread)).unwrap();
    clean_up(driver.as_ref(), || {});
}

#[test]
fn a_destroyed_stream_still_finishes_its_work() {
    let driver = exclusive_driver();
    let _current = Current::new(0);
    let stream = create_stream();
    let block = Block::in_stream(stream);
    let count = Arc::new(AtomicU32::new(0));
    let counted = count.clone();
    launch(stream, move || {
        counted.fetch_add(1, Ordering::Release);
    });
    let done = recorded(stream);
    call!(cuStreamDestroy_v2(stream)).unwrap();
    block.lift();
    call!(cuEventSynchronize(done)).unwrap();
    assert_eq!(count.load(Ordering::Acquire), 1);
    clean_up(driver.as_ref(), || call!(cuEventDestroy_v2(done)).unwrap());
}

#[test]
fn each_thread_has_its_own_current_context() {
    let _driver = exclusive_driver();
    let current = Current::new(0);
    let context = current.context.addr();
    let calls = thread::spawn(move || {
        let without_context = call!(cuMemAlloc_v2(&mut 0, 100));
        let context = ptr::with_exposed_provenance_mut(context);
        call!(cuCtxPushCurrent_v2(context)).unwrap();
        let mut memory = 0;
        let with_context = call!(cuMemAlloc_v2(&raw mut memory, 100));
        call!(cuMemFree_v2(memory)).unwrap();
        let mut popped = ptr::null_mut();
        call!(cuCtxPopCurrent_v2(&raw mut popped)).unwrap();
        assert_eq!(popped, context);
        (without_context, with_context)
    });
    assert_eq!(calls.join().unwrap(), (Err(CUresult::CUDA_ERROR_INVALID_CONTEXT), Ok(())));
    let (mut flags, mut active) = (0, 0);
    call!(cuDevicePrimaryCtxGetState(current.device, &raw mut flags, &raw mut active)).unwrap();
    assert_eq!(active, 1);
}

#[test]
fn pointer_attributes_describe_the_memory() {
    let driver = exclusive_driver();
    let _current = Current::new(0);
    let (memory, host) = (device_memory(MIB), PageLocked::new(0, MIB));
    let kind = |address: u64| {
        let mut kind = 0_u32;
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        call!(cuPointerGetAttribute((&raw mut kind).cast(), attribute, address)).map(|()| kind)
    };
    assert_eq!(kind(memory + 100), Ok(2));
    assert_eq!(kind(host.start.addr() as u64), Ok(1));
    assert_eq!(kind(0x1000), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    let (mut start, mut bytes) = (0, 0);
    call!(cuMemGetAddressRange_v2(&raw mut start, &raw mut bytes, memory + 100)).unwrap();
    assert_eq!((start, bytes), (memory, MIB));
    clean_up(driver.as_ref(), || {
        host.free().unwrap();
        call!(cuMemFree_v2(memory)).unwrap();
    });
}

#[test]
fn memory_is_allocated_and_freed_in_stream_order() {
    let driver = exclusive_driver();
    let _current = Current::new(0);
    let stream = create_stream();
    let mut memory = 0;
    call!(cuMemAllocAsync(&raw mut memory, MIB, stream)).unwrap();
    call!(cuMemsetD8Async(memory, 0x66, MIB, stream)).unwrap();
    let (other, host) = (device_memory(MIB), PageLocked::new(0, MIB));
    call!(cuMemcpyDtoDAsync_v2(other, memory, MIB, stream)).unwrap();
    call!(cuMemFreeAsync(memory, stream)).unwrap();
    call!(cuMemcpyDtoHAsync_v2(host.address(), other, MIB, stream)).unwrap();
    call!(cuStreamSynchronize(stream)).unwrap();
    assert!(host.read().iter().all(|byte| *byte == 0x66));
    clean_up(driver.as_ref(), || {
        host.free().unwrap();
        call!(cuMemFree_v2(other)).unwrap();
        call!(cuStreamDestroy_v2(stream)).unwrap();
    });
}

#[test]
fn the_time_between_two_events_is_measured() {
    let driver = exclusive_driver();
    let _current = Current::new(0);
    let stream = create_stream();
    let timed = || {
        let mut event = ptr::null_mut();
        call!(cuEventCreate(&raw mut event, 0)).unwrap();
        event
    };
    let (begin, end) = (timed(), timed());
    call!(cuEventRecord(begin, stream)).unwrap();
    launch(stream, || thread::sleep(Duration::from_millis(5)));
    call!(cuEventRecord(end, stream)).unwrap();
    let mut elapsed_ms = 0.0;
    assert_eq!(elapsed(&mut elapsed_ms, begin, end), NOT_READY);
    call!(cuEventSynchronize(end)).unwrap();
    elapsed(&mut elapsed_ms, begin, end).unwrap();
    assert!(elapsed_ms >= 4.0, "{elapsed_ms} ms");
    clean_up(driver.as_ref(), || {
        call!(cuEventDestroy_v2(begin)).unwrap();
        call!(cuEventDestroy_v2(end)).unwrap();
        call!(cuStreamDestroy_v2(stream)).unwrap();
    });
}

/// Calls `cuEventElapsedTime`, which all drivers have. cudarc binds a newer function, of CUDA 12.8.
fn elapsed(elapsed_ms: &mut f32, begin: sys::CUevent, end: sys::CUevent) -> Answer {
    type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;
    let function = function::<Elapsed>("cuEventElapsedTime").expect("all drivers have this function");
    // SAFETY: the test destroys its events after this call.
    unsafe { function(elapsed_ms, begin, end) }.result().map_err(|error| error.0)
}

#[test]
fn the_capture_mode_of_a_thread_is_exchanged() {
    let _driver = exclusive_driver();
    let _current = Current::new(0);
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    call!(cuThreadExchangeStreamCaptureMode(&raw mut mode)).unwrap();
    assert_eq!(mode, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    call!(cuThreadExchangeStreamCaptureMode(&raw mut mode)).unwrap();
    assert_eq!(mode, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
}

#[test]
fn errors_have_names() {
    let _driver = exclusive_driver();
    let _current = Current::new(0);
    let name = |code| {
        let mut name = ptr::null();
        call!(cuGetErrorName(code, &raw mut name)).unwrap();
        // SAFETY: the driver returns constant zero-terminated text, which lives as long as the driver.
        unsafe { CStr::from_ptr(name) }.to_str().unwrap()
    };
    assert_eq!(name(CUresult::CUDA_ERROR_OUT_OF_MEMORY), "CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(name(CUresult::CUDA_ERROR_NOT_READY), "CUDA_ERROR_NOT_READY");
}
