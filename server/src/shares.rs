//! [`Shares`]: a bounded number of places, of which no holder can take those of the others.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::Hash,
    sync::{Arc, MutexGuard},
    time::Duration,
};
use tensor_relay_device::Lock;
use tokio::{sync::oneshot, time::Instant};

/// The time for connections that lost their places to free their memory: they are told why before they are closed.
const FREED_TIMEOUT: Duration = Duration::from_secs(3);

/// The interval at which that memory is looked for.
const FREED_INTERVAL: Duration = Duration::from_millis(20);

/// Places of one kind, by holder: a network, or a principal. Cheap to clone.
#[derive(Debug)]
pub(crate) struct Shares<H>(Arc<Lock<Taken<H>>>);

impl<H> Clone for Shares<H> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

#[derive(Debug)]
struct Taken<H> {
    max: usize,
    next_number: u64,
    /// The holder of each place and its signal of eviction, in the order of arrival.
    by_age: BTreeMap<u64, (H, oneshot::Sender<()>)>,
    by_holder: HashMap<H, usize>,
    /// Evicted ones that have not left.
    leaving: BTreeSet<u64>,
    /// Those for whom places were taken away, and who wait for what these free.
    waiting: Vec<H>,
}

/// A holder that waits for what evicted ones free, until this is dropped.
#[derive(Debug)]
struct Waiting<H: Clone + Eq + Hash> {
    shares: Shares<H>,
    holder: H,
    /// The last one that was evicted for it.
    evicted: u64,
}

/// A taken place, until this is dropped.
#[derive(Debug)]
#[must_use = "it is counted until this is dropped"]
pub struct Place<H: Clone + Eq + Hash> {
    shares: Shares<H>,
    number: u64,
}

/// Signals that a place was taken away.
#[derive(Debug)]
pub struct Eviction(oneshot::Receiver<()>);

impl<H: Clone + Eq + Hash> Shares<H> {
    /// `max` places.
    pub(crate) fn new(max: usize) -> Self {
        let (by_age, by_holder) = (BTreeMap::new(), HashMap::new());
        let (leaving, waiting) = (BTreeSet::new(), vec![]);
        let taken = Taken { max, next_number: 0, by_age, by_holder, leaving, waiting };
        Self(Arc::new(Lock::new(taken)))
    }

    /// Gives a place to `holder`. If all are taken, that is the oldest of the holder with the most.
    pub(crate) fn enter(&self, holder: H) -> (Place<H>, Eviction) {
        let mut taken = self.0.lock();
        if taken.by_age.len() >= taken.max
            && let Some((most, _)) = taken.most()
        {
            taken.evict(|taken| {
                let has_most = |holder| taken.by_holder.get(holder) == Some(&most);
                taken.by_age.iter().find(|(_, (holder, _))| has_most(holder))
            });
        }
        self.give(taken, holder)
    }

    /// Gives a place to `holder`, if one is free, or if another holder would still have as many with one fewer: then
    /// that one loses its newest place.
    pub(crate) fn enter_fairly(&self, holder: H) -> Option<(Place<H>, Eviction)> {
        let mut taken = self.0.lock();
        if taken.by_age.len() >= taken.max {
            let with_this = taken.count(&holder) + 1;
            taken.evict_for(with_this)?;
        }
        Some(self.give(taken, holder))
    }

