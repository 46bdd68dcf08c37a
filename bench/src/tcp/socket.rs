//! TCP sockets with the options of this contender.

use anyhow::{Context, Result};
use socket2::{Domain, Socket, Type};
use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

/// Listens on `address`.
///
/// # Errors
/// When the address is taken, or the kernel lacks CUBIC.
pub(super) fn listen(address: SocketAddr) -> Result<TcpListener> {
    let listener = new_socket(address)?;
    listener
        .bind(&address.into())
        .with_context(|| format!("cannot listen on {address}"))?;
    listener.listen(BACKLOG)?;
    Ok(listener.into())
}

/// The next connection to `listener`, which inherits its congestion control.
///
/// # Errors
/// When the system lacks a resource, e.g. file descriptors.
pub(super) fn accept(listener: &TcpListener) -> Result<TcpStream> {
    let (stream, _) = listener.accept()?;
    set_options(&stream)?;
    Ok(stream)
}

/// Connects to `remote`.
///
/// # Errors
/// When the server does not answer in time, or the kernel lacks CUBIC.
pub(super) fn connect(remote: SocketAddr) -> Result<TcpStream> {
    let socket = new_socket(remote)?;
    socket
        .connect_timeout(&remote.into(), CONNECT_TIMEOUT)
        .with_context(|| format!("cannot connect to {remote}"))?;
    let stream = socket.into();
    set_options(&stream)?;
    Ok(stream)
}

/// A new socket with CUBIC. The kernel sizes its buffers: a fixed size was slower on every path.
fn new_socket(address: SocketAddr) -> Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket
        .set_tcp_congestion(b"cubic")
        .context("cannot set the congestion control to cubic, which the comparison requires: load the kernel module tcp_cubic")?;
    Ok(socket)
}

fn set_options(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE_TIMEOUT))?;
    stream.set_write_timeout(Some(SILENCE_TIMEOUT))?;
    Ok(())
}

const BACKLOG: i32 = 16;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The time without progress after which the other end counts as dead.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(120);
