//! A device that fails during a transfer: the errors, and the time until they are reported.

use super::{Job, Part};
use crate::gpu::{
    child,
    engine::{DeviceArg, Engine},
    line,
    loopback::{Loopback, Receiving, Serving, Setup},
    payload,
    stream::pieces,
};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};
use tensor_relay_client::{Progress, Snapshot, SubscriptionError};
use tensor_relay_device::{
    Capacity, Source,
    cuda::{
        CudaError,
        measure::{Break, break_context},
    },
};
use tokio::time::{sleep, timeout};

pub(super) const ABOUT: &str = "\
During a transfer the process loses the device's context: by a reset, which another library in the process might \
cause, or by a kernel that traps. The GPU is at the server or at the client; the other end uses host memory. Each case has a \
process of its own. A server whose device failed gives the version up, and its subscriber waits for the next version, which \
is then sent from host memory; a client whose device failed ends the subscription with an error. Nothing may hang or crash; \
times are from the fault. If the complete version arrived nevertheless, the case says so.";

pub(super) async fn run(job: Job) -> Result<()> {
    match (job.scenario, job.device) {
        (Some(scenario), DeviceArg::Cuda(ordinal)) => run_scenario(&job, scenario, ordinal).await,
        (None, DeviceArg::Cuda(_)) => {
            for (traps, at_server) in [(false, true), (false, false), (true, true), (true, false)] {
                run_in_child(&job, Scenario { traps, at_server }).await;
            }
            Ok(())
        }
        (_, DeviceArg::Host) => {
            line::note("The host engine has no context that could be lost.");
            Ok(())
        }
    }
}

/// The kind of fault, and the end at which it happens.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(in crate::gpu) struct Scenario {
    /// Whether a kernel traps; otherwise the context is reset.
    traps: bool,
    at_server: bool,
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fault = if self.traps { "trap" } else { "reset" };
        write!(f, "{fault}-at-{}", if self.at_server { "server" } else { "client" })
    }
}

/// Runs `scenario` in a process of its own, and prints its results.
async fn run_in_child(job: &Job, scenario: Scenario) {
    let job = Job { scenario: Some(scenario), ..job.clone() };
    let output = child::run_part(Part::Fault, &job, SCENARIO_TIMEOUT).await;
    output.lines.iter().for_each(line::print);
    if let Some(failure) = output.failure {
        line::check(scenario.to_string(), Err(failure));
    }
}

/// The deadline of a scenario. All four fit into the deadline of the part.
const SCENARIO_TIMEOUT: Duration = Duration::from_secs(25);

async fn run_scenario(job: &Job, scenario: Scenario, ordinal: usize) -> Result<()> {
    let engine = job.engine()?;
    let device = engine.device(Capacity { slots: 8, slot_bytes: CHUNK_BYTES as usize })?;
    let (on_device, on_host) = payload::on_device_and_host(&engine, job.bytes).await?;
    let gpu_source = on_device.through(&engine, &device)?.source()?;
    // A slot that the transfer does not use, to check the engine afterwards.
    let spare = engine.device(Capacity { slots: 1, slot_bytes: CHUNK_BYTES as usize })?;
    let spare = on_device.through(&engine, &spare)?.source()?;
    let source = if scenario.at_server { gpu_source } else { Arc::clone(&on_host) };
    let landing = (!scenario.at_server).then(|| device.clone());
    let Loopback { serving, readers } = Loopback::start(&Setup::new(CHUNK_BYTES, 4, landing), 1).await?;
    let reader = readers.first().context("one reader was started")?;
    let progress = reader.progress_reader()?;
    serving.publish(payload::tensors(1, job.bytes)?, source).await?;
    wait_for_progress(progress).await?;
    let broken_at = Instant::now();
    let fault = if scenario.traps { Break::Trap } else { Break::Reset };
    match tokio::task::spawn_blocking(move || break_context(ordinal, fault)).await? {
        Ok(()) => {}
        Err(error @ CudaError::NoSymbol { .. }) => {
            line::note(format!("{scenario}: not possible with this driver: {error}"));
            return Ok(());
        }
        Err(error) => return Err(error).context("the context could not be broken"),
    }
    let (expected, outcome) = match scenario.at_server {
        true => {
            let outcome = server_recovers(&serving, reader, &on_host, broken_at).await;
            ("the server gives the version up, and serves the next", outcome)
        }
        false => ("the client reports an error", client_reports(reader.next().await, broken_at)),
    };
    line::check(format!("{scenario}: {expected}"), job.check_result(outcome));
    check_engine(scenario, &spare).await;
    let again = Engine::open(job.device);
    let outcome = again.map_or_else(|error| format!("does not open: {error:#}"), |_| "opens".into());
    line::note(format!("{scenario}: a new engine in the same process {outcome}"));
    Ok(())
}

