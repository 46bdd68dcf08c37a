//! Device memory shared by two processes: this one and a [`Neighbour`].

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

use std::{fs, os::fd::AsFd, sync::Arc, thread, time::Duration};

use cudarc::driver::sys::CUstream;
use tensor_relay_device::{
    Capacity, CopyEngine, CopySegment, Device,
    cuda::{
        CudaEngine, CudaError, CudaMemory,
        share::{self, DeviceUuid, Exported, FdMemory, Imported, IpcMemory, Place, ShareError, SharedBuffer},
    },
};
use tensor_relay_tests::fake_cuda::{Direction, Turn};

use crate::{
    calls::{Block, Current, call, create_stream},
    endpoint::{CHUNK, Endpoint, LEN, pattern, short_timeouts, wait_for_no_objects},
    machine,
    neighbour::{Neighbour, import},
    order::handle,
};

/// Opens the first device, with a tensor of `pattern`.
async fn open_filled(fake: &Turn) -> Endpoint {
    let endpoint = Endpoint::open(0, short_timeouts()).unwrap();
    endpoint.fill(&pattern(LEN)).await.unwrap();
    assert_eq!(fake.live().shared, 0);
    endpoint
}

/// Exports memory in place.
fn export_in_place(engine: &CudaEngine, memory: &Arc<CudaMemory>) -> Result<IpcMemory, ShareError> {
    engine.export_in_place(std::slice::from_ref(memory))?.remove(0)
}

