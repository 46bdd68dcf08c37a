//! The transport: lanes that carry tensors over QUIC or over TCP with TLS.
//!
//! This crate owns quinn, rustls and tokio's network. Its interface is small: a [`Listener`] accepts and a
//! [`Connector`] opens [`Lane`]s; a lane has one [control stream](control) and any number of one-way data streams; the
//! [`egress`] puts manifests and chunks into data streams, the [`ingress`] takes them out. Servers and clients are
//! written against these and never name QUIC: what is under a lane is a [`LaneKind`].
//!
//! Nothing here waits for ever: connecting, greeting and writing control messages have deadlines of their own; payload
//! transfers are watched by the session that owns them.

#![forbid(unsafe_code)]

mod client_certificate;
mod connector;
pub mod control;
pub mod egress;
mod identity;
pub mod ingress;
mod kind;
mod lane;
mod listener;
mod network;
mod probe;
mod receive_buffer;
mod stages;
mod tally;
mod tls;
mod tuning;
mod window;
mod workers;

pub use client_certificate::{AuthoritiesError, ClientAuthorities, ClientCertificate};
pub use connector::{ConnectError, Connector};
pub use identity::{Exposure, Fingerprint, FingerprintError, Identity, IdentityError};
pub use kind::{KindReason, LaneKind, Transport, UnknownTransport};
pub use lane::{DataIn, DataOut, HeaderError, Lane, LaneError, LaneStats};
pub use listener::{Arrival, BindError, HANDSHAKES_PER_SECOND, Listener};
pub use network::{
    Batching, ByteStream, Network, Opening, StreamListener, StreamTuning, SystemNetwork,
    lane_threads::{LaneThread, LaneThreads},
};
pub use probe::{ProbeResult, receive_probe, send_probe};
pub use receive_buffer::Progress;
pub use stages::{AtStage, Stage, StageStats, Stages};
pub use tally::{CodecCount, CodecStats, Tally};
pub use tuning::{Congestion, Tuning};
pub use workers::Workers;
