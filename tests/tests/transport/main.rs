//! Lanes of every kind, held to one list of promises; and what only byte streams can suffer.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod cases;
mod faults;
mod faulty;
mod handshakes;
mod hostile;
mod race;
mod sessions;
mod stage;
