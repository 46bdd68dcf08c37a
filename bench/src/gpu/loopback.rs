//! The whole service over QUIC on loopback: a server in one runtime, clients in others.

use super::{own_runtime::OwnRuntime, payload};
use crate::{contender::LOOPBACK_MTU, cpu::Usage};
use anyhow::{Context, Result, ensure};
use std::{sync::Arc, time::Duration};
use tensor_relay_client::{Client, Connector, Progress, Snapshot, Subscription, Ticket, Topic, Tuning};
use tensor_relay_device::{Device, Source};
use tensor_relay_protocol::TensorSpec;
use tensor_relay_server::{
    Access, Borrowed, Identity, Listener, Publication, Publisher, Server, ServerStats,
};
use tokio::time::{Instant, timeout};

/// The settings of the service that differ from the defaults.
#[derive(Debug, Clone)]
pub(super) struct Setup {
    /// The size of chunks.
    pub(super) chunk_bytes: u64,
    /// The number of chunks in flight, at the server and by the client's credit.
    pub(super) chunks_in_flight: usize,
    /// The device of snapshots; host memory by default.
    pub(super) landing: Option<Device>,
}

/// A running server with one topic, in a room of its own.
pub(super) struct Serving {
    runtime: Arc<OwnRuntime>,
    server: Arc<Server>,
    publisher: Option<Publisher>,
    topic: Topic,
    ticket: Ticket,
}

impl Serving {
    /// Starts a server in `room`.
    pub(super) async fn start(runtime: Arc<OwnRuntime>, setup: &Setup) -> Result<Self> {
        let config = tensor_relay_server::Config {
            chunk_bytes: u32::try_from(setup.chunk_bytes)?,
            chunks_in_flight: setup.chunks_in_flight,
            stall_timeout: STALL,
            ..Default::default()
        };
        let (server, ticket) = runtime.run(async move { start(config) }).await??;
        let server = Arc::new(server);
        Self::another(runtime, server, ticket, 0)
    }

    /// Another topic of the same server.
    pub(super) fn beside(&self, number: u32) -> Result<Self> {
        Self::another(Arc::clone(&self.runtime), Arc::clone(&self.server), self.ticket.clone(), number)
    }

    fn another(runtime: Arc<OwnRuntime>, server: Arc<Server>, ticket: Ticket, number: u32) -> Result<Self> {
        let topic = Topic::new(&format!("gpu/{number}"))?;
        let publisher = Some(server.publisher(topic.clone())?);
        Ok(Self { runtime, server, publisher, topic, ticket })
    }

    /// Publishes `specs`, which lie in `source`, as a new version, whose chunks are hashed when they are first read: as
    /// weights are that a training step just made.
    pub(super) async fn publish(
        &mut self,
        specs: Vec<TensorSpec>,
        source: Arc<dyn Source>,
    ) -> Result<Publication> {
        let borrowed = Borrowed::from_source(&self.server.staging(), specs, vec![], |_| source)?;
        let mut publisher = self.publisher.take().context("a publish before failed")?;
        let published = self.runtime.run(async move {
            let published = publisher.publish(borrowed, vec![]).await;
            (publisher, published)
        });
        let (publisher, published) = published.await?;
        self.publisher = Some(publisher);
        Ok(published?)
    }

    /// The counters of the server.
    pub(super) fn stats(&self) -> ServerStats {
        self.server.stats()
    }
}

fn start(config: tensor_relay_server::Config) -> Result<(Server, Ticket)> {
    let identity = Identity::ephemeral()?;
    let listener = Listener::bind(([127, 0, 0, 1], 0).into(), &identity, tuning())?;
    let server = Server::start(listener, Access::open(), config);
    let address = server.local_address().to_string();
    let ticket = Ticket::new(vec![address], vec![identity.fingerprint().0], None)?;
    Ok((server, ticket))
}

fn tuning() -> Tuning {
    Tuning { udp_payload_max: Some(LOOPBACK_MTU), ..Tuning::default() }
}

