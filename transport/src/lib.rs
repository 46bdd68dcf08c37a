//! Network transport: [`Lane`]s, connections that carry tensors over QUIC, over TCP with TLS, or over a Unix socket.
//!
//! This crate owns quinn, rustls and tokio's sockets. A [`Listener`] accepts lanes and a [`Connector`] opens them. A
//! lane has one [control stream](control) and any number of one-way data streams; the [`egress`] writes manifests and
//! chunks to data streams, the [`ingress`] reads them; [`sending`] sends the versions of a subscription. [`LaneKind`] identifies a lane's transport.
//!
//! [`Tuning`] has the deadlines for connecting, for the exchange of `Hello` and `Welcome`, and for writing control
//! messages. The progress of a payload transfer is monitored by the session that owns it.

#![forbid(unsafe_code)]

mod abort_on_drop;
mod chunk_times;
mod client_certificate;
mod connector;
pub mod control;
pub mod egress;
mod folder_lock;
pub mod forwarding;
mod identity;
mod in_use;
pub mod ingress;
mod kind;
mod lane;
mod listener;
mod network;
mod peer;
mod probe;
mod receive_buffer;
mod runs;
pub mod sending;
mod stages;
mod stops;
mod tally;
mod tls;
mod tuning;
pub mod unix;
mod window;
mod workers;

pub use abort_on_drop::AbortOnDrop;
pub use chunk_times::{ChunkTimeStats, ChunkTimes};
pub use client_certificate::{AuthoritiesError, ClientAuthorities, ClientCertificate};
pub use connector::{ConnectError, Connector, UnexpectedUser};
pub use folder_lock::lock_folder;
pub use identity::{Exposure, Fingerprint, FingerprintError, Identity, IdentityError};
pub use in_use::InUse;
pub use kind::{LaneKind, LaneKindReason, Transport, UnknownTransport, Way};
pub use lane::{DataIn, DataOut, HeaderError, Lane, LaneError, LaneStats};
pub use listener::{Arrival, BindError, HANDSHAKES_PER_SECOND, Listener};
pub use network::{
    Batching, ByteStream, Network, Opening, StreamListener, StreamTuning, SystemNetwork,
    lane_threads::{LaneThread, LaneThreads},
};
pub use peer::{LocalProcess, Peer};
pub use probe::{ProbeResult, receive_probe, send_probe};
pub use receive_buffer::Progress;
pub use runs::Runs;
pub use stages::{AtStage, Stage, StageStats, Stages};
pub use tally::{CodecCount, CodecStats, Tally};
pub use tuning::{Congestion, Tuning};
pub use workers::{IN_PLACE_BYTES, Workers};
