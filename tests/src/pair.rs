//! A real server and real clients on a simulated network.

use crate::{
    simnet::{Host, SimNet},
    tensors,
};
use rcgen::{KeyPair, PKCS_ED25519};
use rustls::pki_types::PrivatePkcs8KeyDer;
use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tensor_relay_client::{Client, ClientError, Connector, Lanes};
use tensor_relay_device::{Capacity, Device, HostEngine, HostMemory};
use tensor_relay_protocol::{Claims, Grant, Limits, Secret, SecretId, Ticket, TicketId, Token, Topic, Verbs};
use tensor_relay_server::{
    Access, Identity, Keep, Listener, Publication, Publisher, Rules, Server, TopicOptions,
};
use tensor_relay_transport::{Congestion, Transport, Tuning, Workers};
use tokio::time::Instant;

/// The maximum duration of a scenario, in simulated time. A longer one counts as a hang.
const SCENARIO_TIMEOUT: Duration = Duration::from_secs(600);

/// The port that the server listens on.
pub const SERVER_PORT: u16 = 4747;

/// The chunk size of simulated servers: small, so that a version of a megabyte has several chunks.
pub const CHUNK_BYTES: u32 = 64 << 10;

/// The environment of one scenario.
#[derive(Debug)]
pub struct Sim {
    /// The seed from which all randomness is derived.
    pub seed: u64,
    /// The network between all hosts.
    pub net: SimNet,
    /// The tuning of servers and clients that start from now on. CUBIC, because quinn's BBR uses the system's random
    /// numbers; scenarios about throughput under loss select BBR again.
    pub tuning: Tuning,
    began: Instant,
}

/// Runs `scenario` on a clock of its own and prints the seed if it fails.
///
/// # Panics
/// If the scenario panics or has not ended after ten simulated minutes.
pub fn simulate<T>(seed: u64, scenario: impl AsyncFnOnce(Sim) -> T) -> T {
    let _on_panic = PrintSeedOnPanic(seed);
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    // A new runtime per seed: timers are rounded to milliseconds since their runtime started.
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let sim = Sim {
            seed,
            net: SimNet::new(seed),
            tuning: Tuning { congestion: Congestion::Cubic, ..Tuning::default() },
            began: Instant::now(),
        };
        let ended = tokio::time::timeout(SCENARIO_TIMEOUT, scenario(sim)).await;
        ended.expect("the scenario ends within ten simulated minutes")
    })
}

/// Prints the seed of a failed scenario.
struct PrintSeedOnPanic(u64);

impl Drop for PrintSeedOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the scenario failed with seed {}", self.0);
        }
    }
}

impl Sim {
    /// The time since the scenario began, in simulated time.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// The server's host.
    pub fn server_host(&self) -> Host {
        self.net.host(Ipv4Addr::new(10, 0, 0, 1))
    }

    /// The host of the client with this number.
    pub fn client_host(&self, number: u8) -> Host {
        self.net.host(Ipv4Addr::new(10, 0, 1, number))
    }

    /// The address that the server listens on.
    pub fn server_address(&self) -> SocketAddr {
        (Ipv4Addr::new(10, 0, 0, 1), SERVER_PORT).into()
    }

    /// A new listener on the server's address, with the server's key.
    pub fn listener(&self) -> Listener {
        let host = Arc::new(self.server_host());
        let bound = Listener::bind_on(
            host,
            transport(),
            self.server_address(),
            &self.identity(),
            self.tuning.clone(),
        );
        bound.unwrap()
    }

    /// The host of a second server.
    pub fn other_host(&self) -> Host {
        self.net.host(Ipv4Addr::new(10, 0, 0, 2))
    }

    /// Starts a second server on a host of its own, with the same key and tickets; and a ticket that names it.
    pub fn other_server(&self, config: tensor_relay_server::Config) -> (Server, Ticket) {
        let (host, address) = (Arc::new(self.other_host()), self.other_address());
        let (identity, tuning) = (self.identity(), self.tuning.clone());
        let listener = Listener::bind_on(host, transport(), address, &identity, tuning).unwrap();
        (Server::start(listener, Access::new(rules()), config), self.other_ticket())
    }

