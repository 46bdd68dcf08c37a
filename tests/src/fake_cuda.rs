//! Loads and controls the fake CUDA driver `tests/fake-cuda`, for machines without a GPU.
//!
//! A test must [`load`] the driver before any code loads CUDA: later loads of `libcuda.so` then return the fake one.
//! All tests of a process share the driver, so tests that change it run one at a time ([`FakeCuda::exclusive`]) and
//! have a test binary of their own. Programs that a test starts get the driver from [`Installed`].

use std::{
    collections::BTreeMap,
    env, fmt,
    path::PathBuf,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

mod control;
mod installed;
mod symbols;

use control::Control;
pub use installed::{Installed, Library, Report};
pub use symbols::SYMBOLS;

/// The time after which [`FakeCuda::wait_until`] fails.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The fake driver of this process.
#[derive(Debug)]
pub struct FakeCuda {
    control: Control,
    turn: Mutex<()>,
}

/// Loads the fake driver into this process and enables it.
///
/// # Panics
///
/// If the library is not built.
pub fn load() -> &'static FakeCuda {
    static LOADED: OnceLock<FakeCuda> = OnceLock::new();
    LOADED.get_or_init(|| {
        let fake = FakeCuda { control: Control::load(&library()), turn: Mutex::new(()) };
        fake.send("allow");
        fake
    })
}

/// The path of the library: next to this test's executable, or one folder above, where cargo puts programs.
///
/// # Panics
///
/// If the library is not built.
pub fn library() -> PathBuf {
    built_library("libfake_cuda.so")
}

/// The path of the library `file` that cargo built with the tests.
pub(crate) fn built_library(file: &str) -> PathBuf {
    let executable = env::current_exe().expect("a test knows its executable");
    let mut candidates = executable.ancestors().skip(1).take(2).map(|folder| folder.join(file));
    candidates.find(|path| path.exists()).unwrap_or_else(|| {
        panic!("There is no {file} near {}. Build it: cargo build --workspace.", executable.display())
    })
}

/// A fault to inject into a driver call or into the work of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// A function name, `*` for any function, or for work of a stream `@htod`, `@dtoh`, `@dtod`, `@memset`, `@host`,
    /// `@free`.
    pub what: String,
    /// The number of the affected occurrence: 1 is the first from now on.
    pub nth: u64,
    /// The effect on that occurrence.
    pub effect: Effect,
    /// Whether all later occurrences are affected too.
    pub is_permanent: bool,
}

/// The effect of a [`Fault`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// A call returns this code without doing anything. Work of a stream fails halfway and corrupts its context.
    Fail(u32),
    /// Blocks until [`FakeCuda::release`].
    Hang,
}

impl Fault {
    /// Affects only the `nth` occurrence from now on.
    pub fn once(what: &str, nth: u64, effect: Effect) -> Self {
        Self { what: what.to_owned(), nth, effect, is_permanent: false }
    }

    /// Affects the `nth` occurrence and all later ones.
    pub fn from(what: &str, nth: u64, effect: Effect) -> Self {
        Self { is_permanent: true, ..Self::once(what, nth, effect) }
    }
}

/// Formats the fault in the syntax of the driver and of `FAKE_CUDA_FAULTS`.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:", self.what, self.nth)?;
        match self.effect {
            Effect::Fail(code) => write!(f, "{code}"),
            Effect::Hang => f.write_str("hang"),
        }?;
        f.write_str(if self.is_permanent { ":on" } else { "" })
    }
}

/// One of the copy engines of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The engine that reads host memory.
    HostToDevice,
    /// The engine that writes host memory.
    DeviceToHost,
    /// The engine that copies within the device.
    DeviceToDevice,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HostToDevice => "@htod",
            Self::DeviceToHost => "@dtoh",
            Self::DeviceToDevice => "@dtod",
        })
    }
}

/// The pending and completed work of a copy engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Engine {
    /// Requested copies that have not begun.
    pub waiting: u64,
    /// Requested copies that have not ended: the waiting ones and the running one.
    pub in_flight: u64,
    /// Copies that succeeded.
    pub ended: u64,
    /// The bytes of copies that succeeded.
    pub ended_bytes: u64,
}

