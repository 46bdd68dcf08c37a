//! What only the fake driver has: injected failures and hangs, held copies, and reported violations.

use std::{
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use cudarc::driver::sys::CUresult;
use tensor_relay_tests::fake_cuda::{self, Direction, Effect, Fault, Live, Turn};

use crate::calls::{
    Answer, Block, Current, PageLocked, call, copy_rows, create_stream, device_memory, device_memory_of,
    launch, recorded, try_launch,
};

const MIB: usize = 1 << 20;
const LAUNCH_FAILED: u32 = 719;

fn exclusive_fake() -> Turn {
    fake_cuda::load().exclusive()
}

/// Checks that there was exactly one violation, whose text contains `words`.
fn assert_violation(fake: &Turn, words: &str) {
    let violations = fake.violations();
    assert!(
        violations.len() == 1 && violations[0].contains(words),
        "not exactly one violation with {words:?}: {violations:?}"
    );
}

#[test]
fn torn_copies_are_visible() {
    let fake = exclusive_fake();
    let _current = Current::new(0);
    let stream = create_stream();
    let (host, memory) = (PageLocked::new(1, MIB), device_memory_of(2, MIB));
    let gate = fake.hold(0, Direction::DeviceToHost);
    call!(cuMemcpyDtoHAsync_v2(host.address(), memory, MIB, stream)).unwrap();
    assert!(
        host.read().iter().all(|byte| *byte == 0xA5),
        "the old bytes are overwritten, and the new ones have not arrived"
    );
    fake.set_gbps(0.0, 0.01);
    drop(gate);
    fake.wait_until("a piece has arrived", |_| host.read()[0] == 2);
    assert_ne!(host.read()[MIB - 1], 2, "pieces arrive one after the other");
    call!(cuStreamSynchronize(stream)).unwrap();
    assert!(host.read().iter().all(|byte| *byte == 2));
}

#[test]
fn rows_that_leave_their_memory_are_refused() {
    let fake = exclusive_fake();
    let _current = Current::new(0);
    let stream = create_stream();
    let (from, to) = (device_memory(100), device_memory(100));
    assert!(copy_rows([to, 46], [from, 46], [8, 3], stream).is_ok());
    for (to_pitch, from_pitch, to, from) in [(47, 46, to, from), (46, 47, to, from), (46, 46, to + 1, from)] {
        assert!(copy_rows([to, to_pitch], [from, from_pitch], [8, 3], stream).is_err());
    }
    call!(cuStreamSynchronize(stream)).unwrap();
    assert_eq!(fake.violations(), [""; 0]);
    call!(cuMemFree_v2(from)).unwrap();
    assert!(copy_rows([to, 46], [from, 46], [8, 3], stream).is_err());
    assert_violation(&fake, "used after it was freed");
}

/// A copy from a host range that is queued before a copy to it reads the old bytes, as on a real device.
#[test]
fn a_copy_to_the_host_does_not_overwrite_what_an_earlier_copy_reads() {
    let _fake = exclusive_fake();
    let _current = Current::new(0);
    let stream = create_stream();
    let (host, memory) = (PageLocked::new(3, 100), device_memory_of(7, 200));
    call!(cuMemcpyHtoDAsync_v2(memory, host.address(), 100, stream)).unwrap();
    call!(cuMemcpyDtoHAsync_v2(host.address(), memory + 50, 100, stream)).unwrap();
    call!(cuStreamSynchronize(stream)).unwrap();
    assert_eq!(host.read(), [[3; 50], [7; 50]].concat());
}

#[test]
fn fresh_device_memory_is_not_zero() {
    let _fake = exclusive_fake();
    let _current = Current::new(0);
    let memory = device_memory(100);
    let mut bytes = [0_u8; 100];
    call!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), memory, 100)).unwrap();
    assert_eq!(bytes, [0xD7; 100]);
}

#[test]
fn a_gate_holds_copies_and_lets_a_number_of_them_pass() {
    let fake = exclusive_fake();
    let _current = Current::new(0);
    let (first, second) = (create_stream(), create_stream());
    let (host, memory) = (PageLocked::new(0, 4 * MIB), device_memory_of(7, MIB));
    let gate = fake.hold(0, Direction::DeviceToHost);
    for (index, stream) in [first, second, first, second].into_iter().enumerate() {
        let to = host.start.wrapping_add(index * MIB).cast();
        call!(cuMemcpyDtoHAsync_v2(to, memory, MIB, stream)).unwrap();
    }
    gate.until_waiting(4);
    gate.pass(1);
    fake.wait_until("one copy has ended", |fake| fake.engine(0, Direction::DeviceToHost).ended == 1);
    let engine = fake.engine(0, Direction::DeviceToHost);
    assert_eq!((engine.waiting, engine.in_flight, engine.ended_bytes), (3, 3, MIB as u64));
    assert_eq!(fake.engine(0, Direction::HostToDevice).in_flight, 0);
    drop(gate);
    call!(cuCtxSynchronize()).unwrap();
    assert_eq!(fake.engine(0, Direction::DeviceToHost).ended, 4);
}

