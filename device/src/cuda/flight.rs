use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// The direction of a copy. Each direction has a stream of its own, so that both directions of the bus are used at the
/// same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the device into a slot.
    Out,
    /// From a slot to the device.
    In,
}

impl Direction {
    pub(super) const BOTH: [Self; 2] = [Self::Out, Self::In];
}

/// The copies in flight, and when to poll them. Pure: no driver call.
///
/// Copies of one direction share a stream, so they end in the order in which they began, and only the oldest is polled.
/// Usually the device signals the end of a copy. Copies are polled as well, since signals can be lost: a failed context
/// sends none.
#[derive(Debug)]
pub(super) struct Flights<C> {
    queues: [VecDeque<Flight<C>>; 2],
    timing: Timing,
}

/// The deadlines of copies.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timing {
    /// After this time, a copy is reported to its waiter as timed out.
    pub(super) late_after: Duration,
    /// After this time, the device counts as hung.
    pub(super) hung_after: Duration,
}

#[derive(Debug)]
struct Flight<C> {
    copy: C,
    bytes: u64,
    started: Instant,
    poll_at: Instant,
    pause: Duration,
    late: bool,
}

impl<C> Flights<C> {
    pub(super) fn new(timing: Timing) -> Self {
        Self { queues: [VecDeque::new(), VecDeque::new()], timing }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queues.iter().all(VecDeque::is_empty)
    }

    /// Adds a copy of `bytes`, submitted after all others of its direction.
    pub(super) fn begin(&mut self, direction: Direction, copy: C, bytes: u64, now: Instant) {
        let queue = &mut self.queues[direction as usize];
        let bytes_in_flight = bytes + queue.iter().map(|flight| flight.bytes).sum::<u64>();
        let poll_at = now + POLL_INTERVAL_MIN + Duration::from_nanos(bytes_in_flight / SLOW_BYTES_PER_NS);
        let (started, pause) = (now, POLL_INTERVAL_MIN);
        queue.push_back(Flight { copy, bytes, started, poll_at, pause, late: false });
    }

    /// The copies of one direction, oldest first.
    pub(super) fn copies(&self, direction: Direction) -> impl Iterator<Item = &C> {
        self.queues[direction as usize].iter().map(|flight| &flight.copy)
    }

    /// Removes the oldest copy of one direction, and returns it with whether it was reported as late.
    pub(super) fn remove_oldest(&mut self, direction: Direction) -> Option<(C, bool)> {
        let flight = self.queues[direction as usize].pop_front()?;
        Some((flight.copy, flight.late))
    }

    /// Whether the oldest copy of one direction is due to be polled without a signal.
    pub(super) fn is_due(&self, direction: Direction, now: Instant) -> bool {
        self.queues[direction as usize]
            .front()
            .is_some_and(|flight| flight.poll_at <= now)
    }

    /// Records that the oldest copy was polled and has not ended. If that poll was due, the next one comes after a
    /// longer pause.
    pub(super) fn still_running(&mut self, direction: Direction, now: Instant) {
        if let Some(flight) = self.queues[direction as usize].front_mut()
            && flight.poll_at <= now
        {
            flight.pause = (flight.pause * 2).min(POLL_INTERVAL_MAX);
            flight.poll_at = now + flight.pause;
        }
    }

    /// Marks the copies that have become late since the last call, and returns them.
    pub(super) fn newly_late(&mut self, now: Instant) -> impl Iterator<Item = &mut C> {
        let late_after = self.timing.late_after;
        let is_new = move |flight: &&mut Flight<C>| !flight.late && flight.started + late_after <= now;
        self.queues.iter_mut().flatten().filter(is_new).map(|flight| {
            flight.late = true;
            &mut flight.copy
        })
    }

    /// Whether a copy is so late that the device counts as hung.
    pub(super) fn hangs(&self, now: Instant) -> bool {
        let hung_after = self.timing.hung_after;
        self.queues
            .iter()
            .filter_map(VecDeque::front)
            .any(|flight| flight.started + hung_after <= now)
    }

    /// The next time to act without a signal.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        let Timing { late_after, hung_after } = self.timing;
        let oldest = self.queues.iter().filter_map(VecDeque::front);
        let poll_at_next = oldest.map(|flight| flight.poll_at.min(flight.started + hung_after));
        let on_time = |queue: &VecDeque<Flight<C>>| {
            queue.iter().find(|flight| !flight.late).map(|flight| flight.started)
        };
        let late = self.queues.iter().filter_map(on_time).map(|started| started + late_after);
        poll_at_next.chain(late).min()
    }
}

