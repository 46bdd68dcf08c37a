//! The lanes of a connection: their tasks, their wanted number, and their retirement.

use super::{
    Event, Target,
    lane_task::{LaneEvent, LaneSlot, StreamAcceptor},
    plan::Plan,
};
use crate::{
    config::{Config, LANES_MAX, Lanes},
    rate::Sample,
};
use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{
    ClientMessage, CloseCode, InstanceId, LaneId, ProtocolViolation, RangeSet, Welcome,
};
use tensor_relay_transport::Lane;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, timeout},
};

/// The maximum number of events of further lanes that wait for the session, which handles them promptly. Beyond it,
/// these lanes wait.
const EVENTS_MAX: usize = 64;

/// The interval of rate samples, for the automatic number of lanes and for trials of the other transport.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// The lanes of a client's current connection, for statistics.
#[derive(Debug, Default)]
pub(crate) struct LaneRegistry(Lock<BTreeMap<LaneId, Lane>>);

/// The lanes of one connection. Their tasks end when this is dropped.
#[derive(Debug)]
pub(crate) struct LaneSet {
    registry: Arc<LaneRegistry>,
    live: BTreeMap<LaneId, Lane>,
    /// The lanes below `counted_to` that the server has not retired, whether they joined, are joining or have ended.
    remaining: RangeSet,
    counted_to: u32,
    /// The id of the next lane. Ids only rise.
    next_lane: Arc<AtomicU32>,
    /// Accepts the streams of lane 0, within [`next`](Self::next): no task is woken between the lane's driver and the
    /// session.
    acceptor: StreamAcceptor,
    /// The events of the further lanes.
    events: mpsc::Receiver<LaneEvent>,
    tasks: JoinSet<()>,
    /// The decoded length of all chunks that were received and verified, over all lanes.
    verified_bytes: Arc<AtomicU64>,
    /// The index, from 1, of the current period with a large version in transfer; `None` between periods.
    bulky_period: watch::Sender<Option<u64>>,
    /// The number of such periods so far.
    periods: u64,
    /// Whether the number of lanes is final.
    has_settled: Arc<AtomicBool>,
}

/// The server of a connection, and the statistics of its lanes.
#[derive(Debug)]
pub(crate) struct Path {
    pub(super) peer: SocketAddr,
    pub(super) instance: InstanceId,
    lanes: Arc<LaneRegistry>,
    verified_bytes: Arc<AtomicU64>,
    bulky_period: watch::Receiver<Option<u64>>,
    /// The period of the last sample, if it was not the end of that period.
    sampled_period: Option<u64>,
    has_settled: Arc<AtomicBool>,
}

impl Path {
    /// The next sample: at the beginning and at the end of each period in which a large version is in transfer, and in
    /// intervals between these; `None` after the connection has ended.
    pub(crate) async fn sample(&mut self) -> Option<Sample> {
        if self.sampled_period.is_none() {
            self.bulky_period.wait_for(Option::is_some).await.ok()?;
        } else if let Ok(changed) = timeout(SAMPLE_INTERVAL, self.bulky_period.changed()).await {
            changed.ok()?;
        }
        let current = *self.bulky_period.borrow_and_update();
        // The end of a period belongs to it, even if the next one has begun already.
        let period = self.sampled_period.or(current);
        self.sampled_period = current;
        let (lanes, verified_bytes) =
            (self.lanes.0.lock().len() as u32, self.verified_bytes.load(Ordering::Relaxed));
        Some(Sample { period, lanes, verified_bytes })
    }

    /// Whether the number of lanes is final.
    pub(crate) fn has_settled(&self) -> bool {
        self.has_settled.load(Ordering::Relaxed)
    }
}

impl LaneRegistry {
    pub(crate) fn lanes(&self) -> Vec<Lane> {
        self.0.lock().values().cloned().collect()
    }
}

