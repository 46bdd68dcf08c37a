//! Two ends of a lane, of each kind.

use crate::faulty::{Faults, Faulty};
use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tensor_relay_tests::pair::{SERVER_PORT, Sim, simulate};
use tensor_relay_transport::{
    ConnectError, Connector, Fingerprint, Identity, Lane, LaneError, Listener, Network, SystemNetwork,
    Transport, Tuning,
};

/// What lies under a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Under {
    /// QUIC on the simulated network.
    SimulatedQuic,
    /// TLS over a stream of the simulated network.
    SimulatedStream,
    /// TLS over TCP on this machine.
    Tcp,
}

pub(crate) const ALL: [Under; 3] = [Under::SimulatedQuic, Under::SimulatedStream, Under::Tcp];

pub(crate) const STREAMS: [Under; 2] = [Under::SimulatedStream, Under::Tcp];

/// A server's door, and a way to it.
pub(crate) struct Stage {
    pub(crate) under: Under,
    pub(crate) listener: Listener,
    pub(crate) connector: Connector,
    pub(crate) address: SocketAddr,
    pub(crate) key: Fingerprint,
    /// Of the client's byte streams.
    pub(crate) faults: Faults,
    pub(crate) sim: Option<Sim>,
}

/// How long a case may take on a real clock.
const CASE_MAX: Duration = Duration::from_secs(60);

/// Runs `case` on each of these.
pub(crate) fn on(all: &[Under], case: impl AsyncFn(&Stage)) {
    for under in all {
        let named = Named(*under);
        match under {
            Under::Tcp => {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                let run = async { case(&Stage::real()).await };
                runtime.block_on(async { tokio::time::timeout(CASE_MAX, run).await.unwrap() });
            }
            _ => simulate(7, async |sim| case(&Stage::simulated(sim, *under)).await),
        }
        drop(named);
    }
}

/// Tells what a failed case ran on.
struct Named(Under);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the case failed on {:?}", self.0);
        }
    }
}

impl Stage {
    fn simulated(sim: Sim, under: Under) -> Self {
        let (server, client) = (Arc::new(sim.server_host()), Arc::new(sim.client_host(1)));
        let (identity, tuning) = (sim.identity(), sim.tuning.clone());
        let address = (sim.server_address().ip(), SERVER_PORT).into();
        Self::new(under, server, client, address, &identity, tuning, Some(sim))
    }

    /// The same on this machine's clock, so deadlines are short.
    fn real() -> Self {
        let tuning = Tuning { idle_timeout_ms: 1_500, keep_alive_ms: 200, ..Tuning::default() };
        let (network, address) = (Arc::new(SystemNetwork), (Ipv4Addr::LOCALHOST, 0).into());
        let identity = Identity::ephemeral().unwrap();
        Self::new(Under::Tcp, Arc::clone(&network) as _, network, address, &identity, tuning, None)
    }

    fn new(
        under: Under,
        server: Arc<dyn Network>,
        client: Arc<dyn Network>,
        address: SocketAddr,
        identity: &Identity,
        tuning: Tuning,
        sim: Option<Sim>,
    ) -> Self {
        let listener = Listener::bind_on(server, Transport::Auto, address, identity, tuning.clone()).unwrap();
        let address = listener.local_address();
        let faults = Faults::default();
        let faulty = Arc::new(Faulty { inner: client, faults: faults.clone() });
        let connector = Connector::over(faulty, tuning).with_transport(match under {
            Under::SimulatedQuic => Transport::Quic,
            Under::SimulatedStream | Under::Tcp => Transport::Tcp,
        });
        Self { under, listener, connector, address, key: identity.fingerprint(), faults, sim }
    }

    /// The server's end and the client's end of a new lane.
    pub(crate) async fn lane(&self) -> (Lane, Lane) {
        let (server, client) = self.connect(&[self.key]).await;
        (server.unwrap(), client.unwrap())
    }

    /// What becomes of both ends where the client expects one of `keys`.
    pub(crate) async fn connect(
        &self,
        keys: &[Fingerprint],
    ) -> (Result<Lane, LaneError>, Result<Lane, ConnectError>) {
        let hosts = [self.address.to_string()];
        let accepting = async { self.listener.accept().await.unwrap().accept().await };
        tokio::join!(accepting, self.connector.connect(&hosts, keys))
    }

    /// Lets nothing pass between the two ends any more.
    pub(crate) fn silence(&self) {
        match &self.sim {
            Some(sim) => sim.cut(1),
            None => self.faults.silence(),
        }
    }
}
