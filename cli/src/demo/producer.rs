//! The demo's producer: serves a generated model, and publishes its versions.

use super::{PUBLISHED_NS, SEED, SMALL, SMALL_BYTES, WEIGHTS};
use crate::{args::DemoArgs, device};
use anyhow::Context;
use std::{
    convert::Infallible,
    time::{Duration, SystemTime},
};
use tensor_relay_bench::workload::StateDict;
use tensor_relay_device::Device;
use tensor_relay_server::{
    Access, Config, Dtype, Identity, Listener, Metadata, Publishable, Publisher, Server, Shape, Staged,
    TensorName, TensorSpec, Ticket, Topic, Tuning,
};
use tokio::runtime::{Builder, Runtime};

/// The pause between two small versions, long enough that the transfers do not overlap.
const SMALL_VERSION_DELAY: Duration = Duration::from_millis(3);

/// The deadline for transfers to finish at the end of the demo.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct Producer {
    size_bytes: u64,
    device: Option<Device>,
    server: Server,
    weights: Publisher,
    small: Publisher,
    _runtime: OwnRuntime,
}

impl Producer {
    /// Starts a server on a thread of its own, and makes a ticket for its model.
    pub(super) async fn start(args: &DemoArgs) -> anyhow::Result<(Self, Ticket)> {
        let config = Config { codec: args.codec.into(), ..Config::default() };
        let device = device::open(&args.device, config.chunk_bytes).await?;
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let identity = Identity::ephemeral()?;
        let server = {
            let _entered = runtime.enter();
            let listener = Listener::bind(([127, 0, 0, 1], 0).into(), &identity, Tuning::default())?;
            Server::start(listener, Access::open(), config)
        };
        let address = server.local_address().to_string();
        let ticket = Ticket::new(vec![address], vec![identity.fingerprint().0], Some(Topic::new(WEIGHTS)?))?;
        let (weights, small) =
            (server.publisher(Topic::new(WEIGHTS)?)?, server.publisher(Topic::new(SMALL)?)?);
        let _runtime = OwnRuntime(Some(runtime));
        Ok((Self { size_bytes: args.size, device, server, weights, small, _runtime }, ticket))
    }

    /// Generates a version of the model, on a blocking thread.
    pub(super) async fn generate(&self, seed: u64) -> anyhow::Result<Publishable> {
        let (dict, staging) = (StateDict::new(self.size_bytes, seed), self.server.staging());
        let staged = tokio::task::spawn_blocking(move || {
            let specs = dict.tensors().to_vec();
            Staged::new::<Infallible>(&staging, specs, vec![], |index, out| {
                dict.fill(index, out);
                Ok(())
            })
        });
        self.upload(staged.await?.context("cannot stage the model; try a smaller --size")?)
            .await
    }

    pub(super) async fn publish(&mut self, version: Publishable, seed: u64) -> anyhow::Result<()> {
        self.weights.publish(version, metadata_now(seed)?).await?;
        Ok(())
    }

    pub(super) async fn publish_small(&mut self, count: u64) -> anyhow::Result<()> {
        for seed in 1..=count {
            let spec = TensorSpec::new(TensorName::new(SMALL)?, Dtype::U8, Shape::new(&[SMALL_BYTES])?);
            let metadata = metadata_now(seed)?;
            let staged = Staged::new::<Infallible>(&self.server.staging(), vec![spec], vec![], |_, out| {
                out.fill(seed as u8);
                Ok(())
            })?;
            let version = self.upload(staged).await?;
            self.small.publish(version, metadata).await?;
            tokio::time::sleep(SMALL_VERSION_DELAY).await;
        }
        Ok(())
    }

    /// Uploads a version to the device, if one is used.
    async fn upload(&self, staged: Staged) -> anyhow::Result<Publishable> {
        match &self.device {
            Some(device) => Ok(staged.onto(device).await?),
            None => Ok(staged.into()),
        }
    }

    pub(super) async fn close(self) {
        self.server.shutdown(SHUTDOWN_TIMEOUT).await;
    }
}

/// The metadata of a version with this seed, published now.
fn metadata_now(seed: u64) -> anyhow::Result<Metadata> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(vec![(SEED.into(), seed.to_string()), (PUBLISHED_NS.into(), now.as_nanos().to_string())])
}

/// The runtime of the server. It is dropped without waiting for its tasks, since that is impossible in another runtime.
struct OwnRuntime(Option<Runtime>);

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(Runtime::shutdown_background);
    }
}