    /// Gives a place to `holder` with what `reserve` returns, such as memory. If that fails, and another holder would
    /// still have as many places with one fewer, that one loses its newest place, and `reserve` is tried again, for
    /// [`FREED_TIMEOUT`] at most. If it still fails when the evicted one has left, the next one is evicted. What they free
    /// is for this holder: others wait meanwhile, such as the next connection of the evicted client. Cancel safe.
    ///
    /// # Errors
    /// The last one of `reserve`.
    pub(crate) async fn enter_reserving<R, E>(
        &self,
        holder: H,
        reserve: impl Fn() -> Result<R, E>,
    ) -> Result<(R, Place<H>, Eviction), E> {
        let turn = Instant::now() + FREED_TIMEOUT;
        while self.is_another_waiting(&holder) && Instant::now() < turn {
            tokio::time::sleep(FREED_INTERVAL).await;
        }
        let (deadline, mut reserved) = (Instant::now() + FREED_TIMEOUT, reserve());
        // It counts while it waits, so that several at once take no more than their share.
        let (place, eviction) = self.give(self.0.lock(), holder.clone());
        let mut waiting = reserved.is_err().then(|| self.evict_and_wait(holder)).flatten();
        while let (Err(_), Some(waited)) = (&reserved, &mut waiting)
            && Instant::now() < deadline
        {
            tokio::time::sleep(FREED_INTERVAL).await;
            let has_left = waited.has_evicted_left();
            reserved = reserve();
            if reserved.is_err() && has_left && !waited.evict_next() {
                break;
            }
        }
        Ok((reserved?, place, eviction))
    }

    /// What `reserve` returns. While that fails, these places are given up, the newest of the holder with the most first,
    /// one after another, for [`FREED_TIMEOUT`] at most. Cancel safe.
    ///
    /// # Errors
    /// The last one of `reserve`.
    pub(crate) async fn give_way<R, E>(&self, reserve: impl Fn() -> Result<R, E>) -> Result<R, E> {
        let (deadline, mut reserved) = (Instant::now() + FREED_TIMEOUT, reserve());
        while reserved.is_err() && Instant::now() < deadline {
            let is_leaving = |taken: &mut Taken<H>| !taken.leaving.is_empty() || taken.evict_for(0).is_some();
            if !is_leaving(&mut self.0.lock()) {
                break;
            }
            tokio::time::sleep(FREED_INTERVAL).await;
            reserved = reserve();
        }
        reserved
    }

    fn is_another_waiting(&self, holder: &H) -> bool {
        self.0.lock().waiting.iter().any(|waiting| waiting != holder)
    }

    /// Evicts another holder's newest place for `holder`, which then waits; `None` if it has its share.
    fn evict_and_wait(&self, holder: H) -> Option<Waiting<H>> {
        let mut taken = self.0.lock();
        let with_this = taken.count(&holder);
        let evicted = taken.evict_for(with_this)?;
        taken.waiting.push(holder.clone());
        Some(Waiting { shares: self.clone(), holder, evicted })
    }

    fn give(&self, mut taken: MutexGuard<'_, Taken<H>>, holder: H) -> (Place<H>, Eviction) {
        let (signal, signalled) = oneshot::channel();
        let number = taken.next_number;
        taken.next_number += 1;
        *taken.by_holder.entry(holder.clone()).or_default() += 1;
        taken.by_age.insert(number, (holder, signal));
        (Place { shares: self.clone(), number }, Eviction(signalled))
    }
}

impl<P: Clone + Eq + Hash> Shares<(P, u64)> {
    /// As [`enter_fairly`](Self::enter_fairly), for holders that share with others of their principal what the principals
    /// share: of the principal with the most, the holder with the most loses its newest place.
    pub(crate) fn enter_within_share(&self, holder: (P, u64)) -> Option<(Place<(P, u64)>, Eviction)> {
        let mut taken = self.0.lock();
        if taken.by_age.len() >= taken.max {
            let mut of_principals: HashMap<&P, usize> = HashMap::new();
            for ((principal, _), count) in &taken.by_holder {
                *of_principals.entry(principal).or_default() += count;
            }
            let of_principal = |principal: &P| of_principals.get(principal).copied().unwrap_or_default();
            let (principal, own) = (of_principal(&holder.0), taken.count(&holder));
            let holders = taken.by_holder.iter();
            let counts = holders.map(|(other, count)| ((of_principal(&other.0), *count), other));
            let may_take = |((all, count), other): &((usize, usize), &(P, u64))| match other.0 == holder.0 {
                true => *count > own + 1,
                false => *all > principal + 1,
            };
            let (_, greedy) = counts.filter(may_take).max_by_key(|(counts, _)| *counts)?;
            let greedy = greedy.clone();
            taken.evict(|taken| taken.newest_of(&greedy))?;
        }
        Some(self.give(taken, holder))
    }
}

