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

/// All that the driver knows. One lock guards it; streams, waits and calls hold it, and give it up only while they copy,
/// run a host function, or wait.
#[derive(Debug)]
pub(crate) struct State {
    /// Counts resets. What belongs to an earlier generation is left alone.
    pub(crate) generation: u64,
    /// Whether this process may use the driver at all.
    pub(crate) allowed: bool,
    pub(crate) initialized: bool,
    pub(crate) options: Options,
    pub(crate) faults: Faults,
    pub(crate) calls: Calls,
    pub(crate) report: Report,
    pub(crate) devices: Vec<Device>,
    /// Host memory is page-locked for all devices at once, as it is with unified addresses.
    pub(crate) host: HostMemory,
    pub(crate) virtual_memory: VirtualMemory,
    /// Copies that are under way without the lock.
    pub(crate) copying: usize,
}

/// The state, locked.
pub(crate) type Guard = MutexGuard<'static, State>;

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| Mutex::new(State::new()));
static CHANGED: Condvar = Condvar::new();
static GENERATION: AtomicU64 = AtomicU64::new(1);
static SERIAL: AtomicU64 = AtomicU64::new(1);

/// Locks the state. A panic elsewhere spoils the test, not what others see of it.
pub(crate) fn lock() -> Guard {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives the lock up until something has changed.
pub(crate) fn wait(state: Guard) -> Guard {
    CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner)
}

/// Wakes all who wait, because something may have become possible.
pub(crate) fn changed() {
    CHANGED.notify_all();
}

/// Whether a copy that began in `generation` is still wanted. Needs no lock.
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

    /// A handle that never was before, whatever it is for.
    pub(crate) fn handle(&self) -> u64 {
        (self.generation << 32) | SERIAL.fetch_add(1, Ordering::Relaxed)
    }
}

/// Makes a new machine by the same options, without faults, counts and violations. It stays initialised, as processes do.
///
/// Handles of before are refused. Host memory that somebody had page-locked stays mapped, because he may still have it.
pub(crate) fn reset(mut state: Guard) -> Guard {
    state.generation = GENERATION.fetch_add(1, Ordering::AcqRel) + 1;
    state.devices.iter_mut().for_each(Device::abandon_streams);
    changed();
    while state.copying > 0 {
        state = wait(state);
    }
    state.faults = Faults::default();
    state.calls = Calls::default();
    state.report.forget();
    state.devices = Device::all(&state.options);
    state.host = HostMemory::default();
    state.virtual_memory = VirtualMemory::default();
    state
}