/// The numbers of driver objects that a program owns. All are zero once the program has cleaned up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Blocks of device memory.
    pub device_blocks: u64,
    /// The used bytes of device memory.
    pub device_bytes: u64,
    /// Objects that can be shared between processes: open handles of CUDA IPC; physical memory, mappings, reserved
    /// addresses.
    pub shared: u64,
    /// Blocks of page-locked memory.
    pub host_blocks: u64,
    /// The bytes of page-locked memory.
    pub host_bytes: u64,
    /// Streams that the program created.
    pub streams: u64,
    /// Events.
    pub events: u64,
    /// Retained contexts.
    pub contexts: u64,
    /// Copies in flight.
    pub in_flight: u64,
    /// Objects that still existed when their context was destroyed.
    pub reclaimed: u64,
}

impl FakeCuda {
    /// Resets the driver to a new machine, with one device and no faults, counts or objects, for exclusive use. Other
    /// tests wait until the result is dropped.
    pub fn exclusive(&'static self) -> Turn {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.send("option devices 1");
        self.send(&format!("option memory_bytes {}", 1_u64 << 30));
        self.send("option first_device 0");
        self.set_shareable(true, true);
        self.set_gbps(0.0, 0.0);
        self.reset();
        Turn { fake: self, _turn: turn }
    }

    /// Replaces the machine by a new one. Earlier contexts, streams and memory become invalid.
    pub fn reset(&self) {
        self.send("reset");
    }

    /// Replaces the machine by a new one with `devices` devices of `memory_bytes` each.
    pub fn reset_with(&self, devices: usize, memory_bytes: usize) {
        self.send(&format!("option devices {devices}"));
        self.send(&format!("option memory_bytes {memory_bytes}"));
        self.reset();
    }

    /// Sets the rate of copies to and from devices, in 10⁹ bytes per second. 0 is unlimited.
    pub fn set_gbps(&self, to_device: f64, to_host: f64) {
        self.send(&format!("option h2d_gbps {to_device}"));
        self.send(&format!("option d2h_gbps {to_host}"));
    }

    /// Sets the machine-wide number of the first visible device, as `CUDA_VISIBLE_DEVICES` does.
    pub fn set_first_device(&self, number: usize) {
        self.send(&format!("option first_device {number}"));
    }

    /// Sets whether plain allocations can be exported by CUDA IPC, and whether buffers can be shared as file
    /// descriptors.
    pub fn set_shareable(&self, in_place: bool, as_descriptors: bool) {
        self.send(&format!("option exportable {}", u8::from(in_place)));
        self.send(&format!("option shareable_fds {}", u8::from(as_descriptors)));
    }

    /// Adds a fault.
    pub fn fault(&self, fault: &Fault) {
        self.send(&format!("fault {fault}"));
    }

    /// Removes all faults. Calls and work that already hang stay blocked.
    pub fn clear_faults(&self) {
        self.send("clear-faults");
    }

    /// Unblocks all hanging calls and work.
    pub fn release(&self) {
        self.send("release");
    }

    /// Corrupts the context of a device, like an asynchronous error anywhere in the process.
    pub fn fail_device(&self, device: usize, code: u32) {
        self.send(&format!("fail {device} {code}"));
    }

    /// Destroys the context of a device, like `cudaDeviceReset` anywhere in the process.
    pub fn destroy_context(&self, device: usize) {
        self.send(&format!("destroy-context {device}"));
    }

    /// Holds the copies of one engine that have not begun, until the gate is dropped.
    pub fn hold(&'static self, device: usize, direction: Direction) -> Gate {
        self.send(&format!("hold {device} {direction}"));
        Gate { fake: self, device, direction }
    }

