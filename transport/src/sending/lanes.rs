//! [`Lanes`]: the lanes of one session, and the choice of a lane for the next chunk.
//!
//! All lanes are alike: each has a number chosen by its client, and carries chunks until it is retired. Lane 0 is the
//! session's first connection; it carries control messages and manifests even after it is retired for chunks. So there
//! may be no lane for chunks; then they wait for one to join.

mod set;
mod silence;

pub use set::JoinRefused;
pub use silence::Silence;

use crate::{InUse, Lane, LaneError, control, in_use::Used};
use set::{LANE_NUMBERS_MAX, LaneSet, Retirement};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{LaneId, ServerMessage};
use tokio::sync::watch;

/// The lane with the control stream.
const CONTROL: LaneId = LaneId(0);

/// The lanes of a session.
#[derive(Debug)]
pub struct Lanes {
    set: Lock<LaneSet<Arc<LiveLane>>>,
    /// The connection of the control stream.
    control: Lane,
    sender: control::Sender<ServerMessage>,
    /// Notified when a lane joins.
    joined: watch::Sender<()>,
    /// The number of chunks assigned to lanes.
    chunks: AtomicU64,
}

/// A lane that carries chunks, until it is retired.
#[derive(Debug)]
pub struct LiveLane {
    /// Its connection.
    pub lane: Lane,
    /// Bytes of chunks that are being written to this lane.
    bytes: InUse,
    /// The session-wide number of its last chunk, from 1.
    last_chunk: AtomicU64,
    retired: watch::Sender<bool>,
}

/// A chunk on a lane, counted there until this is dropped.
#[derive(Debug)]
pub(crate) struct LaneLoad {
    lane: Arc<LiveLane>,
    _bytes: Used,
}

impl Lanes {
    /// The lanes of a session with the connection `control`, whose messages are sent by `sender`.
    pub fn new(control: Lane, sender: control::Sender<ServerMessage>) -> Self {
        let mut set = LaneSet::default();
        set.insert(CONTROL, LiveLane::new(control.clone()));
        Self {
            set: Lock::new(set),
            control,
            sender,
            joined: watch::Sender::new(()),
            chunks: AtomicU64::new(0),
        }
    }

    /// The connection of control messages and manifests.
    pub fn control(&self) -> &Lane {
        &self.control
    }

    /// Checks whether a lane may join as `id` in a session of at most `max` lanes.
    pub fn check_join(&self, id: LaneId, max: usize) -> Result<(), JoinRefused> {
        self.set.lock().check_join(id, max)
    }

    /// Adds `lane` as `id`.
    pub fn join(&self, id: LaneId, lane: Lane, max: usize) -> Result<Arc<LiveLane>, JoinRefused> {
        let live = LiveLane::new(lane);
        self.set.lock().join(id, Arc::clone(&live), max)?;
        self.joined.send_replace(());
        Ok(live)
    }

    /// Retires a lane, cancels its chunks, and informs the client. Idempotent: the client gets one message for each
    /// number.
    ///
    /// # Errors
    /// [`LaneError`] when the session has ended.
    pub async fn retire(&self, id: LaneId) -> Result<(), LaneError> {
        let retirement = self.set.lock().retire(id);
        let Some(Retirement { lane }) = retirement else { return Ok(()) };
        if let Some(lane) = lane {
            lane.retired.send_replace(true);
        }
        // Queued after the lane left the set: no chunk starts on it after `Retired`.
        self.send(ServerMessage::Retired(id)).await
    }

    /// Sends a message on the control stream.
    ///
    /// # Errors
    /// [`LaneError`] when the session has ended.
    pub(crate) async fn send(&self, message: ServerMessage) -> Result<(), LaneError> {
        self.sender.send(message).await
    }

    /// Retires every lane when the session ends, and admits no more.
    pub fn close(&self) {
        let live = self.set.lock().close();
        for lane in live {
            lane.retired.send_replace(true);
        }
    }

    /// The number of lanes that carry chunks.
    pub(crate) fn len(&self) -> usize {
        self.set.lock().live.len()
    }

    /// Whether a lane carries chunks.
    pub(crate) fn is_live(&self, id: LaneId) -> bool {
        self.set.lock().live.contains_key(&id)
    }

