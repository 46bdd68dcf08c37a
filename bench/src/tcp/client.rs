//! The receiving side of TCP.

use super::{
    Encryption, PIECE_BYTES, request, socket,
    stream::{self, Stream},
};
use crate::{
    contender::{Begun, Received, SmallMessages},
    latency::{self, Latencies},
};
use anyhow::Result;
use std::{
    io::{Read, Write},
    net::SocketAddr,
};

/// A client that receives the same bytes into the same memory, round after round.
pub(super) struct Client {
    stream: Box<dyn Stream>,
    /// Untouched until the first round, whose time includes its page faults, as with tensor-relay.
    memory: Vec<u8>,
}

impl Client {
    /// Connects to the server at `remote`, which holds `bytes` bytes.
    ///
    /// # Errors
    /// When the server does not answer, or the kernel lacks CUBIC.
    pub(super) fn connect(remote: SocketAddr, bytes: u64, encryption: Encryption) -> Result<Self> {
        let memory = vec![0; bytes as usize];
        Ok(Self { stream: stream::client(socket::connect(remote)?, encryption)?, memory })
    }

    /// Requests the payload and receives it into memory.
    ///
    /// # Errors
    /// When the connection breaks.
    pub(super) fn receive(&mut self, round: u32) -> Result<Received> {
        let begun = Begun::now();
        self.send(request::ALL)?;
        for piece in self.memory.chunks_mut(PIECE_BYTES) {
            self.stream.read_exact(piece)?;
        }
        let received = Received::since(begun, round, self.memory.len() as u64);
        self.send(request::RECEIVED)?;
        Ok(received)
    }

    /// Requests small messages, one after the other: those to warm up, then `count` that are counted.
    ///
    /// # Errors
    /// When the connection breaks.
    pub(super) fn receive_small(&mut self, count: u32) -> Result<SmallMessages> {
        let mut latencies = Latencies::new(count);
        let mut message = [0; latency::MESSAGE_BYTES];
        for _ in 0..latency::message_count(count) {
            self.send(request::SMALL)?;
            self.stream.read_exact(&mut message)?;
            latencies.add(&message)?;
        }
        Ok(latencies.summary())
    }

    /// The bytes of the last round.
    #[cfg(test)]
    pub(super) fn memory(&self) -> &[u8] {
        &self.memory
    }

    fn send(&mut self, byte: u8) -> Result<()> {
        self.stream.write_all(&[byte])?;
        Ok(self.stream.flush()?)
    }
}
