//! Goal: a driver call, or work of a stream, that fails or hangs causes at most an error of the transfer. Only a call
//! that hangs may make the transfer hang too.
//!
//! Method: a transfer runs once to record its calls, then once for each fault, each time on a new machine. It may
//! succeed with correct bytes, or fail with an error. It must not deliver torn data, free memory under a copy, or leak
//! more than the engine reports. A call that hangs is released after a second; the last two rules hold then too.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tensor_relay_device::cuda::{CudaEngine, CudaStats, share::IpcMemory};
use tensor_relay_tests::fake_cuda::{Effect, Fault, Turn};
use tokio::time::timeout;

use crate::{
    endpoint::{
        CHUNK, Failure, LEN, move_a_tensor, pattern, wait_for_at_most, wait_for_no_objects, wait_until_freed,
    },
    exchange::{NotReturned, exchange_a_tensor},
    machine,
    neighbour::Neighbour,
    relay::{NothingReceived, relay_a_tensor},
};

/// The deadline of a transfer with a fault. A relay waits up to 5.25 s for its versions, and each transfer for a few
/// timeouts of 0.4 s.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(10);

const OUT_OF_MEMORY: u32 = 2;
const ILLEGAL_ADDRESS: u32 = 700;
const LAUNCH_FAILED: u32 = 719;

/// The kinds of a stream's work in the transfers between engines and through a relay, as `Fault::what` names them.
const STREAM_WORK: [&str; 3] = ["@htod", "@dtoh", "@host"];

/// A transfer in which calls and work fail.
#[derive(Clone, Copy, Debug)]
enum Transfer {
    /// From one engine to another, with callers' streams.
    Engines,
    /// Through a server and a client.
    Relay,
    /// Exported, imported by the same process, and imported from a neighbour that has exported this memory.
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

/// The outcome of a transfer with a fault.
#[derive(Debug)]
enum Outcome {
    Correct,
    Failed(Failure),
    /// The transfer hung, which only a driver call that hangs may cause.
    TimedOut,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_fails_once() {
    let fake = machine();
    let outcomes = every_call_fails(&fake, Transfer::Engines).await;
    assert_eq!(outcomes.keys().copied().collect::<Vec<_>>(), ["correct", "failed"], "{outcomes:?}");
}

/// Runs a transfer for each of its calls and each of two errors with which that call fails. Counts the outcomes.
async fn every_call_fails(fake: &Turn, kind: Transfer) -> BTreeMap<&'static str, u32> {
    let mut outcomes = BTreeMap::<&str, u32>::new();
    for (function, count) in calls_of_a_clean_transfer(fake, kind).await {
        for nth in 1..=count {
            for code in [OUT_OF_MEMORY, LAUNCH_FAILED] {
                let outcome = transfer(fake, Fault::once(&function, nth, Effect::Fail(code)), kind).await;
                *outcomes.entry(outcome_name(&outcome)).or_default() += 1;
            }
        }
    }
    outcomes
}

/// As `every_call_fails_once`, for memory shared with a neighbour, whose own driver has no faults.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_of_an_exchange_fails_once() {
    let fake = machine();
    let mut neighbour = Neighbour::start(0, None);
    let outcomes = every_call_fails(&fake, Transfer::Exchange(neighbour.export())).await;
    assert_eq!(outcomes.keys().copied().collect::<Vec<_>>(), ["correct", "failed"], "{outcomes:?}");
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
        let outcome = transfer(&fake, Fault::once("@dtod", 1, effect), kind).await;
        assert!(matches!(outcome, Outcome::Failed(_)), "{effect:?}: {outcome:?}");
    }
    assert_eq!(neighbour.end().violations, [""; 0]);
}

