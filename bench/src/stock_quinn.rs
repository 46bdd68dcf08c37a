//! The contender for raw speed over QUIC: bare quinn, with the settings that measured fastest.
//!
//! It only moves bytes from memory to memory: no manifest, no hashes, no versions. The difference to tensor-relay over
//! QUIC is therefore mostly the cost of tensor-relay's own work. Each 4 MiB chunk has a unidirectional stream of its
//! own, opened in order, four at a time; the receiver copies packets directly into memory that was written before.
//! Packets are encrypted with AES-128-GCM, but the certificate is self-signed and not checked: for loopback and test
//! networks only.

mod client;
mod endpoint;
mod server;
mod socket;

use crate::{
    contender::{self, ConnectArgs, Ready, ServeArgs},
    noise,
};
use anyhow::{Context, Result};
use client::Client;

/// Serves clients until the process is killed.
///
/// # Errors
/// When it cannot listen, or when standard output is closed. The error of a connection is printed to standard error.
pub async fn serve(args: ServeArgs) -> Result<()> {
    let endpoint = endpoint::server(args.listen, args.mtu);
    let endpoint = endpoint.with_context(|| format!("cannot listen on {}", args.listen))?;
    let memory = noise::bytes(args.bytes);
    contender::print(&Ready::at(endpoint.local_addr()?.port()))?;
    while let Some(incoming) = endpoint.accept().await {
        if let Err(error) = server::serve(incoming, &memory, |sent| contender::print(&sent)).await {
            eprintln!("A connection ended with an error: {error:#}");
        }
    }
    Ok(())
}

/// Receives small messages, if `args` say so, and then the payload once a round.
///
/// # Errors
/// When the connection cannot be made or breaks, or when standard output is closed.
pub async fn receive(args: ConnectArgs) -> Result<()> {
    let ConnectArgs { connect, receive: args } = args;
    let mut client = Client::connect(connect, args.bytes, args.mtu).await?;
    if args.small > 0 {
        contender::print(&client.receive_small(args.small).await?)?;
    }
    for round in 0..args.rounds {
        contender::print(&client.receive(round).await?)?;
    }
    client.close().await;
    Ok(())
}

/// The number of bytes on one stream. Sizes from 1 to 64 MiB made no difference.
const CHUNK_BYTES: u64 = 4 << 20;

/// The number of concurrent streams. One stream was slower at an MTU of 9000; 16 were no faster.
const CHUNKS_IN_FLIGHT: usize = 4;

/// The requests of a client.
mod request {
    /// Requests the payload.
    pub(super) const ALL: &[u8] = b"all";
    /// Requests a small message that contains the time.
    pub(super) const SMALL: &[u8] = b"small";
    /// The maximum length of a request.
    pub(super) const MAX_BYTES: usize = 5;
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    /// Goal: bare quinn moves the right bytes, at any packet size, of any length. Method: both ends in one process on
    /// loopback, sizes around multiples of a chunk, two rounds, and memory compared.
    #[tokio::test]
    async fn the_sent_bytes_arrive() {
        for mtu in [1472, 8972, 65_000] {
            for bytes in [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 5 * CHUNK_BYTES + 1] {
                transfer(noise::bytes(bytes), mtu).await;
            }
        }
    }

    async fn transfer(memory: Bytes, mtu: u16) {
        let endpoint = endpoint::server("127.0.0.1:0".parse().unwrap(), mtu).unwrap();
        let address = endpoint.local_addr().unwrap();
        let serving = tokio::spawn({
            let memory = memory.clone();
            async move {
                let mut sent = vec![];
                let incoming = endpoint.accept().await.unwrap();
                let report = |line| {
                    sent.push(line);
                    Ok(())
                };
                server::serve(incoming, &memory, report).await.unwrap();
                sent
            }
        });
        let mut client = Client::connect(address, memory.len() as u64, mtu).await.unwrap();
        for round in 0..2 {
            let received = client.receive(round).await.unwrap();
            assert_eq!((received.round, received.bytes), (round, memory.len() as u64));
            assert!(client.memory().eq(memory.iter().copied()), "{} bytes, {mtu}", memory.len());
        }
        client.close().await;
        assert_eq!(serving.await.unwrap().len(), 2, "one line a round");
    }
}
