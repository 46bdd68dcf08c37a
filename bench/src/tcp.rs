//! The simplest contender: one TCP connection, plain or with TLS, tuned to be as fast as possible.
//!
//! Each end uses one thread and large reads and writes. The receive buffer's pages are first touched, and so faulted
//! in, during the first round. TLS is rustls' TLS 1.3 with AES-128-GCM and a self-signed certificate that is not
//! checked: for loopback and test networks only. The congestion control is CUBIC, because BBR, the default of some
//! kernels, halves the rate on a fast link, and would make tensor-relay look better.

mod stream;

use crate::{
    contender::{self, Begun, ConnectArgs, Ready, Received, Sent, ServeArgs, SmallMessages},
    latency::{self, Latencies},
    noise,
};
use anyhow::{Result, bail, ensure};
use std::io::ErrorKind;
use stream::Stream;
use tokio::task::spawn_blocking;

/// Serves clients until the process is killed. `args.mtu` has no effect: the kernel chooses the size of packets.
///
/// # Errors
/// When it cannot listen, report that it is ready, or accept a connection. The error of a connection is printed to
/// standard error, also if its rounds cannot be reported because standard output is closed.
pub async fn serve(args: ServeArgs, tls: bool) -> Result<()> {
    let serving = spawn_blocking(move || {
        let (listener, memory) = (stream::listen(args.listen)?, noise::bytes(args.bytes));
        contender::print(&Ready::at(listener.local_addr()?.port()))?;
        loop {
            let (socket, _) = listener.accept()?;
            let served = stream::server(socket, tls)
                .and_then(|mut stream| serve_client(&mut *stream, &memory, |sent| contender::print(&sent)));
            if let Err(error) = served {
                eprintln!("A connection ended with an error: {error:#}");
            }
        }
    });
    serving.await?
}

/// Receives small messages, if `args` say so, and then the payload once a round.
///
/// # Errors
/// When the connection cannot be made or breaks, or when standard output is closed.
pub async fn receive(args: ConnectArgs, tls: bool) -> Result<()> {
    let ConnectArgs { connect, receive: args } = args;
    let receiving = spawn_blocking(move || {
        // Untouched until the first round, whose time includes its page faults, as with tensor-relay.
        let mut memory = vec![0; args.bytes as usize];
        let mut stream = stream::client(connect, tls)?;
        if args.small > 0 {
            contender::print(&receive_small(&mut *stream, args.small)?)?;
        }
        for round in 0..args.rounds {
            contender::print(&receive_round(&mut *stream, &mut memory, round)?)?;
        }
        Ok(())
    });
    receiving.await?
}

/// Serves one client until it disconnects, and calls `report` after each round. A round ends when the client has
/// received the payload, so that no work of a round is measured in the next.
fn serve_client(
    stream: &mut dyn Stream,
    memory: &[u8],
    mut report: impl FnMut(Sent) -> Result<()>,
) -> Result<()> {
    while let Some(byte) = next_request(stream)? {
        match byte {
            request::ALL => {
                let begun = Begun::now();
                for piece in memory.chunks(PIECE_BYTES) {
                    stream.write_all(piece)?;
                }
                stream.flush()?;
                let received = next_request(stream)? == Some(request::RECEIVED);
                ensure!(received, "the client disconnected before it had received everything");
                report(Sent::since(begun, memory.len() as u64))?;
            }
            request::SMALL => stream.write_all(&latency::stamped())?,
            other => bail!("the client sent the unknown request {other:#04x}"),
        }
    }
    Ok(())
}

/// The next request of the client, a byte of [`request`](mod@request); `None` if the client has disconnected.
fn next_request(stream: &mut dyn Stream) -> Result<Option<u8>> {
    let mut byte = [0];
    match stream.read_exact(&mut byte) {
        Ok(()) => Ok(Some(byte[0])),
        // With TLS too: our client sends no close_notify.
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Requests the payload and receives it into `memory`.
fn receive_round(stream: &mut dyn Stream, memory: &mut [u8], round: u32) -> Result<Received> {
    let begun = Begun::now();
    request(stream, request::ALL)?;
    for piece in memory.chunks_mut(PIECE_BYTES) {
        stream.read_exact(piece)?;
    }
    let received = Received::since(begun, round, memory.len() as u64);
    request(stream, request::RECEIVED)?;
    Ok(received)
}

/// Requests small messages, one after the other: those to warm up, then `count` that are counted.
fn receive_small(stream: &mut dyn Stream, count: u32) -> Result<SmallMessages> {
    let mut latencies = Latencies::new(count);
    let mut message = [0; latency::MESSAGE_BYTES];
    for _ in 0..latency::message_count(count) {
        request(stream, request::SMALL)?;
        stream.read_exact(&mut message)?;
        latencies.add(&message)?;
    }
    Ok(latencies.summary())
}

fn request(stream: &mut dyn Stream, byte: u8) -> Result<()> {
    stream.write_all(&[byte])?;
    Ok(stream.flush()?)
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
                transfer(bytes, tls);
            }
        }
    }

    fn transfer(bytes: u64, tls: bool) {
        let sent = noise::bytes(bytes);
        let listener = stream::listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let serving = thread::spawn({
            let sent = sent.clone();
            move || {
                let mut rounds = 0;
                let mut stream = stream::server(listener.accept().unwrap().0, tls).unwrap();
                let count = |_| {
                    rounds += 1;
                    Ok(())
                };
                serve_client(&mut *stream, &sent, count).unwrap();
                rounds
            }
        });
        let mut stream = stream::client(address, tls).unwrap();
        let mut memory = vec![0; sent.len()];
        assert_eq!(receive_small(&mut *stream, 3).unwrap().small, 3);
        for round in 0..2 {
            let received = receive_round(&mut *stream, &mut memory, round).unwrap();
            assert_eq!((received.round, received.bytes), (round, bytes));
            assert!(memory == sent, "{bytes} bytes, TLS {tls}");
        }
        drop(stream);
        assert_eq!(serving.join().unwrap(), 2, "one line a round");
    }
}
