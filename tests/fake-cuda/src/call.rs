use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fs,
};

use crate::{
    faults::Effect,
    state::{self, Guard, State},
    status::{Answer, Status},
};

thread_local! {
    /// This thread's stack of contexts; the last is current. Zero stands for no context.
    static CONTEXTS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
    /// The generation of this thread's latest context; zero if the thread never had a context.
    static GENERATION: Cell<u64> = const { Cell::new(0) };
    /// The thread's name, read from the system: another copy of Rust's standard library started the program's threads.
    static THREAD_NAME: String = fs::read_to_string("/proc/thread-self/comm").unwrap_or_default().trim_end().to_owned();
}

/// The numbers of driver calls.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    /// The number of calls of each function.
    pub(crate) by_function: BTreeMap<&'static str, u64>,
    /// The number of calls by the threads of each name.
    pub(crate) by_thread: BTreeMap<String, u64>,
}

/// Runs a call that is allowed before `cuInit`.
pub(crate) fn before_init(name: &'static str, body: impl FnOnce(Guard) -> Answer) -> u32 {
    Status::of(enter(name, state::lock()).and_then(body))
}

/// Runs a call that needs `cuInit`, but no context.
pub(crate) fn initialized(name: &'static str, body: impl FnOnce(Guard) -> Answer) -> u32 {
    let locked = enter(name, state::lock());
    let ready =
        locked.and_then(|state| if state.initialized { Ok(state) } else { Err(Status::NOT_INITIALIZED) });
    Status::of(ready.and_then(body))
}

/// Runs a call that needs a current context; `body` receives the index of the context's device. Once the context has
/// failed, all such calls return its error.
pub(crate) fn in_context(name: &'static str, body: impl FnOnce(Guard, usize) -> Answer) -> u32 {
    let ready = enter_current(name, state::lock()).and_then(|state| {
        let device = if state.initialized { current_device(&state) } else { Err(Status::NOT_INITIALIZED) }?;
        state.devices[device].check()?;
        Ok((state, device))
    });
    Status::of(ready.and_then(|(state, device)| body(state, device)))
}

/// Runs a call that needs no current context, on an object that an earlier call created.
pub(crate) fn on_object(name: &'static str, body: impl FnOnce(Guard) -> Answer) -> u32 {
    let locked = enter_current(name, state::lock());
    let ready =
        locked.and_then(|state| if state.initialized { Ok(state) } else { Err(Status::NOT_INITIALIZED) });
    Status::of(ready.and_then(body))
}

/// Like `enter`, but a call from a thread whose context is older than the last reset fails and is not counted.
fn enter_current(name: &'static str, state: Guard) -> Answer<Guard> {
    match GENERATION.get() {
        generation if generation == 0 || generation == state.generation => enter(name, state),
        _ => Err(Status::CONTEXT_IS_DESTROYED),
    }
}

/// Records that this thread has a context of this generation.
pub(crate) fn set_generation(generation: u64) {
    GENERATION.set(generation);
}

/// The common start of all calls: counts them, refuses them in host functions, and injects faults.
fn enter(name: &'static str, mut state: Guard) -> Answer<Guard> {
    *state.calls.by_function.entry(name).or_default() += 1;
    *state.calls.by_thread.entry(THREAD_NAME.with(String::clone)).or_default() += 1;
    if IN_HOST_FUNCTION.get() {
        state.report.violation(format!("{name} is called in a host function"));
        return Err(Status::NOT_PERMITTED);
    }
    match state.faults.count(name) {
        None => Ok(state),
        Some(Effect::Fail(status)) => Err(status),
        Some(Effect::Hang) => Ok(wait_until_released(state)),
    }
}

fn wait_until_released(mut state: Guard) -> Guard {
    let generation = state.generation;
    while !state.faults.released() && state.generation == generation {
        state = state::wait(state);
    }
    state
}

/// Runs a host function, in which driver calls are refused.
pub(crate) fn as_host_function(run: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    run();
    IN_HOST_FUNCTION.set(false);
}

/// The current context of this thread, or zero.
pub(crate) fn current_context() -> u64 {
    CONTEXTS.with_borrow(|contexts| contexts.last().copied().unwrap_or(0))
}

/// Replaces the current context. Zero removes it.
pub(crate) fn set_current_context(context: u64) {
    CONTEXTS.with_borrow_mut(|contexts| {
        contexts.pop();
        if context != 0 {
            contexts.push(context);
        }
    });
}

/// Makes a context current until it is popped.
pub(crate) fn push_context(context: u64) {
    CONTEXTS.with_borrow_mut(|contexts| contexts.push(context));
}

/// Removes and returns the current context.
pub(crate) fn pop_context() -> Option<u64> {
    CONTEXTS.with_borrow_mut(Vec::pop)
}

/// The device of the current context.
pub(crate) fn current_device(state: &State) -> Answer<usize> {
    match current_context() {
        0 => Err(Status::INVALID_CONTEXT),
        context => device_of(state, context).ok_or(Status::CONTEXT_IS_DESTROYED),
    }
}

/// The device whose primary context this is, while the context exists.
pub(crate) fn device_of(state: &State, context: u64) -> Option<usize> {
    state
        .devices
        .iter()
        .position(|device| device.context.as_ref().is_some_and(|primary| primary.handle == context))
}
