//! Versions on the GPU that a server lends to other processes of its host.

use super::{Job, Part, rate};
use crate::{
    gpu::{
        child,
        engine::Engine,
        line::{self, Cells},
        payload::{self, OnDevice, noise_of},
    },
    size,
};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::{
    path::PathBuf,
    process::Stdio,
    sync::Arc,
    time::{Duration, Instant},
};
use tensor_relay_client::{Client, Request, Sharing, Snapshot, Ticket, Topic};
use tensor_relay_device::{Capacity, cuda::CudaEngine};
use tensor_relay_server::{Access, Listener, Publishable, Server, SocketListener, Tuning};
use tokio::time::timeout;

pub(super) const ABOUT: &str = "\
A version on the GPU is taken by another process of the host, over a Unix socket. A taker on the same GPU gets it by two \
copies within the GPU: one that the server makes for it, and one into its own memory. A taker without a GPU maps a copy in \
host memory, which the server makes once. `next_ms` is the time from the request to the complete version. The first request \
of each taker also opens what later ones use; the first of a taker without a GPU waits for the copy to host memory.";

pub(super) async fn run(job: Job) -> Result<()> {
    match (&job.taker, job.engine()?) {
        (_, Engine::Host(_)) => {
            line::note("The host engine lends no GPU memory.");
            Ok(())
        }
        (Some(taker), Engine::Cuda(engine)) => take(&job, engine, taker).await,
        (None, Engine::Cuda(engine)) => serve(&job, &engine).await,
    }
}

async fn serve(job: &Job, engine: &Arc<CudaEngine>) -> Result<()> {
    let device = Engine::Cuda(Arc::clone(engine)).device(CAPACITY)?;
    let tensor = OnDevice::whole(&device, job.bytes)?;
    tensor.upload(&noise_of(job.bytes, 0)?).await?;
    let buffer = tensor.buffers().next().context("a payload has a tensor")?.clone();

    let socket = std::env::temp_dir().join(format!("relay-bench-{}.sock", std::process::id()));
    let listener = SocketListener::bind(&socket, SocketListener::PRIVATE)?;
    let listener = Listener::on_socket(listener, Tuning::default());
    // Room for a copy in host memory, and for three versions more.
    let config = tensor_relay_server::Config { staged_bytes: job.bytes * 5, ..Default::default() };
    let server = Server::start(listener, Access::open(), config);
    let spec = payload::tensors(1, job.bytes)?.pop().context("one tensor")?;
    let (staging, tensors) = (server.staging(), vec![(spec, buffer)]);
    let staged = Publishable::from_device(&staging, tensors, vec![], Some(&device)).await?;
    let mut publisher = server.publisher(topic()?)?;
    let publication = publisher.publish(staged, vec![]).await?;

    for is_on_gpu in [true, false] {
        let taking = Job { taker: Some(Taker { socket: socket.clone(), is_on_gpu }), ..job.clone() };
        let command = child::part_command(&[], &[], Part::Takers, &taking)?;
        let output = child::run("the taker", command, Stdio::null(), TAKER_TIMEOUT).await;
        output.lines.iter().for_each(line::print);
        let outcome = output.failure.map_or_else(|| Ok("it has".into()), Err);
        line::check(format!("a taker {} has ended", place(is_on_gpu)), outcome);
    }
    drop((publication, publisher));
    server.shutdown(Duration::ZERO).await;
    Ok(())
}

/// Takes the version again and again: what the other process does.
async fn take(job: &Job, engine: Arc<CudaEngine>, taker: &Taker) -> Result<()> {
    let device = Engine::Cuda(engine).device(CAPACITY)?;
    let ticket: Ticket = format!("unix:{}", taker.socket.display()).parse()?;
    let config = tensor_relay_client::Config {
        device: taker.is_on_gpu.then_some(device),
        memory_bytes: job.bytes * 2,
        ..Default::default()
    };
    let client = Client::connect(&ticket, config).await?;
    for round in 0..ROUNDS {
        let begun = Instant::now();
        let mut subscription = client.subscribe_to(Request::newest(topic()?)).await?;
        let snapshot = timeout(NEXT_TIMEOUT, subscription.next()).await.context("no version came")??;
        let seconds = begun.elapsed().as_secs_f64();
        let sharing = snapshot.receipt().sharing;
        if round == 0 {
            let is_expected = match taker.is_on_gpu {
                true => sharing == Sharing::CopiedOnGpu,
                false => sharing == Sharing::Mapped,
            };
            let outcome = if is_expected { Ok(sharing.to_string()) } else { Err(sharing.to_string()) };
            line::check(format!("a taker {} gets memory", place(taker.is_on_gpu)), outcome);
            let equal = compare(job, &snapshot).await.map_err(|error| format!("{error:#}"));
            line::check(format!("a taker {} has equal bytes", place(taker.is_on_gpu)), equal);
        }
        let setting = Cells::of([
            ("taker", place(taker.is_on_gpu).to_owned()),
            ("round", if round == 0 { "first" } else { "later" }.to_owned()),
            ("bytes", size::text(job.bytes)),
        ]);
        let measured = Cells::of([("next_ms", seconds * 1e3), ("gb_per_s", rate(job.bytes, seconds))]);
        line::sample("takers", setting, measured);
    }
    client.close().await;
    Ok(())
}

async fn compare(job: &Job, snapshot: &Snapshot) -> Result<String> {
    let (host, expected) = (snapshot.to_host().await?, noise_of(job.bytes, 0)?);
    let (spec, _) = host.tensors().next().context("no tensor")?;
    let tensor = host.tensor(spec.name.as_str()).context("no bytes")?;
    ensure!(tensor[..] == expected[..], "the bytes differ");
    Ok(format!("{} bytes are equal", job.bytes))
}

fn topic() -> Result<Topic> {
    Ok(Topic::new("takers")?)
}

fn place(is_on_gpu: bool) -> &'static str {
    if is_on_gpu { "on the GPU" } else { "without a GPU" }
}

/// The number of measured requests of each taker, the first included.
const ROUNDS: usize = 8;
const CAPACITY: Capacity = Capacity { slots: 8, slot_bytes: 4 << 20 };
/// The deadline of a taker. Creating a context takes a second, and comparing the bytes another.
const TAKER_TIMEOUT: Duration = Duration::from_secs(20);
/// The deadline of one request.
const NEXT_TIMEOUT: Duration = Duration::from_secs(10);

/// What the other process takes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::gpu) struct Taker {
    socket: PathBuf,
    is_on_gpu: bool,
}
