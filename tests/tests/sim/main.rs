//! Complete servers and clients on a simulated network: the promises to users, under faults that are derived from
//! seeds.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod access;
mod afresh;
mod bases;
mod buffers;
mod codecs;
mod connecting;
mod contract;
mod deltas;
mod device_landing;
mod device_serving;
mod ends;
mod every;
mod faults;
mod files;
mod lanes;
mod lives;
mod resume;
mod snapshots;
mod stalls;
mod topics;
mod watching;
