//! A UDP proxy between one client and one server. It can hold the server's datagrams.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// The read timeout after which the proxy's threads check whether it was dropped.
const READ_TIMEOUT: Duration = Duration::from_millis(20);

/// The deadline of [`UdpProxy::wait_until_held`].
const TIMEOUT: Duration = Duration::from_secs(60);

/// A UDP proxy that holds datagrams to the client after a number of bytes, so that a test can act during a transfer,
/// however fast the machine is. It can hold repeatedly. A server that restarts on the same port is reached as well.
///
/// Datagrams from the client always pass. While the proxy holds, datagrams to the client wait in a socket's buffer;
/// those that do not fit are lost.
pub struct UdpProxy {
    client_side: UdpSocket,
    gate: Arc<Gate>,
    dropped: Arc<AtomicBool>,
    forwarders: Vec<JoinHandle<()>>,
}

/// The gate that datagrams to the client pass.
#[derive(Debug, Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    /// The number of bytes that may still pass before the gate closes. `None`: it is closed, or stays open.
    remaining: Option<u64>,
    closed: bool,
    /// The number of bytes that have passed.
    passed_bytes: u64,
}

impl Gate {
    /// Counts `bytes`, and waits while the gate is closed.
    fn pass(&self, bytes: u64) {
        let mut state = self.state.lock().unwrap();
        if let Some(remaining) = state.remaining {
            state.remaining = remaining.checked_sub(bytes);
            state.closed |= state.remaining.is_none();
            self.changed.notify_all();
        }
        state = self.changed.wait_while(state, |state| state.closed).unwrap();
        state.passed_bytes += bytes;
    }

    fn set(&self, remaining: Option<u64>) {
        let mut state = self.state.lock().unwrap();
        (state.remaining, state.closed) = (remaining, false);
        self.changed.notify_all();
    }
}

impl UdpProxy {
    /// A proxy with a bound socket for the client. Start the server with [`advertise`](Self::advertise).
    #[expect(clippy::new_without_default, reason = "it binds a socket")]
    pub fn new() -> Self {
        Self { client_side: socket(), gate: Arc::default(), dropped: Arc::default(), forwarders: vec![] }
    }

    /// The server argument that makes its tickets name the proxy.
    pub fn advertise(&self) -> String {
        format!("--advertise={}", self.client_side.local_addr().unwrap())
    }

    /// Forwards to the server that listens on the address `server`, and holds after `bytes` bytes from it.
    pub fn forward_to(&mut self, server: &str, bytes: u64) {
        let server: SocketAddr = server.parse().unwrap();
        self.hold_after(bytes);
        let server_side = socket();
        let client = Arc::new(Mutex::new(None));
        let (from, to, last_sender) =
            (self.client_side.try_clone().unwrap(), server_side.try_clone().unwrap(), Arc::clone(&client));
        self.forward(from, move |datagram, sender| {
            *last_sender.lock().unwrap() = Some(sender);
            // Errors are ignored: the server may have stopped.
            let _ = to.send_to(datagram, server);
        });
        let (to, gate) = (self.client_side.try_clone().unwrap(), Arc::clone(&self.gate));
        self.forward(server_side, move |datagram, _| {
            let client = *client.lock().unwrap();
            gate.pass(datagram.len() as u64);
            let _ = to.send_to(datagram, client.expect("the client sends first"));
        });
    }

    /// Lets `bytes` more bytes pass, then holds.
    pub fn hold_after(&self, bytes: u64) {
        self.gate.set(Some(bytes));
    }

    /// Waits until the proxy holds.
    pub fn wait_until_held(&self) {
        let state = self.gate.state.lock().unwrap();
        let (state, _) = self
            .gate
            .changed
            .wait_timeout_while(state, TIMEOUT, |state| !state.closed)
            .unwrap();
        assert!(state.closed, "the server sent fewer bytes than the proxy lets pass");
    }

    /// Lets all datagrams pass from now on.
    pub fn release(&self) {
        self.gate.set(None);
    }

    /// The number of bytes that passed to the client, including retransmissions.
    pub fn passed_bytes(&self) -> u64 {
        self.gate.state.lock().unwrap().passed_bytes
    }

    fn forward(&mut self, from: UdpSocket, mut deliver: impl FnMut(&[u8], SocketAddr) + Send + 'static) {
        let dropped = Arc::clone(&self.dropped);
        self.forwarders.push(thread::spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            while !dropped.load(Ordering::Relaxed) {
                if let Ok((size, sender)) = from.recv_from(&mut buffer) {
                    deliver(&buffer[..size], sender);
                }
            }
        }));
    }
}

impl Drop for UdpProxy {
    fn drop(&mut self) {
        self.release();
        self.dropped.store(true, Ordering::Relaxed);
        for forwarder in self.forwarders.drain(..) {
            let _ = forwarder.join();
        }
    }
}

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
    socket
}
