//! A wire between one client and one server that can be held.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// How long until the wire's threads notice that it is gone.
const TICK: Duration = Duration::from_millis(20);

/// How long it takes at most until so many bytes went that the wire is held.
const PATIENCE: Duration = Duration::from_secs(60);

/// Carries datagrams between a client and a server, and stops carrying those to the client after a number of bytes: so
/// a test acts in the middle of a transfer, however fast the machine is. It may be held again and again, and leads to
/// whatever server has the port.
///
/// The client's datagrams go through at all times. Those to the client wait in a socket's buffer while the wire is
/// held; what does not fit there is lost, as on any wire.
pub struct Wire {
    client_side: UdpSocket,
    gate: Arc<Gate>,
    gone: Arc<AtomicBool>,
    carriers: Vec<JoinHandle<()>>,
}

/// Where what goes to the client passes.
#[derive(Debug, Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    /// How much more may pass before the gate closes, if it is to close.
    left: Option<u64>,
    closed: bool,
    /// All that passed.
    passed_bytes: u64,
}

impl Gate {
    /// Waits for as long as the gate is closed.
    fn pass(&self, bytes: u64) {
        let mut state = self.state.lock().unwrap();
        if let Some(left) = state.left {
            state.left = left.checked_sub(bytes);
            state.closed |= state.left.is_none();
            self.changed.notify_all();
        }
        state = self.changed.wait_while(state, |state| state.closed).unwrap();
        state.passed_bytes += bytes;
    }

    fn set(&self, left: Option<u64>) {
        let mut state = self.state.lock().unwrap();
        (state.left, state.closed) = (left, false);
        self.changed.notify_all();
    }
}

impl Wire {
    /// A wire with an end for a client; [`advertise`](Self::advertise) is for its server, which comes next.
    #[expect(clippy::new_without_default, reason = "it binds a socket")]
    pub fn new() -> Self {
        Self { client_side: socket(), gate: Arc::default(), gone: Arc::default(), carriers: vec![] }
    }

    /// The word that makes a server's tickets lead through the wire.
    pub fn advertise(&self) -> String {
        format!("--advertise={}", self.client_side.local_addr().unwrap())
    }

    /// Leads to the server that listens on `server`; holds after `bytes` from there.
    pub fn lead_to(&mut self, server: &str, bytes: u64) {
        let server: SocketAddr = server.parse().unwrap();
        self.hold_after(bytes);
        let server_side = socket();
        let client = Arc::new(Mutex::new(None));
        let (from, to, known) =
            (self.client_side.try_clone().unwrap(), server_side.try_clone().unwrap(), Arc::clone(&client));
        self.carry(from, move |datagram, sender| {
            *known.lock().unwrap() = Some(sender);
            // Who is not there any more hears nothing: a wire does not care.
            let _ = to.send_to(datagram, server);
        });
        let (to, gate) = (self.client_side.try_clone().unwrap(), Arc::clone(&self.gate));
        self.carry(server_side, move |datagram, _| {
            let known = *client.lock().unwrap();
            gate.pass(datagram.len() as u64);
            let _ = to.send_to(datagram, known.expect("who is answered has asked"));
        });
    }

    /// Lets so many more bytes through, and holds then.
    pub fn hold_after(&self, bytes: u64) {
        self.gate.set(Some(bytes));
    }

    /// Waits until the wire is held: so many bytes went, and no more do.
    pub fn wait_until_held(&self) {
        let state = self.gate.state.lock().unwrap();
        let (state, _) = self
            .gate
            .changed
            .wait_timeout_while(state, PATIENCE, |state| !state.closed)
            .unwrap();
        assert!(state.closed, "the server sends less than the wire lets through");
    }

    /// Lets everything through, for good.
    pub fn release(&self) {
        self.gate.set(None);
    }

    /// How much went to the client, repetitions and all.
    pub fn passed_bytes(&self) -> u64 {
        self.gate.state.lock().unwrap().passed_bytes
    }

    fn carry(&mut self, from: UdpSocket, mut deliver: impl FnMut(&[u8], SocketAddr) + Send + 'static) {
        let gone = Arc::clone(&self.gone);
        self.carriers.push(thread::spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            while !gone.load(Ordering::Relaxed) {
                if let Ok((size, sender)) = from.recv_from(&mut buffer) {
                    deliver(&buffer[..size], sender);
                }
            }
        }));
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.release();
        self.gone.store(true, Ordering::Relaxed);
        for carrier in self.carriers.drain(..) {
            let _ = carrier.join();
        }
    }
}

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(TICK)).unwrap();
    socket
}
