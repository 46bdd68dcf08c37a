//! The checker of a history: finds broken promises from the record of a life, and from nothing else. Pure: no network
//! and no clock.

mod tests;

use std::{collections::BTreeSet, fmt};

/// The time for which a lost right may still be used (docs/access.md).
const RIGHT_LINGER_MS: u64 = 10_000;

/// The time within which readers must receive the last version, after it was published and all paths were repaired.
pub(crate) const DELIVERY_TIMEOUT_MS: u64 = 60_000;

/// A promise to users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Promise {
    /// Mode `every`: versions rise.
    Ordered,
    /// Mode `every`: each version is delivered, or reported missing.
    GapFree,
    /// The place of a named reader is kept while the reader is away.
    PlaceKept,
    /// Mode `latest`: versions rise, and skips are counted.
    LatestMonotonic,
    /// A version has only its own bytes.
    Untorn,
    /// A lost connection costs only the chunks in flight.
    ResumedOnlyMissing,
    /// Connected readers receive the newest version, and publishers can publish, in bounded time.
    NobodyStarved,
    /// Once all faults are mended, connected readers have what new clients receive, in bounded time and without another
    /// publish.
    NobodyStale,
    /// Clients without a right receive no versions, and no names of topics.
    NobodyUnauthorised,
    /// Clients with a right are neither refused nor cut off.
    NobodyCutOff,
}

/// A broken promise.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Breach {
    pub(crate) promise: Promise,
    pub(crate) description: String,
}

/// A version of a topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Id {
    pub(crate) epoch: u64,
    pub(crate) version: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Latest,
    Every,
}

/// Why a subscription ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End {
    /// Its user left.
    Left,
    /// The server reports that the topic is not granted, or refuses the session.
    Unauthorised,
    /// The reader did not keep up.
    TooSlow,
    /// The reader got a valid reason: its topic was withdrawn or not found, or the server was not reached again.
    Explained,
    /// The subscription failed with any other error.
    Failed(String),
}

/// A snapshot that a user received.
#[derive(Debug, Clone)]
pub(crate) struct Received {
    pub(crate) id: Id,
    /// The number of its content, by its metadata.
    pub(crate) content: u64,
    pub(crate) skipped: u64,
    pub(crate) is_new_epoch: bool,
    /// The first difference from the published version, if any.
    pub(crate) torn: Option<String>,
    /// Whether the user was waiting for the snapshot, which therefore arrived at the time of the event. Otherwise it
    /// may have arrived earlier.
    pub(crate) was_awaited: bool,
    pub(crate) wire_bytes: u64,
    pub(crate) payload_bytes: u64,
    /// How often the connection, or one of its lanes, has been cut so far.
    pub(crate) cuts: u64,
}

/// An event that a reader saw.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    Version(Received),
    Gap { after: Option<Id>, found: Id },
    Ended(End),
}

/// A subscription and its events.
#[derive(Debug, Clone)]
pub(crate) struct Reader {
    pub(crate) principal: usize,
    pub(crate) topic: usize,
    pub(crate) mode: Mode,
    /// The version after which the reader requested to begin.
    pub(crate) after: Option<Id>,
    pub(crate) is_named: bool,
    /// Whether the reader has a name, and its publisher waits for readers.
    pub(crate) has_place: bool,
    pub(crate) opened_ms: u64,
    /// The times when the reader's connection, or one of its lanes, was cut.
    pub(crate) cuts_ms: Vec<u64>,
    /// The maximum number of bytes in flight, which may be sent again after a cut.
    pub(crate) cut_bytes: u64,
    /// The events, with their times in milliseconds.
    pub(crate) events: Vec<(u64, Event)>,
}

/// A period in which a principal had the right to a topic.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Right {
    pub(crate) principal: usize,
    pub(crate) topic: usize,
    pub(crate) from_ms: u64,
    pub(crate) until_ms: u64,
}

/// A server's answer to a principal that connected or listed topics.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    Admitted,
    Refused,
    Listed(Vec<usize>),
}

#[derive(Debug, Clone)]
pub(crate) struct Published {
    pub(crate) at_ms: u64,
    pub(crate) topic: usize,
    pub(crate) id: Id,
    /// The number of its content, unique among all versions: two versions of one epoch and number differ in it.
    pub(crate) content: u64,
}