#[test]
fn a_failed_call_has_no_effect() {
    let fake = exclusive_fake();
    let _current = Current::new(0);
    let stream = create_stream();
    fake.fault(&Fault::once("cuMemAlloc_v2", 2, Effect::Fail(2)));
    fake.fault(&Fault::once("cuMemFree_v2", 1, Effect::Fail(LAUNCH_FAILED)));
    let memory = device_memory(100);
    assert_eq!(call!(cuMemAlloc_v2(&mut 0, 100)), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    assert_eq!(fake.live().device_blocks, 1);
    assert_eq!(call!(cuMemFree_v2(memory)), Err(CUresult::CUDA_ERROR_LAUNCH_FAILED));
    assert_eq!(fake.live().device_blocks, 1);
    call!(cuMemFree_v2(memory)).unwrap();
    call!(cuStreamDestroy_v2(stream)).unwrap();
    assert_eq!(fake.live(), Live { contexts: 1, ..Live::default() });
    assert_eq!(fake.calls()["cuMemAlloc_v2"], 2);
}

#[test]
fn an_asynchronous_error_corrupts_the_context_and_stops_host_functions() {
    let fake = exclusive_fake();
    let _current = Current::new(0);
    let stream = create_stream();
    let (first, second) = (PageLocked::new(1, MIB), PageLocked::new(1, MIB));
    let memory = device_memory_of(2, MIB);
    fake.fault(&Fault::once("@dtoh", 2, Effect::Fail(LAUNCH_FAILED)));
    let calls = Arc::new(AtomicU32::new(0));
    let block = Block::in_stream(stream);
    for host in [&first, &second] {
        call!(cuMemcpyDtoHAsync_v2(host.address(), memory, MIB, stream)).unwrap();
        let calls = calls.clone();
        launch(stream, move || {
            calls.fetch_add(1, Ordering::Release);
        });
    }
    let done = recorded(stream);
    block.lift();
    let failed: Answer = Err(CUresult::CUDA_ERROR_LAUNCH_FAILED);
    assert_eq!(call!(cuEventSynchronize(done)), failed);
    assert_eq!(calls.load(Ordering::Acquire), 1, "only the host function after the first copy was called");
    let bytes = second.read();
    assert_eq!((bytes[0], bytes[MIB - 1]), (2, 0xA5), "the second copy is torn");
    assert_eq!(call!(cuStreamQuery(stream)), failed);
    assert_eq!(call!(cuMemAlloc_v2(&mut 0, 1)), failed);
    assert_eq!(call!(cuMemFreeHost(second.address())), failed);
    assert_eq!(try_launch(stream, || {}), failed);
    assert_eq!(fake.violations(), [""; 0]);
}

#[test]
fn hanging_work_continues_when_it_is_released() {
    let fake = exclusive_fake();
    let _current = Current::new(0);
    let stream = create_stream();
    let (host, memory) = (PageLocked::new(1, MIB), device_memory_of(2, MIB));
    fake.fault(&Fault::once("@dtoh", 1, Effect::Hang));
    call!(cuMemcpyDtoHAsync_v2(host.address(), memory, MIB, stream)).unwrap();
    assert_eq!(call!(cuStreamQuery(stream)), Err(CUresult::CUDA_ERROR_NOT_READY));
    assert_eq!(fake.engine(0, Direction::DeviceToHost).in_flight, 1);
    fake.release();
    call!(cuStreamSynchronize(stream)).unwrap();
    assert!(host.read().iter().all(|byte| *byte == 2));
}

#[test]
fn freeing_under_a_copy_is_a_violation() {
    for freed in ["host", "registered", "device", "device, asynchronously"] {
        let fake = exclusive_fake();
        let _current = Current::new(0);
        let (copying, other) = (create_stream(), create_stream());
        let (host, memory) = (PageLocked::new(1, MIB), device_memory_of(2, MIB));
        let mut owned = vec![0_u8; MIB];
        let to = if freed == "registered" { owned.as_mut_ptr().cast() } else { host.address() };
        if freed == "registered" {
            call!(cuMemHostRegister_v2(to, MIB, 0)).unwrap();
        }
        let gate = fake.hold(0, Direction::DeviceToHost);
        call!(cuMemcpyDtoHAsync_v2(to, memory, MIB, copying)).unwrap();
        let result = match freed {
            "host" => call!(cuMemFreeHost(to)),
            "registered" => call!(cuMemHostUnregister(to)),
            "device" => call!(cuMemFree_v2(memory)),
            _ => call!(cuMemFreeAsync(memory, other)).and_then(|()| call!(cuStreamSynchronize(other))),
        };
        assert_eq!(result.is_ok(), freed == "device, asynchronously", "{freed}");
        assert_violation(&fake, "under a copy");
        drop(gate);
        call!(cuStreamSynchronize(copying)).unwrap();
    }
}

#[test]
fn double_free_and_use_after_free_are_violations() {
    let fake = exclusive_fake();
    let _current = Current::new(0);
    let (host, memory) = (PageLocked::new(1, MIB), device_memory(MIB));
    call!(cuMemFree_v2(memory)).unwrap();
    call!(cuMemFree_v2(memory)).unwrap_err();
    assert_violation(&fake, "freed twice");
    fake.reset();
    let _current = Current::new(0);
    let memory = device_memory(MIB);
    let other = PageLocked::new(1, MIB);
    let address = other.address();
    other.free().unwrap();
    call!(cuMemFreeHost(address)).unwrap_err();
    assert_violation(&fake, "freed twice");
    call!(cuMemcpyDtoH_v2(address, memory, MIB)).unwrap_err();
    call!(cuMemFree_v2(memory)).unwrap();
    call!(cuMemcpyHtoD_v2(memory, host.address(), MIB)).unwrap_err();
    let uses_after_free: Vec<_> = fake
        .violations()
        .into_iter()
        .filter(|text| text.contains("after it was freed"))
        .collect();
    assert_eq!(uses_after_free.len(), 2, "{uses_after_free:?}");
}

#[test]
fn calling_cuda_in_a_host_function_is_a_violation() {
    let fake = exclusive_fake();
    let _current = Current::new(0);
    let stream = create_stream();
    launch(stream, || {
        let mut current = ptr::null_mut();
        assert_eq!(call!(cuCtxGetCurrent(&raw mut current)), Err(CUresult::CUDA_ERROR_NOT_PERMITTED));
    });
    call!(cuStreamSynchronize(stream)).unwrap();
    assert_violation(&fake, "cuCtxGetCurrent is called in a host function");
}

#[test]
fn releasing_the_context_under_a_copy_is_a_violation() {
    let fake = exclusive_fake();
    let current = Current::new(0);
    let again = Current::new(0);
    let context = current.context;
    let (host, memory, stream) = (PageLocked::new(1, MIB), device_memory(MIB), create_stream());
    drop(again);
    assert_eq!(fake.live().reclaimed, 0);
    call!(cuCtxSetCurrent(context)).unwrap();
    let gate = fake.hold(0, Direction::HostToDevice);
    call!(cuMemcpyHtoDAsync_v2(memory, host.address(), MIB, stream)).unwrap();
    drop(current);
    assert_violation(&fake, "destroyed under 1 copies");
    assert_eq!(fake.live(), Live { reclaimed: 3, ..Live::default() });
    assert_eq!(call!(cuCtxSetCurrent(context)), Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
    drop(gate);
}

#[test]
fn calls_fail_after_their_context_was_destroyed() {
    let fake = exclusive_fake();
    let _current = Current::new(0);
    let stream = create_stream();
    let done = recorded(stream);
    fake.destroy_context(0);
    assert_eq!(call!(cuMemAlloc_v2(&mut 0, 1)), Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED));
    assert_eq!(call!(cuEventQuery(done)), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    assert_eq!(fake.violations(), [""; 0]);
}

#[test]
fn each_device_has_its_own_memory() {
    let fake = exclusive_fake();
    fake.reset_with(2, 4 * MIB);
    let first = Current::new(0);
    let memory = device_memory(3 * MIB);
    assert_eq!(call!(cuMemAlloc_v2(&mut 0, 2 * MIB)), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    let second = Current::new(1);
    let other = device_memory(3 * MIB);
    assert_ne!((first.device, memory), (second.device, other));
    let host = PageLocked::new(0, MIB);
    assert_eq!(
        call!(cuMemcpyDtoH_v2(host.address(), memory, MIB)),
        Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        "a context copies memory of its own device only"
    );
    fake.fail_device(0, LAUNCH_FAILED);
    call!(cuMemcpyDtoH_v2(host.address(), other, MIB)).unwrap();
}

#[test]
fn threads_with_a_context_from_before_a_reset_are_refused() {
    let fake = exclusive_fake();
    let old = Current::new(0);
    let stream = create_stream();
    let (host, memory) = (PageLocked::new(1, MIB), device_memory(MIB));
    fake.set_gbps(0.001, 0.0);
    call!(cuMemcpyHtoDAsync_v2(memory, host.address(), MIB, stream)).unwrap();
    fake.reset();
    assert_eq!(call!(cuStreamSynchronize(stream)), Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED));
    assert_eq!(host.read()[0], 1, "page-locked memory is still mapped");
    let new_thread = thread::spawn(|| {
        let _current = Current::new(0);
        device_memory(100);
    });
    new_thread.join().unwrap();
    assert!(!fake.calls().contains_key("cuStreamSynchronize"), "refused calls are not counted");
    assert_eq!(fake.violations(), [""; 0]);
    drop(old);
}
