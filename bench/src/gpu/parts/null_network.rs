//! The pipeline without a network: every stage as in the service, connected through memory. The copies
//! or the CPU are the bottleneck here, so this shows whether the stages overlap.

use super::{Job, pipeline_cells, rate};
use crate::{
    cpu::{self, Usage},
    gpu::{
        engine::Engine,
        line::Cells,
        passes::Passes,
        payload::{self, OnDevice},
        plain::{self, Plain},
        stream::{Depth, LastStage, SlotSource, pieces, read_all, transfer, write_all},
    },
};
use anyhow::Result;
use std::{sync::Arc, time::Instant};
use tensor_relay_device::{Capacity, Device, Sink, Source};
use tensor_relay_protocol::Manifest;

pub(super) const ABOUT: &str = "\
GPU → slot → hashed by the egress encoder → copied to the receiver's slot, hashed and verified on the way → GPU, in one \
process and without sockets. `d2h` and `h2d` are the copies alone with the same slots and chunks; `network` is the other \
stages alone: hash, copy, verification. `efficiency` is `end_to_end` / min(`d2h`, `network`, `h2d`) of the same pass: 1 \
means that the stages overlap fully. `both_ways` is the rate of each direction when copies in both directions run at one \
time and nothing else, because one GPU is at both ends; `of_both_ways` is `end_to_end` / min(`both_ways`, `network`); \
`of_plain` is `end_to_end` divided by the slower direction of plain page-locked copies. Slots are per end.";

pub(super) async fn run(job: Job) -> Result<()> {
    let engine = job.engine()?;
    let memory = engine.device(Capacity { slots: 2, slot_bytes: 4 << 20 })?;
    let from = OnDevice::whole(&memory, job.bytes)?;
    from.upload(&payload::noise_of(job.bytes, 0)?).await?;
    let to = OnDevice::whole(&memory, job.bytes)?;
    let mut passes = Passes::within(job.budget());
    while passes.begin_next() {
        let plain = plain::measure(job.device, job.bytes)?;
        for (slots, chunk_bytes) in job.pipelines() {
            let pipeline = Pipeline::new(&engine, &from, &to, slots, chunk_bytes)?;
            let measured = pipeline.measure(plain).await?;
            job.printer()
                .sample("null network", pipeline_cells(slots, chunk_bytes), measured);
        }
    }
    Ok(())
}

/// A sending and a receiving end with slots of their own, as on two machines.
struct Pipeline {
    manifest: Arc<Manifest>,
    source: Arc<dyn Source>,
    sink: Arc<dyn Sink>,
    /// A source that costs no copy.
    slot_source: Arc<dyn Source>,
    depth: Depth,
}

impl Pipeline {
    fn new(engine: &Engine, from: &OnDevice, to: &OnDevice, slots: usize, chunk_bytes: u64) -> Result<Self> {
        let capacity = Capacity { slots, slot_bytes: chunk_bytes as usize };
        let ends: [Device; 2] = [engine.device(capacity)?, engine.device(capacity)?];
        let len_bytes = from.len_bytes();
        Ok(Self {
            manifest: payload::manifest(payload::tensors(1, len_bytes)?, chunk_bytes)?,
            source: from.through(engine, &ends[0])?.source()?,
            sink: to.through(engine, &ends[1])?.sink()?,
            slot_source: Arc::new(SlotSource::new(ends[0].slots().clone(), len_bytes)),
            depth: Depth::of_slots(slots),
        })
    }

    /// Measures each stage alone, then all together, right after each other.
    async fn measure(&self, plain: Option<Plain>) -> Result<Cells<f64>> {
        let bytes = self.source.len_bytes();
        let ranges = pieces(bytes, self.manifest.chunk_bytes().into());
        let in_flight = self.depth.sending;
        // A warm-up: the first use of memory allocates its pages.
        self.transfer(LastStage::Written).await?;
        let d2h = measured_rate(bytes, read_all(&self.source, &ranges, in_flight)).await?;
        let h2d = measured_rate(bytes, write_all(&self.sink, &ranges, in_flight)).await?;
        let network = measured_rate(
            bytes,
            transfer(&self.manifest, &self.slot_source, &self.sink, self.depth, LastStage::Dropped),
        )
        .await?;
        let both_directions = async {
            let reads = read_all(&self.source, &ranges, in_flight);
            let writes = write_all(&self.sink, &ranges, in_flight);
            tokio::try_join!(reads, writes).map(drop)
        };
        let both_ways = measured_rate(bytes, both_directions).await?;
        let usage = Usage::now();
        let end_to_end = measured_rate(bytes, self.transfer(LastStage::Written)).await?;
        let cpu_s = Usage::now().since(usage).total_s();
        let measured = Cells::of([
            ("end_to_end_gb_per_s", end_to_end),
            ("d2h_gb_per_s", d2h),
            ("network_gb_per_s", network),
            ("h2d_gb_per_s", h2d),
            ("both_ways_gb_per_s", both_ways),
            ("efficiency", end_to_end / d2h.min(network).min(h2d)),
            ("of_both_ways", end_to_end / both_ways.min(network)),
            ("cpu_s_per_gib", cpu::per_gib(cpu_s, bytes)),
        ]);
        Ok(measured.and("of_plain", plain.map(|plain| end_to_end / plain.slower())))
    }

    async fn transfer(&self, last_stage: LastStage) -> Result<()> {
        transfer(&self.manifest, &self.source, &self.sink, self.depth, last_stage).await
    }
}

/// The rate at which `work` moves `bytes`.
async fn measured_rate(bytes: u64, work: impl Future<Output = Result<()>>) -> Result<f64> {
    let begun = Instant::now();
    work.await?;
    Ok(rate(bytes, begun.elapsed().as_secs_f64()))
}
