//! One source on the GPU and several readers, for which it is read once.

use super::{Job, rate};
use crate::{
    cpu,
    gpu::{
        line::{self, Cells},
        loopback::{Loopback, Setup},
        passes::passes,
        payload::{self, OnDevice},
        stream::chunks_in_flight,
    },
};
use anyhow::Result;
use tensor_relay_device::Capacity;

pub(super) const ABOUT: &str = "\
One server sends one version from the GPU to several readers in host memory at once, all over one socket and on one thread. \
The rate is the sum of all readers. Per chunk of the version, `source_requests` is the number of requests, `source_reads` the \
number of copies off the GPU for these, and `source_rereads` the number of repeated copies, because a reader was so far \
behind the others that the chunk was no longer cached.";

pub(super) async fn run(job: Job) -> Result<()> {
    let engine = job.engine()?;
    let (slots, chunk_bytes) = job.default_pipeline();
    let device = engine.device(Capacity { slots: slots * 4, slot_bytes: chunk_bytes as usize })?;
    let from = OnDevice::whole(&device, job.bytes)?;
    from.upload(&payload::noise_of(job.bytes, 2)?).await?;
    let source = from.source()?;
    let setup = Setup::new(chunk_bytes, chunks_in_flight(slots), None);
    let mut services = Vec::new();
    for readers in [1, 4] {
        let mut service = Loopback::start(&setup, readers).await?;
        service.round(&source).await?;
        services.push((readers, service));
    }
    for _ in passes(job.budget()) {
        for (readers, service) in &mut services {
            let before = service.serving.stats().encoder;
            let round = service.round(&source).await?;
            let after = service.serving.stats().encoder;
            let chunks = job.bytes.div_ceil(chunk_bytes) as f64;
            let all_bytes = job.bytes * u64::from(*readers);
            let setting = Cells::of([("readers", readers.to_string())]);
            let measured = Cells::of([
                ("gb_per_s", rate(all_bytes, round.seconds)),
                ("cpu_s_per_gib", cpu::per_gib(round.cpu_s, all_bytes)),
                ("source_requests", (after.source_requests - before.source_requests) as f64 / chunks),
                ("source_reads", (after.source_reads - before.source_reads) as f64 / chunks),
                ("source_rereads", (after.source_rereads - before.source_rereads) as f64 / chunks),
            ]);
            line::sample("fan-out", setting, measured);
        }
    }
    Ok(())
}
