//! The simplest contender: one TCP connection, plain or with TLS, tuned to be as fast as possible.
//!
//! Each end uses one thread and large reads and writes. The receive buffer's pages are first touched, and so faulted
//! in, during the first round. TLS is rustls' TLS 1.3 with AES-128-GCM and a self-signed certificate that is not
//! checked: for loopback and test networks only. The congestion control is CUBIC, because BBR, the default of some
//! kernels, halves the rate on a fast link, and would make tensor-relay look better.

mod buffered;
mod client;
mod server;
mod socket;
mod stream;

use crate::{
    contender::{self, Ready, ReceiveArgs, ServeArgs},
    noise,
};
use anyhow::Result;
use client::Client;
use server::Server;
use std::net::SocketAddr;
use tokio::task::spawn_blocking;

/// Whether bytes are encrypted on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::Args)]
pub struct Encryption {
    /// Encrypts with TLS 1.3. Any certificate is accepted: for test networks only.
    #[arg(long)]
    pub tls: bool,
}

/// Serves clients until the process is killed. `args.mtu` has no effect: the kernel chooses the size of packets.
///
/// # Errors
/// When it cannot listen, report that it is ready, or accept a connection. The error of a connection is printed to
/// standard error, also if its rounds cannot be reported because standard output is closed.
pub async fn serve(args: ServeArgs, encryption: Encryption) -> Result<()> {
    let serving = spawn_blocking(move || {
        let server = Server::bind(args.listen, noise::bytes(args.bytes), encryption)?;
        contender::print(&Ready::at(server.local_addr()?.port()))?;
        loop {
            let accepted = server.accept()?;
            if let Err(error) = server.serve(accepted, |sent| contender::print(&sent)) {
                eprintln!("A connection ended with an error: {error:#}");
            }
        }
    });
    serving.await?
}

/// Receives `args.small` small messages from the server at `connect`, then the payload `args.rounds` times.
///
/// # Errors
/// When the connection cannot be made or breaks, or when standard output is closed.
pub async fn receive(connect: SocketAddr, args: ReceiveArgs, encryption: Encryption) -> Result<()> {
    let receiving = spawn_blocking(move || {
        let mut client = Client::connect(connect, args.bytes, encryption)?;
        if args.small > 0 {
            contender::print(&client.receive_small(args.small)?)?;
        }
        for round in 0..args.rounds {
            contender::print(&client.receive(round)?)?;
        }
        Ok(())
    });
    receiving.await?
}

/// The size of one read or write. Sizes of 256 KiB and more made no difference on most paths.
const PIECE_BYTES: usize = 1 << 20;

/// The messages of a client, a byte each.
mod request {
    /// Send the payload.
    pub(super) const ALL: u8 = b'a';
    /// Send one small message.
    pub(super) const SMALL: u8 = b's';
    /// The payload has been received.
    pub(super) const RECEIVED: u8 = b't';
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// Goal: TCP moves the right bytes, of any size, plain and encrypted. Method: both ends in one process on
    /// loopback, sizes around multiples of a piece, small messages, two rounds, and memory compared.
    #[test]
    fn the_sent_bytes_arrive() {
        for tls in [false, true] {
            for bytes in [0, 1, PIECE_BYTES as u64, 3 * PIECE_BYTES as u64 + 1] {
                transfer(bytes, Encryption { tls });
            }
        }
    }

    fn transfer(bytes: u64, encryption: Encryption) {
        let memory = noise::bytes(bytes);
        let server = Server::bind("127.0.0.1:0".parse().unwrap(), memory.clone(), encryption).unwrap();
        let address = server.local_addr().unwrap();
        let serving = thread::spawn(move || {
            let mut rounds = 0;
            let accepted = server.accept().unwrap();
            let count = |_| {
                rounds += 1;
                Ok(())
            };
            server.serve(accepted, count).unwrap();
            rounds
        });
        let mut client = Client::connect(address, bytes, encryption).unwrap();
        assert_eq!(client.receive_small(3).unwrap().small, 3);
        for round in 0..2 {
            let received = client.receive(round).unwrap();
            assert_eq!((received.round, received.bytes), (round, bytes));
            assert!(client.memory() == memory, "{bytes} bytes, {encryption:?}");
        }
        drop(client);
        assert_eq!(serving.join().unwrap(), 2, "one line a round");
    }
}
