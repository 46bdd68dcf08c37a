//! The complete service over loopback, from GPU to GPU and from host to host.

use super::{Job, rate};
use crate::{
    cpu,
    gpu::{
        engine::Engine,
        line::{self, Cells},
        loopback::{Loopback, Setup},
        passes::passes,
        payload::{self, OnDevice},
        stream::{chunks_in_flight, pieces, read_all, write_all},
    },
    size,
};
use anyhow::Result;
use std::{sync::Arc, time::Instant};
use tensor_relay_client::Lanes;
use tensor_relay_device::{Capacity, Source};

pub(super) const ABOUT: &str = "\
A server and a client on one machine, each on one thread and one for each further lane, with TLS 1.3 and all hashes. A \
round is from the publish to the verified snapshot, and moves every byte raw; chunks are hashed when they are first read, \
like those of new weights. `network` is the same from host memory to host memory, in the same pass and with the same \
number of lanes; `d2h` and `h2d` are the copies alone. `efficiency` is `end_to_end` / min(`d2h`, `network`, `h2d`) of the \
same pass: 1 means that a GPU at both ends costs nothing. CPU seconds are those of both ends.";

pub(super) async fn run(job: Job) -> Result<()> {
    let engine = job.engine()?;
    let (from, host) = payload::on_device_and_host(&engine, job.bytes).await?;
    let memory = engine.device(Capacity { slots: 2, slot_bytes: 4 << 20 })?;
    let to = OnDevice::whole(&memory, job.bytes)?;
    for _ in passes(job.budget()) {
        for (slots, chunk_bytes, lanes) in settings(&job) {
            let setting = [("slots", slots.to_string()), ("chunk", size::text(chunk_bytes))];
            let setting = Cells::of(setting).and("lanes", Some(lanes.to_string()));
            let capacity = Capacity { slots, slot_bytes: chunk_bytes as usize };
            let rounds = if job.quick { 1 } else { ROUNDS };
            for measured in measure(&engine, (&from, &host, &to), capacity, lanes, rounds).await? {
                line::sample("loopback", setting.clone(), measured);
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

/// Measures the service from GPU to GPU, and the same from host to host, in alternating rounds. The first round is not
/// counted, so that memory is allocated and windows are open.
async fn measure(
    engine: &Engine,
    (from, host_source, to): (&OnDevice, &Arc<dyn Source>, &OnDevice),
    capacity: Capacity,
    lanes: u32,
    rounds: u32,
) -> Result<Vec<Cells<f64>>> {
    let (bytes, chunk_bytes) = (from.len_bytes(), capacity.slot_bytes as u64);
    let [sending, landing] = [engine.device(capacity)?, engine.device(capacity)?];
    // Slots of their own for the copies alone, because a server keeps chunks in its slots for further readers.
    let alone = engine.device(capacity)?;
    let (source_alone, sink_alone) =
        (from.through(engine, &alone)?.source()?, to.through(engine, &alone)?.sink()?);
    let gpu_source = from.through(engine, &sending)?.source()?;
    // At most the program's default.
    let default = tensor_relay_server::Config::default().chunks_in_flight;
    let in_flight = chunks_in_flight(capacity.slots).min(default);
    let on_host = Setup { lanes: Lanes::Fixed(lanes), ..Setup::new(chunk_bytes, in_flight, None) };
    let mut gpu = Loopback::start(&Setup { landing: Some(landing), ..on_host.clone() }, 1).await?;
    let mut host = Loopback::start(&on_host, 1).await?;
    let pieces = pieces(bytes, chunk_bytes);
    let mut all = vec![];
    for _ in 0..=rounds {
        let begun = Instant::now();
        read_all(&source_alone, &pieces, in_flight).await?;
        let d2h = rate(bytes, begun.elapsed().as_secs_f64());
        let begun = Instant::now();
        write_all(&sink_alone, &pieces, in_flight).await?;
        let h2d = rate(bytes, begun.elapsed().as_secs_f64());
        let (host, gpu) = (host.round(host_source).await?, gpu.round(&gpu_source).await?);
        let (network, end_to_end) = (rate(bytes, host.seconds), rate(bytes, gpu.seconds));
        all.push(Cells::of([
            ("end_to_end_gb_per_s", end_to_end),
            ("network_gb_per_s", network),
            ("d2h_gb_per_s", d2h),
            ("h2d_gb_per_s", h2d),
            ("efficiency", end_to_end / d2h.min(network).min(h2d)),
            ("cpu_s_per_gib", cpu::per_gib(gpu.cpu_s, bytes)),
            ("network_cpu_s_per_gib", cpu::per_gib(host.cpu_s, bytes)),
        ]));
    }
    Ok(all.split_off(1))
}
