//! Several sessions at once: an upper bound for several lanes of one session.

use super::{Job, rate};
use crate::{
    cpu::{self, Usage},
    gpu::{
        engine::Engine,
        line::Cells,
        loopback::{Loopback, Receiving, Serving, Setup},
        own_runtime::OwnRuntime,
        passes::Passes,
        payload::{self, OnDevice},
        stream::Depth,
    },
};
use anyhow::Result;
use std::{sync::Arc, thread::available_parallelism, time::Instant};
use tensor_relay_client::Lanes;
use tensor_relay_device::{Capacity, Device, Source};
use tokio::task::JoinSet;

pub(super) const ABOUT: &str = "\
The rate of several sessions at once, each with a connection, a client thread and a topic of its own, all from one GPU to \
the same GPU: an upper bound for as many lanes of one session, each of which has a client thread too. `own` \
servers: each session has a server of its own, on a thread of its own. `one` server: all sessions share a server \
and its socket, on as many threads. The rate is the sum of all sessions.";

pub(super) async fn run(job: Job) -> Result<()> {
    let engine = job.engine()?;
    let (slots, chunk_bytes) = job.default_pipeline();
    let memory = engine.device(Capacity { slots: 2, slot_bytes: chunk_bytes as usize })?;
    let from = OnDevice::whole(&memory, job.bytes)?;
    from.upload(&payload::noise_of(job.bytes, 0)?).await?;
    let mut passes = Passes::within(job.budget());
    while passes.begin_next() {
        for sessions in job.choose(&[1, 2, 4, 8], &[1, 2]) {
            for servers in [Servers::Own, Servers::One] {
                let endpoints = Endpoints::new(&engine, &from, slots, chunk_bytes, sessions)?;
                measure(&job, endpoints, servers).await?;
            }
        }
    }
    Ok(())
}

/// The assignment of sessions to servers.
#[derive(Debug, Clone, Copy)]
enum Servers {
    Own,
    One,
}

/// The source and the landing device of all sessions, each with one pool of slots for all sessions.
struct Endpoints {
    source: Arc<dyn Source>,
    landing: Device,
    chunk_bytes: u64,
    in_flight: usize,
    sessions: u32,
}

impl Endpoints {
    fn new(engine: &Engine, from: &OnDevice, slots: usize, chunk_bytes: u64, sessions: u32) -> Result<Self> {
        let capacity = Capacity { slots: slots * sessions as usize, slot_bytes: chunk_bytes as usize };
        let (sending, landing) = (engine.device(capacity)?, engine.device(capacity)?);
        let source = from.through(engine, &sending)?.source()?;
        Ok(Self { source, landing, chunk_bytes, in_flight: Depth::of_slots(slots).sending.max(2), sessions })
    }

    async fn start(&self, servers: Servers) -> Result<Vec<Loopback>> {
        let setup = Setup {
            chunk_bytes: self.chunk_bytes,
            chunks_in_flight: self.in_flight,
            landing: Some(self.landing.clone()),
            lanes: Lanes::Auto,
        };
        let mut all: Vec<Loopback> = Vec::new();
        for topic_number in 0..self.sessions {
            let serving = match (servers, all.first()) {
                (Servers::One, Some(first)) => first.serving.another_topic(topic_number)?,
                (Servers::One, None) => {
                    Serving::start(Arc::new(OwnRuntime::new("serving", self.sessions as usize)?), &setup)
                        .await?
                }
                (Servers::Own, _) => Serving::start(Arc::new(OwnRuntime::new("serving", 1)?), &setup).await?,
            };
            let reader = Receiving::start(&serving, &setup).await?;
            all.push(Loopback { serving, readers: vec![reader] });
        }
        Ok(all)
    }
}

/// Moves the payload once in all sessions to warm up, then measures two rounds of all sessions at once.
async fn measure(job: &Job, endpoints: Endpoints, servers: Servers) -> Result<()> {
    let mut sessions = endpoints.start(servers).await?;
    for counted in [false, true, true] {
        let (begun, usage) = (Instant::now(), Usage::now());
        let mut rounds = JoinSet::new();
        for mut session in sessions.drain(..) {
            let source = Arc::clone(&endpoints.source);
            rounds.spawn(async move { session.round(&source).await.map(|_| session) });
        }
        while let Some(session) = rounds.join_next().await {
            sessions.push(session??);
        }
        let bytes = endpoints.source.len_bytes() * u64::from(endpoints.sessions);
        let (seconds, cpu_s) = (begun.elapsed().as_secs_f64(), Usage::now().since(usage).total_s());
        if counted {
            let setting = Cells::of([
                ("sessions", endpoints.sessions.to_string()),
                ("servers", if matches!(servers, Servers::Own) { "own" } else { "one" }.into()),
                ("cores", available_parallelism().map_or(0, usize::from).to_string()),
            ]);
            let measured = Cells::of([
                ("gb_per_s", rate(bytes, seconds)),
                ("cpu_s_per_gib", cpu::per_gib(cpu_s, bytes)),
            ]);
            job.printer().sample("sessions", setting, measured);
        }
    }
    Ok(())
}
