//! The lanes of a connection: their tasks, their wanted number, and their retirement.

use super::{
    Event, Target,
    lane_task::{LaneEvent, LaneSlot, LaneTask},
    plan::{Plan, Sample},
};
use crate::config::{Config, LANES_MAX, Lanes as LanesWanted};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};
use tensor_relay_protocol::{ClientMessage, CloseCode, LaneId, Misbehaved, RangeSet, Welcome};
use tensor_relay_transport::Lane;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep},
};

/// The most lane events waiting for the session. It handles them at once; a lane that is ahead waits.
const EVENTS_MAX: usize = 64;

/// The interval of rate samples for the automatic number of lanes. Shorter than the versions that matter.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// The lanes of a client's current connection, for statistics.
#[derive(Debug, Default)]
pub(crate) struct LaneRegistry(Mutex<BTreeMap<LaneId, Lane>>);

/// The lanes of one connection. They end when this is dropped.
#[derive(Debug)]
pub(crate) struct Lanes {
    roster: Arc<LaneRegistry>,
    live: BTreeMap<LaneId, Lane>,
    /// The lanes that the server was asked to retire.
    retiring: RangeSet,
    /// The lanes that the server has retired.
    retired: RangeSet,
    /// The number of the next lane.
    next_lane: Arc<AtomicU32>,
    events: mpsc::Receiver<LaneEvent>,
    tasks: JoinSet<()>,
    /// Bytes of chunks that were received and verified over all lanes, decoded.
    verified_bytes: Arc<AtomicU64>,
    /// Numbers the periods in which a large version is under way; `None` between them.
    bulky: watch::Sender<Option<u64>>,
    periods: u64,
}

impl LaneRegistry {
    pub(crate) fn lanes(&self) -> Vec<Lane> {
        self.get().values().cloned().collect()
    }

    fn get(&self) -> MutexGuard<'_, BTreeMap<LaneId, Lane>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lanes {
    /// Starts with `control`, the lane of the control stream, and joins further lanes to its peer, as many as `config`
    /// wants and `welcome` allows.
    pub(super) fn begin(target: &Target, config: &Config, welcome: &Welcome, control: &Lane) -> Self {
        let (tell, events) = mpsc::channel(EVENTS_MAX);
        let (bulky, verified_bytes) = (watch::Sender::new(None), Arc::<AtomicU64>::default());
        let next_lane = Arc::new(AtomicU32::new(1));
        let live = BTreeMap::from([(LaneId(0), control.clone())]);
        *target.roster.get() = live.clone();
        let mut tasks = JoinSet::new();
        let task = LaneTask::new(LaneId(0), control.clone(), config.stall_timeout, tell.clone());
        tasks.spawn(task.run());
        if let Some(offer) = welcome.lanes {
            let most = config.lanes.most().min(offer.lanes_max).min(LANES_MAX);
            let plan = Plan::new(most);
            let wanted = watch::Sender::new(if config.lanes.is_sought() { plan.lanes() } else { most });
            for number in 1..most as usize {
                let slot = LaneSlot {
                    number,
                    target: target.clone(),
                    peer: control.peer(),
                    kind: control.kind(),
                    session: welcome.session,
                    grant: offer.grant,
                    instance: welcome.instance,
                    next_lane: Arc::clone(&next_lane),
                    header_timeout: config.stall_timeout,
                    wanted: wanted.subscribe(),
                    tell: tell.clone(),
                };
                tasks.spawn(slot.keep());
            }
            match config.lanes {
                LanesWanted::Auto | LanesWanted::UpTo(_) => {
                    let (roster, verified_bytes) = (Arc::clone(&target.roster), Arc::clone(&verified_bytes));
                    tasks.spawn(seek(plan, roster, verified_bytes, bulky.subscribe(), wanted))
                }
                // The number is fixed.
                LanesWanted::Fixed(_) => tasks.spawn(async move { wanted.closed().await }),
            };
        }
        Self {
            roster: Arc::clone(&target.roster),
            live,
            retiring: RangeSet::new(),
            retired: RangeSet::new(),
            next_lane,
            events,
            tasks,
            verified_bytes,
            bulky,
            periods: 0,
        }
    }