    /// The lane `id`, if it carries chunks.
    pub fn get(&self, id: LaneId) -> Option<Lane> {
        self.set.lock().live.get(&id).map(|live| live.lane.clone())
    }

    /// The lane for the next chunk: with the fewest bytes being written. Of equals, the one with the oldest last
    /// chunk, so that lanes take turns while send buffers have room. `None` if there is no lane.
    pub(crate) fn least_loaded(&self) -> Option<LaneId> {
        let set = self.set.lock();
        least_loaded(set.live.iter().map(|(id, lane)| (*id, lane.load_key())))
    }

    /// Whether a lane may have this number.
    pub fn is_number(id: LaneId) -> bool {
        id.0 < LANE_NUMBERS_MAX
    }

    /// Counts a chunk of `bytes` on a lane; `None` if the lane was retired meanwhile.
    pub(crate) fn begin_chunk(&self, id: LaneId, bytes: u64) -> Option<LaneLoad> {
        let set = self.set.lock();
        let lane = set.live.get(&id)?;
        lane.last_chunk
            .store(1 + self.chunks.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        Some(LaneLoad::new(lane, bytes))
    }

    /// Subscribes to the signal that a lane joined.
    pub(crate) fn joined(&self) -> watch::Receiver<()> {
        self.joined.subscribe()
    }
}

/// The load of a lane: bytes being written first, then its last chunk.
type LaneLoadKey = (u64, u64);

/// The least busy lane; of equals, the lowest number.
fn least_loaded(loads: impl Iterator<Item = (LaneId, LaneLoadKey)>) -> Option<LaneId> {
    loads.min_by_key(|(_, load)| *load).map(|(id, _)| id)
}

impl LiveLane {
    fn new(lane: Lane) -> Arc<Self> {
        Arc::new(Self {
            lane,
            bytes: InUse::default(),
            last_chunk: AtomicU64::new(0),
            retired: watch::Sender::new(false),
        })
    }

    fn load_key(&self) -> LaneLoadKey {
        (self.bytes.get(), self.last_chunk.load(Ordering::Relaxed))
    }

    /// Waits until the lane is retired or its session has ended. Cancel safe.
    pub async fn retired(&self) {
        // The sender is borrowed, so it cannot be gone.
        let _ = self.retired.subscribe().wait_for(|retired| *retired).await;
    }
}

impl LaneLoad {
    fn new(lane: &Arc<LiveLane>, bytes: u64) -> Self {
        Self { lane: Arc::clone(lane), _bytes: lane.bytes.add(bytes) }
    }

    pub(crate) fn lane(&self) -> &LiveLane {
        &self.lane
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Connector, Identity, Listener, Tuning};
    use proptest::prelude::*;
    use std::time::Duration;
    use tensor_relay_protocol::ClientMessage;
    use tokio::time::timeout;

    const TIMEOUT: Duration = Duration::from_secs(10);

    proptest! {
        /// For chunks that begin on the chosen lane and end at any time: no lane has fewer bytes than the chosen one,
        /// and of equals it waited longest.
        #[test]
        fn the_least_loaded_lane_is_chosen(
            lanes in 0usize..6,
            steps in prop::collection::vec((1u64..4, prop::option::of(any::<prop::sample::Index>())), 0..60),
        ) {
            let (mut bytes, mut last, mut running) = (vec![0; lanes], vec![0; lanes], vec![]);
            for (at, (size, ends)) in (1u64..).zip(steps) {
                let loads = bytes.iter().copied().zip(last.iter().copied());
                let chosen = least_loaded((0..).map(LaneId).zip(loads.clone()));
                prop_assert_eq!(chosen.is_none(), lanes == 0);
                let Some(chosen) = chosen.map(|id| id.0 as usize) else { continue };
                let fewest = bytes.iter().min().copied();
                prop_assert_eq!(fewest, Some(bytes[chosen]));
                let waited = loads.filter(|(bytes, _)| Some(*bytes) == fewest).map(|(_, last)| last).min();
                prop_assert_eq!(waited, Some(last[chosen]));
                bytes[chosen] += size;
                last[chosen] = at;
                running.push((chosen, size));
                if let Some(ends) = ends {
                    let (lane, size) = running.swap_remove(ends.index(running.len()));
                    bytes[lane] -= size;
                }
            }
        }

        /// Lanes take turns both if every chunk is written at once and if none is.
        #[test]
        fn chunks_spread_evenly(lanes in 1usize..17, chunks in 0usize..100, are_written in any::<bool>()) {
            let (mut loads, mut given) = (vec![(0u64, 0u64); lanes], vec![0usize; lanes]);
            for at in 1..=chunks {
                let chosen = least_loaded((0..).map(LaneId).zip(loads.iter().copied())).unwrap().0 as usize;
                loads[chosen] = (loads[chosen].0 + u64::from(!are_written), at as u64);
                given[chosen] += 1;
            }
            prop_assert!(given.iter().all(|count| *count == chunks / lanes || *count == chunks.div_ceil(lanes)));
        }
    }