impl LaneSet {
    /// Starts with `control`, the lane of the control stream, and joins further lanes to its peer, as many as `config`
    /// wants and `welcome` allows.
    pub(super) fn begin(target: &Target, config: &Config, welcome: &Welcome, control: &Lane) -> Self {
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let live = BTreeMap::from([(LaneId(0), control.clone())]);
        *target.registry.0.lock() = live.clone();
        let mut lanes = Self {
            registry: Arc::clone(&target.registry),
            live,
            remaining: RangeSet::from_range(0..1),
            counted_to: 1,
            next_lane: Arc::new(AtomicU32::new(1)),
            acceptor: StreamAcceptor::new(LaneId(0), control.clone()),
            events,
            tasks: JoinSet::new(),
            verified_bytes: Arc::default(),
            bulky_period: watch::Sender::new(None),
            periods: 0,
            has_settled: Arc::new(AtomicBool::new(true)),
        };
        if let Some(offer) = welcome.lanes {
            let lanes_max = config.lanes.max().min(offer.lanes_max).min(LANES_MAX);
            let plan = Plan::new(lanes_max);
            let wanted =
                watch::Sender::new(if config.lanes.is_automatic() { plan.lanes() } else { lanes_max });
            for index in 1..lanes_max as usize {
                let slot = LaneSlot {
                    index,
                    target: target.clone(),
                    peer: control.peer(),
                    kind: control.kind(),
                    session: welcome.session,
                    grant: offer.grant,
                    instance: welcome.instance,
                    next_lane: Arc::clone(&lanes.next_lane),
                    wanted: wanted.subscribe(),
                    events: sender.clone(),
                };
                lanes.tasks.spawn(slot.run_slot());
            }
            match config.lanes {
                Lanes::Auto | Lanes::UpTo(_) => {
                    lanes.has_settled.store(plan.is_settled(), Ordering::Relaxed);
                    let path = lanes.path(control.peer(), welcome.instance);
                    lanes.tasks.spawn(determine_lanes(plan, path, wanted))
                }
                // Keeps `wanted` open, so that the slots run.
                Lanes::Fixed(_) => lanes.tasks.spawn(async move { wanted.closed().await }),
            };
        }
        lanes
    }

    /// The next event. Cancel safe.
    pub(super) async fn next(&mut self) -> Event {
        let event = tokio::select! {
            Some(event) = self.acceptor.next() => return event,
            Some(event) = self.events.recv() => event,
            else => return std::future::pending().await, // All lanes have ended; the control stream reports why.
        };
        match event {
            LaneEvent::Joined(id, lane) => {
                tracing::info!(lane = %id, peer = %lane.peer(), "A lane joined the session.");
                self.registry.0.lock().insert(id, lane.clone());
                self.live.insert(id, lane);
                Event::Joined
            }
            LaneEvent::Event(event) => {
                if let Event::Ended(id) = event {
                    self.remove(id);
                }
                event
            }
        }
    }

