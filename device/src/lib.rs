//! Tensor memory: regions, staging slots, copy engines, sources and sinks.
//!
//! A byte travels source → network → sink, through a [`Slot`] where it has to be staged. This crate owns both ends:
//!
//! - [`HostMemory`] hands out large [`Region`]s of host memory within a budget, and reuses them;
//! - [`SlotPool`] hands out [`Slot`]s: staging memory, permission and back-pressure in one value;
//! - a [`CopyEngine`] moves bytes between slots and the memory of one kind of device ([`HostEngine`] is the
//!   reference, against which every other engine is tested; [`cuda`] has the engine of GPUs);
//! - a [`Device`] is an engine of any kind with its slots, and a [`DeviceBuffer`] is memory on it;
//! - a [`Source`] reads the bytes of a payload, a [`Sink`] writes them, wherever they lie: in one region, in many
//!   tensors of the caller's ([`GatherSource`], [`HostSink`]), or on a device;
//! - a [`Spread`] computes where the bytes of a part lie that are many short runs in memory ([`SpreadParts`]);
//! - a [`Memfd`] is memory to share with another process; [`Sealed`] is another process's memory, which can no longer
//!   change;
//! - a [`SharedRange`] is memory of ours that others may read while we reuse it; they open it as a [`SharedView`], and a
//!   [`Lifeline`] tells when they are gone;
//! - a [`Reservation`] keeps part of the container's memory limit free for memory that is not allocated here;
//! - a [`Loan`] reports to the owner of lent bytes that nobody uses them any more; with [`Region::lent_by`] the lender
//!   gets the owner itself back;
//! - a [`Lock`] is a mutex that a panic of its holder does not poison;
//! - [`VolatileBytes`] are bytes of our memory that others may write while this process reads them, and [`ForeignBytes`]
//!   are bytes of others' memory, which may also be freed meanwhile.
//!
//! Ownership enforces the rules. A region is exclusive; a copy in flight owns its slot and holds its tensor memory;
//! memory is returned by dropping the value that holds it. Most of the project's `unsafe` code is here: `mapping` calls
//! the kernel, and `region` makes safe slices of memory; `host_memory` guarantees that a mapping has one owner, `owner`
//! that nobody else touches a caller's memory while it is lent, `sealed` that nobody can change sealed bytes,
//! `shared_view` that lent bytes stay where they are, and `volatile` that no reference points to bytes that others may
//! write; `foreign` lets the kernel read what others may free. In [`cuda`], `symbols`, `driver` and `gpu` call the
//! driver, and `page_locked` guarantees that the memory of its slots is valid. The other modules contain no unsafe
//! code, except that the rest of `cuda` calls the unsafe functions of these; each call says why its arguments are
//! valid.

mod cgroup;
pub mod cuda;
mod descriptors;
mod device;
mod device_parts;
mod engine;
mod engine_sink;
mod engine_source;
mod foreign;
mod gather_source;
mod host;
mod host_memory;
mod host_sink;
mod id;
mod ledger;
mod lifeline;
mod loan;
mod lock;
mod mapping;
mod memfd;
mod on_device;
mod owner;
mod parts;
mod pieces;
mod pool;
mod region;
mod reservation;
mod runs;
mod sealed;
mod shared_range;
mod shared_view;
mod sink;
mod slot;
mod source;
mod spread;
mod spread_parts;
mod volatile;

#[cfg(any(test, feature = "engine-cases"))]
pub mod cases;
#[cfg(test)]
mod test_process;

pub use descriptors::descriptors_are_scarce;
pub use device::{Device, DeviceBuffer};
pub use engine::{Completion, CopyEngine, CopyError, CopySegment, Copying};
pub use engine_sink::EngineSink;
pub use engine_source::EngineSource;
pub use foreign::ForeignBytes;
pub use gather_source::{GatherSource, LentBytes};
pub use host::{HostEngine, HostEngineMemory};
pub use host_memory::{AllocError, CacheLease, Charge, HostMemory, HostMemoryStats};
pub use host_sink::HostSink;
pub use lifeline::{Lifeline, is_lifeline, lender_is_alive};
pub use loan::{Loan, Returned};
pub use lock::Lock;
pub use memfd::{Memfd, SealedFd};
pub use on_device::OnDevice;
pub use owner::GiveBack;
pub use parts::PartsError;
pub use pool::{Capacity, SlotPool};
pub use region::Region;
pub use reservation::{Reservation, container_memory_bytes};
pub use sealed::{Sealed, SealedError};
pub use shared_range::{NotShared, SharedRange};
pub use shared_view::{SharedError, SharedView};
pub use sink::{Sink, SinkError, Target};
pub use slot::Slot;
pub use source::{BoxFuture, HostSource, Source, SourceError};
pub use spread::{Rectangle, Spread, SpreadError};
pub use spread_parts::SpreadParts;
pub use volatile::{HostBytes, VolatileBytes};
