//! The lanes of a connection: their tasks, their wanted number, and their retirement.

use super::{
    Event, Target,
    lane_task::{LaneEvent, LaneSlot, StreamAcceptor},
    plan::{Bounds, Known, Plan},
};
use crate::{
    config::{Config, Lanes},
    rate::{Period, Sample},
};
use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};
use tensor_relay_device::{Lock, container_memory_bytes};
use tensor_relay_protocol::{
    ClientMessage, CloseCode, InstanceId, LaneId, ProtocolViolation, RangeSet, Welcome,
};
use tensor_relay_transport::{Lane, LaneKind, Workers};
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

/// The further lanes of a client may take one in this many bytes of its container's memory limit.
const MEMORY_FRACTION: u64 = 16;

/// The lanes of a client's current connection, for statistics, and what was measured on earlier ones of each kind.
#[derive(Debug, Default)]
pub(crate) struct LaneRegistry {
    lanes: Lock<BTreeMap<LaneId, Lane>>,
    known: Lock<HashMap<LaneKind, Known>>,
}

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
    counters: Arc<Received>,
    /// The current period with a large version in transfer; `None` between periods.
    bulky_period: watch::Sender<Option<Period>>,
    /// The number of such periods so far.
    periods: u64,
    /// Whether the number of lanes is final.
    has_settled: Arc<AtomicBool>,
}

/// The decoded lengths of what was received on a connection, over all lanes.
#[derive(Debug, Default)]
pub(crate) struct Received {
    /// Of all pieces of chunks that arrived.
    pub(crate) arrived_bytes: AtomicU64,
    /// Of all chunks that were verified.
    pub(crate) verified_bytes: AtomicU64,
}

/// The server of a connection, and the statistics of its lanes.
#[derive(Debug)]
pub(crate) struct Path {
    /// `None` over a Unix socket, to which there is no other transport.
    pub(super) peer: Option<SocketAddr>,
    pub(super) instance: InstanceId,
    lanes: Arc<LaneRegistry>,
    counters: Arc<Received>,
    workers: Workers,
    bulky_period: watch::Receiver<Option<Period>>,
    /// The period of the last sample, if it was not the end of that period.
    sampled_period: Option<Period>,
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
        Some(Sample {
            period,
            lanes: self.lanes.lanes.lock().len() as u32,
            has_settled: self.has_settled.load(Ordering::Relaxed),
            arrived_bytes: self.counters.arrived_bytes.load(Ordering::Relaxed),
            processor_time: self.workers.processor_time(),
        })
    }
}

impl LaneRegistry {
    pub(crate) fn lanes(&self) -> Vec<Lane> {
        self.lanes.lock().values().cloned().collect()
    }
}

