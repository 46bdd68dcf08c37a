//! Many small tensors, and the same bytes in one tensor.

use super::{Job, rate};
use crate::{
    cpu,
    gpu::{
        line::{self, Cells},
        loopback::{Loopback, Setup},
        passes::passes,
        payload::{self, OnDevice, UNPADDED_BYTES},
        stream::chunks_in_flight,
    },
};
use anyhow::Result;
use tensor_relay_device::Capacity;

pub(super) const ABOUT: &str = "\
The same bytes in three layouts: tensors of 4 KiB, each in an allocation of its own on the GPU (a chunk then needs a thousand \
copies by the driver); the same tensors in one allocation (a chunk needs one copy); and one tensor. The snapshot lands in one \
allocation.";

pub(super) async fn run(job: Job) -> Result<()> {
    let engine = job.engine()?;
    let (slots, chunk_bytes) = job.default_pipeline();
    let capacity = Capacity { slots, slot_bytes: chunk_bytes as usize };
    let count = if job.quick { 200 } else { 10_000 };
    let mut layouts = Vec::new();
    for (layout, is_scattered, count, bytes) in [
        ("tensors in allocations of their own", true, count, UNPADDED_BYTES),
        ("tensors in one allocation", false, count, UNPADDED_BYTES),
        ("one tensor", false, 1, count * UNPADDED_BYTES),
    ] {
        let specs = payload::tensors(count, bytes)?;
        let manifest = payload::manifest(specs.clone(), chunk_bytes)?;
        let [sending, landing] = [engine.device(capacity)?, engine.device(capacity)?];
        let from = match is_scattered {
            true => OnDevice::scattered(&sending, &manifest)?,
            false => OnDevice::whole(&sending, manifest.payload_bytes())?,
        };
        from.upload(&payload::noise_of(from.len_bytes(), 1)?).await?;
        let source = from.source()?;
        let setup = Setup::new(chunk_bytes, chunks_in_flight(slots), Some(landing));
        let mut service = Loopback::start(&setup, 1).await?;
        service.round_of(specs.clone(), &source).await?;
        let setting = Cells::of([("layout", layout.to_owned()), ("tensors", count.to_string())]);
        layouts.push((setting, specs, source, service));
    }
    for _ in passes(job.budget()) {
        for (setting, specs, source, service) in &mut layouts {
            let round = service.round_of(specs.clone(), source).await?;
            let bytes = source.len_bytes();
            let measured = Cells::of([
                ("gb_per_s", rate(bytes, round.seconds)),
                ("ms", round.seconds * 1e3),
                ("cpu_s_per_gib", cpu::per_gib(round.cpu_s, bytes)),
            ]);
            line::sample("small tensors", setting.clone(), measured);
        }
    }
    Ok(())
}
