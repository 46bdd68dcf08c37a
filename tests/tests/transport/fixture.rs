//! A listener and a connector on each backend.

use crate::faulty_network::{Faults, FaultyNetwork};
use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tempfile::TempDir;
use tensor_relay_tests::pair::{SERVER_PORT, Sim, simulate};
use tensor_relay_transport::{
    ConnectError, Connector, Fingerprint, Identity, Lane, LaneError, Listener, Network, SystemNetwork,
    Transport, Tuning, unix::SocketListener,
};

/// The transport and network of a lane under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    /// QUIC on the simulated network.
    SimulatedQuic,
    /// TLS over a stream of the simulated network.
    SimulatedStream,
    /// TLS over TCP on this machine.
    Tcp,
    /// A Unix socket.
    Unix,
}

/// All backends.
pub(crate) const ALL: [Backend; 4] =
    [Backend::SimulatedQuic, Backend::SimulatedStream, Backend::Tcp, Backend::Unix];

/// The backends with addresses and keys.
pub(crate) const NETWORK: [Backend; 3] = [Backend::SimulatedQuic, Backend::SimulatedStream, Backend::Tcp];

/// The backends whose lanes are byte streams with TLS.
pub(crate) const BYTE_STREAMS: [Backend; 2] = [Backend::SimulatedStream, Backend::Tcp];

/// A server's listener, and a client's connector for it.
pub(crate) struct Fixture {
    pub(crate) backend: Backend,
    pub(crate) listener: Listener,
    pub(crate) connector: Connector,
    pub(crate) address: SocketAddr,
    /// What clients connect to.
    pub(crate) host: String,
    pub(crate) key: Fingerprint,
    /// Faults of the client's byte streams.
    pub(crate) faults: Faults,
    pub(crate) sim: Option<Sim>,
    /// The folder of the Unix socket, on that backend.
    pub(crate) folder: Option<TempDir>,
}

/// The timeout of a case in real time.
const CASE_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs `case` on each of `backends`.
pub(crate) fn run_on(backends: &[Backend], case: impl AsyncFn(&Fixture)) {
    for backend in backends {
        let on_panic = PrintBackendOnPanic(*backend);
        match backend {
            Backend::Tcp | Backend::Unix => {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                let run = async { case(&Fixture::real(*backend)).await };
                runtime.block_on(async { tokio::time::timeout(CASE_TIMEOUT, run).await.unwrap() });
            }
            _ => simulate(7, async |sim| case(&Fixture::simulated(sim, *backend)).await),
        }
        drop(on_panic);
    }
}

/// Prints the backend of a failed case.
struct PrintBackendOnPanic(Backend);

impl Drop for PrintBackendOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the case failed on {:?}", self.0);
        }
    }
}

impl Fixture {
    fn simulated(sim: Sim, backend: Backend) -> Self {
        let (server, client) = (Arc::new(sim.server_host()), Arc::new(sim.client_host(1)));
        let (identity, tuning) = (sim.identity(), sim.tuning.clone());
        let address = (sim.server_address().ip(), SERVER_PORT).into();
        Self::new(backend, server, client, address, &identity, tuning, Some(sim))
    }

    /// On this machine, in real time, with short timeouts.
    fn real(backend: Backend) -> Self {
        let tuning = Tuning { idle_timeout_ms: 1_500, keep_alive_ms: 200, ..Tuning::default() };
        let (network, address) = (Arc::new(SystemNetwork), (Ipv4Addr::LOCALHOST, 0).into());
        let identity = Identity::ephemeral().unwrap();
        Self::new(backend, Arc::clone(&network) as _, network, address, &identity, tuning, None)
    }

    fn new(
        backend: Backend,
        server: Arc<dyn Network>,
        client: Arc<dyn Network>,
        address: SocketAddr,
        identity: &Identity,
        tuning: Tuning,
        sim: Option<Sim>,
    ) -> Self {
        let mut listener =
            Listener::bind_on(server, Transport::Auto, address, identity, tuning.clone()).unwrap();
        let address = listener.local_address();
        let (mut host, mut folder) = (address.to_string(), None);
        if backend == Backend::Unix {
            let folder = folder.insert(TempDir::new().unwrap());
            let path = folder.path().join("s");
            listener = listener.and_socket(SocketListener::bind(&path, SocketListener::PRIVATE).unwrap());
            host = format!("unix:{}", path.display());
        }
        let faults = Faults::default();
        let faulty = Arc::new(FaultyNetwork { inner: client, faults: faults.clone() });
        let connector = Connector::over(faulty, tuning).with_transport(match backend {
            Backend::SimulatedQuic => Transport::Quic,
            _ => Transport::Tcp,
        });
        let key = identity.fingerprint();
        Self { backend, listener, connector, address, host, key, faults, sim, folder }
    }

    /// The server's end and the client's end of a new lane.
    pub(crate) async fn lane(&self) -> (Lane, Lane) {
        let (server, client) = self.connect(&[self.key]).await;
        (server.unwrap(), client.unwrap())
    }

    /// Connects a client that accepts the server `keys`; returns the result at each end, the server's first.
    pub(crate) async fn connect(
        &self,
        keys: &[Fingerprint],
    ) -> (Result<Lane, LaneError>, Result<Lane, ConnectError>) {
        let hosts = [self.host.clone()];
        let accepting = async { self.listener.accept().await.unwrap().accept().await };
        tokio::join!(accepting, self.connector.connect(&hosts, keys))
    }

    /// Silently drops all further traffic between the two ends.
    pub(crate) fn blackhole(&self) {
        match &self.sim {
            Some(sim) => sim.cut(1),
            None => self.faults.blackhole(),
        }
    }
}
