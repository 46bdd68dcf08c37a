//! The complete service over loopback, from GPU to GPU and from host to host. Its name in results, `quic`, is older than
//! sessions over TCP.

use super::{Job, pipeline_cells, rate};
use crate::{
    cpu,
    gpu::{
        engine::Engine,
        line::Cells,
        loopback::{Loopback, Round, Setup},
        passes::passes,
        payload::{self, OnDevice},
        stream::{chunks_in_flight, pieces, read_all, write_all},
    },
};
use anyhow::Result;
use std::{ops::Range, sync::Arc, time::Instant};
use tensor_relay_client::Lanes;
use tensor_relay_device::{Capacity, Sink, Source};

pub(super) const ABOUT: &str = "\
A server and a client on one machine, each on one thread and one for each further lane, with TLS 1.3 and all hashes. A round is from the publish to the \
verified snapshot; chunks are hashed when they are first read, like those of new weights. `network` is the same from host \
memory to host memory, in the same pass and with the same number of lanes; `d2h` and `h2d` are the copies alone. `efficiency` is `end_to_end` / min(`d2h`, \
`network`, `h2d`) of the same pass: 1 means that a GPU at both ends costs nothing. CPU seconds are those of both ends.";

pub(super) async fn run(job: Job) -> Result<()> {
    let engine = job.engine()?;
    let (from, host) = payload::on_device_and_host(&engine, job.bytes).await?;
    let memory = engine.device(Capacity { slots: 2, slot_bytes: 4 << 20 })?;
    let to = OnDevice::whole(&memory, job.bytes)?;
    for _ in passes(job.budget()) {
        for (slots, chunk_bytes, lanes) in settings(&job) {
            let mut pair = Pair::start(&engine, &from, &to, &host, (slots, chunk_bytes), lanes).await?;
            for _ in 0..if job.quick { 1 } else { ROUNDS } {
                let measured = pair.measure().await?;
                let setting = pipeline_cells(slots, chunk_bytes).and("lanes", Some(lanes.to_string()));
                job.printer().sample("quic", setting, measured);
            }
        }
    }
    Ok(())
}

/// The slots, chunk sizes and lanes to measure. Clients that chose their lanes would give the halves of a pair different
/// numbers of them. One lane shows what a pipeline costs; several, what the default pipeline can reach.
fn settings(job: &Job) -> impl Iterator<Item = (usize, u64, u32)> {
    let (slots, chunk_bytes) = job.default_pipeline();
    let with_lanes = job
        .choose(&[2, 4, 8], &[2])
        .into_iter()
        .map(move |lanes| (slots, chunk_bytes, lanes));
    let with_one = job.pipelines().into_iter().map(|(slots, chunk_bytes)| (slots, chunk_bytes, 1));
    with_one.chain(with_lanes)
}

/// The number of measured rounds of a pipeline in a pass, after one to warm up.
const ROUNDS: u32 = 2;

/// The service from GPU to GPU, and the same from host to host.
struct Pair {
    gpu: Loopback,
    host: Loopback,
    gpu_source: Arc<dyn Source>,
    host_source: Arc<dyn Source>,
    source_alone: Arc<dyn Source>,
    sink_alone: Arc<dyn Sink>,
    pieces: Vec<Range<u64>>,
    in_flight: usize,
}

impl Pair {
    /// Starts both services and moves the payload once, so that memory is allocated and windows are open.
    async fn start(
        engine: &Engine,
        from: &OnDevice,
        to: &OnDevice,
        host_source: &Arc<dyn Source>,
        (slots, chunk_bytes): (usize, u64),
        lanes: u32,
    ) -> Result<Self> {
        let capacity = Capacity { slots, slot_bytes: chunk_bytes as usize };
        let ends = [engine.device(capacity)?, engine.device(capacity)?];
        // Slots of their own for the copies alone, because a server keeps chunks in its slots for further readers.
        let alone = engine.device(capacity)?;
        // At most the program's default.
        let in_flight = chunks_in_flight(slots).min(tensor_relay_server::Config::default().chunks_in_flight);
        let lanes = Lanes::Fixed(lanes);
        let on_host = Setup { lanes, ..Setup::new(chunk_bytes, in_flight, None) };
        let on_gpu = Setup { landing: Some(ends[1].clone()), ..on_host.clone() };
        let mut pair = Self {
            gpu: Loopback::start(&on_gpu, 1).await?,
            host: Loopback::start(&on_host, 1).await?,
            gpu_source: from.through(engine, &ends[0])?.source()?,
            host_source: Arc::clone(host_source),
            source_alone: from.through(engine, &alone)?.source()?,
            sink_alone: to.through(engine, &alone)?.sink()?,
            pieces: pieces(from.len_bytes(), chunk_bytes),
            in_flight,
        };
        pair.gpu.round(&pair.gpu_source).await?;
        pair.host.round(&pair.host_source).await?;
        Ok(pair)
    }

    async fn measure(&mut self) -> Result<Cells<f64>> {
        let bytes = self.gpu_source.len_bytes();
        let begun = Instant::now();
        read_all(&self.source_alone, &self.pieces, self.in_flight).await?;
        let d2h = rate(bytes, begun.elapsed().as_secs_f64());
        let begun = Instant::now();
        write_all(&self.sink_alone, &self.pieces, self.in_flight).await?;
        let h2d = rate(bytes, begun.elapsed().as_secs_f64());
        let host: Round = self.host.round(&self.host_source).await?;
        let gpu: Round = self.gpu.round(&self.gpu_source).await?;
        let (network, end_to_end) = (rate(bytes, host.seconds), rate(bytes, gpu.seconds));
        Ok(Cells::of([
            ("end_to_end_gb_per_s", end_to_end),
            ("network_gb_per_s", network),
            ("d2h_gb_per_s", d2h),
            ("h2d_gb_per_s", h2d),
            ("efficiency", end_to_end / d2h.min(network).min(h2d)),
            ("cpu_s_per_gib", cpu::per_gib(gpu.cpu_s, bytes)),
            ("network_cpu_s_per_gib", cpu::per_gib(host.cpu_s, bytes)),
        ]))
    }
}