impl LaneSet {
    /// Starts with `control`, the lane of the control stream, and joins further lanes to its peer, as many as `config`
    /// wants and `welcome` allows.
    pub(super) fn begin(target: &Target, config: &Config, welcome: &Welcome, control: &Lane) -> Self {
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let live = BTreeMap::from([(LaneId(0), control.clone())]);
        *target.registry.lanes.lock() = live.clone();
        let mut lanes = Self {
            registry: Arc::clone(&target.registry),
            live,
            remaining: RangeSet::from_range(0..1),
            counted_to: 1,
            next_lane: Arc::new(AtomicU32::new(1)),
            acceptor: StreamAcceptor::new(LaneId(0), control.clone()),
            events,
            tasks: JoinSet::new(),
            counters: Arc::default(),
            bulky_period: watch::Sender::new(None),
            periods: 0,
            has_settled: Arc::new(AtomicBool::new(true)),
        };
        // A Unix socket has no further lanes.
        if let (Some(offer), Some(peer)) = (welcome.lanes, control.peer().address()) {
            let bounds = Bounds {
                processors: config.processors,
                max: config.lanes.max().min(offer.lanes_max).min(memory_lanes(control.kind())),
                busy_max: config.lanes.busy_max(config.processors),
                known: target.registry.known.lock().get(&control.kind()).copied(),
            };
            let wanted = watch::Sender::new(if config.lanes.is_automatic() { 1 } else { bounds.max });
            for index in 1..bounds.max as usize {
                let slot = LaneSlot {
                    index,
                    target: target.clone(),
                    peer,
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
                Lanes::Auto | Lanes::UpTo(_) if bounds.max > 1 => {
                    lanes.has_settled.store(false, Ordering::Relaxed);
                    let path = lanes.path(Some(peer), welcome.instance, config.workers);
                    lanes
                        .tasks
                        .spawn(determine_lanes(Plan::new(bounds), path, control.kind(), wanted))
                }
                // Keeps `wanted` open, so that the slots run.
                _ => lanes.tasks.spawn(async move { wanted.closed().await }),
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
                self.registry.lanes.lock().insert(id, lane.clone());
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

    /// The counters of received bytes.
    pub(super) fn received(&self) -> Arc<Received> {
        Arc::clone(&self.counters)
    }

    /// The path to `peer`, which is the server's `instance`.
    pub(super) fn path(&self, peer: Option<SocketAddr>, instance: InstanceId, workers: Workers) -> Path {
        Path {
            peer,
            instance,
            lanes: Arc::clone(&self.registry),
            counters: Arc::clone(&self.counters),
            workers,
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

    /// Records the size of the large version that is being received, if there is one and anything samples the rate.
    pub(crate) fn note_bulky(&mut self, bytes: impl FnOnce() -> Option<u64>) {
        if self.bulky_period.receiver_count() == 0 {
            return;
        }
        let bytes = bytes();
        if bytes.is_some() != self.bulky_period.borrow().is_some() {
            self.periods += u64::from(bytes.is_some());
            let index = self.periods;
            self.bulky_period.send_replace(bytes.map(|bytes| Period { index, bytes }));
        }
    }

    /// Stops joining lanes, and closes all lanes.
    pub(super) fn close(&mut self, code: CloseCode, text: &str) {
        self.tasks.abort_all();
        self.registry.lanes.lock().retain(|id, _| *id == LaneId(0)); // Lane 0's statistics are read after the close.
        self.live.values().for_each(|lane| lane.close(code, text));
    }

    /// Waits until the server is notified of closed lanes.
    pub(super) async fn flush_close(self) {
        for lane in self.live.into_values() {
            lane.flush_close().await;
        }
    }

    fn remove(&mut self, lane: LaneId) -> Option<Lane> {
        self.registry.lanes.lock().remove(&lane);
        self.live.remove(&lane)
    }
}

/// The number of lanes that this process's memory permits.
fn memory_lanes(kind: LaneKind) -> u32 {
    let lanes = container_memory_bytes().map(|limit| limit / MEMORY_FRACTION / kind.memory_bytes_max());
    lanes.map_or(u32::MAX, |further| u32::try_from(1 + further).unwrap_or(u32::MAX))
}

/// Determines the best number of lanes, and sends it to the slots.
async fn determine_lanes(mut plan: Plan, mut path: Path, kind: LaneKind, wanted: watch::Sender<u32>) {
    while let Some(sample) = path.sample().await {
        plan.handle_sample(Instant::now(), sample);
        path.has_settled.store(plan.is_settled(), Ordering::Relaxed);
        if let Some(known) = plan.known().filter(|_| plan.is_settled()) {
            path.lanes.known.lock().insert(kind, known);
        }
        let lanes = plan.lanes();
        if wanted.send_if_modified(|wanted| std::mem::replace(wanted, lanes) != lanes) {
            tracing::info!(lanes, settled = plan.is_settled(), "The number of lanes changes.");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a version that is received faster than the interval of samples is measured, so that lanes and transport
    /// are chosen for it, too.
    #[tokio::test(start_paused = true)]
    async fn short_periods_are_sampled_at_both_ends() {
        let (bulky_period, counters) = (watch::Sender::new(None), Arc::new(Received::default()));
        let mut path = Path {
            peer: None,
            instance: InstanceId([0; 16]),
            lanes: Arc::default(),
            counters: Arc::clone(&counters),
            workers: Workers::Inline,
            bulky_period: bulky_period.subscribe(),
            sampled_period: None,
            has_settled: Arc::default(),
        };
        let mut now = Instant::now();
        for (index, bytes) in [(1, 100), (2, 200)] {
            let period = Period { index, bytes: 7 };
            tokio::time::advance(SAMPLE_INTERVAL * 10).await;
            bulky_period.send_replace(Some(period));
            let begun = path.sample().await.unwrap();
            now = Instant::now();
            tokio::time::advance(SAMPLE_INTERVAL / 2).await;
            counters.arrived_bytes.store(bytes, Ordering::Relaxed);
            bulky_period.send_replace(None);
            let ended = path.sample().await.unwrap();
            assert_eq!([begun.period, ended.period], [Some(period); 2]);
            assert_eq!((begun.arrived_bytes, ended.arrived_bytes), (bytes - 100, bytes));
        }
        assert_eq!(now.elapsed(), SAMPLE_INTERVAL / 2);
        drop(bulky_period);
        assert_eq!(path.sample().await, None);
    }
}