/// Waits until the server gives the version up, then checks that the subscriber receives the next version, which is
/// sent from host memory.
async fn server_recovers(
    serving: &Serving,
    reader: &Receiving,
    on_host: &Arc<dyn Source>,
    broken_at: Instant,
) -> Result<Option<String>, String> {
    while serving.stats().transfers > 0 {
        if broken_at.elapsed() > GIVE_UP_TIMEOUT {
            return Err(format!("the server still sends the version {GIVE_UP_TIMEOUT:?} after the fault"));
        }
        sleep(Duration::from_millis(1)).await;
    }
    let given_up_s = broken_at.elapsed().as_secs_f64();
    let next = async {
        let published = serving
            .publish(payload::tensors(1, on_host.len_bytes())?, Arc::clone(on_host))
            .await?;
        let version = published.id().version;
        let mut earlier_versions = 0;
        while reader.next().await?.id().version != version {
            earlier_versions += 1;
        }
        anyhow::Ok(earlier_versions)
    };
    match next.await {
        Ok(0) => Ok(Some(format!("given up after {given_up_s:.3} s; the next version arrived"))),
        Ok(_) => Ok(None),
        Err(error) => {
            Err(format!("given up after {given_up_s:.3} s; the next version did not arrive: {error:#}"))
        }
    }
}

/// The deadline for the server to give the version up: longer than the stall timeout of both ends, after which a
/// transfer ends in any case.
const GIVE_UP_TIMEOUT: Duration = Duration::from_secs(12);

/// Checks that the subscription ended with an error of its own, and not by the deadline of this suite.
fn client_reports(next: Result<Snapshot>, broken_at: Instant) -> Result<Option<String>, String> {
    let seconds = broken_at.elapsed().as_secs_f64();
    match next {
        Ok(_) => Ok(None),
        Err(error) if error.is::<SubscriptionError>() => Ok(Some(format!("after {seconds:.3} s: {error:#}"))),
        Err(error) => Err(format!("no error after {seconds:.3} s: {error:#}")),
    }
}

/// The size of chunks: small, so that many are in flight at the fault.
const CHUNK_BYTES: u64 = 1 << 20;

impl Job {
    /// The result of a check, whose outcome says when and how the fault was reported, or is `None` if the complete version
    /// arrived, verified. A fault without effect is a failure, except in a quick run, in which the transfer may end
    /// before the fault.
    fn check_result(&self, outcome: Result<Option<String>, String>) -> Result<String, String> {
        const NO_EFFECT: &str =
            "the complete version arrived, verified: the fault came too late or had no effect";
        match outcome? {
            Some(detail) => Ok(detail),
            None if self.quick => Ok(NO_EFFECT.into()),
            None => Err(NO_EFFECT.into()),
        }
    }
}

/// Waits until more than a tenth of the version is verified.
async fn wait_for_progress(progress: Box<dyn Fn() -> Progress + Send>) -> Result<()> {
    let begun = Instant::now();
    loop {
        let Progress { payload_bytes, verified_bytes, .. } = progress();
        if payload_bytes > 0 && verified_bytes > payload_bytes / 10 {
            return Ok(());
        }
        if begun.elapsed() > PROGRESS_TIMEOUT {
            bail!("the transfer had not reached a tenth within {PROGRESS_TIMEOUT:?}");
        }
        sleep(Duration::from_micros(200)).await;
    }
}

/// The deadline for a tenth of the version.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(10);

/// Checks that a copy by the engine ends or fails within a deadline, and prints the outcome.
async fn check_engine(scenario: Scenario, source: &Arc<dyn Source>) {
    let name = format!("{scenario}: the engine answers");
    let begun = Instant::now();
    let range = pieces(source.len_bytes(), CHUNK_BYTES)[0].clone();
    let outcome = match timeout(COPY_TIMEOUT, source.read(range)).await {
        Ok(Ok(_)) => Ok("it copies as before".into()),
        Ok(Err(error)) => {
            let error = anyhow::Error::new(error);
            Ok(format!("after {} ms: {error:#}", begun.elapsed().as_millis()))
        }
        Err(_) => Err(format!("a copy did not end within {COPY_TIMEOUT:?}")),
    };
    line::check(name, outcome);
}

/// The deadline for a copy after the fault.
const COPY_TIMEOUT: Duration = Duration::from_secs(8);