    /// The state of one copy engine.
    pub fn engine(&self, device: usize, direction: Direction) -> Engine {
        let answer = self.send(&format!("engine {device} {direction}"));
        let numbers = Numbers::read(&answer, ' ');
        Engine {
            waiting: numbers.get("waiting"),
            in_flight: numbers.get("in_flight"),
            ended: numbers.get("ended"),
            ended_bytes: numbers.get("ended_bytes"),
        }
    }

    /// The objects that exist now.
    pub fn live(&self) -> Live {
        Live::read(&self.send("live"))
    }

    /// The illegal uses of the driver since the last reset.
    pub fn violations(&self) -> Vec<String> {
        self.send("violations").lines().map(str::to_owned).collect()
    }

    /// The number of calls of each function since the last reset, by the name of the function.
    pub fn calls(&self) -> BTreeMap<String, u64> {
        Numbers::read(&self.send("calls"), '\n').0
    }

    /// The number of calls by each thread, by the name of the thread.
    pub fn threads(&self) -> BTreeMap<String, u64> {
        Numbers::read(&self.send("threads"), '\n').0
    }

    /// Polls until `condition` returns true. `description` says what is waited for.
    ///
    /// # Panics
    ///
    /// After ten seconds.
    pub fn wait_until(&self, description: &str, condition: impl Fn(&Self) -> bool) {
        let begun = Instant::now();
        while !condition(self) {
            assert!(begun.elapsed() < TIMEOUT, "waited {TIMEOUT:?} in vain until {description}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn send(&self, command: &str) -> String {
        self.control.send(command)
    }
}

/// One test's exclusive use of the driver of its process.
#[derive(Debug)]
pub struct Turn {
    fake: &'static FakeCuda,
    _turn: MutexGuard<'static, ()>,
}

impl std::ops::Deref for Turn {
    type Target = &'static FakeCuda;

    fn deref(&self) -> &Self::Target {
        &self.fake
    }
}

/// Removes all faults and unblocks hanging calls and work, so that the next test is not affected.
impl Drop for Turn {
    fn drop(&mut self) {
        self.fake.clear_faults();
        self.fake.release();
    }
}

/// A held copy engine. Dropping this releases all copies.
#[derive(Debug)]
pub struct Gate {
    fake: &'static FakeCuda,
    device: usize,
    direction: Direction,
}

impl Gate {
    /// Lets `count` more copies begin.
    pub fn pass(&self, count: u64) {
        self.fake.send(&format!("pass {} {} {count}", self.device, self.direction));
    }

    /// Waits until at least `count` copies wait at the gate.
    pub fn until_waiting(&self, count: u64) {
        self.fake
            .wait_until(&format!("{count} copies wait for {}", self.direction), |fake| {
                fake.engine(self.device, self.direction).waiting >= count
            });
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // A reset may have removed the device and its gate.
        drop(self.fake.control.try_send(&format!("open {} {}", self.device, self.direction)));
    }
}

impl Live {
    fn read(text: &str) -> Self {
        let numbers = Numbers::read(text, ' ');
        Self {
            device_blocks: numbers.get("device_blocks"),
            device_bytes: numbers.get("device_bytes"),
            shared: numbers.get("shared"),
            host_blocks: numbers.get("host_blocks"),
            host_bytes: numbers.get("host_bytes"),
            streams: numbers.get("streams"),
            events: numbers.get("events"),
            contexts: numbers.get("contexts"),
            in_flight: numbers.get("in_flight"),
            reclaimed: numbers.get("reclaimed"),
        }
    }
}

/// Numbers by name, parsed from a list of `name=number` pairs.
struct Numbers(BTreeMap<String, u64>);

impl Numbers {
    fn read(text: &str, separator: char) -> Self {
        let pairs = text.split(separator).filter(|pair| !pair.is_empty());
        Self(pairs.map(Self::pair).collect())
    }

    fn pair(text: &str) -> (String, u64) {
        let (name, number) = text.rsplit_once('=').expect("the fake driver writes pairs");
        (name.to_owned(), number.parse().expect("the fake driver writes numbers"))
    }

    fn get(&self, name: &str) -> u64 {
        *self.0.get(name).unwrap_or_else(|| panic!("the fake driver reports no {name}"))
    }
}
