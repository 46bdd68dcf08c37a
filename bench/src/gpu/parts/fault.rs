//! A device that fails in mid-transfer: what everybody says, and how soon.

use super::{Job, Part};
use crate::gpu::{
    child,
    line::{Line, Printer},
    loopback::{Loopback, Setup},
    payload,
    place::{Engine, Place},
    stream::pieces,
};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use std::{
    ffi::OsString,
    sync::Arc,
    time::{Duration, Instant},
};
use tensor_relay_client::Progress;
use tensor_relay_device::{
    Capacity, Source,
    cuda::measure::{Break, break_context},
};
use tokio::time::{sleep, timeout};

pub(super) const ABOUT: &str = "\
In the middle of a transfer over QUIC the device's context is lost for the whole process: reset, as a library might do \
that believes to be alone, or broken by a kernel that traps. The GPU is at the server or at the client, the other end in \
host memory. Each case has a process of its own. It passes when the client hears of it with an error, and nothing hangs \
or crashes; the time is from the fault to the error. Where the transfer was over before the fault, or the whole snapshot \
came all the same, the case says so.";

pub(super) async fn run(job: Job) -> Result<()> {
    match (job.scenario, job.device) {
        (Some(scenario), Place::Cuda(ordinal)) => play(&job, scenario, ordinal).await,
        (None, Place::Cuda(_)) => {
            for scenario in Scenario::value_variants() {
                watch(&job, *scenario).await;
            }
            Ok(())
        }
        (_, Place::Host) => {
            job.printer().note("The host engine has no context that could be lost.");
            Ok(())
        }
    }
}

/// What goes wrong, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::gpu) enum Scenario {
    ResetAtServer,
    ResetAtClient,
    TrapAtServer,
    TrapAtClient,
}

impl Scenario {
    fn name(self) -> &'static str {
        match self {
            Self::ResetAtServer => "reset-at-server",
            Self::ResetAtClient => "reset-at-client",
            Self::TrapAtServer => "trap-at-server",
            Self::TrapAtClient => "trap-at-client",
        }
    }

    fn is_at_server(self) -> bool {
        matches!(self, Self::ResetAtServer | Self::TrapAtServer)
    }

    fn fault(self) -> Break {
        match self {
            Self::ResetAtServer | Self::ResetAtClient => Break::Reset,
            Self::TrapAtServer | Self::TrapAtClient => Break::Trap,
        }
    }
}

/// Lets a process of its own play `scenario`, and says what came of it.
async fn watch(job: &Job, scenario: Scenario) {
    let arguments: Vec<OsString> = vec![
        "--end-with-stdin".into(),
        "gpu-part".into(),
        Part::Fault.name().into(),
        format!("--device={}", job.device).into(),
        format!("--bytes={}", job.bytes).into(),
        "--budget-ms=0".into(),
        format!("--scenario={}", scenario.name()).into(),
    ];
    let quick = job.quick.then(|| "--quick".into());
    let arguments = arguments.into_iter().chain(quick).collect();
    let said = child::run(arguments, SCENARIO_MAX).await;
    for line in said.lines {
        match line {
            Line::Check(check) => {
                let outcome = if check.passed { Ok(check.detail) } else { Err(check.detail) };
                job.printer().check(check.name, outcome);
            }
            Line::Note(note) => job.printer().note(note),
            Line::Sample(_) | Line::Fact(_) => {}
        }
    }
    if let Some(failure) = said.failure {
        job.printer().check(scenario.name(), Err(failure));
    }
}

/// Four of these, and what is left, fit into the time of the part.
const SCENARIO_MAX: Duration = Duration::from_secs(25);

