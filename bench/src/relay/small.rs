//! Small tensors, published when they are asked for.
//!
//! The receiving side asks over a plain TCP connection to the port after the serving side's, a byte for each version. What is
//! measured begins before the serving side stages the tensor (the time is taken then, and written into the bytes while they
//! are staged), covers publishing, and ends when the receiving side's program has the committed snapshot.

use crate::{
    contender::Small,
    latency::{self, Latencies, Stamp},
};
use anyhow::{Context, Result};
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
const DEADLINE: Duration = Duration::from_secs(10);

/// Publishes versions of its topic when somebody asks.
pub(super) struct SmallPublisher {
    listener: TcpListener,
    publisher: Publisher,
    staging: Staging,
}

impl SmallPublisher {
    /// Listens on the TCP port [after](asked_at) that of `server`.
    ///
    /// # Errors
    /// When that port is taken.
    pub(super) async fn new(server: &Server) -> Result<Self> {
        let address = asked_at(server.local_address());
        let listener = TcpListener::bind(address).await.with_context(|| {
            format!("TCP port {address} is taken, over which small tensors are asked for")
        })?;
        Ok(Self { listener, publisher: server.publisher(Topic::new(TOPIC)?)?, staging: server.staging() })
    }

    /// Serves one receiving side after the other, for ever.
    ///
    /// # Errors
    /// When a version cannot be published. A connection that breaks is no error.
    pub(super) async fn run(mut self) -> Result<()> {
        loop {
            let (mut asking, _) = self.listener.accept().await?;
            asking.set_nodelay(true)?;
            let mut last: Option<Publication> = None;
            while let Ok(_word) = asking.read_u8().await {
                // One at a time: the acknowledgement of a message is not part of the next one's time.
                if let Some(mut last) = last.take() {
                    last.committed(1, DEADLINE).await;
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

/// The address for requests of small tensors, beside `server`.
fn asked_at(server: SocketAddr) -> SocketAddr {
    SocketAddr::new(server.ip(), server.port().checked_add(1).unwrap_or(u16::MAX - 1))
}

/// Asks the server at `remote`, which `client` is connected to, for small tensors, one after the other, until `count` of
/// them count.
///
/// # Errors
/// When a version does not come in time, or is none of ours.
pub(super) async fn receive(client: &Client, remote: SocketAddr, count: u32) -> Result<Small> {
    let mut asking = TcpStream::connect(asked_at(remote))
        .await
        .context("nobody listens for who asks for small tensors")?;
    asking.set_nodelay(true)?;
    let mut subscription = client.subscribe(&Topic::new(TOPIC)?).await?;
    let mut latencies = Latencies::new(count);
    for number in 0..latency::messages(count) {
        asking.write_u8(1).await?;
        let snapshot = timeout(DEADLINE, subscription.next())
            .await
            .with_context(|| format!("small tensor {number} did not come within {DEADLINE:?}"))??;
        let message = snapshot.tensor(TENSOR).context("a snapshot came without its tensor")?;
        latencies.add(&message)?;
    }
    Ok(latencies.summary())
}
