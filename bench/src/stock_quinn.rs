//! The contender for raw speed over QUIC: bare quinn, with the settings that measured fastest.
//!
//! It only moves bytes from memory to memory: no manifest, no hashes, no versions. The difference to tensor-relay over
//! QUIC is therefore mostly the cost of tensor-relay's own work. Each 4 MiB chunk has a unidirectional stream of its
//! own, opened in order, four at a time; the receiver copies packets directly into memory that was written before.
//! Packets are encrypted with AES-128-GCM, but the certificate is self-signed and not checked: for loopback and test
//! networks only.

mod client;
mod server;
mod settings;
mod socket;

use crate::{
    contender::{self, Ready, ReceiveArgs, ServeArgs},
    noise,
};
use anyhow::Result;
use client::Client;
use server::Server;
use settings::Settings;
use std::net::SocketAddr;

/// Serves clients until the process is killed.
///
/// # Errors
/// When it cannot listen, or when standard output is closed. The error of a connection is printed to standard error.
pub async fn serve(args: ServeArgs) -> Result<()> {
    let settings = Settings { mtu: args.mtu };
    let server = Server::bind(args.listen, noise::bytes(args.bytes), settings)?;
    let port = server.local_addr()?.port();
    contender::print(&Ready::at(port))?;
    while let Some(incoming) = server.next().await {
        if let Err(error) = server.serve(incoming, |sent| contender::print(&sent)).await {
            eprintln!("A connection ended with an error: {error:#}");
        }
    }
    Ok(())
}

/// Receives `args.small` small messages from the server at `connect`, then the payload `args.rounds` times.
///
/// # Errors
/// When the connection cannot be made or breaks, or when standard output is closed.
pub async fn receive(connect: SocketAddr, args: ReceiveArgs) -> Result<()> {
    let settings = Settings { mtu: args.mtu };
    let mut client = Client::connect(connect, args.bytes, settings).await?;
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
                transfer(noise::bytes(bytes), Settings { mtu }).await;
            }
        }
    }

    async fn transfer(memory: Bytes, settings: Settings) {
        let loopback = "127.0.0.1:0".parse().unwrap();
        let server = Server::bind(loopback, memory.clone(), settings).unwrap();
        let address = server.local_addr().unwrap();
        let serving = tokio::spawn(async move {
            let mut sent = vec![];
            let incoming = server.next().await.unwrap();
            let report = |line| {
                sent.push(line);
                Ok(())
            };
            server.serve(incoming, report).await.unwrap();
            sent
        });
        let mut client = Client::connect(address, memory.len() as u64, settings).await.unwrap();
        for round in 0..2 {
            let received = client.receive(round).await.unwrap();
            assert_eq!((received.round, received.bytes), (round, memory.len() as u64));
            assert!(client.memory().eq(memory.iter().copied()), "{} bytes, {settings:?}", memory.len());
        }
        client.close().await;
        assert_eq!(serving.await.unwrap().len(), 2, "one line a round");
    }
}
