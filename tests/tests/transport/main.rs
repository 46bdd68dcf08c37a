//! Tests of lanes: cases that each kind of lane must pass, and faults and protocol violations of byte streams.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod cases;
mod faults;
mod faulty_network;
mod fixture;
mod handshakes;
mod hostile;
mod race;
mod sessions;
mod unix;