    /// The counter of received and verified bytes.
    pub(super) fn verified_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.verified_bytes)
    }

    /// The path to `peer`, which is the server's `instance`.
    pub(super) fn path(&self, peer: SocketAddr, instance: InstanceId) -> Path {
        Path {
            peer,
            instance,
            lanes: Arc::clone(&self.registry),
            verified_bytes: Arc::clone(&self.verified_bytes),
            bulky_period: self.bulky_period.subscribe(),
            sampled_period: None,
            has_settled: Arc::clone(&self.has_settled),
        }
    }

    /// The number of lanes.
    pub(crate) fn len(&self) -> u32 {
        self.live.len() as u32
    }

    /// Allows the server `bytes` of unread payload in flight on each lane.
    pub(crate) fn allow_unread(&self, bytes: u64) {
        self.live.values().for_each(|lane| lane.allow_unread(bytes));
    }

    /// The `Retire` message for a lane that ended at the client, as each further lane does once; `None` if the server
    /// retired it before.
    pub(crate) fn retire(&mut self, lane: LaneId) -> Option<ClientMessage> {
        (!self.is_retired(lane)).then_some(ClientMessage::Retire(lane))
    }

    /// Handles `Retired`: the server begins no more chunks on the lane, which is closed here.
    ///
    /// # Errors
    /// [`ProtocolViolation`] for an unknown lane, lane 0, or a lane that was retired before.
    pub(crate) fn handle_retired(&mut self, lane: LaneId) -> Result<(), ProtocolViolation> {
        if lane == LaneId(0) || !self.remaining().remove(lane.0) {
            return Err(ProtocolViolation::OutOfTurn { found: "Retired", expected: "one for each lane" });
        }
        if let Some(lane) = self.remove(lane) {
            lane.close(CloseCode::Done, "");
        }
        Ok(())
    }

    /// Whether the server has retired a lane of this connection, so that its further data is ignored.
    pub(crate) fn is_retired(&mut self, lane: LaneId) -> bool {
        !self.remaining().contains(lane.0)
    }

    /// The lanes that the server has not retired, with those that were numbered since the last call.
    fn remaining(&mut self) -> &mut RangeSet {
        let next = self.next_lane.load(Ordering::Acquire);
        for lane in std::mem::replace(&mut self.counted_to, next)..next {
            self.remaining.insert(lane);
        }
        &mut self.remaining
    }

    /// Records whether a large version is being received, if anything samples the rate.
    pub(crate) fn note_bulky(&mut self, is_bulky: impl FnOnce() -> bool) {
        if self.bulky_period.receiver_count() == 0 {
            return;
        }
        let is_bulky = is_bulky();
        if is_bulky != self.bulky_period.borrow().is_some() {
            self.periods += u64::from(is_bulky);
            self.bulky_period.send_replace(is_bulky.then_some(self.periods));
        }
    }

    /// Stops joining lanes, and closes all lanes.
    pub(super) fn close(&mut self, code: CloseCode, text: &str) {
        self.tasks.abort_all();
        self.registry.0.lock().retain(|id, _| *id == LaneId(0)); // Lane 0's statistics are read after the close.
        self.live.values().for_each(|lane| lane.close(code, text));
    }

    /// Waits until the server is notified of closed lanes.
    pub(super) async fn flush_close(self) {
        for lane in self.live.into_values() {
            lane.flush_close().await;
        }
    }

    fn remove(&mut self, lane: LaneId) -> Option<Lane> {
        self.registry.0.lock().remove(&lane);
        self.live.remove(&lane)
    }
}

/// Determines the best number of lanes, and sends it to the slots.
async fn determine_lanes(mut plan: Plan, mut path: Path, wanted: watch::Sender<u32>) {
    while !plan.is_settled() {
        let Some(sample) = path.sample().await else { return };
        if plan.handle_sample(Instant::now(), sample) {
            tracing::info!(
                lanes = plan.lanes(),
                settled = plan.is_settled(),
                "The number of lanes was set by the measured rate."
            );
            wanted.send_replace(plan.lanes());
        }
    }
    path.has_settled.store(true, Ordering::Relaxed);
    drop(path);
    wanted.closed().await;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a version that is received faster than the interval of samples is measured, so that lanes and transport
    /// are chosen for it, too.
    #[tokio::test(start_paused = true)]
    async fn short_periods_are_sampled_at_both_ends() {
        let (bulky_period, verified_bytes) = (watch::Sender::new(None), Arc::new(AtomicU64::new(7)));
        let mut path = Path {
            peer: SocketAddr::from(([127, 0, 0, 1], 1)),
            instance: InstanceId([0; 16]),
            lanes: Arc::default(),
            verified_bytes: Arc::clone(&verified_bytes),
            bulky_period: bulky_period.subscribe(),
            sampled_period: None,
            has_settled: Arc::default(),
        };
        let mut now = Instant::now();
        for (period, bytes) in [(1, 107), (2, 207)] {
            tokio::time::advance(SAMPLE_INTERVAL * 10).await;
            bulky_period.send_replace(Some(period));
            let begun = path.sample().await.unwrap();
            now = Instant::now();
            tokio::time::advance(SAMPLE_INTERVAL / 2).await;
            verified_bytes.store(bytes, Ordering::Relaxed);
            bulky_period.send_replace(None);
            let ended = path.sample().await.unwrap();
            assert_eq!([begun.period, ended.period], [Some(period); 2]);
            assert_eq!((begun.verified_bytes, ended.verified_bytes), (bytes - 100, bytes));
        }
        assert_eq!(now.elapsed(), SAMPLE_INTERVAL / 2);
        drop(bulky_period);
        assert_eq!(path.sample().await, None);
    }
}