/// The record of a life.
#[derive(Debug, Clone, Default)]
pub(crate) struct History {
    /// The time for which a place is kept.
    pub(crate) linger_ms: u64,
    /// The times when the server was stopped, and lost all places.
    pub(crate) stops_ms: Vec<u64>,
    /// When the first server started with a restored state; later, numbers may have been used twice.
    pub(crate) restored_ms: Option<u64>,
    pub(crate) readers: Vec<Reader>,
    pub(crate) published: Vec<Published>,
    /// The contents that could not be read for so long that servers may have given them up.
    pub(crate) unreadable: BTreeSet<u64>,
    pub(crate) rights: Vec<Right>,
    /// The answers, with their times in milliseconds and the principals that got them.
    pub(crate) answers: Vec<(u64, usize, Answer)>,
    /// The version of each topic that was on offer when all faults were mended, and that time; `None` without one.
    pub(crate) current: Vec<Option<Published>>,
    /// Each topic's last version, published after all faults were mended, and the time of its publish; `None` if that
    /// failed.
    pub(crate) last: Vec<Option<Published>>,
    pub(crate) ended_ms: u64,
}

/// Finds all broken promises in `history`.
pub(crate) fn check(history: &History) -> Vec<Breach> {
    let mut breaches = Breaches(vec![]);
    for (number, reader) in history.readers.iter().enumerate() {
        breaches.check_bytes(history, number, reader);
        match reader.mode {
            Mode::Latest => breaches.check_latest(history, number, reader),
            Mode::Every => breaches.check_every(history, number, reader),
        }
        breaches.check_reader_rights(history, number, reader);
        breaches.check_stale(history, number, reader);
        breaches.check_starving(history, number, reader);
    }
    breaches.check_places(history);
    breaches.check_answers(history);
    for (topic, last) in history.last.iter().enumerate() {
        breaches.check(last.is_some(), Promise::NobodyStarved, || {
            format!("the publisher of topic {topic} cannot publish")
        });
    }
    breaches.0
}