    /// The next event. Cancel safe.
    pub(super) async fn next(&mut self) -> Event {
        match self.events.recv().await {
            Some(LaneEvent::Joined(id, lane)) => {
                tracing::info!(lane = %id, peer = %lane.peer(), "A lane joined the session.");
                self.roster.get().insert(id, lane.clone());
                self.live.insert(id, lane);
                Event::Joined
            }
            Some(LaneEvent::Heard(event)) => {
                if let Event::Ended(id) = event {
                    self.remove(id);
                }
                event
            }
            None => std::future::pending().await, // All lanes ended: so did the control stream, which says why.
        }
    }

    /// Where bytes are counted that were received and verified.
    pub(super) fn verified_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.verified_bytes)
    }

    /// How many there are.
    pub(crate) fn len(&self) -> u32 {
        self.live.len() as u32
    }

    /// Allows the server `bytes` of unread payload in flight, over any lane.
    pub(crate) fn allow_unread(&self, bytes: u64) {
        self.live.values().for_each(|lane| lane.allow_unread(bytes));
    }

    /// The message to the server about a lane that ended here, unless it knows already.
    pub(crate) fn retire(&mut self, lane: LaneId) -> Option<ClientMessage> {
        let is_news = lane != LaneId(0) && !self.is_retired(lane) && self.retiring.insert(lane.0);
        is_news.then_some(ClientMessage::Retire(lane))
    }

    /// Handles `Retired`: the server begins nothing more on the lane, which is closed.
    ///
    /// # Errors
    /// [`Misbehaved`] for an unknown lane, the control stream's, and one that was retired before.
    pub(crate) fn handle_retired(&mut self, lane: LaneId) -> Result<(), Misbehaved> {
        let was_used = (1..self.next_lane.load(Ordering::Acquire)).contains(&lane.0);
        if !was_used || !self.retired.insert(lane.0) {
            return Err(Misbehaved::OutOfTurn { found: "Retired", expected: "it once for each lane" });
        }
        if let Some(lane) = self.remove(lane) {
            lane.close(CloseCode::Done, "");
        }
        Ok(())
    }

    /// Whether the server has retired a lane, so that its further data is ignored.
    pub(crate) fn is_retired(&self, lane: LaneId) -> bool {
        self.retired.contains(lane.0)
    }

    /// Records whether a large version is being received, if the number of lanes is automatic.
    pub(crate) fn note_bulky(&mut self, is_bulky: impl FnOnce() -> bool) {
        if self.bulky.receiver_count() == 0 {
            return;
        }
        let is_bulky = is_bulky();
        if is_bulky != self.bulky.borrow().is_some() {
            self.periods += u64::from(is_bulky);
            self.bulky.send_replace(is_bulky.then_some(self.periods));
        }
    }

    /// Stops joining lanes, and closes the joined ones.
    pub(super) fn close(&mut self, code: CloseCode, text: &str) {
        self.tasks.abort_all();
        self.roster.get().retain(|id, _| *id == LaneId(0)); // Its statistics are looked at after the end.
        self.live.values().for_each(|lane| lane.close(code, text));
    }

    /// Waits until the server is notified of closed lanes.
    pub(super) async fn flush_close(&self) {
        for lane in self.live.values() {
            lane.flush_close().await;
        }
    }

    fn remove(&mut self, lane: LaneId) -> Option<Lane> {
        self.roster.get().remove(&lane);
        self.live.remove(&lane)
    }
}

/// Determines the best number of lanes, and tells the slots.
async fn seek(
    mut plan: Plan,
    roster: Arc<LaneRegistry>,
    verified_bytes: Arc<AtomicU64>,
    mut bulky: watch::Receiver<Option<u64>>,
    wanted: watch::Sender<u32>,
) {
    while !plan.is_settled() {
        if bulky.wait_for(Option::is_some).await.is_err() {
            return;
        }
        let (stretch, lanes) = (*bulky.borrow(), roster.get().len() as u32);
        let sample = Sample { stretch, lanes, verified_bytes: verified_bytes.load(Ordering::Relaxed) };
        if plan.handle_sample(Instant::now(), sample) {
            tracing::info!(
                lanes = plan.lanes(),
                settled = plan.is_settled(),
                "The rate decides on the number of lanes."
            );
            wanted.send_replace(plan.lanes());
        }
        sleep(SAMPLE_INTERVAL).await;
    }
    drop(bulky);
    wanted.closed().await;
}