    /// The lanes of a session over loopback, of which only the first has joined; and the values that must stay alive.
    async fn session() -> (Lanes, impl Sized) {
        let identity = Identity::ephemeral().unwrap();
        let any_port = "127.0.0.1:0".parse().unwrap();
        let listener = Listener::bind(any_port, &identity, Tuning::default()).unwrap();
        let (hosts, keys) = ([listener.local_address().to_string()], [identity.fingerprint()]);
        let connector = Connector::new(Tuning::default());
        let arrival = async { listener.accept().await.unwrap().accept().await.unwrap() };
        let (client, server) = tokio::join!(connector.connect(&hosts, &keys), arrival);
        let client = client.unwrap();
        let at_client = control::open(&client, TIMEOUT).await.unwrap();
        at_client.0.send(ClientMessage::List).await.unwrap(); // The server sees the stream once it carries data.
        let (sender, receiver) = control::accept(&server, TIMEOUT).await.unwrap();
        (Lanes::new(server, sender), (listener, client, at_client, receiver))
    }

    #[tokio::test]
    async fn each_joining_lane_is_signalled() {
        let (lanes, _alive) = session().await;
        let mut joined = lanes.joined();
        let join = |id| lanes.join(LaneId(id), lanes.control().clone(), 2);
        let (signalled, live) = tokio::join!(timeout(TIMEOUT, joined.changed()), async { join(1).unwrap() });
        signalled.expect("a lane has joined").unwrap();
        assert_eq!(join(2).unwrap_err(), JoinRefused::Full);
        assert!(!joined.has_changed().unwrap(), "none has joined");
        lanes.retire(LaneId(1)).await.unwrap();
        timeout(TIMEOUT, live.retired()).await.expect("it was retired");
        assert!(!lanes.is_live(LaneId(1)) && lanes.len() == 1);
        join(2).unwrap();
        assert!(joined.has_changed().unwrap());
    }

    #[tokio::test]
    async fn a_chunk_counts_on_its_lane_until_it_is_sent() {
        let (lanes, _alive) = session().await;
        let live = lanes.join(LaneId(1), lanes.control().clone(), 2).unwrap();
        assert_eq!((lanes.len(), lanes.least_loaded()), (2, Some(CONTROL)));
        let first = lanes.begin_chunk(CONTROL, 100).unwrap();
        assert_eq!((first.lane().load_key(), lanes.least_loaded()), ((100, 1), Some(LaneId(1))));
        let second = lanes.begin_chunk(LaneId(1), 200).unwrap();
        assert_eq!((live.load_key(), lanes.least_loaded()), ((200, 2), Some(CONTROL)));
        drop(second);
        assert_eq!((live.load_key(), lanes.least_loaded()), ((0, 2), Some(LaneId(1))));
        drop(first);
        assert_eq!(lanes.least_loaded(), Some(CONTROL), "it waited for longer");
        assert_eq!(lanes.check_join(LaneId(1), 3), Err(JoinRefused::NumberUnavailable));
        lanes.close();
        timeout(TIMEOUT, live.retired()).await.expect("the session has ended");
        assert!(lanes.begin_chunk(LaneId(1), 1).is_none() && lanes.least_loaded().is_none());
        assert_eq!(lanes.check_join(LaneId(2), 3), Err(JoinRefused::Ended));
    }
}
