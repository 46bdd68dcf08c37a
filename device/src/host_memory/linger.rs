//! The linger time of cached memory after the last lease is dropped: for programs that subscribe again. And that of
//! prepared memory, which a program that publishes once never uses.

use std::{
    sync::{Arc, Weak},
    thread,
    time::{Duration, Instant},
};

use super::{
    POPULATED_BYTES_MIN,
    cache::{Cache, Keep, State},
    populated::Populated,
};

/// The linger time: enough for a program that makes a new subscription for each version.
const LINGER_DURATION: Duration = Duration::from_secs(2);

/// The time in which prepared memory must be used: that of many training steps.
const PREPARED_DURATION: Duration = Duration::from_secs(60);

/// The end of a cache's linger time, and whether a thread waits for it.
#[derive(Debug, Default)]
pub(super) struct Linger {
    until: Option<Instant>,
    /// Whether a thread waits for `until`.
    is_awaited: bool,
}

impl Linger {
    pub(super) fn is_on(&self) -> bool {
        self.until.is_some()
    }
}

/// Whether there is no lease, and enough memory to be worth a thread.
pub(super) fn is_worth_it(state: &State) -> bool {
    let bytes = state.in_use_bytes + state.cached_bytes;
    matches!(state.keep, Keep::OnDemand(0)) && bytes >= POPULATED_BYTES_MIN as u64
}

/// Starts or restarts the linger time. At most one thread waits per cache; restarting only moves its deadline. If no
/// thread can be started, evicts the cache and returns the evicted mappings.
pub(super) fn begin(cache: &Arc<Cache>, state: &mut State) -> Vec<Arc<Populated>> {
    state.linger.until = Some(Instant::now() + LINGER_DURATION);
    if !state.linger.is_awaited {
        let weak = Arc::downgrade(cache);
        let waiting = thread::Builder::new().name("relay-linger".into()).spawn(|| wait(weak));
        if waiting.is_err() {
            state.linger = Linger::default();
            return state.evict_unneeded();
        }
        state.linger.is_awaited = true;
    }
    vec![]
}

/// Waits for the end of the linger time, which may be postponed meanwhile, and evicts the cache unless there is a lease
/// by then.
fn wait(weak: Weak<Cache>) {
    let mut left = LINGER_DURATION;
    while !left.is_zero() {
        thread::sleep(left);
        let Some(cache) = weak.upgrade() else { return };
        left = cache.state().linger.left_or_end(Instant::now());
        if left.is_zero() {
            let released = cache.state().evict_unneeded();
            drop(released); // Outside the lock: unmapping is slow.
        }
    }
}

/// Evicts a prepared mapping after [`PREPARED_DURATION`], unless the cache was used meanwhile. Without a thread that
/// waits, evicts it now.
pub(super) fn begin_prepared(cache: &Arc<Cache>, prepared: Weak<Populated>) {
    let (weak, reused) = (Arc::downgrade(cache), cache.state().reused_count);
    let late = prepared.clone();
    let wait = move || {
        thread::sleep(PREPARED_DURATION);
        if let Some(cache) = weak.upgrade() {
            evict_unused(&cache, &late, reused);
        }
    };
    if thread::Builder::new().name("relay-prepared".into()).spawn(wait).is_err() {
        evict_unused(cache, &prepared, reused);
    }
}

fn evict_unused(cache: &Cache, prepared: &Weak<Populated>, reused: u64) {
    let unused = cache.state().take_unused(prepared, reused);
    drop(unused); // Outside the lock: unmapping is slow.
}

impl Linger {
    /// Returns the time left at `now`; if that is zero, ends the linger time.
    fn left_or_end(&mut self, now: Instant) -> Duration {
        let left = self.until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now));
        if left.is_zero() {
            *self = Self::default();
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostMemory;

    const LEN: usize = POPULATED_BYTES_MIN;

    fn end_linger_time(memory: &HostMemory) {
        let mut state = memory.cache.state();
        assert!(state.linger.left_or_end(Instant::now()) > Duration::ZERO);
        assert_eq!(state.linger.left_or_end(Instant::now() + LINGER_DURATION), Duration::ZERO);
        drop(state.evict_unneeded());
    }

    #[test]
    fn a_lease_within_the_linger_time_reuses_the_memory() {
        let memory = HostMemory::on_demand(u64::MAX);
        let first = memory.demand();
        drop(memory.allocate(LEN).unwrap());
        drop(first);
        assert_eq!(memory.stats().cached_bytes, LEN as u64);
        let again = memory.demand();
        let region = memory.allocate(LEN).unwrap();
        assert_eq!(memory.stats().reused, 1);
        drop(again);
        drop(region);
        assert_eq!(memory.stats().cached_bytes, LEN as u64, "regions dropped later are cached as well");
        end_linger_time(&memory);
        assert_eq!(memory.stats().cached_bytes, 0);
    }

    #[test]
    fn prepared_memory_is_kept_only_if_the_cache_is_used() {
        for is_used in [false, true] {
            let memory = HostMemory::new(u64::MAX);
            memory.prepare(LEN);
            let prepared = Arc::downgrade(&memory.cache.state().cached[0]);
            let region = is_used.then(|| memory.allocate(LEN).unwrap());
            drop(region);
            evict_unused(&memory.cache, &prepared, 0);
            assert_eq!(memory.stats().cached_bytes, if is_used { LEN as u64 } else { 0 });
            let deadline = Instant::now() + Duration::from_secs(10);
            while !is_used && prepared.strong_count() > 0 {
                assert!(Instant::now() < deadline, "the threads that populate it have let go of it");
                thread::yield_now();
            }
            assert_eq!(prepared.strong_count() > 0, is_used);
        }
    }

    #[test]
    fn a_new_lease_keeps_the_memory_after_the_linger_time() {
        let memory = HostMemory::on_demand(u64::MAX);
        let first = memory.demand();
        drop(memory.allocate(LEN).unwrap());
        drop(first);
        let _again = memory.demand();
        end_linger_time(&memory);
        assert_eq!(memory.stats().cached_bytes, LEN as u64);
    }
}