/// The numbers of events that test promises, by kind: a life without such events does not test the promise.
pub(crate) fn event_counts(history: &History) -> [(&'static str, usize); 10] {
    let readers = || history.readers.iter();
    let received = || readers().flat_map(Reader::versions);
    let count = |which: fn(&Event) -> bool| {
        readers().flat_map(|of| &of.events).filter(|(_, event)| which(event)).count()
    };
    let answers =
        |which: fn(&Answer) -> bool| history.answers.iter().filter(|(.., answer)| which(answer)).count();
    [
        ("versions", received().count()),
        ("skips", received().filter(|received| received.skipped > 0).count()),
        (
            "other contents",
            readers()
                .flat_map(|reader| reader.versions().zip(reader.versions().skip(1)))
                .filter(|(before, after)| after.is_new_epoch && after.id.epoch == before.id.epoch)
                .count(),
        ),
        ("gaps", count(|event| matches!(event, Event::Gap { .. }))),
        (
            "chunks sent again",
            received()
                .filter(|received| received.wire_bytes > received.payload_bytes)
                .count(),
        ),
        (
            "places",
            (0..history.readers.len())
                .filter(|number| history.kept_place(*number).is_some())
                .count(),
        ),
        ("evictions", count(|event| matches!(event, Event::Ended(End::TooSlow)))),
        ("lost rights", count(|event| matches!(event, Event::Ended(End::Unauthorised)))),
        ("refusals", answers(|answer| matches!(answer, Answer::Refused))),
        ("lists", answers(|answer| matches!(answer, Answer::Listed(topics) if !topics.is_empty()))),
    ]
}

struct Breaches(Vec<Breach>);

impl Breaches {
    /// Adds a breach unless the promise holds.
    fn check(&mut self, holds: bool, promise: Promise, description: impl FnOnce() -> String) {
        if !holds {
            self.0.push(Breach { promise, description: description() });
        }
    }

    fn check_bytes(&mut self, history: &History, number: usize, reader: &Reader) {
        for received in reader.versions() {
            let was_published = history.published.iter().any(|published| {
                let Published { topic, id, content, .. } = *published;
                (topic, id, content) == (reader.topic, received.id, received.content)
            });
            self.check(was_published, Promise::Untorn, || {
                format!("reader {number}, {}: content {}", received.id, received.content)
            });
            self.check(received.torn.is_none(), Promise::Untorn, || {
                format!("reader {number}, {}: {:?}", received.id, received.torn)
            });
            let max = received.payload_bytes + received.cuts * reader.cut_bytes;
            self.check(received.wire_bytes <= max, Promise::ResumedOnlyMissing, || {
                format!("reader {number}, {}: {} bytes, at most {max}", received.id, received.wire_bytes)
            });
        }
    }

    fn check_latest(&mut self, history: &History, number: usize, reader: &Reader) {
        let versions: Vec<_> = reader.versions_with_times().collect();
        for ((_, before), (at, received)) in versions.iter().zip(versions.iter().skip(1)) {
            let may_fall = history.was_restored_before(*at);
            let is_after = |number| {
                before.id.epoch == received.id.epoch && received.id.version == number + received.skipped
            };
            // Other content under the number of `before` counts as skipped, too.
            let continues = is_after(before.id.version + 1) || (may_fall && is_after(before.id.version));
            let follows = match received.is_new_epoch {
                true => may_fall || received.id.epoch > before.id.epoch,
                false => continues,
            };
            self.check(follows, Promise::LatestMonotonic, || {
                format!(
                    "reader {number}: {} and {} skipped after {}",
                    received.id, received.skipped, before.id
                )
            });
        }
    }

    fn check_every(&mut self, history: &History, number: usize, reader: &Reader) {
        let (mut last, mut reported) = (reader.after, None);
        for (at, event) in &reader.events {
            let may_fall = history.was_restored_before(*at);
            match event {
                Event::Gap { after, found } => {
                    // A reader may have lost the place that an earlier process, or its own lost connection, had; or its
                    // first versions could not be read.
                    let had_place = reader.is_named || !reader.cuts_ms.is_empty();
                    let is_given_up = |after: Id| history.were_unreadable(reader.topic, after.next(), *found);
                    let is_valid = match last {
                        Some(_) => *after == last,
                        None => had_place || after.is_some_and(is_given_up),
                    };
                    self.check(is_valid, Promise::GapFree, || {
                        format!(
                            "reader {number}: a gap after {after:?} is reported, but {last:?} was received"
                        )
                    });
                    reported = Some(*found);
                }
                Event::Version(received) => {
                    self.check(
                        may_fall || last.is_none_or(|last| last < received.id),
                        Promise::Ordered,
                        || format!("reader {number}: {} after {last:?}", received.id),
                    );
                    let is_other_content = may_fall && last == Some(received.id) && received.is_new_epoch;
                    let follows = is_other_content || last.is_none_or(|last| last.next() == received.id);
                    self.check(
                        reported.map_or(follows, |found| found == received.id),
                        Promise::GapFree,
                        || format!("reader {number}: {} after {last:?}, reported {reported:?}", received.id),
                    );
                    (last, reported) = (Some(received.id), None);
                }
                Event::Ended(_) => {}
            }
        }
    }

    fn check_places(&mut self, history: &History) {
        for number in 0..history.readers.len() {
            let reader = &history.readers[number];
            let has_gap = matches!(reader.events.first(), Some((_, Event::Gap { .. })));
            if let Some((last, first)) = history.kept_place(number) {
                // A version that cannot be read for long is given up, which its reader is told as a gap.
                let is_kept = first <= last.next()
                    || (has_gap && history.were_unreadable(reader.topic, last.next(), first));
                self.check(is_kept, Promise::PlaceKept, || {
                    format!("reader {number}: began with {first}, although it had left after {last}")
                });
            }
            if let Some((last, first)) = history.place_before(number).filter(|_| !has_gap) {
                self.check(first <= last.next(), Promise::GapFree, || {
                    format!(
                        "reader {number}: began with {first} without a gap, although it had left after {last}"
                    )
                });
            }
        }
    }

    fn check_reader_rights(&mut self, history: &History, number: usize, reader: &Reader) {
        for (at, event) in &reader.events {
            match event {
                Event::Version(received) => {
                    let published = history.published.iter();
                    let published =
                        published.filter(|one| (one.topic, one.content) == (reader.topic, received.content));
                    let earliest = published.map(|one| one.at_ms).min().unwrap_or(0);
                    // A version that arrived in time may be taken late.
                    let arrived = if received.was_awaited { *at } else { earliest.max(reader.opened_ms) };
                    let had_right = history.had_right_within(reader.principal, reader.topic, arrived, *at);
                    self.check(had_right, Promise::NobodyUnauthorised, || {
                        format!(
                            "reader {number}: {} came at {arrived} to {at} ms, without a right",
                            received.id
                        )
                    });
                }
                Event::Gap { .. } => {}
                Event::Ended(End::Unauthorised) => {
                    let has_right = history.had_right_throughout(reader, reader.opened_ms, *at);
                    self.check(!has_right, Promise::NobodyCutOff, || {
                        format!("reader {number} was cut off at {at} ms, although it had the right")
                    });
                }
                Event::Ended(end) => {
                    let is_valid = match end {
                        End::Failed(_) => false,
                        End::TooSlow => !reader.has_place,
                        _ => true,
                    };
                    self.check(is_valid, Promise::NobodyCutOff, || {
                        format!("reader {number} ended at {at} ms: {end:?}")
                    });
                }
            }
        }
    }

    fn check_answers(&mut self, history: &History) {
        for (at, principal, answer) in &history.answers {
            let had_right = |topic| history.had_right_within(*principal, topic, *at, *at);
            let topics = 0..history.last.len();
            let (holds, promise) = match answer {
                Answer::Admitted => (topics.into_iter().any(had_right), Promise::NobodyUnauthorised),
                Answer::Listed(listed) => {
                    (listed.iter().copied().all(had_right), Promise::NobodyUnauthorised)
                }
                Answer::Refused => {
                    let is_valid =
                        |right: &Right| right.principal == *principal && right.covers(*at, *at + 1);
                    (!history.rights.iter().any(is_valid), Promise::NobodyCutOff)
                }
            };
            self.check(holds, promise, || format!("principal {principal} at {at} ms: {answer:?}"));
        }
    }

    fn check_stale(&mut self, history: &History, number: usize, reader: &Reader) {
        let Some(Some(current)) = history.current.get(reader.topic) else { return };
        let due_ms = current.at_ms + DELIVERY_TIMEOUT_MS;
        let has_ended = reader.end_ms().is_some_and(|at| at <= due_ms);
        if has_ended || !history.had_right_throughout(reader, reader.opened_ms, due_ms.min(history.ended_ms))
        {
            return;
        }
        self.check(history.has_received(reader, current, due_ms), Promise::NobodyStale, || {
            format!("reader {number} did not receive {current:?} by {due_ms} ms")
        });
    }

    fn check_starving(&mut self, history: &History, number: usize, reader: &Reader) {
        let last = history.last.get(reader.topic).filter(|_| reader.end_ms().is_none());
        let Some(Some(last)) = last else { return };
        if !history.had_right_throughout(reader, reader.opened_ms, history.ended_ms) {
            let lost_ms = history.right_lost_ms(reader).saturating_add(RIGHT_LINGER_MS);
            self.check(
                lost_ms.saturating_add(DELIVERY_TIMEOUT_MS) > history.ended_ms,
                Promise::NobodyUnauthorised,
                || format!("reader {number} has not ended, without a right since {lost_ms} ms"),
            );
            return;
        }
        let due_ms = last.at_ms + DELIVERY_TIMEOUT_MS;
        self.check(history.has_received(reader, last, due_ms), Promise::NobodyStarved, || {
            format!("reader {number} did not receive {last:?} by {due_ms} ms")
        });
    }
}

impl History {
    fn was_restored_before(&self, at_ms: u64) -> bool {
        self.restored_ms.is_some_and(|restored| restored <= at_ms)
    }

    /// Whether the reader has received `version` by this time. One of mode `every` need not if its principal has, under
    /// its name or before it continued, or if it requested a later version.
    pub(crate) fn has_received(&self, reader: &Reader, version: &Published, by_ms: u64) -> bool {
        let is_same = |(at, received): (u64, &Received)| {
            (received.id, received.content) == (version.id, version.content) && at <= by_ms
        };
        let is_later = |after: Id| after.epoch == version.id.epoch && after >= version.id;
        let key = |of: &Reader| (of.principal, of.topic);
        match reader.mode {
            Mode::Latest => reader.versions_with_times().any(is_same),
            Mode::Every => {
                let readers = self.readers.iter().filter(|other| key(other) == key(reader));
                reader.after.is_some_and(is_later)
                    || readers.flat_map(Reader::versions_with_times).any(is_same)
            }
        }
    }

    /// Whether none of the versions from `first` to the one before `end` could be read for long.
    fn were_unreadable(&self, topic: usize, first: Id, end: Id) -> bool {
        (first.version..end.version).all(|version| {
            let id = Id { version, ..first };
            let mut published = self.published.iter();
            published.any(|one| (one.topic, one.id) == (topic, id) && self.unreadable.contains(&one.content))
        })
    }

    /// Whether the principal had the right at some time of this period, or at most [`RIGHT_LINGER_MS`] before it.
    fn had_right_within(&self, principal: usize, topic: usize, from_ms: u64, until_ms: u64) -> bool {
        let mut rights = self
            .rights
            .iter()
            .filter(|right| (right.principal, right.topic) == (principal, topic));
        rights.any(|right| {
            right.from_ms <= until_ms && from_ms <= right.until_ms.saturating_add(RIGHT_LINGER_MS)
        })
    }

    /// The last version before a named reader left, and the first after it came back, if the server ran throughout: its
    /// place is kept, or what it missed is reported.
    fn place_before(&self, number: usize) -> Option<(Id, Id)> {
        let reader = &self.readers[number];
        let before = self.readers[..number].iter().rev().find(|other| {
            (other.principal, other.topic, other.mode) == (reader.principal, reader.topic, Mode::Every)
        })?;
        let has_left = matches!(before.events.last(), Some((_, Event::Ended(End::Left))));
        let (last, first) = (before.versions().last()?.id, reader.versions_with_times().next()?);
        let has_stopped = self.stops_ms.iter().any(|stop| (before.opened_ms..=first.0).contains(stop));
        let was_granted = self.had_right_throughout(reader, before.opened_ms, first.0);
        let is_told = before.is_named && reader.is_named && has_left && !has_stopped && was_granted;
        (is_told && first.1.id.epoch == last.epoch).then_some((last, first.1.id))
    }

    /// The last version before a named reader left, and the first after it came back. `None` if its place need not have
    /// been kept.
    fn kept_place(&self, number: usize) -> Option<(Id, Id)> {
        let reader = &self.readers[number];
        let mut before = self.readers[..number].iter().rev();
        let before =
            before.find(|other| (other.principal, other.topic) == (reader.principal, reader.topic))?;
        let began = reader.events.iter().find(|(_, event)| matches!(event, Event::Version(_)))?.0;
        // If the reader's path was cut, only its first version proves that the server knew of the reader.
        let is_cut = reader.cuts_ms.iter().any(|at| (reader.opened_ms..=began).contains(at));
        let (left, back) = (before.away_since_ms()?, if is_cut { began } else { reader.opened_ms });
        let (last, first) = (before.versions().last()?.id, reader.versions().next()?.id);
        let is_kept = (reader.has_place && before.has_place)
            && back < left + self.linger_ms
            && !self.stops_ms.iter().any(|stop| (before.opened_ms..=began).contains(stop))
            && self.had_right_throughout(reader, left, back)
            && first.epoch == last.epoch;
        is_kept.then_some((last, first))
    }

    /// Whether the reader had the right during the whole period.
    fn had_right_throughout(&self, reader: &Reader, from_ms: u64, until_ms: u64) -> bool {
        let mut rights = self.rights_of(reader);
        rights.any(|right| right.covers(from_ms, until_ms))
    }

    fn right_lost_ms(&self, reader: &Reader) -> u64 {
        self.rights_of(reader).map(|right| right.until_ms).max().unwrap_or(0)
    }

    fn rights_of(&self, reader: &Reader) -> impl Iterator<Item = &Right> {
        let key = (reader.principal, reader.topic);
        self.rights.iter().filter(move |right| (right.principal, right.topic) == key)
    }
}

impl Reader {
    fn versions(&self) -> impl Iterator<Item = &Received> {
        self.versions_with_times().map(|(_, received)| received)
    }

    fn versions_with_times(&self) -> impl Iterator<Item = (u64, &Received)> {
        self.events.iter().filter_map(|(at, event)| match event {
            Event::Version(received) => Some((*at, received)),
            _ => None,
        })
    }

    pub(crate) fn end_ms(&self) -> Option<u64> {
        let has_ended = |(_, event): &&(u64, Event)| matches!(event, Event::Ended(_));
        self.events.iter().find(has_ended).map(|(at, _)| *at)
    }

    /// The time from which the server may treat an ended reader as away: its end, or an earlier cut after which no
    /// version arrived. Versions that were not awaited do not count, since they may have arrived before the cut.
    fn away_since_ms(&self) -> Option<u64> {
        let left_ms = self.end_ms()?;
        let has_arrived = |event: &Event| matches!(event, Event::Version(received) if received.was_awaited);
        let mut arrived = self.events.iter().filter(|(_, event)| has_arrived(event));
        let last_ms = arrived.next_back().map_or(self.opened_ms, |(at, _)| *at);
        let cuts = self.cuts_ms.iter().copied().filter(|at| *at >= last_ms);
        Some(cuts.min().unwrap_or(left_ms))
    }
}

impl Right {
    fn covers(&self, from_ms: u64, until_ms: u64) -> bool {
        self.from_ms <= from_ms && until_ms <= self.until_ms
    }
}

impl Id {
    pub(crate) fn next(self) -> Self {
        Self { version: self.version + 1, ..self }
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.epoch, self.version)
    }
}
