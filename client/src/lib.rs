//! Receives tensors: connect with a ticket, subscribe to a topic, receive complete, verified snapshots.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use tensor_relay_client::{Client, Config, Ticket};
//!
//! let ticket: Ticket = std::fs::read_to_string("policy.ticket")?.parse()?;
//! let client = Client::connect(&ticket, Config::default()).await?;
//! let mut policy = client.subscribe(ticket.topic().ok_or("the ticket names no topic")?).await?;
//! loop {
//!     let snapshot = policy.next().await?;
//!     for (tensor, bytes) in snapshot.tensors() {
//!         println!("{} {} {}: {} bytes", tensor.name, tensor.dtype, tensor.shape, bytes.len());
//!     }
//! }
//! # }
//! ```
//!
//! A snapshot is delivered only when every chunk is verified, and all chunks together match the server's digest. Its
//! memory is reused for a later version once the last reference to it is dropped.
//!
//! With a [device](Config::device) of any kind, versions are received into its memory:
//!
//! ```no_run
//! # async fn example(ticket: tensor_relay_client::Ticket) -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//! use tensor_relay_client::{Client, Config};
//! use tensor_relay_device::{Capacity, Device, HostEngine, HostMemory};
//!
//! // The engine determines the kind of device: here, host memory that behaves like a device.
//! let engine = Arc::new(HostEngine::new(HostMemory::new(1 << 30))?);
//! let device = Device::new(engine, Capacity { slots: 16, slot_bytes: 4 << 20 })?;
//! let client = Client::connect(&ticket, Config { device: Some(device), ..Config::default() }).await?;
//! let mut policy = client.subscribe(ticket.topic().ok_or("the ticket names no topic")?).await?;
//! let snapshot = policy.next().await?;
//! for (tensor, place) in snapshot.device_tensors() {
//!     println!("{} is in bytes {:?} of {:?}", tensor.name, place.range(), place.buffer());
//! }
//! let weights = snapshot.to_host().await?; // A copy to inspect or save.
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod backoff;
mod base;
mod buffers;
mod client;
mod command;
mod config;
mod connection;
mod destination;
mod device_snapshot;
mod engine_cache;
mod error;
mod files;
mod fill;
mod gpu_memory;
mod held;
mod holding;
mod load_report;
mod membership;
mod mirror;
mod other_servers;
mod peers;
mod probing;
mod progress;
mod rate;
mod reception;
mod reconnector;
mod recovery;
mod request;
mod save;
mod server_memory;
mod session;
mod snapshot;
mod snapshot_queue;
mod source_progress;
mod source_table;
mod status;
mod subscription;
mod temporary;
mod transport_trial;
mod watches;
mod whole_file;

pub use buffers::{BufferError, Buffers, NameMatch};
pub use client::{Client, MemoryStats};
pub use config::{Config, LANES_MAX, Lanes, Relaying};
pub use device_snapshot::{DeviceError, DeviceTensor};
pub use engine_cache::{UnpackError, Unpacked, unpack_engine_cache};
pub use error::{ClientError, GetError, SubscriptionError};
pub use files::{FilePart, FilePlan, FileSet, FilesError};
pub use fill::{FillCause, FillError, Filled};
pub use load_report::LoadReport;
pub use membership::Membership;
pub use mirror::Mirror;
pub use peers::{PeerReport, PeerState};
pub use progress::Progress;
pub use request::Request;
pub use save::SaveError;
pub use server_memory::Sharing;
pub use snapshot::{Receipt, ReceiptSources, Snapshot};
pub use status::{ClientStatus, StatusReader};
pub use subscription::Subscription;
pub use tensor_relay_protocol::Transport as PeerTransport;
pub use tensor_relay_protocol::{
    AbortReason, BOXES_MAX, Bounds, BoxError, CloseCode, CodecId, CodecSet, Dtype, EndReason, Epoch,
    GLOBS_MAX, Gap, Glob, GlobError, Indices, InstanceId, Manifest, Metadata, Mode, NotLent, PathError,
    PeerAddress, ProbeBytes, ProbeReport, ReaderName, RelayId, RelayPath, SELECTION_MAX_BYTES, Selection,
    Shape, Shard, Site, Slice, Start, Tensor, TensorBox, TensorName, Ticket, TicketError, Topic, TopicEntry,
    Version, VersionId,
    engine_cache::{CacheError, CacheName, Difference, EngineCache, Facts},
};
pub use tensor_relay_transport::{
    CodecCount, CodecStats, ConnectError, Connector, Fingerprint, Identity, IdentityError, LaneError,
    LaneKind, LaneKindReason, LaneStats, Peer, ProbeResult, Stage, StageStats, Transport, Tuning,
};
pub use watches::TopicWatch;
pub use whole_file::{check_replaceable, replace_file};