async fn play(job: &Job, scenario: Scenario, ordinal: usize) -> Result<()> {
    let engine = job.engine()?;
    let device = engine.device(Capacity { slots: 8, slot_bytes: CHUNK_BYTES as usize })?;
    let (on_device, on_host) = payload::both(&engine, job.bytes).await?;
    let gpu_source = on_device.through(&engine, &device)?.source()?;
    // A slot that nobody else can have when the engine is asked afterwards.
    let spare = engine.device(Capacity { slots: 1, slot_bytes: CHUNK_BYTES as usize })?;
    let spare = on_device.through(&engine, &spare)?.source()?;
    let source = if scenario.is_at_server() { gpu_source } else { on_host };
    let landing = (!scenario.is_at_server()).then(|| device.clone());
    let setup = Setup { chunk_bytes: CHUNK_BYTES, chunks_in_flight: 4, landing };
    let mut service = Loopback::start(&setup, 1).await?;
    let reader = service.readers.first().context("one reader was started")?;
    let breaking = tokio::spawn(break_in_the_middle(reader.progress()?, ordinal, scenario.fault()));
    let outcome = service.round(&source).await;
    let (ended, heard) = (Instant::now(), outcome.map(drop));
    let broken = match timeout(SCENARIO_MAX, breaking).await?? {
        Ok(broken) => broken,
        Err(error) => {
            job.printer()
                .note(format!("{}: not possible with this driver: {error:#}", scenario.name()));
            return Ok(());
        }
    };
    let seconds = ended.saturating_duration_since(broken).as_secs_f64();
    judge(job.printer(), scenario, job.quick, heard, seconds);
    ask_engine(job.printer(), scenario, &spare).await;
    ask_for_another(job.printer(), scenario, job.device);
    Ok(())
}

/// Small, so that many are under way.
const CHUNK_BYTES: u64 = 1 << 20;

/// Breaks the context when a tenth of the version is there. Gives the moment before.
async fn break_in_the_middle(
    progress: Box<dyn Fn() -> Progress + Send>,
    ordinal: usize,
    fault: Break,
) -> Result<Instant> {
    let begun = Instant::now();
    loop {
        let Progress { payload_bytes, verified_bytes, .. } = progress();
        if payload_bytes > 0 && verified_bytes > payload_bytes / 10 {
            break;
        }
        if begun.elapsed() > MIDDLE_MAX {
            bail!("the transfer had not reached its middle within {MIDDLE_MAX:?}");
        }
        sleep(Duration::from_micros(200)).await;
    }
    let broken = Instant::now();
    tokio::task::spawn_blocking(move || break_context(ordinal, fault)).await??;
    Ok(broken)
}

const MIDDLE_MAX: Duration = Duration::from_secs(10);

fn judge(printer: Printer, scenario: Scenario, quick: bool, heard: Result<()>, seconds: f64) {
    let name = format!("{}: the client hears of it", scenario.name());
    printer.check(
        name,
        match heard {
            Err(error) => Ok(format!("after {seconds:.3} s: {error:#}")),
            // In a version as short as that of a quick run, the last copies may have been made before the fault.
            Ok(()) if quick => Ok("the whole snapshot came, verified: the fault came too late".into()),
            Ok(()) => Err("the whole snapshot came: the fault did not reach the transfer".into()),
        },
    );
}

/// What the engine says now, and that it says anything.
async fn ask_engine(printer: Printer, scenario: Scenario, source: &Arc<dyn Source>) {
    let name = format!("{}: the engine answers", scenario.name());
    let begun = Instant::now();
    let range = pieces(source.len_bytes(), CHUNK_BYTES)[0].clone();
    let outcome = match timeout(ENGINE_MAX, source.read(range)).await {
        Ok(Ok(_)) => Ok("it copies as before".into()),
        Ok(Err(error)) => {
            let error = anyhow::Error::new(error);
            Ok(format!("after {} ms: {error:#}", begun.elapsed().as_millis()))
        }
        Err(_) => Err(format!("a copy said nothing for {ENGINE_MAX:?}")),
    };
    printer.check(name, outcome);
}

const ENGINE_MAX: Duration = Duration::from_secs(8);

/// Whether the device can be opened again in the same process.
fn ask_for_another(printer: Printer, scenario: Scenario, place: Place) {
    let said = match Engine::open(place) {
        Ok(_) => "opens".to_owned(),
        Err(error) => format!("does not open: {error:#}"),
    };
    printer.note(format!("{}: a new engine in the same process {said}", scenario.name()));
}
