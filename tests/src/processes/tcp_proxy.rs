//! A TCP proxy between clients and a server. It can cut and damage connections, and answer in the server's place.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    thread::{self, JoinHandle},
};

/// What the proxy does with each connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TcpPath {
    /// It passes all bytes.
    Open,
    /// It ends the connection after this many bytes from the server.
    CutAfter(u64),
    /// It inverts a bit of the byte at this offset from the server.
    DamageAt(u64),
    /// It answers as a server of HTTP does.
    Http,
}

/// A TCP proxy in front of one server. Threads of connections end with these.
pub struct TcpProxy {
    address: SocketAddr,
    state: Arc<State>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct State {
    path: Mutex<TcpPath>,
    /// The server; `None` before it listens, and once the proxy was dropped.
    server: Mutex<Option<SocketAddr>>,
    /// The clients of current and former connections.
    clients: Mutex<Vec<TcpStream>>,
    connections: AtomicU32,
}

impl TcpProxy {
    /// A proxy that listens. Start the server with [`advertise`](Self::advertise).
    #[expect(clippy::new_without_default, reason = "it binds a socket")]
    pub fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let state = State {
            path: Mutex::new(TcpPath::Open),
            server: Mutex::new(None),
            clients: Mutex::default(),
            connections: AtomicU32::new(0),
        };
        let (address, state) = (listener.local_addr().unwrap(), Arc::new(state));
        let accepting = Arc::clone(&state);
        let acceptor = thread::spawn(move || {
            for client in listener.incoming() {
                let Some(server) = *accepting.server.lock().unwrap() else { return };
                accepting.serve(client.unwrap(), server);
            }
        });
        Self { address, state, acceptor: Some(acceptor) }
    }

    /// The server argument that makes its tickets name the proxy.
    pub fn advertise(&self) -> String {
        format!("--advertise={}", self.address)
    }

    /// Forwards to the server that listens on the address `server`.
    pub fn forward_to(&self, server: &str) {
        *self.state.server.lock().unwrap() = Some(server.parse().unwrap());
    }

    /// Ends all connections, and treats new ones as `path` says.
    pub fn set_path(&self, path: TcpPath) {
        *self.state.path.lock().unwrap() = path;
        for client in self.state.clients.lock().unwrap().drain(..) {
            let _ = client.shutdown(Shutdown::Both); // It may have ended.
        }
    }

    /// The number of connections so far.
    pub fn connections(&self) -> u32 {
        self.state.connections.load(Ordering::Relaxed)
    }
}

impl State {
    fn serve(&self, mut client: TcpStream, server: SocketAddr) {
        self.connections.fetch_add(1, Ordering::Relaxed);
        let path = *self.path.lock().unwrap();
        if path == TcpPath::Http {
            let _ = client.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
            return;
        }
        let Ok(server) = TcpStream::connect(server) else { return };
        self.clients.lock().unwrap().push(client.try_clone().unwrap());
        let (mut from_client, mut to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        thread::spawn(move || {
            let _ = std::io::copy(&mut from_client, &mut to_server);
            let _ = to_server.shutdown(Shutdown::Both);
        });
        thread::spawn(move || {
            let _ = pass(server, &client, path);
            let _ = client.shutdown(Shutdown::Both);
        });
    }
}

/// Passes bytes to the client until the path or a peer ends the connection.
fn pass(mut server: TcpStream, mut client: &TcpStream, path: TcpPath) -> std::io::Result<()> {
    let (mut buffer, mut passed) = (vec![0; 1 << 16], 0);
    loop {
        let mut bytes = server.read(&mut buffer)?;
        match path {
            TcpPath::CutAfter(end) => bytes = bytes.min((end - passed) as usize),
            TcpPath::DamageAt(at) if (passed..passed + bytes as u64).contains(&at) => {
                buffer[(at - passed) as usize] ^= 1;
            }
            _ => {}
        }
        if bytes == 0 {
            return Ok(());
        }
        client.write_all(&buffer[..bytes])?;
        passed += bytes as u64;
    }
}

impl Drop for TcpProxy {
    fn drop(&mut self) {
        *self.state.server.lock().unwrap() = None;
        self.set_path(TcpPath::Open);
        let _ = TcpStream::connect(self.address); // Wakes the acceptor, which then ends.
        let _ = self.acceptor.take().unwrap().join();
    }
}
