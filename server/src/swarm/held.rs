//! [`HeldMessages`]: handles what a client says it holds, a part at a time.

use super::Sharer;
use crate::handshakes::pace;
use std::time::Duration;
use tensor_relay_protocol::{Held, RangeSet};
use tokio::time::Instant;

/// The interval between parts, several times shorter than that of the messages of an honest client.
const INTERVAL: Duration = Duration::from_millis(100);

/// The number of parts that need not wait: of several subscriptions at once, or of the largest version.
const BURST: u32 = 256;

/// The chunks of one part, which takes about a millisecond: a version's other members wait for it.
const PART_CHUNKS: u32 = 1 << 12;

/// The messages of one session about what its client holds. A client that says more than it should waits, and no message
/// keeps the members of its version waiting, however many chunks it names.
#[derive(Debug)]
pub(crate) struct HeldMessages {
    /// When the next part may be handled without waiting, beyond a burst.
    due: Instant,
}

impl Default for HeldMessages {
    fn default() -> Self {
        Self { due: Instant::now() }
    }
}

impl HeldMessages {
    /// Handles that the client can, or can no longer, send chunks of a version to its peers. About another version than the
    /// last one of the subscription it says nothing any more.
    pub(crate) async fn handle(&mut self, sharer: &Sharer, held: &Held) {
        self.wait().await;
        let seat = || sharer.seat(held.subscription, (held.epoch, held.version));
        let Some((mut added, mut withdrawn)) =
            seat().map(|seat| (seat.relevant(&held.added), seat.relevant(&held.withdrawn)))
        else {
            return;
        };
        loop {
            let (first, second) = next_part(&mut added, &mut withdrawn);
            match seat() {
                Some(seat) => seat.handle_held(&first, &second), // It must not be kept while this waits.
                None => return,
            }
            if added.is_empty() && withdrawn.is_empty() {
                return;
            }
            self.wait().await;
            tokio::task::yield_now().await;
        }
    }

    async fn wait(&mut self) {
        let (begins, due) = pace(self.due, Instant::now(), INTERVAL, BURST);
        self.due = due;
        if begins > Instant::now() {
            tokio::time::sleep_until(begins).await;
        }
    }
}

/// Takes the next part: of what is added, and then of what is withdrawn.
fn next_part(added: &mut RangeSet, withdrawn: &mut RangeSet) -> (RangeSet, RangeSet) {
    let first = added.take_first(PART_CHUNKS);
    let second = withdrawn.take_first(PART_CHUNKS - first.len());
    (first, second)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the largest message is handled in small parts, as many as need not wait, and completely.
    #[test]
    fn parts_are_small_and_make_up_the_message() {
        let whole = RangeSet::from_range(0..1 << 20);
        let (mut added, mut withdrawn, mut parts) = (whole.clone(), RangeSet::from_range(0..100), vec![]);
        while !(added.is_empty() && withdrawn.is_empty()) {
            parts.push(next_part(&mut added, &mut withdrawn));
        }
        assert!(
            parts
                .iter()
                .all(|(added, withdrawn)| added.len() + withdrawn.len() <= PART_CHUNKS)
        );
        assert!(parts.len() as u32 <= BURST + 1, "{}", parts.len());
        let sum = |part: fn(&(RangeSet, RangeSet)) -> &RangeSet| {
            parts.iter().fold(RangeSet::new(), |sum, it| sum.union(part(it)))
        };
        assert_eq!((sum(|it| &it.0), sum(|it| &it.1)), (whole, RangeSet::from_range(0..100)));
    }
}
