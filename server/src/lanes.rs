//! The lanes of one session, and which of them takes the next chunk.
//!
//! Control and manifests stay on the first lane; so does everything while there is no other. A chunk goes to the lane that
//! has the fewest bytes on their way. A further lane that dies, or that is silent, loses its chunks to the others;
//! the first one is the session, and ends with it.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};
use tensor_relay_protocol::CloseCode;
use tensor_relay_transport::{Lane, LaneStats};
use tokio::sync::watch;

/// The lanes of a session. The first is always there.
#[derive(Debug)]
pub(crate) struct Lanes {
    first: Arc<Member>,
    further: Mutex<Further>,
}

#[derive(Debug, Default)]
struct Further {
    members: Vec<Arc<Member>>,
    /// How many lanes have a place: the members, and those that are about to be.
    places: usize,
    /// Whether the session is over, so that nobody joins it any more.
    closed: bool,
}

/// A place among the further lanes of a session. Dropped, it is free again, and what its lane had goes to others.
#[derive(Debug)]
pub(crate) struct Place {
    lanes: Arc<Lanes>,
    member: Option<Arc<Member>>,
}

/// One lane of a session.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) lane: Lane,
    is_first: bool,
    /// Bytes of chunks that were given to this lane and have not arrived, as far as anybody knows.
    bytes: AtomicU64,
    standing: watch::Sender<Standing>,
}

/// What may be expected of a further lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It takes chunks.
    Good,
    /// It finishes what it has and takes nothing more: its client wants it to end.
    Leaving,
    /// It sends and hears nothing: what it has goes to others, until it is heard of again.
    Silent,
    /// It is gone.
    Gone,
}

/// Why a lane cannot join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoPlace {
    /// The session has as many lanes as it may.
    Full,
    /// The session is over.
    Over,
}

impl Lanes {
    pub(crate) fn new(first: Lane) -> Self {
        Self { first: Member::new(first, true), further: Mutex::default() }
    }

    /// The lane of control messages and manifests.
    pub(crate) fn first(&self) -> &Lane {
        &self.first.lane
    }

    /// Keeps a place for a lane, while fewer than `max` have one.
    pub(crate) fn reserve(self: &Arc<Self>, max: usize) -> Result<Place, NoPlace> {
        let mut further = self.further();
        if further.closed {
            return Err(NoPlace::Over);
        }
        if further.places + 1 >= max {
            return Err(NoPlace::Full);
        }
        further.places += 1;
        Ok(Place { lanes: Arc::clone(self), member: None })
    }

    /// Ends every lane but the first, and lets none join any more.
    pub(crate) fn close_further(&self, code: CloseCode) {
        let members = {
            let mut further = self.further();
            further.closed = true;
            std::mem::take(&mut further.members)
        };
        for member in members {
            member.stand(Standing::Gone);
            member.lane.close(code, "");
        }
    }

    /// How many lanes take chunks.
    pub(crate) fn usable(&self) -> usize {
        1 + self.further().members.iter().filter(|member| member.is_good()).count()
    }

    /// Gives a chunk of `bytes` to the lane that has the fewest on their way.
    pub(crate) fn assign(&self, bytes: u64) -> Load {
        let further = self.further();
        let members = || std::iter::once(&self.first).chain(further.members.iter().filter(|m| m.is_good()));
        let loads = members().map(|member| member.bytes.load(Ordering::Relaxed));
        let chosen = members().nth(least_loaded(loads)).unwrap_or(&self.first);
        Load::new(chosen, bytes, !further.members.is_empty())
    }

    /// Gives a chunk of `bytes` to the first lane, whatever that has on its way.
    pub(crate) fn assign_first(&self, bytes: u64) -> Load {
        Load::new(&self.first, bytes, !self.further().members.is_empty())
    }

    /// Nothing that holds this lock can panic in a way that leaves half a change.
    fn further(&self) -> MutexGuard<'_, Further> {
        self.further.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which of the lanes with these `loads` in bytes has the smallest; the first of equals. 0 when there is none.
fn least_loaded(loads: impl Iterator<Item = u64>) -> usize {
    loads.enumerate().min_by_key(|(_, bytes)| *bytes).map_or(0, |(index, _)| index)
}

impl Place {
    /// Gives the place to `lane`, which takes chunks from now on; `None` when the session has ended meanwhile.
    pub(crate) fn take(&mut self, lane: Lane) -> Option<Arc<Member>> {
        let mut further = self.lanes.further();
        if further.closed {
            return None;
        }
        let member = Member::new(lane, false);
        further.members.push(Arc::clone(&member));
        self.member = Some(Arc::clone(&member));
        Some(member)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut further = self.lanes.further();
        further.places -= 1;
        if let Some(member) = &self.member {
            member.stand(Standing::Gone);
            further.members.retain(|other| !Arc::ptr_eq(other, member));
        }
    }
}

impl Member {
    fn new(lane: Lane, is_first: bool) -> Arc<Self> {
        Arc::new(Self {
            lane,
            is_first,
            bytes: AtomicU64::new(0),
            standing: watch::Sender::new(Standing::Good),
        })
    }

    /// Whether it is the first lane, with which everything ends.
    pub(crate) fn is_first(&self) -> bool {
        self.is_first
    }

