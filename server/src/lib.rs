//! A tensor server: publishers put versions into topics, and each subscriber's session sends them.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use tensor_relay_server::{AccessStore, Config, Identity, Listener, Server, TensorFiles, Topic, Tuning};
//!
//! let state_dir = "/var/lib/tensor-relay".as_ref();
//! let (identity, access) = (Identity::load_or_create(state_dir)?, AccessStore::open(state_dir)?.watch_changes()?);
//! let listener = Listener::bind("0.0.0.0:4747".parse()?, &identity, Tuning::default())?;
//! let server = Server::start(listener, access, Config::default());
//! let mut policy = server.publisher(Topic::new("policy")?)?;
//! let staged = TensorFiles::open("policy.safetensors".as_ref())?.stage(&server.staging())?;
//! let publication = policy.publish(staged, vec![("step".into(), "1200".into())]).await?;
//! println!("published {}", publication.id());
//! # Ok(()) }
//! ```
//!
//! Tensors on a [`Device`] are copied out of it when they are published ([`Staged::from_device`]), or when they are
//! sent ([`Borrowed::from_device`]): then each chunk is read once for all subscribers that need it at about the same
//! time, and the producer may write again when the publication is released. [`Staged::onto`] moves a staged version
//! onto a device, from which it is sent.
//!
//! ```
//! # async fn example(server: tensor_relay_server::Server) -> Result<(), Box<dyn std::error::Error>> {
//! use std::{sync::Arc, time::Duration};
//! use tensor_relay_device::{Capacity, HostEngine, HostMemory};
//! use tensor_relay_server::{Borrowed, Device, Dtype, Shape, TensorName, TensorSpec, Topic};
//!
//! // The only line that names the kind of device.
//! let engine = Arc::new(HostEngine::new(HostMemory::new(1 << 30))?);
//! let device = Device::new(engine, Capacity { slots: 64, slot_bytes: 4 << 20 })?;
//! let spec = TensorSpec::new(TensorName::new("weights")?, Dtype::Bf16, Shape::new(&[1024, 1024])?);
//! let weights = device.allocate(2 << 20)?;
//!
//! let mut policy = server.publisher(Topic::new("policy")?)?;
//! let lent = Borrowed::from_device(&server.staging(), vec![(spec, weights)], vec![])?;
//! let publication = policy.publish(lent, vec![]).await?;
//! publication.withdraw(); // Or publish the next version.
//! if publication.released(Duration::from_secs(15)).await {
//!     // Nothing reads the weights any more: they may be written again.
//! }
//! # Ok(()) }
//! ```
//!
//! [`Config`] bounds the cost of a session. The modules `session` and `subscription_host` serve each client from the
//! topics in `catalogue`.

#![forbid(unsafe_code)]

mod access;
mod address;
mod base_terms;
mod bases;
mod borrowed;
mod bounds;
mod catalogue;
mod client_base;
mod config;
mod consumers;
mod counters;
mod device;
mod failures;
mod files;
mod forwarder;
mod forwarding;
mod gauge;
mod handshakes;
mod hashing;
mod inboxes;
mod joinable;
mod joining;
mod layouts;
mod lend;
mod loads;
mod logins;
mod offer;
mod places;
mod probing;
mod publishable;
mod publisher;
mod refusals;
mod relaying;
mod retained;
mod retention;
mod server;
mod session;
mod shared;
mod shares;
pub mod sidecar;
mod splits;
mod staged;
mod status;
mod status_reader;
mod subscribers;
mod subscription_host;
mod swarm;
mod takers;
mod taking;
mod topic;
mod traffic;
mod watching;

pub use access::{
    Access, AccessStore, AccessStoreError, Acl, AclError, Credentials, Decision, Denied, IssuedTicket,
    LocalUser, Principal, Rules, Standing, seconds_now,
};
pub use address::{AddressError, Advertised, reachable};
pub use bases::BaseStats;
pub use borrowed::Borrowed;
pub use bounds::{Amount, Bound, ContainerTooSmall};
pub use config::Config;
pub use device::DeviceError;
pub use failures::{FailedAt, FailureCount};
pub use files::{
    FileError, FileWatch, FolderRules, Observation, PackedCache, SealFileError, SkipReason, SkippedEntry,
    TensorFiles,
};
pub use forwarder::{ForwardError, Forwarder};
pub use forwarding::ForwardOptions;
pub use lend::LendError;
pub use logins::{Login, Logins};
pub use publishable::Publishable;
pub use publisher::{Publication, PublishError, Publisher, TopicTaken};
pub use relaying::{Relay, RelayOptions, RestoredVersion};
pub use retention::Keep;
pub use server::{Server, ServerStats};
pub use shares::{Eviction, Place};
pub use splits::{ParseSplitError, Split, SplitError, Splits};
pub use staged::{StageError, Staged, Staging};
pub use status::{LaneStatus, Limit, ServerStatus, SubscriberStatus, TopicStatus, TransferStatus};
pub use status_reader::StatusReader;
pub use swarm::{MemberStatus, PeerDialling, PeerNetwork, PeerNetworkError, SwarmStatus};
pub use tensor_relay_device::{BoxFuture, Device, DeviceBuffer, Source, SourceError};
pub use tensor_relay_protocol::{
    ChunkHash, Claims, CodecChoice, CodecId, Dtype, Epoch, Glob, GlobError, Grant, GrantError, Limits,
    Manifest, Metadata, PAYLOAD_ALIGNMENT, RelayId, RelayPath, Shape, TensorName, TensorSpec, Ticket,
    TicketId, Token, Topic, Verb, Verbs, Version, VersionDigest, VersionId,
    engine_cache::{CacheError, CacheName, EngineCache, Facts},
    files::{FileKind, MISSED_GENERATIONS_KEY, RESERVED_PREFIX, epoch_of, is_reserved},
};
pub use tensor_relay_transport::egress::READ_TIMEOUT;
pub use tensor_relay_transport::{
    BindError, ChunkTimeStats, CodecCount, CodecStats, Exposure, Fingerprint, Identity, IdentityError,
    LaneKind, LaneStats, Listener, LocalProcess, Peer, Stage, StageStats, Transport, Tuning,
    egress::EncoderStats,
    unix::{SocketError, SocketListener, overflow_uid},
};
pub use topic::{TopicOptions, WhenFull};
pub use traffic::TrafficStats;
