//! Small tensors, published on request.
//!
//! The receiving side requests each version by a byte over a Unix socket, whose path has the port of the serving side:
//! both sides are on one machine, even if in different network namespaces. The measured time begins before the serving
//! side stages the tensor, which contains the time stamp; it ends when the receiving program has the committed
//! snapshot.

use crate::{
    contender::SmallMessages,
    latency::{self, Latencies, Stamp},
};
use anyhow::{Context, Result, ensure};
use std::{convert::Infallible, fs, path::PathBuf, time::Duration};
use tensor_relay_client::{Client, Topic};
use tensor_relay_server::{
    Dtype, Publication, Publisher, Server, Shape, Staged, Staging, TensorName, TensorSpec,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    time::timeout,
};

const TOPIC: &str = "small";
const TENSOR: &str = "message";

/// The deadline of one version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(10);

/// A publisher that publishes a version of its topic for each request.
pub(super) struct SmallPublisher {
    listener: UnixListener,
    publisher: Publisher,
    staging: Staging,
}

impl SmallPublisher {
    /// Listens for requests of `server`'s small tensors. A socket that a killed server left behind is replaced.
    ///
    /// # Errors
    /// When the socket cannot be created.
    pub(super) fn new(server: &Server) -> Result<Self> {
        let path = requests_path(server.local_address().port());
        fs::remove_file(&path).ok(); // Usually there is none. If it cannot be removed, `bind` fails.
        let listener =
            UnixListener::bind(&path).with_context(|| format!("cannot listen on {}", path.display()))?;
        Ok(Self { listener, publisher: server.publisher(Topic::new(TOPIC)?)?, staging: server.staging() })
    }

    /// Serves one receiving side after the other, for ever.
    ///
    /// # Errors
    /// When a version cannot be published, or is not committed in time. A connection that breaks is no error.
    pub(super) async fn run(mut self) -> Result<()> {
        loop {
            let (mut requests, _) = self.listener.accept().await?;
            let mut last: Option<Publication> = None;
            while let Ok(_request) = requests.read_u8().await {
                // One at a time: the acknowledgement of a message is not part of the next one's latency.
                if let Some(mut last) = last.take() {
                    ensure!(
                        last.committed(1, VERSION_TIMEOUT).await,
                        "the last small tensor was not acknowledged"
                    );
                }
                last = Some(self.publish().await?);
            }
        }
    }

    async fn publish(&mut self) -> Result<Publication> {
        let shape = Shape::new(&[latency::MESSAGE_BYTES as u64])?;
        let spec = TensorSpec::new(TensorName::new(TENSOR)?, Dtype::U8, shape);
        let begun = Stamp::now();
        let staged = Staged::new::<Infallible>(&self.staging, vec![spec], vec![], |_, out| {
            begun.write(out);
            Ok(())
        })?;
        Ok(self.publisher.publish(staged, vec![]).await?)
    }
}

/// The socket for requests of small tensors from the server at `port`.
fn requests_path(port: u16) -> PathBuf {
    std::env::temp_dir().join(format!("tensor-relay-bench-{port}.requests"))
}

/// Connects to the server at `port` to request small tensors, and removes the socket's path.
///
/// # Errors
/// When there is no such server.
pub(super) async fn connect(port: u16) -> Result<UnixStream> {
    let path = requests_path(port);
    let connected = UnixStream::connect(&path).await;
    let requests = connected.with_context(|| format!("cannot connect to {}", path.display()))?;
    fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    Ok(requests)
}

/// Requests small tensors, one after the other, from the server to which `client` is connected: those to warm up, then
/// `count` that are counted.
///
/// # Errors
/// When a version is not received in time, or is not the expected one.
pub(super) async fn receive(client: &Client, mut requests: UnixStream, count: u32) -> Result<SmallMessages> {
    let mut subscription = client.subscribe(&Topic::new(TOPIC)?).await?;
    let mut latencies = Latencies::new(count);
    for number in 0..latency::message_count(count) {
        requests.write_u8(1).await?;
        let snapshot = timeout(VERSION_TIMEOUT, subscription.next()).await.with_context(|| {
            format!("small tensor {number} was not received within {VERSION_TIMEOUT:?}")
        })??;
        let message = snapshot.tensor(TENSOR).context("a snapshot has no small tensor")?;
        latencies.add(&message)?;
    }
    Ok(latencies.summary())
}
