//! Goal: a driver call that fails or hangs causes an error and nothing worse.
//!
//! Method: a transfer runs once to record its calls, then once per fault, each time on a new machine. It may succeed
//! with correct bytes, or fail with an error. It must not hang, deliver torn data, free memory under a copy, or leak
//! more than the engine reports.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tensor_relay_device::cuda::{CudaEngine, CudaStats, share::IpcMemory};
use tensor_relay_tests::fake_cuda::{Effect, Fault, Turn};
use tokio::time::timeout;

use crate::{
    exchange::{NotReturned, exchange_a_tensor},
    journey::{
        CHUNK, Failure, LEN, move_a_tensor, pattern, wait_for_at_most, wait_for_no_objects, wait_until_freed,
    },
    machine,
    neighbour::Neighbour,
    relay::{NothingReceived, relay_a_tensor},
};

/// The deadline of a transfer with a fault. Its longest waits are a few timeouts of 0.4 s.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(10);

const OUT_OF_MEMORY: u32 = 2;
const ILLEGAL_ADDRESS: u32 = 700;
const LAUNCH_FAILED: u32 = 719;

/// The kinds of work in streams that faults can affect.
const EXECUTIONS: [&str; 3] = ["@htod", "@dtoh", "@host"];

/// The kind of transfer.
#[derive(Clone, Copy, Debug)]
enum Transfer {
    /// From one engine to another, with callers' streams.
    Engines,
    /// Through a server and a client.
    Relay,
    /// Shared with another process, and imported from a process that has exported this memory.
    Exchange(IpcMemory),
}

impl Transfer {
    async fn run(self, engines: &mut Vec<Arc<CudaEngine>>) -> Result<Vec<u8>, Failure> {
        match self {
            Self::Engines => move_a_tensor(engines).await,
            Self::Relay => relay_a_tensor(engines).await,
            Self::Exchange(memory) => exchange_a_tensor(engines, memory).await,
        }
    }
}

/// The end of a transfer with a fault.
#[derive(Debug)]
enum End {
    Right,
    Failed(Failure),
    /// The transfer hung, which only a driver call that hangs may cause.
    TimedOut,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_fails_once() {
    let fake = machine();
    let ends = every_call_fails(&fake, Transfer::Engines).await;
    assert_eq!(ends.keys().copied().collect::<Vec<_>>(), ["failed", "right"], "{ends:?}");
}

/// Fails each call of a transfer once, and counts the ends.
async fn every_call_fails(fake: &Turn, kind: Transfer) -> BTreeMap<&'static str, u32> {
    let mut ends = BTreeMap::<&str, u32>::new();
    for (function, count) in calls_of_a_clean_transfer(fake, kind).await {
        for nth in 1..=count {
            for code in [OUT_OF_MEMORY, LAUNCH_FAILED] {
                let end = transfer(fake, Fault::once(&function, nth, Effect::Fail(code)), kind).await;
                *ends.entry(name_of(&end)).or_default() += 1;
            }
        }
    }
    ends
}

