//! Small tensors, each published when the one before was committed.
//!
//! The measured time begins before the serving side stages the tensor, which contains the time stamp; it ends when the
//! receiving program has the committed snapshot.

use crate::{
    clock,
    contender::SmallMessages,
    latency::{self, Latencies},
};
use anyhow::{Context, Result};
use std::{convert::Infallible, time::Duration};
use tensor_relay_client::{Client, Topic};
use tensor_relay_server::{Dtype, Publisher, Server, Shape, Staged, Staging, TensorName, TensorSpec};
use tokio::time::timeout;

const TOPIC: &str = "small";
const TENSOR: &str = "message";

/// The deadline of one version at the receiving side.
const VERSION_TIMEOUT: Duration = Duration::from_secs(10);

/// The time after which the publisher asks again whether a version was committed: it waits for a receiver for ever.
const COMMIT_POLL: Duration = Duration::from_secs(60);

/// A publisher of small tensors.
pub(super) struct SmallPublisher {
    publisher: Publisher,
    staging: Staging,
}

impl SmallPublisher {
    /// A publisher at `server`.
    ///
    /// # Errors
    /// When the server has one already.
    pub(super) fn new(server: &Server) -> Result<Self> {
        Ok(Self { publisher: server.publisher(Topic::new(TOPIC)?)?, staging: server.staging() })
    }

    /// Publishes a version whenever the one before was committed. The first waits for a receiver, which ignores its
    /// time, as that of all messages to warm up.
    ///
    /// # Errors
    /// When a version cannot be published.
    pub(super) async fn run(mut self) -> Result<()> {
        let shape = Shape::new(&[latency::MESSAGE_BYTES as u64])?;
        let spec = TensorSpec::new(TensorName::new(TENSOR)?, Dtype::U8, shape);
        loop {
            let begun_ns = clock::monotonic_ns();
            let staged = Staged::new::<Infallible>(&self.staging, vec![spec.clone()], vec![], |_, out| {
                latency::stamp(out, begun_ns);
                Ok(())
            })?;
            let mut publication = self.publisher.publish(staged, vec![]).await?;
            while !publication.committed(1, COMMIT_POLL).await {}
        }
    }
}

/// Receives small tensors, one after the other, from the server to which `client` is connected: those to warm up, then
/// `count` that are counted.
///
/// # Errors
/// When a version is not received in time, or is not the expected one.
pub(super) async fn receive(client: &Client, count: u32) -> Result<SmallMessages> {
    let mut subscription = client.subscribe(&Topic::new(TOPIC)?).await?;
    let mut latencies = Latencies::new(count);
    for number in 0..latency::message_count(count) {
        let snapshot = timeout(VERSION_TIMEOUT, subscription.next()).await.with_context(|| {
            format!("small tensor {number} was not received within {VERSION_TIMEOUT:?}")
        })??;
        let message = snapshot.tensor(TENSOR).context("a snapshot has no small tensor")?;
        latencies.add(&message)?;
    }
    Ok(latencies.summary())
}
