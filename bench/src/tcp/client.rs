//! The receiving side.

use super::{Encryption, PIECE_BYTES, socket, stream::Stream, word};
use crate::{
    contender::{Begun, Received, Small},
    latency::{self, Latencies},
};
use anyhow::Result;
use std::{
    io::{Read, Write},
    net::SocketAddr,
};

/// Receives the same bytes into the same memory, round after round.
#[derive(Debug)]
pub(super) struct Client {
    stream: Stream,
    /// Fresh until the first round, which pays for its page faults, as a first version does.
    memory: Vec<u8>,
}

impl Client {
    /// Connects to the server at `remote`, which holds `bytes`.
    ///
    /// # Errors
    /// When nobody answers.
    pub(super) fn connect(remote: SocketAddr, bytes: u64, encryption: Encryption) -> Result<Self> {
        let memory = vec![0; bytes as usize];
        Ok(Self { stream: Stream::client(socket::connect(remote)?, encryption)?, memory })
    }

    /// Asks for everything and waits until it is in place.
    ///
    /// # Errors
    /// When the connection breaks.
    pub(super) fn receive(&mut self, round: u32) -> Result<Received> {
        let begun = Begun::now();
        self.say(word::ALL)?;
        for piece in self.memory.chunks_mut(PIECE_BYTES) {
            self.stream.read_exact(piece)?;
        }
        let received = Received::since(begun, round, self.memory.len() as u64);
        self.say(word::THANKS)?;
        Ok(received)
    }

    /// Asks for small messages, one after the other, until `count` of them count.
    ///
    /// # Errors
    /// When the connection breaks.
    pub(super) fn receive_small(&mut self, count: u32) -> Result<Small> {
        let mut latencies = Latencies::new(count);
        let mut message = [0; latency::MESSAGE_BYTES];
        for _ in 0..latency::messages(count) {
            self.say(word::SMALL)?;
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

    fn say(&mut self, word: u8) -> Result<()> {
        self.stream.write_all(&[word])?;
        Ok(self.stream.flush()?)
    }
}