/// A subscriber in a room of its own.
pub(super) struct Receiving {
    runtime: OwnRuntime,
    subscription: Option<Subscription>,
    _client: Arc<Client>,
}

impl Receiving {
    /// Connects to `serving` and subscribes to its topic.
    pub(super) async fn start(serving: &Serving, setup: &Setup) -> Result<Self> {
        let runtime = OwnRuntime::new("receiving", 1)?;
        let config = tensor_relay_client::Config {
            device: setup.landing.clone(),
            credit_chunks: u32::try_from(setup.chunks_in_flight)?,
            stall_timeout: STALL,
            reconnect_timeout: Duration::ZERO,
            ..Default::default()
        };
        let (ticket, topic) = (serving.ticket.clone(), serving.topic.clone());
        let subscribed = runtime.run(async move {
            let client = Client::connect_with(&Connector::new(tuning()), &ticket, config).await?;
            let subscription = client.subscribe(&topic).await?;
            anyhow::Ok((client, subscription))
        });
        let (client, subscription) = subscribed.await??;
        Ok(Self { runtime, subscription: Some(subscription), _client: Arc::new(client) })
    }

    /// The next version, whole and verified, within the deadline of a round. A failure ends the subscription.
    pub(super) async fn next(&mut self) -> Result<Snapshot> {
        let mut subscription = self.subscription.take().context("the subscription failed before")?;
        let next = self.runtime.run(async move {
            let next = timeout(ROUND_MAX, subscription.next()).await;
            (subscription, next)
        });
        let (subscription, next) = next.await?;
        let snapshot = next.with_context(|| format!("no version came within {ROUND_MAX:?}"))??;
        self.subscription = Some(subscription);
        Ok(snapshot)
    }

    /// A way to see how far the version on its way is.
    pub(super) fn progress(&self) -> Result<Box<dyn Fn() -> Progress + Send>> {
        let subscription = self.subscription.as_ref().context("the subscription failed before")?;
        Ok(Box::new(subscription.progress_reader()))
    }
}

/// A server and those who read its topic.
pub(super) struct Loopback {
    pub(super) serving: Serving,
    pub(super) readers: Vec<Receiving>,
}

/// The time of one round, from the publish until the last reader has the whole version.
#[derive(Debug, Clone, Copy)]
pub(super) struct Round {
    pub(super) seconds: f64,
    pub(super) cpu_s: f64,
}

impl Loopback {
    /// A server and `readers` clients, each in a room of its own on one thread.
    pub(super) async fn start(setup: &Setup, readers: u32) -> Result<Self> {
        let serving = Serving::start(Arc::new(OwnRuntime::new("serving", 1)?), setup).await?;
        let mut all = Vec::new();
        for _ in 0..readers {
            all.push(Receiving::start(&serving, setup).await?);
        }
        Ok(Self { serving, readers: all })
    }

    /// Publishes what `source` has as one tensor, and waits until every reader has it.
    pub(super) async fn round(&mut self, source: &Arc<dyn Source>) -> Result<Round> {
        let specs = payload::tensors(1, source.len_bytes())?;
        self.round_of(specs, source).await
    }

    /// The same for tensors of other shapes.
    pub(super) async fn round_of(
        &mut self,
        specs: Vec<TensorSpec>,
        source: &Arc<dyn Source>,
    ) -> Result<Round> {
        let (begun, usage) = (Instant::now(), Usage::now());
        self.serving.publish(specs, Arc::clone(source)).await?;
        for reader in &mut self.readers {
            let received = reader.next().await?.payload_bytes();
            let expected = source.len_bytes();
            ensure!(received == expected, "{received} bytes came where {expected} were published");
        }
        Ok(Round { seconds: begun.elapsed().as_secs_f64(), cpu_s: Usage::now().since(usage).total_s() })
    }
}

/// The deadline of a version. The slowest part of the suite takes less than a second for one.
const ROUND_MAX: Duration = Duration::from_secs(20);

/// The stall timeout of both ends: short, so that a device failure is reported soon.
const STALL: Duration = Duration::from_secs(5);
