//! A barrier that all workers must reach before any proceeds.

/// A barrier that collects one value from each of a set of workers, identified by their numbers. It does no I/O.
#[derive(Debug)]
pub(crate) struct Barrier<T> {
    places: Vec<(usize, Option<T>)>,
}

/// The error for an arrival that the barrier does not expect. In its messages, `it` is the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unexpected {
    #[error("it does not take part in this step")]
    NotExpected,
    #[error("it reported this twice")]
    Twice,
}

impl<T> Barrier<T> {
    /// A barrier for `workers`.
    pub(crate) fn new(workers: &[usize]) -> Self {
        Self { places: workers.iter().map(|worker| (*worker, None)).collect() }
    }

    /// Stores the `value` of `worker`.
    pub(crate) fn arrive(&mut self, worker: usize, value: T) -> Result<(), Unexpected> {
        let place = self.places.iter_mut().find(|(expected, _)| *expected == worker);
        let (_, place) = place.ok_or(Unexpected::NotExpected)?;
        match place.replace(value) {
            None => Ok(()),
            Some(_) => Err(Unexpected::Twice),
        }
    }

    /// The workers that have not arrived.
    pub(crate) fn missing(&self) -> impl Iterator<Item = usize> {
        self.places
            .iter()
            .filter(|(_, value)| value.is_none())
            .map(|(worker, _)| *worker)
    }

    /// Returns the values in the order of the workers, or the barrier itself while a worker is missing.
    pub(crate) fn open(self) -> Result<Vec<T>, Self> {
        if self.missing().next().is_some() {
            return Err(self);
        }
        Ok(self.places.into_iter().filter_map(|(_, value)| value).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn unexpected_arrivals_are_refused() {
        let mut barrier = Barrier::new(&[2, 5]);
        assert_eq!(barrier.arrive(5, 'a'), Ok(()));
        assert_eq!(barrier.arrive(5, 'b'), Err(Unexpected::Twice));
        assert_eq!(barrier.arrive(3, 'c'), Err(Unexpected::NotExpected));
        assert_eq!(barrier.missing().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn a_barrier_without_workers_is_open() {
        assert!(Barrier::<u8>::new(&[]).open().is_ok_and(|all| all.is_empty()));
    }

    proptest! {
        /// In any order of arrival, the barrier opens when the last worker arrives, and returns the value of each.
        #[test]
        fn the_last_worker_opens_the_barrier(order in Just((0..20usize).collect::<Vec<_>>()).prop_shuffle()) {
            let workers: Vec<usize> = (0..20).collect();
            let mut barrier = Barrier::new(&workers);
            for worker in order {
                barrier = barrier.open().unwrap_err();
                prop_assert!(barrier.missing().any(|missing| missing == worker));
                barrier.arrive(worker, worker * 10).unwrap();
            }
            let expected: Vec<usize> = workers.iter().map(|worker| worker * 10).collect();
            prop_assert_eq!(barrier.open().unwrap(), expected);
        }
    }
}