/// An entry of [`Taken::by_age`].
type Entry<'a, H> = (&'a u64, &'a (H, oneshot::Sender<()>));

impl<H: Clone + Eq + Hash> Taken<H> {
    /// The largest number of places of a holder, and that holder.
    fn most(&self) -> Option<(usize, H)> {
        let most = self.by_holder.iter().max_by_key(|(_, count)| **count);
        most.map(|(holder, count)| (*count, holder.clone()))
    }

    fn count(&self, holder: &H) -> usize {
        self.by_holder.get(holder).copied().unwrap_or_default()
    }

    /// Evicts the newest place of the holder with the most, if that one will still have as many as a holder
    /// `with_this`; returns its number.
    fn evict_for(&mut self, with_this: usize) -> Option<u64> {
        let (_, greedy) = self.most().filter(|(most, _)| *most > with_this)?;
        self.evict(|taken| taken.newest_of(&greedy))
    }

    /// The newest place of `holder`.
    fn newest_of(&self, holder: &H) -> Option<Entry<'_, H>> {
        self.by_age.iter().rev().find(|(_, (owner, _))| owner == holder)
    }

    fn evict(&mut self, choose: impl FnOnce(&Self) -> Option<Entry<'_, H>>) -> Option<u64> {
        let number = *choose(self)?.0;
        let _ = self.remove(number)?.send(()); // Its holder may have left.
        self.leaving.insert(number);
        Some(number)
    }

    fn remove(&mut self, number: u64) -> Option<oneshot::Sender<()>> {
        let (holder, signal) = self.by_age.remove(&number)?;
        if let Some(count) = self.by_holder.get_mut(&holder) {
            *count -= 1;
            if *count == 0 {
                self.by_holder.remove(&holder);
            }
        }
        Some(signal)
    }
}

impl<H: Clone + Eq + Hash> Drop for Place<H> {
    fn drop(&mut self) {
        let mut taken = self.shares.0.lock();
        taken.remove(self.number);
        taken.leaving.remove(&self.number);
    }
}

impl<H: Clone + Eq + Hash> Waiting<H> {
    fn has_evicted_left(&self) -> bool {
        !self.shares.0.lock().leaving.contains(&self.evicted)
    }

    /// Evicts one more; returns false if its holder has its share.
    fn evict_next(&mut self) -> bool {
        let mut taken = self.shares.0.lock();
        let with_this = taken.count(&self.holder);
        let evicted = taken.evict_for(with_this);
        self.evicted = evicted.unwrap_or(self.evicted);
        evicted.is_some()
    }
}

impl<H: Clone + Eq + Hash> Drop for Waiting<H> {
    fn drop(&mut self) {
        let waiting = &mut self.shares.0.lock().waiting;
        if let Some(at) = waiting.iter().position(|holder| *holder == self.holder) {
            waiting.swap_remove(at);
        }
    }
}

impl Eviction {
    /// Waits until the place is taken away; never returns once it was given back. Cancel safe.
    pub async fn evicted(&mut self) {
        if (&mut self.0).await.is_err() {
            std::future::pending().await
        }
    }

