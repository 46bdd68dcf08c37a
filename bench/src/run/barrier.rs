//! A barrier that all workers must reach before any proceeds.

/// Waits for one thing from each of some workers, which are named by their numbers. Pure: it is told what arrives.
#[derive(Debug)]
pub(crate) struct Barrier<T> {
    places: Vec<(usize, Option<T>)>,
}

/// Somebody arrived who should not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unexpected {
    #[error("it has no part in this step")]
    NotAsked,
    #[error("it said so before")]
    Twice,
}

impl<T> Barrier<T> {
    /// A barrier for `workers`.
    pub(crate) fn new(workers: &[usize]) -> Self {
        Self { places: workers.iter().map(|worker| (*worker, None)).collect() }
    }

    /// `worker` brings `what`.
    pub(crate) fn arrive(&mut self, worker: usize, what: T) -> Result<(), Unexpected> {
        let place = self.places.iter_mut().find(|(expected, _)| *expected == worker);
        let (_, place) = place.ok_or(Unexpected::NotAsked)?;
        match place.replace(what) {
            None => Ok(()),
            Some(_) => Err(Unexpected::Twice),
        }
    }

    /// The workers that have not arrived.
    pub(crate) fn missing(&self) -> impl Iterator<Item = usize> {
        self.places.iter().filter(|(_, what)| what.is_none()).map(|(worker, _)| *worker)
    }

    /// The values in the order of the workers; or the barrier again, while a worker is missing.
    pub(crate) fn open(self) -> Result<Vec<T>, Self> {
        if self.missing().next().is_some() {
            return Err(self);
        }
        Ok(self.places.into_iter().filter_map(|(_, what)| what).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn strangers_and_those_who_come_twice_are_told_apart() {
        let mut barrier = Barrier::new(&[2, 5]);
        assert_eq!(barrier.arrive(5, 'a'), Ok(()));
        assert_eq!(barrier.arrive(5, 'b'), Err(Unexpected::Twice));
        assert_eq!(barrier.arrive(3, 'c'), Err(Unexpected::NotAsked));
        assert_eq!(barrier.missing().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn nobody_is_waited_for_if_nobody_was_asked() {
        assert!(Barrier::<u8>::new(&[]).open().is_ok_and(|all| all.is_empty()));
    }

    proptest! {
        /// In whatever order they come: it opens with the last and not before, and gives everyone's own.
        #[test]
        fn it_opens_with_the_last(order in Just((0..20usize).collect::<Vec<_>>()).prop_shuffle()) {
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
