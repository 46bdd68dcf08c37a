//! Peers that violate the protocol: the other side reports the error, survives, and delivers no partial tensor.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]
#![expect(clippy::disallowed_methods, reason = "a test sends few messages")]

mod access;
mod access_matrix;
mod bases;
mod clients;
mod features;
mod forged;
mod get;
mod holders;
mod lanes;
mod loaded;
mod members;
mod raw;
mod resumed;
mod script;
mod server_lanes;
mod servers;
mod shares;
mod sources;
mod takers;
