//! Small tensors, published on request.
//!
//! The receiving side requests each version by a byte, over a plain TCP connection to the port after the serving
//! side's. The measured time begins before the serving side stages the tensor, which contains the time stamp; it ends
//! when the receiving program has the committed snapshot.

use crate::{
    contender::SmallMessages,
    latency::{self, Latencies, Stamp},
};
use anyhow::{Context, Result, ensure};
use std::{convert::Infallible, net::SocketAddr, time::Duration};
use tensor_relay_client::{Client, Topic};
use tensor_relay_server::{
    Dtype, Publication, Publisher, Server, Shape, Staged, Staging, TensorName, TensorSpec,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};

const TOPIC: &str = "small";
const TENSOR: &str = "message";

/// The deadline of one version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(10);

/// A publisher that publishes a version of its topic for each request.
pub(super) struct SmallPublisher {
    listener: TcpListener,
    publisher: Publisher,
    staging: Staging,
}

impl SmallPublisher {
    /// Listens on the TCP port [after](request_address) that of `server`.
    ///
    /// # Errors
    /// When that port is taken.
    pub(super) async fn new(server: &Server) -> Result<Self> {
        let address = request_address(server.local_address());
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("cannot listen on {address} (TCP) for requests of small tensors"))?;
        Ok(Self { listener, publisher: server.publisher(Topic::new(TOPIC)?)?, staging: server.staging() })
    }

    /// Serves one receiving side after the other, for ever.
    ///
    /// # Errors
    /// When a version cannot be published, or is not committed in time. A connection that breaks is no error.
    pub(super) async fn run(mut self) -> Result<()> {
        loop {
            let (mut requests, _) = self.listener.accept().await?;
            requests.set_nodelay(true)?;
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

/// The TCP address for requests of small tensors from the server at `server`.
fn request_address(server: SocketAddr) -> SocketAddr {
    SocketAddr::new(server.ip(), server.port().checked_add(1).unwrap_or(u16::MAX - 1))
}

/// Requests small tensors, one after the other, from the server at `remote`, to which `client` is connected: those
/// to warm up, then `count` that are counted.
///
/// # Errors
/// When a version is not received in time, or is not the expected one.
pub(super) async fn receive(client: &Client, remote: SocketAddr, count: u32) -> Result<SmallMessages> {
    let mut requests = TcpStream::connect(request_address(remote))
        .await
        .context("cannot connect to request small tensors")?;
    requests.set_nodelay(true)?;
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
