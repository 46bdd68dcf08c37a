//! The complete service over loopback: a server and clients, each on a runtime of its own. Sessions choose their
//! transport, usually TCP.

use super::{own_runtime::OwnRuntime, payload};
use crate::{
    contender::{Begun, LOOPBACK_MTU},
    server,
};
use anyhow::{Context, Result, ensure};
use std::{sync::Arc, time::Duration};
use tensor_relay_client::{
    Client, Connector, Lanes, Progress, Snapshot, Subscription, Ticket, Topic, Tuning,
};
use tensor_relay_device::{Device, Source};
use tensor_relay_protocol::{CodecSet, TensorSpec};
use tensor_relay_server::{Borrowed, Publication, Publisher, Server, ServerStats};
use tokio::{sync::Mutex, time::timeout};

/// The settings of a server and its clients that differ from the defaults.
#[derive(Debug, Clone)]
pub(super) struct Setup {
    /// The size of a chunk.
    pub(super) chunk_bytes: u64,
    /// The number of chunks in flight: the server's limit, and the client's credit.
    pub(super) chunks_in_flight: usize,
    /// The device on which snapshots land; `None` for host memory.
    pub(super) landing: Option<Device>,
    /// The number of lanes of each client.
    pub(super) lanes: Lanes,
}

impl Setup {
    /// A setup in which clients choose the number of lanes.
    pub(super) fn new(chunk_bytes: u64, chunks_in_flight: usize, landing: Option<Device>) -> Self {
        Self { chunk_bytes, chunks_in_flight, landing, lanes: Lanes::Auto }
    }
}

/// A running server with one topic, on a runtime of its own.
pub(super) struct Serving {
    runtime: OwnRuntime,
    server: Server,
    publisher: Arc<Mutex<Publisher>>,
    topic: Topic,
    ticket: Ticket,
}

impl Serving {
    /// Starts a server.
    pub(super) async fn start(setup: &Setup) -> Result<Self> {
        let runtime = OwnRuntime::new("serving", 1)?;
        let config = tensor_relay_server::Config {
            chunk_bytes: u32::try_from(setup.chunk_bytes)?,
            chunks_in_flight: setup.chunks_in_flight,
            stall_timeout: STALL_TIMEOUT,
            ..Default::default()
        };
        let listen = ([127, 0, 0, 1], 0).into();
        let started = runtime.run(async move { server::start(listen, Some(LOOPBACK_MTU), config, None) });
        let (server, ticket) = started.await??;
        let topic = Topic::new("gpu")?;
        let publisher = Arc::new(Mutex::new(server.publisher(topic.clone())?));
        Ok(Self { runtime, server, publisher, topic, ticket })
    }

    /// Publishes the tensors of `specs`, whose payload is `source`, as a borrowed version. Its chunks are hashed when
    /// they are first read, as for the weights after a training step.
    pub(super) async fn publish(
        &self,
        specs: Vec<TensorSpec>,
        source: Arc<dyn Source>,
    ) -> Result<Publication> {
        let borrowed = Borrowed::from_source(&self.server.staging(), specs, vec![], |_| source)?;
        let publisher = Arc::clone(&self.publisher);
        let publish = async move { publisher.lock().await.publish(borrowed, vec![]).await };
        Ok(self.runtime.run(publish).await??)
    }

    /// The counters of the server.
    pub(super) fn stats(&self) -> ServerStats {
        self.server.stats()
    }
}

/// A subscriber on a runtime of its own.
pub(super) struct Receiving {
    runtime: OwnRuntime,
    subscription: Arc<Mutex<Subscription>>,
    _client: Arc<Client>,
}

impl Receiving {
    /// Connects to `serving` and subscribes to its topic.
    pub(super) async fn start(serving: &Serving, setup: &Setup) -> Result<Self> {
        let runtime = OwnRuntime::new("receiving", 1)?;
        let config = tensor_relay_client::Config {
            codecs: CodecSet::only_raw(),
            device: setup.landing.clone(),
            credit_chunks: u32::try_from(setup.chunks_in_flight)?,
            lanes: setup.lanes,
            stall_timeout: STALL_TIMEOUT,
            reconnect_timeout: Duration::ZERO,
            ..Default::default()
        };
        let (ticket, topic) = (serving.ticket.clone(), serving.topic.clone());
        let subscribed = runtime.run(async move {
            let tuning = Tuning { udp_payload_max: Some(LOOPBACK_MTU), ..Tuning::default() };
            let client = Client::connect_with(&Connector::new(tuning), &ticket, config).await?;
            let subscription = client.subscribe(&topic).await?;
            anyhow::Ok((client, subscription))
        });
        let (client, subscription) = subscribed.await??;
        Ok(Self { runtime, subscription: Arc::new(Mutex::new(subscription)), _client: Arc::new(client) })
    }

    /// The next version, complete and verified, within a deadline.
    pub(super) async fn next(&self) -> Result<Snapshot> {
        let subscription = Arc::clone(&self.subscription);
        let next = async move { timeout(VERSION_TIMEOUT, subscription.lock().await.next()).await };
        let next = self.runtime.run(next).await?;
        Ok(next.with_context(|| format!("no version was received within {VERSION_TIMEOUT:?}"))??)
    }

    /// A function that returns the progress of the current version.
    pub(super) fn progress_reader(&self) -> Result<Box<dyn Fn() -> Progress + Send>> {
        Ok(Box::new(self.subscription.try_lock()?.progress_reader()))
    }
}

/// A server and the subscribers of its topic.
pub(super) struct Loopback {
    pub(super) serving: Serving,
    pub(super) readers: Vec<Receiving>,
}

/// The wall-clock and CPU time of one round, from the publish until the last reader has the complete version.
#[derive(Debug, Clone, Copy)]
pub(super) struct Round {
    pub(super) seconds: f64,
    pub(super) cpu_s: f64,
}

impl Loopback {
    /// Starts a server and `reader_count` clients, each on a runtime of its own with one thread.
    pub(super) async fn start(setup: &Setup, reader_count: u32) -> Result<Self> {
        let serving = Serving::start(setup).await?;
        let mut readers = Vec::new();
        for _ in 0..reader_count {
            readers.push(Receiving::start(&serving, setup).await?);
        }
        Ok(Self { serving, readers })
    }

    /// Publishes the payload in `source` as one tensor, and waits until every reader has it.
    pub(super) async fn round(&mut self, source: &Arc<dyn Source>) -> Result<Round> {
        let specs = payload::tensors(1, source.len_bytes())?;
        self.round_of(specs, source).await
    }

    /// Publishes the payload in `source` as the tensors of `specs`, and waits until every reader has it.
    pub(super) async fn round_of(
        &mut self,
        specs: Vec<TensorSpec>,
        source: &Arc<dyn Source>,
    ) -> Result<Round> {
        let begun = Begun::now();
        self.serving.publish(specs, Arc::clone(source)).await?;
        for reader in &mut self.readers {
            // Rounds repeat the same bytes: a delta would be next to nothing.
            let (received, expected) = (reader.next().await?.receipt().wire_bytes, source.len_bytes());
            ensure!(received == expected, "received {received} bytes instead of {expected}");
        }
        Ok(Round { seconds: begun.seconds(), cpu_s: begun.cpu_s() })
    }
}

/// The deadline of a version, which takes less than a second in all parts.
const VERSION_TIMEOUT: Duration = Duration::from_secs(20);

/// The stall timeout of both ends: short, so that a device failure is reported soon.
const STALL_TIMEOUT: Duration = Duration::from_secs(5);