/// The time until the first poll without a signal, beyond what the bytes in flight take on a slow bus: most copies take
/// far less, so few are polled. A signal that is late or lost delays a small version by no more than this, at each copy.
const POLL_INTERVAL_MIN: Duration = Duration::from_millis(1);
/// The rate of a slow bus: half of PCIe 3.0 with four lanes.
const SLOW_BYTES_PER_NS: u64 = 2;
const POLL_INTERVAL_MAX: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    const TIMING: Timing =
        Timing { late_after: Duration::from_secs(10), hung_after: Duration::from_secs(60) };

    fn millis(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn without_copies_there_is_no_deadline() {
        let flights = Flights::<u32>::new(TIMING);
        assert!(flights.is_empty() && flights.wake_at().is_none() && !flights.hangs(Instant::now()));
    }

    #[test]
    fn the_oldest_copy_is_polled_at_growing_intervals() {
        let start = Instant::now();
        let mut flights = Flights::new(TIMING);
        flights.begin(Direction::Out, 1, 0, start);
        flights.begin(Direction::Out, 2, 0, start + millis(5));
        let mut polls = Vec::new();
        while polls.len() < 10 {
            let now = flights.wake_at().unwrap();
            assert!(flights.is_due(Direction::Out, now) && !flights.is_due(Direction::In, now));
            flights.still_running(Direction::Out, now);
            polls.push((now - start).as_millis());
        }
        assert_eq!(polls, [1, 3, 7, 15, 31, 63, 127, 255, 505, 755]);
        assert_eq!(flights.remove_oldest(Direction::Out), Some((1, false)));
        assert!(flights.is_due(Direction::Out, start + millis(755)), "the next copy is overdue");
    }

    #[test]
    fn copies_on_a_busy_bus_are_polled_later() {
        let start = Instant::now();
        let mut flights = Flights::new(TIMING);
        flights.begin(Direction::In, 1, 4_000_000, start);
        flights.begin(Direction::In, 2, 4_000_000, start);
        flights.begin(Direction::Out, 3, 4_096, start + millis(1));
        assert_eq!(flights.remove_oldest(Direction::Out), Some((3, false)));
        assert_eq!(flights.wake_at(), Some(start + millis(1 + 2)));
        assert_eq!(flights.remove_oldest(Direction::In), Some((1, false)));
        assert_eq!(flights.wake_at(), Some(start + millis(1 + 4)));
    }

    #[test]
    fn an_early_signal_changes_no_pause() {
        let start = Instant::now();
        let mut flights = Flights::new(TIMING);
        flights.begin(Direction::In, 1, 8_000_000, start);
        flights.still_running(Direction::In, start + millis(2));
        assert_eq!(flights.wake_at(), Some(start + millis(5)));
    }

    #[test]
    fn a_late_copy_is_reported_once_and_may_still_end() {
        let start = Instant::now();
        let mut flights = Flights::new(TIMING);
        flights.begin(Direction::In, 1, 0, start);
        flights.begin(Direction::In, 2, 0, start + millis(500));
        let late = |flights: &mut Flights<u32>, after| -> Vec<u32> {
            flights.newly_late(start + millis(after)).map(|copy| *copy).collect()
        };
        assert_eq!(late(&mut flights, 9_999), []);
        assert_eq!(late(&mut flights, 10_000), [1]);
        assert_eq!(late(&mut flights, 10_499), []);
        assert_eq!(late(&mut flights, 20_000), [2]);
        assert!(!flights.hangs(start + millis(59_999)) && flights.hangs(start + millis(60_000)));
        assert_eq!(flights.remove_oldest(Direction::In), Some((1, true)));
        assert!(!flights.hangs(start + millis(60_000)));
    }

    #[derive(Debug, Clone)]
    enum Op {
        Begin(bool),
        End(bool),
        Wait(u64),
    }

    fn any_op() -> impl Strategy<Value = Op> {
        prop_oneof![
            any::<bool>().prop_map(Op::Begin),
            any::<bool>().prop_map(Op::End),
            (0u64..30_000).prop_map(Op::Wait),
        ]
    }

    proptest! {
        /// Every copy is reported late once, at its deadline, unless it ended before, if the thread always wakes at
        /// `wake_at`.
        #[test]
        fn no_deadline_is_missed(ops in vec(any_op(), 0..60)) {
            let start = Instant::now();
            let (mut now, mut next) = (start, 0u32);
            let mut flights = Flights::new(TIMING);
            let mut model: Vec<(Direction, u32, Instant, bool)> = Vec::new();
            for op in ops {
                match op {
                    Op::Begin(out) => {
                        let direction = if out { Direction::Out } else { Direction::In };
                        flights.begin(direction, next, 1 << 20, now);
                        model.push((direction, next, now, false));
                        next += 1;
                    }
                    Op::End(out) => {
                        let direction = if out { Direction::Out } else { Direction::In };
                        let oldest = model.iter().position(|entry| entry.0 == direction);
                        let expected = oldest.map(|at| model.remove(at)).map(|(_, id, _, late)| (id, late));
                        prop_assert_eq!(flights.remove_oldest(direction), expected);
                    }
                    Op::Wait(ms) => {
                        let until = now + millis(ms);
                        while let Some(at) = flights.wake_at().filter(|&at| at <= until && !flights.hangs(now)) {
                            now = now.max(at);
                            for late in flights.newly_late(now) {
                                let entry = model.iter_mut().find(|entry| entry.1 == *late).unwrap();
                                prop_assert!(!entry.3);
                                entry.3 = true;
                            }
                            Direction::BOTH.iter().for_each(|&direction| flights.still_running(direction, now));
                        }
                        if flights.hangs(now) {
                            prop_assert!(model.iter().any(|entry| now - entry.2 >= TIMING.hung_after));
                            return Ok(());
                        }
                        now = until;
                        for (_, id, started, late) in &model {
                            prop_assert_eq!(*late, now - *started >= TIMING.late_after, "copy {}", id);
                        }
                    }
                }
                prop_assert_eq!(flights.is_empty(), model.is_empty());
            }
        }
    }
}
