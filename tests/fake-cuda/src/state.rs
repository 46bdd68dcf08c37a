use std::sync::{
    Condvar, LazyLock, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use crate::{
    call::Calls,
    device::Device,
    faults::Faults,
    host_memory::HostMemory,
    options::{self, Options},
    report::Report,
    virtual_memory::VirtualMemory,
};

/// The state of the driver, guarded by one lock. Streams and calls release the lock only while they copy or fill, run
/// a host function, or wait.
#[derive(Debug)]
pub(crate) struct State {
    /// The generation of the simulated machine, which each reset increments. Streams, copies and waits of an
    /// earlier generation end.
    pub(crate) generation: u64,
    /// Whether this process may use the driver: otherwise `cuInit` finds no device.
    pub(crate) allowed: bool,
    pub(crate) initialized: bool,
    pub(crate) options: Options,
    pub(crate) faults: Faults,
    pub(crate) calls: Calls,
    pub(crate) report: Report,
    pub(crate) devices: Vec<Device>,
    /// The page-locked host memory, which is locked for all devices, as with unified addressing.
    pub(crate) host: HostMemory,
    pub(crate) virtual_memory: VirtualMemory,
    /// The number of copies and fills that run without the lock.
    pub(crate) copying: usize,
}

/// The state, locked.
pub(crate) type Guard = MutexGuard<'static, State>;

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| Mutex::new(State::new()));
static CHANGED: Condvar = Condvar::new();
static GENERATION: AtomicU64 = AtomicU64::new(1);
static SERIAL: AtomicU64 = AtomicU64::new(1);

/// Locks the state. Ignores poisoning: a panic elsewhere has already failed its test.
pub(crate) fn lock() -> Guard {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Releases the lock and waits until the state has changed.
pub(crate) fn wait(state: Guard) -> Guard {
    CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner)
}

/// Wakes all threads in [`wait`]. Every change that a thread may wait for must be followed by this call.
pub(crate) fn changed() {
    CHANGED.notify_all();
}

/// Whether there was no reset since `generation`, so that a copy may continue. Needs no lock.
pub(crate) fn is_current(generation: u64) -> bool {
    GENERATION.load(Ordering::Acquire) == generation
}

impl State {
    fn new() -> Self {
        let options = Options::from_environment();
        Self {
            generation: GENERATION.load(Ordering::Acquire),
            allowed: options::allowed_by_environment(),
            initialized: false,
            faults: options::faults_from_environment(),
            calls: Calls::default(),
            report: Report::from_environment(),
            devices: Device::all(&options),
            host: HostMemory::default(),
            virtual_memory: VirtualMemory::default(),
            copying: 0,
            options,
        }
    }

    /// A new handle, unique among handles of all kinds.
    pub(crate) fn handle(&self) -> u64 {
        (self.generation << 32) | SERIAL.fetch_add(1, Ordering::Relaxed)
    }
}

/// Replaces the simulated machine by a new one with the same options, without faults, counts and violations. The
/// driver stays initialised.
///
/// Earlier handles become invalid. Page-locked host memory stays mapped, because programs may still access it.
pub(crate) fn reset(mut state: Guard) -> Guard {
    state.generation = GENERATION.fetch_add(1, Ordering::AcqRel) + 1;
    state.devices.iter_mut().for_each(Device::abandon_streams);
    changed();
    while state.copying > 0 {
        state = wait(state);
    }
    state.faults = Faults::default();
    state.calls = Calls::default();
    state.report.clear();
    state.devices = Device::all(&state.options);
    state.host = HostMemory::default();
    state.virtual_memory = VirtualMemory::default();
    state
}
