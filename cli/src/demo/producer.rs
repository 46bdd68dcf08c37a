//! The demo's producer: serves a generated model, and publishes a new version on request.

use super::events::{self, ProducerEvent, Sent, Serving};
use crate::{args::DemoProducerArgs, device, exit::Exit};
use anyhow::{Context, bail};
use std::{
    convert::Infallible,
    time::{Duration, SystemTime},
};
use tensor_relay_bench::{cpu::Usage, workload::StateDict};
use tensor_relay_device::Device;
use tensor_relay_server::{
    Access, Config, Dtype, Identity, Listener, Metadata, Publishable, Publisher, Server, Shape, Staged,
    Staging, TensorName, TensorSpec, Ticket, Topic, Tuning,
};
use tokio::io::{AsyncBufReadExt, BufReader};

/// The topic of the model.
pub(super) const WEIGHTS: &str = "weights";

/// The topic of the small tensor whose latency is measured.
pub(super) const SMALL: &str = "small";

/// The size of the small tensor.
pub(super) const SMALL_BYTES: u64 = 4 << 10;

/// The metadata key of the time of publishing, in nanoseconds since 1970. Both processes use the clock of this machine.
pub(super) const PUBLISHED_NS: &str = "published_unix_ns";

/// The metadata key of the seed of a version's bytes.
pub(super) const SEED: &str = "seed";

/// The pause between two small versions, long enough that the transfers do not overlap.
const SMALL_VERSION_DELAY: Duration = Duration::from_millis(3);

/// The minimum size of a tensor that counts as large.
const LARGE_BYTES: u64 = 64 << 10;

/// The deadline for transfers to finish at the end of the demo.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) async fn run(args: DemoProducerArgs) -> anyhow::Result<Exit> {
    let config = Config { codec: args.codec.into(), ..Config::default() };
    let device = device::open(&args.device, config.chunk_bytes).await?;
    let identity = Identity::load_or_create(&args.state_dir)?;
    let listener = Listener::bind(([127, 0, 0, 1], 0).into(), &identity, Tuning::default())?;
    let server = Server::start(listener, Access::open(), config);
    let address = server.local_address().to_string();
    let ticket = Ticket::new(vec![address], vec![identity.fingerprint().0], Some(Topic::new(WEIGHTS)?))?;
    let mut producer = Producer {
        size_bytes: args.size,
        device,
        staging: server.staging(),
        weights: server.publisher(Topic::new(WEIGHTS)?)?,
        small: server.publisher(Topic::new(SMALL)?)?,
        versions: 0,
    };
    events::write(&ProducerEvent::Serving(producer.describe(&ticket)))?;
    let mut commands = BufReader::new(tokio::io::stdin()).lines();
    while let Some(command) = commands.next_line().await? {
        match command.split_once(' ') {
            None if command == "weights" => producer.publish_weights().await?,
            Some(("small", count)) => producer.publish_small_versions(count.parse()?).await?,
            _ => bail!("the demo sent the unknown command {command:?}"),
        }
    }
    server.shutdown(SHUTDOWN_TIMEOUT).await;
    Ok(Exit::Done)
}

struct Producer {
    size_bytes: u64,
    device: Option<Device>,
    staging: Staging,
    weights: Publisher,
    small: Publisher,
    versions: u64,
}

impl Producer {
    fn describe(&self, ticket: &Ticket) -> Serving {
        let dict = StateDict::new(self.size_bytes, 0);
        let large = (0..dict.tensors().len())
            .filter(|index| dict.byte_len(*index) >= LARGE_BYTES)
            .count();
        Serving {
            ticket: ticket.to_string(),
            large_tensors: large,
            small_tensors: dict.tensors().len() - large,
            tensor_bytes: dict.total_bytes(),
        }
    }

    /// Generates the next version of the model on a blocking thread, publishes it, and reports its commit.
    async fn publish_weights(&mut self) -> anyhow::Result<()> {
        self.versions += 1;
        let (dict, staging) = (StateDict::new(self.size_bytes, self.versions), self.staging.clone());
        let staged = tokio::task::spawn_blocking(move || {
            let specs = dict.tensors().to_vec();
            Staged::new::<Infallible>(&staging, specs, vec![], |index, out| {
                dict.fill(index, 0, out);
                Ok(())
            })
        });
        let staged = staged.await?.context("cannot stage the model; try a smaller --size")?;
        let (version, metadata) = (self.upload(staged).await?, metadata_now(self.versions)?);
        let before = Usage::now();
        let mut publication = self.weights.publish(version, metadata).await?;
        if publication.committed(1, super::step_timeout(self.size_bytes)).await {
            events::write(&ProducerEvent::Sent(Sent { cpu_s: Usage::now().since(before).total_s() }))?;
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

    async fn publish_small_versions(&mut self, count: u64) -> anyhow::Result<()> {
        for seed in 1..=count {
            let spec = TensorSpec::new(TensorName::new(SMALL)?, Dtype::U8, Shape::new(&[SMALL_BYTES])?);
            let metadata = metadata_now(seed)?;
            let staged = Staged::new::<Infallible>(&self.staging, vec![spec], vec![], |_, out| {
                out.fill(seed as u8);
                Ok(())
            })?;
            self.small.publish(self.upload(staged).await?, metadata).await?;
            tokio::time::sleep(SMALL_VERSION_DELAY).await;
        }
        Ok(())
    }
}

/// The metadata of a version with this seed, published now.
fn metadata_now(seed: u64) -> anyhow::Result<Metadata> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(vec![(SEED.into(), seed.to_string()), (PUBLISHED_NS.into(), now.as_nanos().to_string())])
}
