//! A wire between one client and one server that can be held.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// How long until the wire's threads notice that it is gone.
const TICK: Duration = Duration::from_millis(20);

/// How long it takes at most until so many bytes went that the wire is held.
const PATIENCE: Duration = Duration::from_secs(60);

/// Carries datagrams between a client and a server, and stops carrying those to the client after a number of bytes: so
/// a test acts in the middle of a transfer, however fast the machine is.
///
/// The client's datagrams go through at all times. Those to the client wait in a socket's buffer while the wire is
/// held; what does not fit there is lost, as on any wire.
pub struct Wire {
    client_side: UdpSocket,
    held: Option<Receiver<()>>,
    release: Option<Sender<()>>,
    gone: Arc<AtomicBool>,
    carriers: Vec<JoinHandle<()>>,
}

impl Wire {
    /// A wire with an end for a client; [`advertise`](Self::advertise) is for its server, which comes next.
    #[expect(clippy::new_without_default, reason = "it binds a socket")]
    pub fn new() -> Self {
        Self { client_side: socket(), held: None, release: None, gone: Arc::default(), carriers: vec![] }
    }

    /// The word that makes a server's tickets lead through the wire.
    pub fn advertise(&self) -> String {
        format!("--advertise={}", self.client_side.local_addr().unwrap())
    }

    /// Leads to the server that listens on `server`; holds after `bytes` from there.
    pub fn lead_to(&mut self, server: &str, bytes: u64) {
        let server: SocketAddr = server.parse().unwrap();
        let (hold, held) = channel();
        let (release, released) = channel();
        (self.held, self.release) = (Some(held), Some(release));
        let server_side = socket();
        let client = Arc::new(Mutex::new(None));
        let (from, to, known) =
            (self.client_side.try_clone().unwrap(), server_side.try_clone().unwrap(), Arc::clone(&client));
        self.carry(from, move |datagram, sender| {
            *known.lock().unwrap() = Some(sender);
            // Who is not there any more hears nothing: a wire does not care.
            let _ = to.send_to(datagram, server);
        });
        let (to, mut left) = (self.client_side.try_clone().unwrap(), Some(bytes));
        self.carry(server_side, move |datagram, _| {
            let known = *client.lock().unwrap();
            left = left.and_then(|left| {
                left.checked_sub(datagram.len() as u64).or_else(|| {
                    let _ = hold.send(());
                    // Ends too when the wire is dropped.
                    let _ = released.recv();
                    None
                })
            });
            let _ = to.send_to(datagram, known.expect("who is answered has asked"));
        });
    }

    /// Waits until the wire is held: so many bytes went, and no more do.
    pub fn wait_until_held(&self) {
        let held = self.held.as_ref().expect("it leads to a server");
        held.recv_timeout(PATIENCE)
            .expect("the server sends more than the wire lets through");
    }

    /// Lets everything through, for good.
    pub fn release(&mut self) {
        self.release = None;
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
        self.release = None;
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
