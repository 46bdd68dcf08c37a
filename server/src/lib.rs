//! Serves tensors: publishers put versions into topics, and every subscriber's session sends them out.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use tensor_relay_server::{Config, Identity, Listener, Server, Staged, Topic, Tuning};
//!
//! let identity = Identity::load_or_create("/var/lib/tensor-relay".as_ref())?;
//! let listener = Listener::bind("0.0.0.0:4747".parse()?, &identity, Tuning::default())?;
//! let server = Server::start(listener, Config::default());
//! let mut policy = server.publisher(Topic::new("policy")?)?;
//! let staged = Staged::from_safetensors("policy.safetensors".as_ref(), &server.staging())?;
//! let publication = policy.publish(staged, vec![("step".into(), "1200".into())]).await?;
//! println!("published {}", publication.id());
//! # Ok(()) }
//! ```
//!
//! What a session may cost is in [`Config`]; what it does is in `session` and `subscription`; what is on offer is in
//! `catalogue`, which no session can change.

#![forbid(unsafe_code)]

mod borrowed;
mod catalogue;
mod config;
mod cursor;
mod device;
mod files;
mod held;
mod lend;
mod places;
mod publisher;
mod retention;
mod sends;
mod server;
mod session;
mod staged;
mod stall;
mod subscription;
mod topic;
mod watching;

pub use borrowed::Borrowed;
pub use config::Config;
pub use device::DeviceError;
pub use files::{FileError, FileWatch, LeftOut, LeftOutReason, Look, TensorFiles};
pub use held::Held;
pub use lend::LendError;
pub use publisher::{Publication, PublishError, Publisher, TopicTaken};
pub use retention::Keep;
pub use server::{Server, ServerStats};
pub use staged::{StageError, Staged, Staging};
pub use tensor_relay_device::{BoxFuture, Device, DeviceBuffer, Source, SourceError};
pub use tensor_relay_protocol::{
    ChunkHash, CodecId, Dtype, Epoch, Manifest, Metadata, Shape, TensorName, TensorSpec, Ticket, Topic,
    Version, VersionDigest, VersionId,
    files::{FileKind, epoch_of},
};
pub use tensor_relay_transport::{
    BindError, Fingerprint, Identity, IdentityError, Listener, Tuning,
    egress::{EncoderStats, Stage, StageStats},
};
pub use topic::{TopicOptions, WhenFull};
