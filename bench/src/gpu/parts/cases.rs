//! The test cases of every copy engine, run on this device.

use super::Job;
use crate::gpu::{
    engine::{DeviceArg, Engine},
    line,
};
use anyhow::Result;
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

pub(super) const ABOUT: &str = "\
The cases that all engines pass in the tests (`device/src/cases.rs`), each on a fresh engine of the device under test.";

pub(super) async fn run(job: Job) -> Result<()> {
    for (name, case) in all() {
        line::check(name, outcome(job.device, case));
    }
    Ok(())
}

/// A function that runs one case on a new engine of the given device.
type Case = fn(DeviceArg) -> Result<()>;

/// Runs `case` on a thread of its own, which is abandoned if it hangs.
fn outcome(device: DeviceArg, case: Case) -> Result<String, String> {
    let (sender, receiver) = mpsc::channel();
    let begun = Instant::now();
    thread::spawn(move || {
        let result = catch_unwind(AssertUnwindSafe(|| case(device)));
        let _ = sender.send(result.map_err(panic_message));
    });
    match receiver.recv_timeout(CASE_TIMEOUT) {
        Ok(Ok(Ok(()))) => Ok(format!("{} ms", begun.elapsed().as_millis())),
        Ok(Ok(Err(error))) => Err(format!("cannot open an engine: {error:#}")),
        Ok(Err(panic)) => Err(panic),
        Err(RecvTimeoutError::Timeout) => Err(format!("it did not end within {CASE_TIMEOUT:?}")),
        Err(RecvTimeoutError::Disconnected) => Err("its thread ended without a result".into()),
    }
}

/// The deadline of a case; the slowest case takes a second.
const CASE_TIMEOUT: Duration = Duration::from_secs(20);

/// The message of a panic.
fn panic_message(panic: Box<dyn Any + Send>) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    text.unwrap_or_else(|| "it panicked without a message".into())
}

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
