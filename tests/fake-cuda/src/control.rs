//! The control interface for tests: one function that takes a text command and returns a text answer.

use std::{collections::BTreeMap, fmt::Display, str::FromStr};

use crate::{
    copying::Direction,
    device::{self, Engine},
    report,
    state::{self, Guard},
    status::Status,
};

/// Executes the command in the first `length` bytes of `command`. Writes as much of the answer as fits, and returns its
/// full length. The answer is `+` and the result, or `-` and an error.
///
/// # Safety
///
/// `command` has `length` readable bytes, and `answer` has `capacity` writable ones.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_cuda_control(
    command: *const u8,
    length: usize,
    answer: *mut u8,
    capacity: usize,
) -> usize {
    // SAFETY: the caller guarantees `length` readable bytes.
    let command = unsafe { std::slice::from_raw_parts(command, length) };
    let text = match execute(&String::from_utf8_lossy(command)) {
        Some(text) => format!("+{text}"),
        None => format!("-{:?} is not a command of the fake driver", String::from_utf8_lossy(command)),
    };
    let written = text.len().min(capacity);
    // SAFETY: the caller guarantees `capacity` writable bytes, and at most that many are written.
    unsafe { answer.copy_from_nonoverlapping(text.as_ptr(), written) };
    text.len()
}

fn execute(command: &str) -> Option<String> {
    let words: Vec<&str> = command.split_whitespace().collect();
    let mut state = state::lock();
    let succeeded = Some(String::new());
    let answer = match words[..] {
        ["allow"] => {
            state.allowed = true;
            succeeded
        }
        ["reset"] => {
            drop(state::reset(state));
            return succeeded;
        }
        ["option", name, value] => state.options.set(name, value).then(String::new),
        ["fault", fault] => state.faults.add(fault).then(String::new),
        ["clear-faults"] => {
            state.faults.clear();
            succeeded
        }
        ["release"] => {
            state.faults.release();
            succeeded
        }
        ["fail", device, code] => {
            let device = parse(device).and_then(|device: usize| state.devices.get_mut(device))?;
            device.fail(Status(parse(code)?));
            succeeded
        }
        ["destroy-context", device] => {
            let device = parse(device).filter(|device: &usize| *device < state.devices.len())?;
            device::end_context(&mut state, device);
            succeeded
        }
        ["hold", device, direction] => {
            change_gate(&mut state, device, direction, |engine| engine.gate.hold())
        }
        ["open", device, direction] => {
            change_gate(&mut state, device, direction, |engine| engine.gate.open())
        }
        ["pass", device, direction, count] => {
            let count = parse(count)?;
            change_gate(&mut state, device, direction, |engine| engine.gate.pass(count))
        }
        ["engine", device, direction] => engine_counts(&state, device, direction),
        ["live"] => Some(report::live(&state)),
        ["violations"] => Some(state.report.violations.join("\n")),
        ["calls"] => Some(pairs(&state.calls.by_function)),
        ["threads"] => Some(pairs(&state.calls.by_thread)),
        _ => None,
    };
    state::changed();
    answer
}

fn change_gate(
    state: &mut Guard,
    device: &str,
    direction: &str,
    change: impl FnOnce(&mut Engine),
) -> Option<String> {
    let direction = Direction::from_name(direction)?;
    let device = parse(device).and_then(|device: usize| state.devices.get_mut(device))?;
    change(&mut device.engines[direction as usize]);
    Some(String::new())
}

/// The numbers of a copy engine's waiting copies, of those queued or running, and of successful ones with their bytes.
fn engine_counts(state: &Guard, device: &str, direction: &str) -> Option<String> {
    let direction = Direction::from_name(direction)?;
    let device = parse(device).and_then(|device: usize| state.devices.get(device))?;
    let engine = &device.engines[direction as usize];
    let (waiting, in_flight) = (device.waiting(direction), device.in_flight(direction));
    let Engine { ended, ended_bytes, .. } = engine;
    Some(format!("waiting={waiting} in_flight={in_flight} ended={ended} ended_bytes={ended_bytes}"))
}

/// One `name=number` per line, since thread names may contain spaces.
fn pairs<K: Display>(counts: &BTreeMap<K, u64>) -> String {
    counts.iter().map(|(name, count)| format!("{name}={count}\n")).collect()
}

fn parse<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}
