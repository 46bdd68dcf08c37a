//! The engine's copy rate by chunk size, copies in flight and number of engines, and the rate of plain copies.

use super::{Job, rate};
use crate::{
    gpu::{
        line::Cells,
        passes::Passes,
        payload::OnDevice,
        place::Engine,
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
*Plain* is the rate of one large synchronous copy by the driver, from or to page-locked or ordinary (pageable) memory: the \
limit of the bus. *Engine* is the rate of a source that reads, or a sink that writes, chunk by chunk through slots, with \
this number of copies in flight. Each engine has one stream for each direction; two engines have two threads and four \
streams. `of_plain` is the rate divided by that of the page-locked plain copies of the same pass.";

pub(super) async fn run(job: Job) -> Result<()> {
    let engines = [job.engine()?, job.engine()?];
    let slot_bytes = *chunks(&job).iter().max().expect("there are chunk sizes") as usize;
    let mut lanes = Vec::new();
    for engine in engines {
        // An engine only copies memory that it allocated itself.
        let memory = engine.device(Capacity { slots: 1, slot_bytes })?;
        lanes.push((OnDevice::whole(&memory, job.bytes)?, engine));
    }
    let mut passes = Passes::within(job.budget());
    while passes.another() {
        let plain = measure_plain(&job)?;
        for chunk_bytes in chunks(&job) {
            for in_flight in job.choose(&[1, 2, 4, 8], &[1, 2]) {
                let lane = Lane { chunk_bytes, in_flight };
                measure(&job, &lanes[..1], lane, plain).await?;
            }
        }
        for chunk_bytes in job.choose(&[1 << 20, 4 << 20], &[1 << 20]) {
            measure(&job, &lanes, Lane { chunk_bytes, in_flight: 4 }, plain).await?;
        }
    }
    Ok(())
}

fn chunks(job: &Job) -> Vec<u64> {
    let usual: Vec<u64> = (18..=26).map(|exponent| 1 << exponent).collect();
    job.choose(&usual, &[256 << 10, 1 << 20])
}

/// Measures and prints the rate of the bus; `None` for the host engine.
fn measure_plain(job: &Job) -> Result<Option<Plain>> {
    let Some(plain) = plain::measure(job.device, job.bytes)? else { return Ok(None) };
    for direction in Direction::BOTH {
        for (memory, gb_per_s) in
            [("page-locked", plain.locked(direction)), ("pageable", plain.pageable(direction))]
        {
            let setting = Cells::of([("direction", direction.name().into()), ("memory", memory.into())]);
            job.printer().sample("plain", setting, Cells::of([("gb_per_s", gb_per_s)]));
        }
    }
    Ok(Some(plain))
}

/// The settings of one engine.
#[derive(Clone, Copy)]
struct Lane {
    chunk_bytes: u64,
    in_flight: usize,
}

async fn measure(job: &Job, engines: &[(OnDevice, Engine)], lane: Lane, plain: Option<Plain>) -> Result<()> {
    for direction in Direction::BOTH {
        let share = job.bytes / engines.len() as u64;
        let mut ends = Vec::new();
        for (payload, engine) in engines {
            ends.push(End::new(engine, payload, direction, lane)?);
        }
        let begun = Instant::now();
        let mut copies = JoinSet::new();
        for (number, end) in (0..).zip(ends) {
            copies.spawn(end.copy(number * share, share, lane));
        }
        while let Some(copied) = copies.join_next().await {
            copied??;
        }
        let gb_per_s = rate(share * engines.len() as u64, begun.elapsed().as_secs_f64());
        let setting = Cells::of([
            ("direction", direction.name().into()),
            ("chunk", size::text(lane.chunk_bytes)),
            ("in flight", lane.in_flight.to_string()),
            ("engines", engines.len().to_string()),
        ]);
        let of_plain = plain.map(|plain| gb_per_s / plain.locked(direction));
        job.printer().sample(
            "engine",
            setting,
            Cells::of([("gb_per_s", gb_per_s)]).and("of_plain", of_plain),
        );
    }
    Ok(())
}

/// The memory to read or write.
enum End {
    Source(Arc<dyn Source>),
    Sink(Arc<dyn Sink>),
}

impl End {
    /// The source or sink of `payload` with slots of its own: a third more than copies in flight, so that a source can
    /// lend a slot for every read.
    fn new(engine: &Engine, payload: &OnDevice, direction: Direction, lane: Lane) -> Result<Self> {
        let slots = lane.in_flight + lane.in_flight.div_ceil(3);
        let device = engine.device(Capacity { slots, slot_bytes: lane.chunk_bytes as usize })?;
        let payload = payload.through(engine, &device)?;
        Ok(match direction {
            Direction::ToHost => Self::Source(payload.source()?),
            Direction::ToDevice => Self::Sink(payload.sink()?),
        })
    }

    async fn copy(self, start: u64, len_bytes: u64, lane: Lane) -> Result<()> {
        let ranges = pieces(len_bytes, lane.chunk_bytes);
        let ranges = ranges.iter().map(|range| start + range.start..start + range.end).collect();
        match self {
            Self::Source(source) => read_all(&source, &ranges, lane.in_flight).await,
            Self::Sink(sink) => write_all(&sink, &ranges, lane.in_flight).await,
        }
    }
}