/// Ends the neighbour, and checks that no objects of either process remain and no driver reports a violation.
async fn check_clean_end(fake: &Turn, neighbour: Neighbour) {
    wait_for_no_objects(fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
    let report = neighbour.end();
    assert_eq!(report.violations, [""; 0]);
    assert_eq!(report.at_exit, [tensor_relay_tests::fake_cuda::Live::default()]);
}

#[tokio::test]
async fn another_process_reads_a_tensor_in_place() {
    let fake = machine();
    let endpoint = open_filled(&fake).await;
    let exported = export_in_place(&endpoint.engine, &endpoint.memory).unwrap();
    assert_eq!((exported.offset, exported.len), (0, LEN as u64));
    let mut neighbour = Neighbour::start(0, None);
    neighbour.import(&exported).unwrap();
    assert!(neighbour.read().unwrap() == pattern(LEN));
    // Both processes have the same memory: later writes are visible.
    endpoint.fill(&vec![0x5A; LEN]).await.unwrap();
    assert!(neighbour.read().unwrap() == vec![0x5A; LEN]);
    neighbour.send("drop").unwrap();
    drop(endpoint);
    check_clean_end(&fake, neighbour).await;
}

#[tokio::test]
async fn parts_of_one_allocation_share_a_handle() {
    let fake = machine();
    let endpoint = open_filled(&fake).await;
    let parts =
        [endpoint.memory.slice(1000..5000).unwrap(), endpoint.memory.slice(70_001..LEN as u64).unwrap()];
    assert!(endpoint.memory.slice(1..LEN as u64 + 1).is_none() && endpoint.memory.slice(0..0).is_some());
    let exported = endpoint.engine.export_in_place(&parts).unwrap();
    assert_eq!(fake.calls()["cuIpcGetMemHandle"], 1, "the parts have one handle");
    let mut neighbour = Neighbour::start(0, None);
    for (exported, part) in exported.into_iter().zip([1000..5000, 70_001..LEN]) {
        neighbour.import(&exported.unwrap()).unwrap();
        assert!(neighbour.read().unwrap() == pattern(LEN)[part]);
    }
    neighbour.send("drop").unwrap();
    drop((parts, endpoint));
    check_clean_end(&fake, neighbour).await;
}

#[tokio::test]
async fn an_allocation_is_opened_once_and_closed_after_its_last_copy() {
    let fake = machine();
    let mut neighbour = Neighbour::start(0, None);
    let exported = neighbour.export();
    let endpoint = Endpoint::open(0, short_timeouts()).unwrap();
    let part_at = |offset| Exported::Ipc(IpcMemory { offset, len: CHUNK as u64, ..exported });
    let Imported { memory: first, returned: first_returned } = import(&endpoint.engine, part_at(0)).unwrap();
    let Imported { memory: second, returned } = import(&endpoint.engine, part_at(CHUNK as u64)).unwrap();
    assert_eq!(second.address() - first.address(), CHUNK as u64);
    assert_eq!(fake.calls()["cuIpcOpenMemHandle_v2"], 1);
    drop(first);
    first_returned.wait().await;

    let gate = fake.hold(0, Direction::DeviceToHost);
    let slot = endpoint.slots.acquire().await;
    let copying = endpoint.engine.copy_out(vec![CopySegment::new(&second, 0, CHUNK)], slot);
    drop(second);
    gate.until_waiting(1);
    assert_eq!(fake.live().shared, 1, "a copy reads the memory");
    assert!(!returned.is_returned());
    drop(gate);
    assert!(copying.await.unwrap()[..] == pattern(LEN)[CHUNK..2 * CHUNK]);
    returned.wait().await;
    assert_eq!((fake.live().shared, fake.calls()["cuIpcCloseMemHandle"]), (0, 1));
    drop(endpoint);
    check_clean_end(&fake, neighbour).await;
}

/// A producer's stream and the memory that it will fill, lent with a fence.
struct Producer {
    _current: Current,
    stream: CUstream,
    block: Option<Block>,
    memory: Arc<CudaMemory>,
}

impl Producer {
    fn new(endpoint: &Endpoint) -> Self {
        let (current, stream) = (Current::new(0), create_stream());
        let block = Some(Block::in_stream(stream));
        call!(cuMemsetD8Async(endpoint.memory.address(), 0x22, LEN, stream)).unwrap();
        let fence = endpoint.engine.fence(handle(stream)).unwrap();
        // SAFETY: the owner is the memory itself, and the work that writes to it is before the fence.
        let memory = unsafe {
            endpoint
                .engine
                .lend(endpoint.memory.address(), LEN, endpoint.memory.clone(), Some(fence))
        };
        Self { _current: current, stream, block, memory }
    }

    fn end(self) {
        drop(self.block);
        drop(self.memory);
        call!(cuStreamDestroy_v2(self.stream)).unwrap();
    }
}

#[tokio::test]
async fn an_export_waits_for_the_stream_that_writes() {
    for in_place in [true, false] {
        let fake = machine();
        fake.set_shareable(in_place, true);
        let endpoint = open_filled(&fake).await;
        let mut producer = Producer::new(&endpoint);
        let (engine, memory) = (endpoint.engine.clone(), producer.memory.clone());
        let exporting = thread::spawn(move || share::export(&engine, &[memory]));
        let polls = |fake: &Turn| fake.calls().get("cuEventQuery").copied().unwrap_or(0);
        let before = polls(&fake);
        fake.wait_until("the engine has polled the stream", |_| polls(&fake) >= before + 5);
        assert!(!exporting.is_finished() && !fake.calls().contains_key("cuIpcGetMemHandle"));
        producer.block.take().unwrap().lift();
        let export = exporting.join().unwrap().unwrap();
        let mut neighbour = match (&export.places[0], &export.buffer) {
            (Place::InPlace(exported), None) if in_place => {
                let mut neighbour = Neighbour::start(0, None);
                neighbour.import(exported).unwrap();
                neighbour
            }
            (Place::Copied { offset: 0, .. }, Some(buffer)) if !in_place => importer_of(&endpoint, buffer),
            other => panic!("{other:?}"),
        };
        assert!(neighbour.read().unwrap()[..LEN] == vec![0x22; LEN], "the bytes were written by the stream");
        neighbour.send("drop").unwrap();
        drop(export);
        producer.end();
        drop(endpoint);
        check_clean_end(&fake, neighbour).await;
    }
}

/// A neighbour that has imported a buffer.
fn importer_of(endpoint: &Endpoint, buffer: &SharedBuffer) -> Neighbour {
    let mut neighbour = Neighbour::start(0, Some(buffer.fd()));
    neighbour
        .import_fd(device_of(endpoint), buffer.fd(), buffer.memory().len_bytes())
        .unwrap();
    neighbour
}

fn device_of(endpoint: &Endpoint) -> DeviceUuid {
    endpoint.engine.info().uuid.unwrap()
}

#[tokio::test]
async fn a_stream_that_does_not_finish_in_time_fails_the_export() {
    let fake = machine();
    let endpoint = open_filled(&fake).await;
    let producer = Producer::new(&endpoint);
    let refused = share::export(&endpoint.engine, std::slice::from_ref(&producer.memory)).unwrap_err();
    assert!(matches!(refused, ShareError::FenceTimedOut { .. }), "{refused:?}");
    producer.end();
    drop(endpoint);
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn memory_that_cannot_be_shared_in_place_is_copied_into_a_buffer() {
    let fake = machine();
    fake.set_shareable(false, true);
    let endpoint = open_filled(&fake).await;
    let parts = [
        endpoint.memory.slice(3..1003).unwrap(),
        endpoint.memory.slice(0..0).unwrap(),
        endpoint.memory.clone(),
    ];
    let export = share::export(&endpoint.engine, &parts).unwrap();
    let [Place::Copied { offset: 0, len: 1000, why }, Place::Empty, Place::Copied { offset: 1024, .. }] =
        &export.places[..]
    else {
        panic!("{export:?}")
    };
    let why = why.to_string();
    assert!(why.contains("cuIpcGetMemHandle") && why.contains("expandable segments"), "{why}");
    let stats = endpoint.engine.stats();
    assert_eq!((stats.within_bytes, stats.out_bytes), (1000 + LEN as u64, 0), "no byte went to the host");
    // The shared buffer counts as one page of 2 MiB, the tensor's own allocation in units of 512 bytes.
    assert_eq!(stats.device_bytes, (2 << 20) + (LEN as u64).next_multiple_of(512));

    let mut neighbour = importer_of(&endpoint, export.buffer.as_ref().unwrap());
    drop((export, parts));
    fake.wait_until("the exporter has released the buffer", |fake| fake.live().shared == 0);
    let read = neighbour.read().unwrap();
    assert!(read[..1000] == pattern(LEN)[3..1003] && read[1024..1024 + LEN] == pattern(LEN));
    neighbour.send("drop").unwrap();
    drop(endpoint);
    check_clean_end(&fake, neighbour).await;
}

#[tokio::test]
async fn both_reasons_are_reported_if_memory_cannot_be_shared() {
    let fake = machine();
    fake.set_shareable(false, false);
    let endpoint = open_filled(&fake).await;
    let export = share::export(&endpoint.engine, std::slice::from_ref(&endpoint.memory)).unwrap();
    assert!(export.buffer.is_none());
    let [Place::NotShareable { in_place, copy }] = &export.places[..] else { panic!("{export:?}") };
    assert!(matches!(in_place, ShareError::NotExportable { .. }), "{in_place:?}");
    assert!(matches!(copy, ShareError::NoBuffer { .. }), "{copy:?}");
    assert!(copy.to_string().contains("CUDA_ERROR_NOT_SUPPORTED"), "{copy}");
    drop((export, endpoint));
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn shared_buffers_count_against_the_budget() {
    let fake = machine();
    let endpoint = open_filled(&fake).await;
    let large = endpoint.engine.shared_buffer(14 << 20).unwrap();
    let refused = endpoint.engine.shared_buffer((2 << 20) + 1).unwrap_err();
    let expected = ShareError::OverBudget {
        device: "cuda:0".into(),
        asked_bytes: 4 << 20,
        in_use_bytes: (14 << 20) + (LEN as u64).next_multiple_of(512),
        budget_bytes: 16 << 20,
    };
    assert_eq!(refused, expected);
    drop(large);
    fake.wait_until("the buffer is freed", |fake| fake.live().shared == 0);
    drop(endpoint.engine.shared_buffer((2 << 20) + 1).unwrap());
    assert!(matches!(endpoint.engine.shared_buffer(u64::MAX), Err(ShareError::OverBudget { .. })));
    drop(endpoint);
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

/// Goal: a process that opens a copy sees the payload, and nothing that the memory had before. Method: it maps all that the
/// driver lets it map.
#[tokio::test]
async fn what_lies_behind_a_copy_is_zero() {
    const MAPPED: usize = 2 << 20;
    let fake = machine();
    let endpoint = open_filled(&fake).await;
    let device = Device::new(Arc::clone(&endpoint.engine), Capacity { slots: 2, slot_bytes: CHUNK }).unwrap();
    let part = device.wrap::<CudaEngine>(Arc::clone(&endpoint.memory)).unwrap();
    let len = LEN as u64;
    let copied = tokio::task::spawn_blocking({
        let device = device.clone();
        move || device.export_copy(len, &[(0..len, part)], false, Arc::new(()))
    });
    let copy = copied.await.unwrap().unwrap();
    let Exported::Fd(file) = &copy.exported else { panic!("the driver has descriptors") };
    assert_eq!((file.len, copy.memory.len_bytes()), (len, len));
    let mut neighbour = Neighbour::start(0, Some(file.fd.as_fd()));
    neighbour.import_fd(file.device, file.fd.as_fd(), MAPPED as u64).unwrap();
    let mapped = neighbour.read().unwrap();
    assert!(mapped.len() == MAPPED && mapped[..LEN] == pattern(LEN));
    assert!(mapped[LEN..].iter().all(|byte| *byte == 0));
    neighbour.send("drop").unwrap();
    drop((copy, device, endpoint));
    check_clean_end(&fake, neighbour).await;
}

#[tokio::test]
async fn parts_out_of_bounds_and_memory_of_another_engine_are_refused() {
    let fake = machine();
    let (endpoint, other) = (open_filled(&fake).await, Endpoint::open(1, short_timeouts()).unwrap());
    let buffer = endpoint.engine.shared_buffer(LEN as u64).unwrap();
    for offset in [1, u64::MAX] {
        let refused = buffer.fill(vec![(endpoint.memory.clone(), offset)]).unwrap_err();
        assert!(matches!(refused, ShareError::OutOfBuffer { .. }), "{refused:?}");
    }
    assert_eq!(buffer.fill(vec![(other.memory.clone(), 0)]), Err(ShareError::ForeignMemory));
    assert_eq!(export_in_place(&endpoint.engine, &other.memory), Err(ShareError::ForeignMemory));
    assert!(!fake.calls().contains_key("cuMemcpyDtoDAsync_v2"));
    drop((buffer, endpoint, other));
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

/// A neighbour may send an invalid description of memory by mistake or on purpose.
#[tokio::test]
async fn invalid_descriptions_from_a_neighbour_are_refused() {
    let fake = machine();
    let mut neighbour = Neighbour::start(0, None);
    let exported = neighbour.export();
    let endpoint = open_filled(&fake).await;
    let refusal_of = |memory: IpcMemory| import(&endpoint.engine, Exported::Ipc(memory)).unwrap_err();

    let other = DeviceUuid::new([7; 16]);
    let refused = refusal_of(IpcMemory { device: other, ..exported });
    assert!(matches!(refused, ShareError::OtherDevice { theirs, .. } if theirs == other), "{refused:?}");
    assert!(refused.to_string().contains("GPU-07070707-0707-0707-0707-070707070707"), "{refused}");
    let mut handle = exported.handle;
    handle[20] ^= 1;
    assert!(matches!(refusal_of(IpcMemory { handle, ..exported }), ShareError::NotOpened { .. }));
    assert!(matches!(refusal_of(IpcMemory { handle: [0; 64], ..exported }), ShareError::NotOpened { .. }));
    // The size of the allocation that holds the neighbour's tensor.
    let bytes = (LEN as u64).next_multiple_of(512);
    for (offset, len) in [(1, bytes), (0, bytes + 1), (u64::MAX, 2), (bytes, 1)] {
        let refused = refusal_of(IpcMemory { offset, len, ..exported });
        assert_eq!(refused, ShareError::OutOfBounds { offset, len, bytes });
    }
    assert_eq!(refusal_of(IpcMemory { len: 0, ..exported }), ShareError::Empty);
    // A handle cannot be opened in the process that exported it.
    let own = export_in_place(&endpoint.engine, &endpoint.memory).unwrap();
    let refused = refusal_of(own).to_string();
    assert!(
        refused.contains("CUDA_ERROR_INVALID_CONTEXT") && !refused.contains("reset the device"),
        "{refused}"
    );

    let buffer = endpoint.engine.shared_buffer(LEN as u64).unwrap();
    let device = device_of(&endpoint);
    let too_long = [(2 << 20) + 1, 1 << 46, u64::MAX];
    let files = too_long.map(|len| FdMemory { len, ..buffer.export().unwrap() });
    let null = FdMemory { device, fd: fs::File::open("/dev/null").unwrap().into(), len: 1 };
    for file in files.into_iter().chain([null]) {
        let (text, refused) =
            (format!("{file:?}"), import(&endpoint.engine, Exported::Fd(file)).unwrap_err());
        assert!(matches!(refused, ShareError::NotMapped { .. }), "{text}: {refused:?}");
    }
    drop(buffer);
    assert!(endpoint.read().await.unwrap() == pattern(LEN), "the engine still works");
    drop(endpoint);
    check_clean_end(&fake, neighbour).await;
}

/// As with `CUDA_VISIBLE_DEVICES`: the neighbour's `cuda:0` is this process's `cuda:1`.
#[tokio::test]
async fn devices_are_matched_by_uuid_and_not_by_number() {
    let fake = machine();
    let mut neighbour = Neighbour::start(1, None);
    let exported = neighbour.export();
    let [first, second] = [0, 1].map(|ordinal| Endpoint::open(ordinal, short_timeouts()).unwrap());
    let refused = import(&first.engine, Exported::Ipc(exported)).unwrap_err();
    assert!(matches!(refused, ShareError::OtherDevice { .. }), "{refused:?}");
    let imported = import(&second.engine, Exported::Ipc(exported)).unwrap();
    assert!(second.with(imported.memory).read().await.unwrap() == pattern(LEN));
    drop((first, second));
    check_clean_end(&fake, neighbour).await;
}

#[tokio::test]
async fn imported_memory_stays_open_when_its_exporter_dies() {
    let fake = machine();
    let mut neighbour = Neighbour::start(0, None);
    let exported = neighbour.export();
    let endpoint = Endpoint::open(0, short_timeouts()).unwrap();
    let Imported { memory, returned } = import(&endpoint.engine, Exported::Ipc(exported)).unwrap();
    neighbour.kill();
    // Imported memory stays open until it is dropped.
    assert!(endpoint.with(memory).read().await.is_ok());
    returned.wait().await;
    assert_eq!(fake.live().shared, 0);
    let refused = import(&endpoint.engine, Exported::Ipc(exported)).unwrap_err();
    assert!(matches!(refused, ShareError::NotOpened { .. }), "{refused:?}");
    drop(endpoint);
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

/// Open files, address space and device memory do not grow over many versions.
#[tokio::test]
async fn exports_and_imports_leak_nothing() {
    let fake = machine();
    let mut neighbour = Neighbour::start(0, None);
    let exported = neighbour.export();
    let endpoint = open_filled(&fake).await;
    let files = || fs::read_dir("/proc/self/fd").unwrap().count();
    let mut before = 0;
    for version in 0..50 {
        let buffer = endpoint.engine.shared_buffer(LEN as u64).unwrap();
        buffer.fill(vec![(endpoint.memory.clone(), 0)]).unwrap();
        for exported in [Exported::Fd(buffer.export().unwrap()), Exported::Ipc(exported)] {
            let memory = import(&endpoint.engine, exported).unwrap().memory;
            assert!(version % 10 > 0 || endpoint.with(memory).read().await.unwrap() == pattern(LEN));
        }
        drop(buffer);
        fake.wait_until("all shared objects are released", |fake| fake.live().shared == 0);
        if version == 0 {
            before = files();
        }
    }
    assert_eq!(files(), before);
    assert_eq!(endpoint.engine.stats().leaked_bytes, 0);
    drop(endpoint);
    check_clean_end(&fake, neighbour).await;
}

#[tokio::test]
async fn copies_that_timed_out_keep_their_memory_until_they_have_ended() {
    let fake = machine();
    let endpoint = open_filled(&fake).await;
    let buffer = endpoint.engine.shared_buffer(LEN as u64).unwrap();
    let gate = fake.hold(0, Direction::DeviceToDevice);
    let late = buffer.fill(vec![(endpoint.memory.clone(), 0)]).unwrap_err();
    assert!(matches!(late, ShareError::CopyTimedOut { .. }), "{late:?}");
    drop(buffer);
    let Endpoint { engine, slots, memory } = endpoint;
    drop((memory, slots));
    thread::sleep(Duration::from_millis(50));
    assert_eq!(
        fake.live().shared,
        2,
        "the buffer's mapping and address range remain, since the copy writes there"
    );
    drop(gate);
    fake.wait_until("all shared objects are released", |fake| fake.live().shared == 0);
    drop(engine);
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn a_failed_device_exports_and_imports_nothing() {
    let fake = machine();
    let endpoint = open_filled(&fake).await;
    let buffer = endpoint.engine.shared_buffer(LEN as u64).unwrap();
    fake.fail_device(0, 700);
    let refused = buffer.fill(vec![(endpoint.memory.clone(), 0)]).unwrap_err();
    assert!(refused.to_string().contains("700"), "{refused}");
    fake.wait_until("the engine declares the device failed", |_| endpoint.engine.failure().is_some());
    let refused = export_in_place(&endpoint.engine, &endpoint.memory).unwrap_err();
    assert!(matches!(refused, ShareError::Engine(CudaError::Driver(_))), "{refused:?}");
    assert!(matches!(endpoint.engine.shared_buffer(1), Err(ShareError::Engine(_))));
    assert!(matches!(
        import(&endpoint.engine, Exported::Fd(buffer.export().unwrap())),
        Err(ShareError::Engine(_))
    ));
    assert_eq!(fake.violations(), [""; 0]);
}
