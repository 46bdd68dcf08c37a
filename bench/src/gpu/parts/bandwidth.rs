//! The engine's copy rate by chunk size, copies in flight and number of engines, and the rate of plain copies.

use super::{Job, rate};
use crate::{
    gpu::{
        engine::Engine,
        line::Cells,
        passes::Passes,
        payload::OnDevice,
        plain::{self, Direction, Plain},
        stream::{pieces, read_all, write_all},
    },
    size,
};
use anyhow::Result;
use std::{sync::Arc, time::Instant};
use tensor_relay_device::{Capacity, Sink, Source};
use tokio::task::JoinSet;

pub(super) const ABOUT: &str = "\
*Plain* is the rate of one large synchronous copy by the driver, from or to ordinary (pageable) memory, or from or to \
page-locked memory, where it is the limit of the bus. *Engine* is the rate of a source that reads, or a sink that \
writes, chunk by chunk through slots, with `in flight` copies of each engine at one time. Each engine has one stream \
for each direction; two engines have two threads and four streams. `of_plain` is the rate divided by that \
of the page-locked plain copies of the same pass.";

pub(super) async fn run(job: Job) -> Result<()> {
    let slot_bytes = *chunk_sizes(&job).iter().max().expect("there are chunk sizes") as usize;
    let mut engines = Vec::new();
    for engine in [job.engine()?, job.engine()?] {
        // An engine only copies memory that it allocated itself.
        let memory = engine.device(Capacity { slots: 1, slot_bytes })?;
        engines.push((OnDevice::whole(&memory, job.bytes)?, engine));
    }
    let mut passes = Passes::within(job.budget());
    while passes.begin_next() {
        let plain = measure_plain(&job)?;
        for chunk_bytes in chunk_sizes(&job) {
            for in_flight in job.choose(&[1, 2, 4, 8], &[1, 2]) {
                let settings = CopySettings { chunk_bytes, in_flight };
                measure(&job, &engines[..1], settings, plain).await?;
            }
        }
        for chunk_bytes in job.choose(&[1 << 20, 4 << 20], &[1 << 20]) {
            measure(&job, &engines, CopySettings { chunk_bytes, in_flight: 4 }, plain).await?;
        }
    }
    Ok(())
}

fn chunk_sizes(job: &Job) -> Vec<u64> {
    let usual: Vec<u64> = (18..=26).map(|exponent| 1 << exponent).collect();
    job.choose(&usual, &[256 << 10, 1 << 20])
}

/// Measures and prints the rates of plain copies; `None` for the host engine.
fn measure_plain(job: &Job) -> Result<Option<Plain>> {
    let Some(plain) = plain::measure(job.device, job.bytes)? else { return Ok(None) };
    for direction in Direction::BOTH {
        for (memory, gb_per_s) in [("page-locked", plain.locked), ("pageable", plain.pageable)] {
            let setting = Cells::of([("direction", direction.name().into()), ("memory", memory.into())]);
            job.printer()
                .sample("plain", setting, Cells::of([("gb_per_s", gb_per_s[direction as usize])]));
        }
    }
    Ok(Some(plain))
}

/// The size of the copies of an engine, and the number in flight.
#[derive(Clone, Copy)]
struct CopySettings {
    chunk_bytes: u64,
    in_flight: usize,
}

/// Measures and prints the rate of copies by all `engines` together, in each direction.
async fn measure(
    job: &Job,
    engines: &[(OnDevice, Engine)],
    settings: CopySettings,
    plain: Option<Plain>,
) -> Result<()> {
    for direction in Direction::BOTH {
        let share = job.bytes / engines.len() as u64;
        let mut ends = Vec::new();
        for (payload, engine) in engines {
            ends.push(SourceOrSink::new(engine, payload, direction, settings)?);
        }
        let begun = Instant::now();
        let mut copies = JoinSet::new();
        for (index, end) in (0..).zip(ends) {
            copies.spawn(end.copy(index * share, share, settings));
        }
        while let Some(copied) = copies.join_next().await {
            copied??;
        }
        let gb_per_s = rate(share * engines.len() as u64, begun.elapsed().as_secs_f64());
        let setting = Cells::of([
            ("direction", direction.name().into()),
            ("chunk", size::text(settings.chunk_bytes)),
            ("in flight", settings.in_flight.to_string()),
            ("engines", engines.len().to_string()),
        ]);
        let of_plain = plain.map(|plain| gb_per_s / plain.locked[direction as usize]);
        job.printer().sample(
            "engine",
            setting,
            Cells::of([("gb_per_s", gb_per_s)]).and("of_plain", of_plain),
        );
    }
    Ok(())
}

/// The source to read, or the sink to write.
enum SourceOrSink {
    Source(Arc<dyn Source>),
    Sink(Arc<dyn Sink>),
}

impl SourceOrSink {
    /// The source or sink of `payload` with slots of its own: a third more than copies in flight, so that a source can
    /// lend a slot for every read.
    fn new(
        engine: &Engine,
        payload: &OnDevice,
        direction: Direction,
        settings: CopySettings,
    ) -> Result<Self> {
        let slots = settings.in_flight + settings.in_flight.div_ceil(3);
        let device = engine.device(Capacity { slots, slot_bytes: settings.chunk_bytes as usize })?;
        let payload = payload.through(engine, &device)?;
        Ok(match direction {
            Direction::ToHost => Self::Source(payload.source()?),
            Direction::ToDevice => Self::Sink(payload.sink()?),
        })
    }

    async fn copy(self, start: u64, len_bytes: u64, settings: CopySettings) -> Result<()> {
        let ranges = pieces(len_bytes, settings.chunk_bytes);
        let ranges = ranges.iter().map(|range| start + range.start..start + range.end).collect();
        match self {
            Self::Source(source) => read_all(&source, &ranges, settings.in_flight).await,
            Self::Sink(sink) => write_all(&sink, &ranges, settings.in_flight).await,
        }
    }
}
