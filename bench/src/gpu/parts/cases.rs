//! The test cases of every copy engine, run on this device.

use super::Job;
use crate::gpu::{
    engine::{DeviceArg, Engine},
    line,
};
use anyhow::Result;
use std::time::{Duration, Instant};
use tokio::{task::spawn_blocking, time::timeout};

pub(super) const ABOUT: &str = "\
The cases that all engines pass in the tests (`device/src/cases.rs`), each on a fresh engine of the device under test.";

pub(super) async fn run(job: Job) -> Result<()> {
    for (name, case) in all() {
        line::check(name, outcome(job.device, case).await);
    }
    Ok(())
}

/// A function that runs one case on a new engine of the given device.
type Case = fn(DeviceArg) -> Result<()>;

/// Runs `case` on a thread of its own, which is abandoned if it hangs.
async fn outcome(device: DeviceArg, case: Case) -> Result<String, String> {
    let begun = Instant::now();
    match timeout(CASE_TIMEOUT, spawn_blocking(move || case(device))).await {
        Ok(Ok(Ok(()))) => Ok(format!("{} ms", begun.elapsed().as_millis())),
        Ok(Ok(Err(error))) => Err(format!("cannot open an engine: {error:#}")),
        Ok(Err(panic)) => Err(panic.to_string()),
        Err(_) => Err(format!("it did not end within {CASE_TIMEOUT:?}")),
    }
}

/// The deadline of a case; the slowest case takes a second.
const CASE_TIMEOUT: Duration = Duration::from_secs(20);

macro_rules! cases {
    ($($case:ident)*) => {
        fn all() -> Vec<(&'static str, Case)> {
            vec![$((stringify!($case), |device| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                match Engine::open(device)? {
                    Engine::Host(engine) => runtime.block_on(tensor_relay_device::cases::$case(engine)),
                    Engine::Cuda(engine) => runtime.block_on(tensor_relay_device::cases::$case(engine)),
                }
                Ok(())
            })),*]
        }
    };
}

tensor_relay_device::for_each_engine_case!(cases,);