    /// Waits until one of two places is taken away. Cancel safe.
    pub(crate) async fn of_either([one, other]: &mut [Self; 2]) {
        tokio::select! {
            () = one.evicted() => {}
            () = other.evicted() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: usize = 100;

    fn is_evicted(eviction: &mut Eviction) -> bool {
        eviction.0.try_recv().is_ok()
    }

    #[test]
    fn the_holder_with_the_most_is_evicted_first() {
        let shares = Shares::new(MAX);
        let (good, mut good_eviction) = shares.enter(1);
        let mut bad: Vec<_> = (0..MAX - 1).map(|_| shares.enter(2)).collect();
        assert!(bad.iter_mut().all(|(_, eviction)| !is_evicted(eviction)));
        let (other, mut other_eviction) = shares.enter(3);
        assert!(is_evicted(&mut bad[0].1), "the oldest of the holder with the most");
        assert!(!is_evicted(&mut good_eviction) && !is_evicted(&mut other_eviction));
        bad.push(shares.enter(2));
        assert!(is_evicted(&mut bad[1].1) && !is_evicted(&mut good_eviction), "also for its own new one");
        drop((good, bad, other));
        let taken = shares.0.lock();
        assert!(taken.by_age.is_empty() && taken.by_holder.is_empty());
    }

    #[test]
    fn among_equals_the_oldest_is_evicted() {
        let shares = Shares::new(MAX);
        let each: Vec<_> = (0..MAX).map(|holder| shares.enter(holder)).collect();
        let _one_more = shares.enter(MAX);
        let evicted: Vec<_> = each.into_iter().map(|(_, mut eviction)| is_evicted(&mut eviction)).collect();
        assert!(evicted[0] && !evicted[1..].contains(&true));
    }

    /// A holder gets places at the cost of others until none has two more than it, newest first.
    #[test]
    fn fair_places_are_taken_from_the_greedy_only() {
        let shares = Shares::new(8);
        let mut greedy: Vec<_> = (0..8).map(|_| shares.enter_fairly("greedy").unwrap()).collect();
        assert!(shares.enter_fairly("greedy").is_none(), "its own are all that it gets");
        let others: Vec<_> = (0..4).map(|_| shares.enter_fairly("other").unwrap()).collect();
        assert!(shares.enter_fairly("other").is_none() && shares.enter_fairly("greedy").is_none());
        let evicted: Vec<_> = greedy.iter_mut().map(|(_, eviction)| is_evicted(eviction)).collect();
        assert_eq!(evicted, [false, false, false, false, true, true, true, true], "the newest");
        drop((greedy, others));
        assert!(shares.enter_fairly("third").is_some());
        let single = Shares::new(1);
        let _only = single.enter_fairly("one").unwrap();
        assert!(single.enter_fairly("other").is_none(), "nobody loses its only place");
    }

    /// Goal: further lanes are shared max-min, first among principals, then among the clients of each. Method: one
    /// client takes all places, then come others of its principal and of another one.
    #[test]
    fn clients_share_what_their_principal_has() {
        let shares = Shares::new(8);
        let enter = |principal, client| shares.enter_within_share((principal, client));
        let mut first: Vec<_> = (0..8).map(|_| enter("a", 1).unwrap()).collect();
        assert!(enter("a", 1).is_none());
        let second: Vec<_> = (0..4).map(|_| enter("a", 2).unwrap()).collect();
        assert!(enter("a", 2).is_none() && enter("a", 1).is_none(), "both have four");
        let evicted: Vec<_> = first.iter_mut().map(|(_, eviction)| is_evicted(eviction)).collect();
        assert_eq!(evicted, [false, false, false, false, true, true, true, true], "the newest");
        let other: Vec<_> = (0..4).map(|_| enter("b", 3).unwrap()).collect();
        assert!(
            enter("b", 3).is_none() && enter("b", 4).is_some(),
            "its principal has its share; it gives one away"
        );
        let counts = |holder| shares.0.lock().count(&holder);
        assert_eq!((counts(("a", 1)), counts(("a", 2))), (2, 2));
        drop((first, second, other));
        assert!(shares.0.lock().by_age.is_empty());
    }

    /// Goal: 200 clients that connect at once to a server that has memory for 200 connections, on which further lanes
    /// took a sixteenth of it, are all admitted, and no lane more than necessary is given up. Method: each evicted lane
    /// leaves after a while.
    #[tokio::test(start_paused = true)]
    async fn no_session_is_refused_for_lanes() {
        let (lanes, memory) = (Shares::new(12), Arc::new(tokio::sync::Semaphore::new(200)));
        let reserve = || Arc::clone(&memory).try_acquire_owned();
        for lane in 0..12 {
            let (place, mut eviction) = lanes.enter_within_share(("p", lane % 5)).unwrap();
            let memory = reserve().unwrap();
            tokio::spawn(async move {
                eviction.evicted().await;
                tokio::time::sleep(Duration::from_millis(5)).await;
                drop((place, memory));
            });
        }
        let enter = async |sessions| {
            let mut entering = tokio::task::JoinSet::new();
            for _ in 0..sessions {
                let (lanes, memory) = (lanes.clone(), Arc::clone(&memory));
                entering
                    .spawn(async move { lanes.give_way(|| Arc::clone(&memory).try_acquire_owned()).await });
            }
            entering.join_all().await
        };
        let admitted = enter(196).await;
        assert!(admitted.iter().all(Result::is_ok));
        let counts: Vec<_> = lanes.0.lock().by_holder.values().copied().collect();
        assert_eq!((counts.iter().sum::<usize>(), counts.iter().max()), (4, Some(&1)), "{counts:?}");
        let later = enter(5).await;
        assert_eq!(later.iter().filter(|session| session.is_ok()).count(), 4, "there are no more lanes");
    }

    /// Goal: where memory ends before places do, the greedy holder gives up its newest, and nobody else; what is not
    /// freed in time is refused. Method: memory for four places, of which an evicted one frees its own or does not.
    #[tokio::test(start_paused = true)]
    async fn memory_is_taken_from_the_greedy_only() {
        let (shares, memory) = (Shares::new(MAX), Arc::new(()));
        let reserve = || match Arc::strong_count(&memory) {
            0..=4 => Ok(Arc::clone(&memory)),
            _ => Err("no memory"),
        };
        let enter = |holder| shares.enter_reserving(holder, reserve);
        let mut greedy = vec![];
        for _ in 0..4 {
            greedy.push(enter("greedy").await.unwrap());
        }
        assert_eq!(enter("greedy").await.unwrap_err(), "no memory", "its own is all that it gets");
        assert!(greedy.iter_mut().all(|(_, _, eviction)| !is_evicted(eviction)));
        let (mut first, mut second) = (Box::pin(enter("other")), Box::pin(enter("other")));
        for waiting in [&mut first, &mut second] {
            assert!(tokio::time::timeout(Duration::ZERO, waiting).await.is_err());
        }
        let evicted: Vec<_> = greedy.iter_mut().map(|(_, _, eviction)| is_evicted(eviction)).collect();
        assert_eq!(evicted, [false, false, true, true], "the newest");
        assert_eq!(enter("other").await.unwrap_err(), "no memory", "those that wait count");
        assert_eq!(first.await.unwrap_err(), "no memory", "the evicted one holds it still");
        drop(greedy.pop());
        // The next connection of the evicted client waits, too.
        let mut again = Box::pin(enter("greedy"));
        assert!(tokio::time::timeout(Duration::ZERO, &mut again).await.is_err());
        let _second = second.await.unwrap();
        assert_eq!(again.await.unwrap_err(), "no memory", "what was freed was for the other");
    }

    /// Goal: a connection that frees less than the next one needs is followed by another; one that stays is not. Method:
    /// memory for eight halves; each connection of the greedy holder has one half, and another one needs two.
    #[tokio::test(start_paused = true)]
    async fn as_many_are_evicted_as_the_memory_takes() {
        let (shares, memory) = (Shares::new(MAX), Arc::new(tokio::sync::Semaphore::new(8)));
        let enter = |holder, halves| {
            let memory = Arc::clone(&memory);
            shares.enter_reserving(holder, move || Arc::clone(&memory).try_acquire_many_owned(halves))
        };
        let mut greedy = vec![];
        for _ in 0..8 {
            greedy.push(enter("greedy", 1).await.unwrap());
        }
        let mut other = Box::pin(enter("other", 2));
        for evicted in [1, 2, 3] {
            let waited = tokio::time::timeout(2 * FREED_INTERVAL, &mut other).await;
            assert_eq!(waited.is_ok(), evicted == 3);
            let are_evicted = greedy
                .iter_mut()
                .filter_map(|(_, _, eviction)| is_evicted(eviction).then_some(()));
            assert_eq!(are_evicted.count(), usize::from(evicted < 3), "{evicted}");
            greedy.pop();
        }
        assert!(shares.0.lock().leaving.is_empty() && shares.0.lock().waiting.is_empty());
    }
}