    fn is_good(&self) -> bool {
        *self.standing.borrow() == Standing::Good
    }

    /// Whether chunks are on their way on it.
    pub(crate) fn has_chunks(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > 0
    }

    /// Changes what may be expected of it. What is gone stays gone, and what leaves does not come back.
    pub(crate) fn stand(&self, standing: Standing) {
        self.standing.send_if_modified(|now| {
            let changes = match (*now, standing) {
                (Standing::Gone, _) | (Standing::Leaving, Standing::Good) => false,
                (now, next) => now != next,
            };
            if changes {
                *now = standing;
            }
            changes
        });
    }

    /// Returns once nothing more may be expected of what was given to it. Never for the first lane. Cancel safe.
    pub(crate) async fn given_up(&self) {
        let lost = |standing: &Standing| matches!(standing, Standing::Silent | Standing::Gone);
        if self.standing.subscribe().wait_for(lost).await.is_err() {
            std::future::pending().await
        }
    }
}

/// A chunk on a lane, which counts there until this is dropped.
#[derive(Debug)]
pub(crate) struct Load {
    member: Arc<Member>,
    bytes: u64,
    /// Whether there are other lanes, so that it matters when the chunk has arrived.
    among_several: bool,
}

impl Load {
    fn new(member: &Arc<Member>, bytes: u64, among_several: bool) -> Self {
        member.bytes.fetch_add(bytes, Ordering::Relaxed);
        Self { member: Arc::clone(member), bytes, among_several }
    }

    pub(crate) fn member(&self) -> &Member {
        &self.member
    }

    /// Whether anybody has to know when the chunk has arrived.
    pub(crate) fn is_among_several(&self) -> bool {
        self.among_several
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.member.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Notices that a lane is silent: what it sent before the look before is still unanswered, without a single byte.
///
/// What was sent just before a look may be answered right after it, so one look says nothing. A lane whose client does not
/// read is not silent: what was sent is acknowledged, and no more is sent. Acknowledgements themselves get no answer.
#[derive(Debug)]
pub(crate) struct Silence {
    eliciting_frames: u64,
    received_bytes: u64,
    /// Whether something was sent before the last look, after which nothing was heard.
    unanswered: bool,
}

impl Silence {
    pub(crate) fn new(stats: &LaneStats) -> Self {
        let LaneStats { eliciting_frames, received_bytes, .. } = *stats;
        Self { eliciting_frames, received_bytes, unanswered: false }
    }

    /// Looks at what the lane has done since the last look; returns what may be expected of it, or `None` if that gave no
    /// news.
    pub(crate) fn look(&mut self, stats: &LaneStats) -> Option<Standing> {
        let heard = stats.received_bytes > self.received_bytes;
        let asked = stats.eliciting_frames > self.eliciting_frames;
        let was_unanswered = self.unanswered;
        *self = Self { unanswered: !heard && (was_unanswered || asked), ..Self::new(stats) };
        match (heard, was_unanswered) {
            (true, _) => Some(Standing::Good),
            (false, true) => Some(Standing::Silent),
            (false, false) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    proptest! {
        /// No lane has less on its way than the one that is chosen, and none before it as little.
        #[test]
        fn the_least_loaded_lane_is_chosen(loads in prop::collection::vec(0u64..8, 1..17)) {
            let chosen = least_loaded(loads.iter().copied());
            prop_assert!(loads.iter().all(|other| *other >= loads[chosen]));
            prop_assert!(loads[..chosen].iter().all(|before| *before > loads[chosen]));
        }

        /// Chunks that are given while none arrives spread evenly, to a chunk.
        #[test]
        fn chunks_spread_evenly(lanes in 1usize..17, chunks in 0usize..100) {
            let mut loads = vec![0u64; lanes];
            for _ in 0..chunks {
                let chosen = least_loaded(loads.iter().copied());
                loads[chosen] += 1;
            }
            prop_assert!(loads.iter().all(|load| *load as usize == chunks / lanes || *load as usize == chunks.div_ceil(lanes)));
        }
    }

    #[test]
    fn silence_is_to_be_unanswered_for_two_looks() {
        let stats = |eliciting_frames, received_bytes| LaneStats {
            udp_payload_bytes: 1_200,
            rtt: Duration::ZERO,
            sent_bytes: 0,
            received_bytes,
            sent_packets: 0,
            lost_packets: 0,
            eliciting_frames,
        };
        let mut silence = Silence::new(&stats(5, 100));
        assert_eq!(silence.look(&stats(9, 180)), Some(Standing::Good));
        assert_eq!(silence.look(&stats(9, 180)), None, "it says nothing and need not be answered");
        assert_eq!(silence.look(&stats(10, 180)), None, "it spoke just before the look");
        assert_eq!(silence.look(&stats(10, 200)), Some(Standing::Good), "and was answered after it");
        assert_eq!(silence.look(&stats(12, 200)), None);
        assert_eq!(silence.look(&stats(12, 200)), Some(Standing::Silent));
        assert_eq!(silence.look(&stats(13, 200)), Some(Standing::Silent), "until it is heard again");
        assert_eq!(silence.look(&stats(13, 220)), Some(Standing::Good));
        assert_eq!(silence.look(&stats(14, 220)), None, "what was before is forgotten");
    }
}