/// A sample of the calls, and of the work of streams, on the whole path from a producer's device to a consumer's
/// device.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_a_relay_fail() {
    let fake = machine();
    let calls = calls_of_a_clean_transfer(&fake, Transfer::Relay).await;
    // The tests above fail every call. This one fails at most three calls of each function, evenly distributed.
    let faults = calls.iter().flat_map(|(function, count)| {
        let sample = (1..=*count).step_by(count.div_ceil(3) as usize);
        sample.map(move |nth| Fault::once(function, nth, Effect::Fail(LAUNCH_FAILED)))
    });
    let work_faults = STREAM_WORK
        .iter()
        .flat_map(|work| (1..=6).map(move |nth| Fault::once(work, nth, Effect::Fail(ILLEGAL_ADDRESS))));
    let hangs = STREAM_WORK.map(|work| Fault::once(work, 3, Effect::Hang));
    for fault in faults.chain(work_faults).chain(hangs) {
        transfer(&fake, fault, Transfer::Relay).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_function_fails_permanently() {
    let fake = machine();
    for (function, count) in calls_of_a_clean_transfer(&fake, Transfer::Engines).await {
        for nth in [1, count.div_ceil(2)] {
            let outcome = transfer(
                &fake,
                Fault::from(&function, nth, Effect::Fail(ILLEGAL_ADDRESS)),
                Transfer::Engines,
            )
            .await;
            assert!(!matches!(outcome, Outcome::TimedOut), "{function} from {nth} on");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_kind_of_stream_work_fails_once() {
    let fake = machine();
    for work in STREAM_WORK {
        for nth in 1..=LEN.div_ceil(CHUNK) as u64 * 2 {
            let outcome =
                transfer(&fake, Fault::once(work, nth, Effect::Fail(ILLEGAL_ADDRESS)), Transfer::Engines)
                    .await;
            // Possibly nothing waits for the last host functions any more.
            let may_succeed = work == "@host";
            assert!(may_succeed || matches!(outcome, Outcome::Failed(_)), "{work} {nth}: {outcome:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_work_hangs() {
    let fake = machine();
    for (work, nth) in STREAM_WORK.into_iter().flat_map(|work| [(work, 2), (work, 8)]) {
        let outcome = transfer(&fake, Fault::once(work, nth, Effect::Hang), Transfer::Engines).await;
        // If a host function hangs, the engine polls the copy. A copy that hangs times out.
        let succeeded = matches!(outcome, Outcome::Correct);
        assert_eq!(succeeded, work == "@host", "{work} {nth}: {outcome:?}");
        assert!(!matches!(outcome, Outcome::TimedOut), "{work} {nth}");
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

/// Runs one transfer on a new machine with one fault, and checks its outcome and the remaining objects.
async fn transfer(fake: &Turn, fault: Fault, kind: Transfer) -> Outcome {
    fake.reset_with(2, 64 << 20);
    fake.fault(&fault);
    let _printed = PrintOnPanic(&fault);
    let mut engines = Vec::new();
    let deadline = if hangs_in_a_call(&fault) { Duration::from_secs(1) } else { TRANSFER_TIMEOUT };
    let outcome = match timeout(deadline, kind.run(&mut engines)).await {
        Ok(Ok(bytes)) => {
            assert!(bytes == pattern(LEN), "{fault}: the received bytes differ");
            Outcome::Correct
        }
        Ok(Err(failure)) => {
            // After a copy that hangs, later copies wait until the engine declares the device failed. Then both
            // versions may fail to arrive.
            assert!(fault.effect == Effect::Hang || !failure.is::<NothingReceived>(), "{fault}: {failure}");
            // Memory that the driver refused to close must not be returned to its owner.
            assert!(
                !failure.is::<NotReturned>() || is_in_a_close_of_imported_memory(&fault),
                "{fault}: {failure}"
            );
            Outcome::Failed(failure)
        }
        Err(_) => Outcome::TimedOut,
    };
    assert!(hangs_in_a_call(&fault) || !matches!(outcome, Outcome::TimedOut), "{fault}: the transfer hangs");
    fake.release();
    if !matches!(fault.effect, Effect::Hang) && !fault.is_permanent {
        fake.clear_faults();
    }
    let mut final_stats = Vec::new();
    for engine in &engines {
        final_stats.push(wait_until_freed(fake, engine).await);
    }
    check_remaining_objects(fake, &fault, engines, &final_stats).await;
    outcome
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

/// Whether a fault may prevent the release of an object: the engine's counters do not include such an object.
fn is_in_a_release(fault: &Fault) -> bool {
    ["Destroy", "Release", "Free", "Unregister", "Query", "Unmap", "Close"]
        .iter()
        .any(|part| fault.what.contains(part))
}

fn outcome_name(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Correct => "correct",
        Outcome::Failed(failure) => {
            assert!(failure.to_string().split(' ').count() > 3, "an error is a sentence: {failure}");
            "failed"
        }
        Outcome::TimedOut => "timed out",
    }
}
