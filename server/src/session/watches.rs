//! [`Watches`]: the active watches of a session.

use std::collections::HashMap;
use tensor_relay_protocol::{ProtocolViolation, WATCHES_MAX, WatchId};

/// The active watches of a session, at most [`WATCHES_MAX`], each with its task `T`. An id may be used again once its
/// watch has ended.
#[derive(Debug)]
pub(super) struct Watches<T>(HashMap<WatchId, T>);

impl<T> Default for Watches<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T> Watches<T> {
    /// Adds a watch, whose task `start` starts.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when there are too many watches, or the id is in use.
    pub(super) fn begin(
        &mut self,
        watch: WatchId,
        start: impl FnOnce() -> T,
    ) -> Result<(), ProtocolViolation> {
        if self.0.len() >= WATCHES_MAX {
            return Err(ProtocolViolation::TooManyWatches(WATCHES_MAX));
        }
        if self.0.contains_key(&watch) {
            return Err(ProtocolViolation::DuplicateWatch(watch));
        }
        self.0.insert(watch, start());
        Ok(())
    }

    /// Removes a watch, and returns its task.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when no active watch has the id.
    pub(super) fn end(&mut self, watch: WatchId) -> Result<T, ProtocolViolation> {
        self.0.remove(&watch).ok_or(ProtocolViolation::UnknownWatch(watch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_and_watches_are_bounded() {
        let mut watches = Watches::default();
        for watch in (0..WATCHES_MAX as u32).map(WatchId) {
            assert_eq!(watches.begin(watch, || watch), Ok(()));
        }
        let begin = |watches: &mut Watches<_>, watch| {
            let mut is_started = false;
            let begun = watches.begin(watch, || {
                is_started = true;
                watch
            });
            assert_eq!(is_started, begun.is_ok(), "a refused watch has no task");
            begun
        };
        let (first, further) = (WatchId(0), WatchId(WATCHES_MAX as u32));
        assert_eq!(begin(&mut watches, further), Err(ProtocolViolation::TooManyWatches(WATCHES_MAX)));
        assert_eq!(watches.end(further), Err(ProtocolViolation::UnknownWatch(further)));
        assert_eq!(watches.end(first), Ok(first));
        assert_eq!(watches.end(first), Err(ProtocolViolation::UnknownWatch(first)));
        let second = WatchId(1);
        assert_eq!(begin(&mut watches, second), Err(ProtocolViolation::DuplicateWatch(second)));
        assert_eq!(begin(&mut watches, first), Ok(()), "the id is free again");
    }
}