/// As `every_call_fails_once`, for memory shared with another process, whose own driver has no faults.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_of_an_exchange_fails_once() {
    let fake = machine();
    let mut neighbour = Neighbour::start(0, None);
    let ends = every_call_fails(&fake, Transfer::Exchange(neighbour.export())).await;
    assert_eq!(ends.keys().copied().collect::<Vec<_>>(), ["failed", "right"], "{ends:?}");
    assert_eq!(neighbour.end().violations, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_an_exchange_hang_or_keep_failing() {
    let fake = machine();
    let mut neighbour = Neighbour::start(0, None);
    let kind = Transfer::Exchange(neighbour.export());
    let is_for_sharing =
        |function: &String| ["cuIpc", "cuMem", "cuEvent"].iter().any(|part| function.starts_with(part));
    let functions: Vec<String> = calls_of_a_clean_transfer(&fake, kind).await.into_keys().collect();
    for function in functions.iter().filter(|function| is_for_sharing(function)) {
        transfer(&fake, Fault::once(function, 1, Effect::Hang), kind).await;
        transfer(&fake, Fault::from(function, 1, Effect::Fail(ILLEGAL_ADDRESS)), kind).await;
    }
    for effect in [Effect::Fail(ILLEGAL_ADDRESS), Effect::Hang] {
        let end = transfer(&fake, Fault::once("@dtod", 1, effect), kind).await;
        assert!(matches!(end, End::Failed(_)), "{effect:?}: {end:?}");
    }
    assert_eq!(neighbour.end().violations, [""; 0]);
}

/// As above, on the whole path from a producer's device to a consumer's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_a_relay_fail() {
    let fake = machine();
    let calls = calls_of_a_clean_transfer(&fake, Transfer::Relay).await;
    // The tests above fail every call. This test fails an early, a midway and a late call of each function.
    let faults = calls.iter().flat_map(|(function, count)| {
        let sample = (1..=*count).step_by(count.div_ceil(3) as usize);
        sample.map(move |nth| Fault::once(function, nth, Effect::Fail(LAUNCH_FAILED)))
    });
    let executions = EXECUTIONS.iter().flat_map(|execution| {
        (1..=6).map(move |nth| Fault::once(execution, nth, Effect::Fail(ILLEGAL_ADDRESS)))
    });
    let hangs = EXECUTIONS.map(|execution| Fault::once(execution, 3, Effect::Hang));
    for fault in faults.chain(executions).chain(hangs) {
        transfer(&fake, fault, Transfer::Relay).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_function_keeps_failing_from_some_call_on() {
    let fake = machine();
    for (function, count) in calls_of_a_clean_transfer(&fake, Transfer::Engines).await {
        for nth in [1, count.div_ceil(2)] {
            let end = transfer(
                &fake,
                Fault::from(&function, nth, Effect::Fail(ILLEGAL_ADDRESS)),
                Transfer::Engines,
            )
            .await;
            assert!(!matches!(end, End::TimedOut), "{function} from {nth} on");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_execution_fails_once() {
    let fake = machine();
    for execution in EXECUTIONS {
        for nth in 1..=LEN.div_ceil(CHUNK) as u64 * 2 {
            let end = transfer(
                &fake,
                Fault::once(execution, nth, Effect::Fail(ILLEGAL_ADDRESS)),
                Transfer::Engines,
            )
            .await;
            // The last host functions may have no waiter.
            let may_be_right = execution == "@host";
            assert!(may_be_right || matches!(end, End::Failed(_)), "{execution} {nth}: {end:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn executions_hang() {
    let fake = machine();
    for (execution, nth) in EXECUTIONS.into_iter().flat_map(|execution| [(execution, 2), (execution, 8)]) {
        let end = transfer(&fake, Fault::once(execution, nth, Effect::Hang), Transfer::Engines).await;
        // If a host function hangs, the engine polls the copy. A copy that hangs times out.
        let right = matches!(end, End::Right);
        assert_eq!(right, execution == "@host", "{execution} {nth}: {end:?}");
        assert!(!matches!(end, End::TimedOut), "{execution} {nth}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_hang() {
    let fake = machine();
    for function in calls_of_a_clean_transfer(&fake, Transfer::Engines).await.into_keys() {
        if runs_on_the_callers_thread(&function) {
            continue;
        }
        transfer(&fake, Fault::once(&function, 2, Effect::Hang), Transfer::Engines).await;
    }
}

/// Whether `CudaEngine::open` calls the function on the caller's thread, without a deadline.
fn runs_on_the_callers_thread(function: &str) -> bool {
    function == "cuInit" || function == "cuDriverGetVersion" || function.starts_with("cuDevice")
}

/// The functions that a transfer without faults calls, with the number of calls.
async fn calls_of_a_clean_transfer(fake: &Turn, kind: Transfer) -> BTreeMap<String, u64> {
    fake.reset_with(2, 64 << 20);
    let mut engines = Vec::new();
    let bytes = kind.run(&mut engines).await.expect("nothing fails");
    assert!(bytes == pattern(LEN));
    for engine in &engines {
        wait_until_freed(fake, engine).await;
    }
    drop(engines);
    wait_for_no_objects(fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
    fake.calls()
}

/// Runs one transfer on a new machine with one fault, and checks its end and the remaining objects.
async fn transfer(fake: &Turn, fault: Fault, kind: Transfer) -> End {
    fake.reset_with(2, 64 << 20);
    fake.fault(&fault);
    let _printed = PrintOnPanic(&fault);
    let mut engines = Vec::new();
    let patience = if hangs_in_a_call(&fault) { Duration::from_secs(1) } else { TRANSFER_TIMEOUT };
    let end = match timeout(patience, kind.run(&mut engines)).await {
        Ok(Ok(bytes)) => {
            assert!(bytes == pattern(LEN), "{fault}: the received bytes differ");
            End::Right
        }
        Ok(Err(failure)) => {
            // Copies after one that hangs wait until the engine declares the device failed, so nothing may be received.
            assert!(fault.effect == Effect::Hang || !failure.is::<NothingReceived>(), "{fault}: {failure}");
            // Memory that the driver refused to close must not be returned to its owner.
            assert!(
                !failure.is::<NotReturned>() || is_in_a_close_of_imported_memory(&fault),
                "{fault}: {failure}"
            );
            End::Failed(failure)
        }
        Err(_) => End::TimedOut,
    };
    assert!(hangs_in_a_call(&fault) || !matches!(end, End::TimedOut), "{fault}: the transfer hangs");
    fake.release();
    if !matches!(fault.effect, Effect::Hang) && !fault.is_permanent {
        fake.clear_faults();
    }
    let mut final_stats = Vec::new();
    for engine in &engines {
        final_stats.push(wait_until_freed(fake, engine).await);
    }
    check_remaining_objects(fake, &fault, engines, &final_stats).await;
    end
}

/// Prints the fault if the test fails.
struct PrintOnPanic<'a>(&'a Fault);

impl Drop for PrintOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the fault was {}", self.0);
        }
    }
}

fn hangs_in_a_call(fault: &Fault) -> bool {
    fault.effect == Effect::Hang && !fault.what.starts_with('@')
}

/// Checks that only objects reported by the engines remain, and that there was no violation.
async fn check_remaining_objects(
    fake: &Turn,
    fault: &Fault,
    engines: Vec<Arc<CudaEngine>>,
    final_stats: &[CudaStats],
) {
    drop(engines);
    let kept_by =
        |stats: &CudaStats| stats.leaked_bytes + stats.pinned_bytes + stats.device_bytes + stats.cached_bytes;
    let kept: u64 = final_stats.iter().map(kept_by).sum();
    let failed = final_stats.iter().any(|stats| stats.leaked_bytes > 0);
    if !failed && !is_in_a_release(fault) {
        wait_for_no_objects(fake, 1).await;
    } else {
        wait_for_at_most(fake, kept).await;
    }
    assert_eq!(fake.violations(), [""; 0], "{fault}");
}

fn is_in_a_close_of_imported_memory(fault: &Fault) -> bool {
    ["cuIpcCloseMemHandle", "cuMemUnmap"].contains(&fault.what.as_str())
}

/// Whether a fault is in a call that releases an object: the engine's counters do not include such an object.
fn is_in_a_release(fault: &Fault) -> bool {
    ["Destroy", "Release", "Free", "Unregister", "Query", "Unmap", "Close"]
        .iter()
        .any(|part| fault.what.contains(part))
}

fn name_of(end: &End) -> &'static str {
    match end {
        End::Right => "right",
        End::Failed(failure) => {
            assert!(failure.to_string().split(' ').count() > 3, "an error is a sentence: {failure}");
            "failed"
        }
        End::TimedOut => "timed out",
    }
}
