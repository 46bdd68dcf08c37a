//! Many small tensors, and the same bytes in one tensor.

use super::{Job, rate};
use crate::{
    cpu,
    gpu::{
        engine::Engine,
        line::Cells,
        loopback::{Loopback, Setup},
        passes::Passes,
        payload::{self, OnDevice},
        stream::chunks_in_flight,
    },
};
use anyhow::Result;
use tensor_relay_client::Lanes;
use tensor_relay_device::Capacity;
use tensor_relay_protocol::TensorSpec;

pub(super) const ABOUT: &str = "\
The same bytes in three layouts: tensors of 4 KiB, each in an allocation of its own on the GPU (a chunk then needs a thousand \
copies by the driver); the same tensors in one allocation (a chunk needs one copy); and one tensor. The snapshot lands in one \
allocation.";

pub(super) async fn run(job: Job) -> Result<()> {
    let engine = job.engine()?;
    let count = if job.quick { 200 } else { 10_000 };
    let mut payloads = Vec::new();
    for layout in Layout::ALL {
        payloads.push(Payload::new(&job, &engine, layout, count).await?);
    }
    let mut passes = Passes::within(job.budget());
    while passes.begin_next() {
        for payload in &mut payloads {
            payload.measure(&job).await?;
        }
    }
    Ok(())
}

/// A layout of the bytes on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    OwnAllocations,
    OneAllocation,
    OneTensor,
}

impl Layout {
    const ALL: [Self; 3] = [Self::OwnAllocations, Self::OneAllocation, Self::OneTensor];

    fn name(self) -> &'static str {
        match self {
            Self::OwnAllocations => "tensors in allocations of their own",
            Self::OneAllocation => "tensors in one allocation",
            Self::OneTensor => "one tensor",
        }
    }

    fn specs(self, count: u64) -> Result<Vec<TensorSpec>> {
        match self {
            Self::OneTensor => payload::tensors(1, count * TENSOR_BYTES),
            _ => payload::tensors(count, TENSOR_BYTES),
        }
    }
}

const TENSOR_BYTES: u64 = payload::UNPADDED_BYTES;

/// The bytes in one layout, and the service that moves them.
struct Payload {
    layout: Layout,
    count: u64,
    from: OnDevice,
    service: Loopback,
}

impl Payload {
    async fn new(job: &Job, engine: &Engine, layout: Layout, count: u64) -> Result<Self> {
        let (slots, chunk_bytes) = job.default_pipeline();
        let capacity = Capacity { slots, slot_bytes: chunk_bytes as usize };
        let [sending, landing] = [engine.device(capacity)?, engine.device(capacity)?];
        let manifest = payload::manifest(layout.specs(count)?, chunk_bytes)?;
        let from = match layout {
            Layout::OwnAllocations => OnDevice::scattered(&sending, &manifest)?,
            _ => OnDevice::whole(&sending, manifest.payload_bytes())?,
        };
        let setup = Setup {
            chunk_bytes,
            chunks_in_flight: chunks_in_flight(slots),
            landing: Some(landing),
            lanes: Lanes::Auto,
        };
        let mut service = Loopback::start(&setup, 1).await?;
        from.upload(&payload::noise_of(manifest.payload_bytes(), 1)?).await?;
        service.round_of(layout.specs(count)?, &from.source()?).await?;
        Ok(Self { layout, count, from, service })
    }

    async fn measure(&mut self, job: &Job) -> Result<()> {
        let specs = self.layout.specs(self.count)?;
        let source = self.from.source()?;
        let bytes = source.len_bytes();
        let quic = self.service.round_of(specs, &source).await?;
        let tensors = if self.layout == Layout::OneTensor { 1 } else { self.count };
        let setting =
            Cells::of([("layout", self.layout.name().to_owned()), ("tensors", tensors.to_string())]);
        let measured = Cells::of([
            ("quic_gb_per_s", rate(bytes, quic.seconds)),
            ("quic_ms", quic.seconds * 1e3),
            ("quic_cpu_s_per_gib", cpu::per_gib(quic.cpu_s, bytes)),
        ]);
        job.printer().sample("small tensors", setting, measured);
        Ok(())
    }
}
