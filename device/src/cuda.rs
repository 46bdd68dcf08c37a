//! The CUDA copy engine: GPU memory through page-locked slots.
//!
//! It is built without CUDA and runs where there is none: [`probe`] finds the driver, or says what is missing. Nothing
//! else here is reached without a driver that the probe found.
//!
//! Three circles, from the inside: `symbols` are the driver's functions, found by name; `driver` makes a `Result` of each;
//! `gpu` owns a context with its streams and events, on the one thread that uses them. What calls no driver knows no
//! `unsafe` but the promise of page-locked memory: `flight` decides when to ask after copies, `shelf` keeps the books of
//! device memory, and `copies`, `fences` and `holdings` do what the thread is told.
//!
//! What keeps memory from being freed under a copy is ownership. A copy in flight owns its slot and holds its memory, and
//! dropping it, in a panic even, keeps both for good; only a copy that the device said has ended lets go of them. Where a
//! device fails, so that nothing can be told of it any more, what its copies used is kept, and counted.

mod copies;
mod devices;
mod driver;
mod engine;
mod error;
mod fence;
mod fences;
mod flight;
mod gpu;
mod holdings;
mod inbox;
mod locality;
#[cfg(feature = "measure")]
pub mod measure;
mod memory;
mod options;
mod page_locked;
mod probe;
mod shelf;
mod stats;
mod symbols;
mod thread;
mod version;
mod waiters;

pub use devices::{DeviceInfo, DeviceMemory, device_memory, devices};
pub use driver::Driver;
pub use engine::CudaEngine;
pub use error::{CudaError, DriverError};
pub use fence::{Fence, StreamHandle};
pub use memory::CudaMemory;
pub use options::{CudaOptions, HANG_FACTOR};
pub use probe::probe;
pub use stats::CudaStats;
pub use thread::all_closed;
pub use version::Version;
