//! The CUDA copy engine: GPU memory through page-locked slots.
//!
//! It builds without CUDA, and programs that contain it start on machines without CUDA: [`probe()`] finds the driver,
//! or returns an error that says what is missing. Functions that need the driver call `probe` themselves.
//!
//! Lending a tensor that kernels may still be writing, without a copy and without waiting:
//!
//! ```no_run
//! use std::{any::Any, sync::Arc};
//! use tensor_relay_device::{Capacity, Device, DeviceBuffer, cuda::{CudaEngine, CudaOptions, StreamHandle}};
//!
//! /// A tensor, for example of PyTorch: its address, and the object that keeps its memory.
//! struct Tensor {
//!     address: u64,
//!     len: usize,
//!     keeper: Box<dyn Any + Send + Sync>,
//! }
//!
//! fn lend(engine: &CudaEngine, device: &Device, tensor: Tensor) -> Result<DeviceBuffer, Box<dyn std::error::Error>> {
//!     let written = engine.fence(StreamHandle::LEGACY)?;
//!     // SAFETY: the keeper keeps the memory. The work that writes it is before the fence, and nobody writes it again
//!     // before the buffer is returned.
//!     let memory = unsafe { engine.lend(tensor.address, tensor.len, tensor.keeper, Some(written)) };
//!     Ok(device.wrap::<CudaEngine>(memory).ok_or("the device has an engine of another kind")?)
//! }
//!
//! let engine = CudaEngine::open(0, CudaOptions::default())?;
//! let device = Device::new(Arc::clone(&engine), Capacity { slots: 16, slot_bytes: 4 << 20 })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Three layers, from the inside: `symbols` holds the driver's functions, found by name; `driver` wraps each in a
//! function that returns a `Result`; `gpu` owns a context with its streams and events, on the one thread that uses
//! them. Around them, `thread` executes commands from its `inbox`, with `copies`, `fences`, `shares` and `holdings`.
//! Pure decisions are separate, so that they can be tested: `flight` decides when to poll copies, `route` how
//! the bytes of a copy travel, and `memory_cache` accounts for device memory.
//!
//! The modules around `inbox` depend on each other: its commands carry memory, fences and page-locked memory, whose
//! handles send commands when they are dropped, and `gpu`'s completion callbacks send commands too.
//!
//! Ownership prevents memory from being freed under a copy. A copy in flight owns its slot and holds its memory. They
//! are released only when the device reports the end of the copy. If the engine's thread drops its record of the copy
//! before that, as in a panic, both are leaked. After a device failure, the memory of its unfinished copies is leaked
//! and counted.

mod copies;
mod device_uuid;
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
mod memory_cache;
mod memory_owner;
mod nvml;
mod opened;
mod options;
mod page_locked;
mod probe;
mod route;
mod setting;
pub mod share;
mod shares;
mod stats;
mod stream;
mod survey;
mod symbols;
mod thread;
mod version;
mod virtual_memory;
mod waiters;

pub use devices::{DeviceInfo, DeviceMemory, device_memory, devices};
pub use driver::Driver;
pub use engine::CudaEngine;
pub use error::{CudaError, DriverError};
pub use fence::Fence;
pub use memory::CudaMemory;
pub use options::{CudaOptions, HANG_FACTOR};
pub use probe::probe;
pub use stats::CudaStats;
pub use stream::StreamHandle;
pub use survey::{DeviceProcess, Survey, SurveyedGpu, survey};
pub use thread::all_closed;
pub use version::Version;