    /// The address of the second server.
    pub fn other_address(&self) -> SocketAddr {
        (Ipv4Addr::new(10, 0, 0, 2), SERVER_PORT).into()
    }

    /// The ticket of the second server.
    pub fn other_ticket(&self) -> Ticket {
        let (address, key) = (self.other_address().to_string(), self.identity().fingerprint().0);
        Ticket::new(vec![address], vec![key], None).unwrap().with_token(token())
    }

    /// Starts the server.
    pub fn server(&self, config: tensor_relay_server::Config) -> Server {
        self.server_with(Access::new(rules()), config)
    }

    /// Starts a server with `access`.
    pub fn server_with(&self, access: Access, config: tensor_relay_server::Config) -> Server {
        Server::start(self.listener(), access, config)
    }

    /// Starts another server on the same address, once the previous one has released it.
    pub async fn server_again(&self, config: tensor_relay_server::Config) -> Server {
        let host = Arc::new(self.server_host());
        loop {
            let (host, tuning) = (Arc::clone(&host), self.tuning.clone());
            match Listener::bind_on(host, transport(), self.server_address(), &self.identity(), tuning) {
                Ok(listener) => return Server::start(listener, Access::new(rules()), config),
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    /// The same environment, in which the server has the key derived from `seed`.
    pub fn with_key_of(&self, seed: u64) -> Self {
        Self { seed, net: self.net.clone(), tuning: self.tuning.clone(), began: self.began }
    }

    /// Partitions the server from the client with this number.
    pub fn cut(&self, number: u8) {
        self.net.partition(&self.server_host(), &self.client_host(number));
    }

    /// Ends the partition of the server from the client with this number.
    pub fn mend(&self, number: u8) {
        self.net.repair(&self.server_host(), &self.client_host(number));
    }

    /// The number of bytes that the server has sent, including dropped ones.
    pub fn server_sent(&self) -> u64 {
        self.net.sent_by(&self.server_host()).bytes
    }

    /// The connector of the client with this number.
    pub fn connector(&self, number: u8) -> Connector {
        Connector::over(Arc::new(self.client_host(number)), self.tuning.clone()).with_transport(transport())
    }

    /// Connects the client with this number.
    ///
    /// # Errors
    /// Those of [`Client::connect_with`].
    pub async fn client(
        &self,
        number: u8,
        config: tensor_relay_client::Config,
    ) -> Result<Client, ClientError> {
        Client::connect_with(&self.connector(number), &self.ticket(), config).await
    }

    /// A ticket that names the server and grants access.
    pub fn ticket(&self) -> Ticket {
        self.bare_ticket().with_token(token())
    }

    /// A ticket that names the server but grants no access.
    pub fn bare_ticket(&self) -> Ticket {
        let key = self.identity().fingerprint().0;
        Ticket::new(vec![self.server_address().to_string()], vec![key], None).unwrap()
    }

    /// The server's identity.
    pub fn identity(&self) -> Identity {
        let state = tempfile::tempdir().unwrap();
        let pem = self.key_pair().serialize_pem();
        std::fs::write(state.path().join("identity.key"), pem).unwrap();
        Identity::load_or_create(state.path()).unwrap()
    }

    /// The server's key.
    pub fn key_pair(&self) -> KeyPair {
        key_pair(self.seed)
    }
}

/// A key derived from `seed`: Ed25519, whose signatures have a fixed length, so that scenarios with equal seeds send
/// equal numbers of bytes.
pub fn key_pair(seed: u64) -> KeyPair {
    // RFC 8410 §7: a private key is this prefix and 32 arbitrary bytes.
    let prefix = b"\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20";
    let secret = [seed.to_le_bytes(); 4].concat();
    let der = PrivatePkcs8KeyDer::from([&prefix[..], &secret].concat());
    KeyPair::from_pkcs8_der_and_sign_algo(&der, &PKCS_ED25519).unwrap()
}

/// The access rules of simulated servers: a ticket is required.
pub fn rules() -> Rules {
    Rules { secrets: vec![Secret::new(SecretId(1), [7; 32])], ..Rules::default() }
}

/// The token in the tickets of simulated servers.
pub fn token() -> Token {
    token_with(9, vec![Grant::everywhere(Verbs::CONSUME)])
}

/// A token for simulated servers with this ticket id and these grants.
pub fn token_with(id: u8, grants: Vec<Grant>) -> Token {
    let claims = Claims { id: TicketId([id; 8]), holder: "a test".into(), expires_s: None, grants };
    rules().secrets[0].seal(&claims)
}

/// The configuration of simulated servers; scenarios change single fields.
pub fn server_config() -> tensor_relay_server::Config {
    let processors = 64; // Whatever this machine has.
    tensor_relay_server::Config {
        chunk_bytes: CHUNK_BYTES,
        processors,
        workers: Workers::Inline,
        ..Default::default()
    }
}

/// The transport of simulated sessions: QUIC, or with `TENSOR_RELAY_TEST_TRANSPORT=tcp` TLS over byte streams.
pub fn transport() -> Transport {
    match std::env::var("TENSOR_RELAY_TEST_TRANSPORT").as_deref() {
        Ok("tcp") => Transport::Tcp,
        _ => Transport::Quic,
    }
}

/// The configuration of simulated clients; scenarios change single fields. With `TENSOR_RELAY_TEST_DEVICE=1` the
/// clients receive onto a device.
pub fn client_config() -> tensor_relay_client::Config {
    let on_device = std::env::var("TENSOR_RELAY_TEST_DEVICE").is_ok_and(|on| on == "1");
    tensor_relay_client::Config {
        device: on_device.then(|| device(u64::MAX)),
        lanes: Lanes::Fixed(1),
        processors: 2, // Whatever this machine has.
        transport: transport(),
        limits: Limits { chunk_bytes: 1 << 20, ..Limits::default() },
        workers: Workers::Inline,
        reconnect_timeout: Duration::ZERO,
        credit_chunks: 4, // Few, so that a version of a few chunks takes several round trips.
        versions_held_max: usize::MAX,
        ..Default::default()
    }
}

/// A device of `budget_bytes` whose copies are complete when the request returns, so that the order of events depends
/// on the seed alone. Its slots have the size of simulated chunks, and suffice for many subscriptions.
pub fn device(budget_bytes: u64) -> Device {
    let engine = Arc::new(HostEngine::inline(HostMemory::new(budget_bytes)));
    Device::new(engine, Capacity { slots: 64, slot_bytes: CHUNK_BYTES as usize }).unwrap()
}

/// [`client_config`] for clients that reconnect.
pub fn reconnecting() -> tensor_relay_client::Config {
    tensor_relay_client::Config { reconnect_timeout: Duration::from_secs(60), ..client_config() }
}

/// The options of a topic that retains `versions` versions.
pub fn retaining(versions: u32) -> TopicOptions {
    TopicOptions { keep: Keep { versions, ..Keep::default() }, ..TopicOptions::default() }
}

/// The seeds of one scenario: the first `default_count`, or those in `TENSOR_RELAY_TEST_SEEDS`, a count or `FROM..TO`.
pub fn seeds(default_count: u64) -> std::ops::Range<u64> {
    let Ok(range) = std::env::var("TENSOR_RELAY_TEST_SEEDS") else { return 0..default_count };
    let (from, to) = range.split_once("..").unwrap_or(("0", &range));
    from.parse().unwrap()..to.parse().unwrap()
}

/// Publishes one tensor of `bytes` incompressible bytes as `version`, which must be the next one.
pub async fn publish(server: &Server, publisher: &mut Publisher, version: u64, bytes: u64) -> Publication {
    let staged = tensors::stage(server, vec![tensors::noise("noise", bytes)], version);
    publisher.publish(staged, tensors::metadata(version)).await.unwrap()
}

/// Waits, for ten simulated seconds at most, until `condition` returns true.
///
/// # Panics
/// If `condition` still returns false, with `description` in the message.
pub async fn eventually(description: &str, mut condition: impl FnMut() -> bool) {
    for _ in 0..10_000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("{description}: not within ten seconds");
}

/// The topic called `name`.
pub fn topic(name: &str) -> Topic {
    Topic::new(name).unwrap()
}
