//! The judge of a history: which promises were broken, by what clients saw alone. Pure: no network, no clock.

mod forged;

use std::fmt;

/// How long after it was lost a right may still be used (docs/access.md).
const RIGHT_LINGERS_MS: u64 = 10_000;

/// How long after everything was mended and its last version published a reader may wait for that.
pub(crate) const STARVED_MS: u64 = 60_000;

/// What was promised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Promise {
    /// Mode `every`: versions rise.
    Ordered,
    /// Mode `every`: each version comes, or is reported missing.
    GapFree,
    /// The place of a named reader is kept while it is away.
    PlaceKept,
    /// Mode `latest`: versions rise, and skips are counted.
    LatestMonotonic,
    /// All bytes of a version are that version's.
    Untorn,
    /// A lost connection costs the chunks on their way.
    ResumedOnlyMissing,
    /// Who is connected gets the newest version in bounded time, and a publisher gets to publish.
    NobodyStarved,
    /// Who has no right learns and receives nothing.
    NobodyUnauthorised,
    /// Who has a right is neither refused nor cut off.
    NobodyCutOff,
}

/// A promise that was broken, and how.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Breach {
    pub(crate) promise: Promise,
    pub(crate) what: String,
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
    /// The server says that the topic is not granted, or refuses the session.
    Unauthorised,
    /// It did not keep up.
    TooSlow,
    /// Its topic was withdrawn or never came, or the server was not reached for long: the reader knows as much.
    Told,
    /// Of anything else.
    Failed(String),
}

/// A snapshot as its user got it.
#[derive(Debug, Clone)]
pub(crate) struct Got {
    pub(crate) id: Id,
    pub(crate) skipped: u64,
    pub(crate) is_new_epoch: bool,
    /// What of it is not as published, if anything.
    pub(crate) torn: Option<String>,
    /// Whether it arrived now, for it was waited for; else it may have been ready for long.
    pub(crate) was_awaited: bool,
    pub(crate) wire_bytes: u64,
    pub(crate) payload_bytes: u64,
    /// How often its connection, or one of its lanes, was cut since it began.
    pub(crate) cuts: u64,
}

/// One thing that a reader saw.
#[derive(Debug, Clone)]
pub(crate) enum Seen {
    Version(Got),
    Gap { after: Option<Id>, found: Id },
    Ended(End),
}

/// One subscription.
#[derive(Debug, Clone)]
pub(crate) struct Reader {
    pub(crate) principal: usize,
    pub(crate) topic: usize,
    pub(crate) mode: Mode,
    /// After which version it asked to begin.
    pub(crate) after: Option<Id>,
    /// Whether it has a name, and a publisher that waits for readers.
    pub(crate) has_place: bool,
    pub(crate) opened_ms: u64,
    /// When its connection, or one of its lanes, was cut.
    pub(crate) cuts_ms: Vec<u64>,
    /// What a cut of its connection may cost in bytes.
    pub(crate) cut_bytes: u64,
    pub(crate) seen: Vec<(u64, Seen)>,
}

/// A time in which a principal had the right to a topic.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Right {
    pub(crate) principal: usize,
    pub(crate) topic: usize,
    pub(crate) from_ms: u64,
    pub(crate) until_ms: u64,
}

/// What a server answered to a principal that connected or listed topics.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    LetIn,
    Refused,
    Listed(Vec<usize>),
}

#[derive(Debug, Clone)]
pub(crate) struct Published {
    pub(crate) at_ms: u64,
    pub(crate) topic: usize,
    pub(crate) id: Id,
}

/// Everything that was seen, and what was asked for meanwhile.
#[derive(Debug, Clone, Default)]
pub(crate) struct History {
    /// The time for which a place is kept.
    pub(crate) linger_ms: u64,
    /// When the server ended, and forgot all places.
    pub(crate) stops_ms: Vec<u64>,
    pub(crate) readers: Vec<Reader>,
    pub(crate) published: Vec<Published>,
    pub(crate) rights: Vec<Right>,
    pub(crate) answers: Vec<(u64, usize, Answer)>,
    /// The last version of each topic, and when it was published, with all ways mended; none if that could not be done.
    pub(crate) last: Vec<Option<(u64, Id)>>,
    pub(crate) ended_ms: u64,
}

/// Every promise that `history` broke.
pub(crate) fn judge(history: &History) -> Vec<Breach> {
    let mut breaches = Breaches(vec![]);
    for (number, reader) in history.readers.iter().enumerate() {
        breaches.of_bytes(number, reader);
        match reader.mode {
            Mode::Latest => breaches.of_latest(number, reader),
            Mode::Every => breaches.of_every(number, reader),
        }
        breaches.of_reader_rights(history, number, reader);
        breaches.of_starving(history, number, reader);
    }
    breaches.of_places(history);
    breaches.of_answers(history);
    for (topic, last) in history.last.iter().enumerate() {
        breaches.check(last.is_some(), Promise::NobodyStarved, || {
            format!("the publisher of topic {topic} cannot publish")
        });
    }
    breaches.0
}

/// How often what a promise is about has happened, for each of them. A life in which nothing happens breaks no promise.
pub(crate) fn occasions(history: &History) -> [(&'static str, usize); 9] {
    let readers = || history.readers.iter();
    let got = || readers().flat_map(Reader::versions);
    let seen =
        |which: fn(&Seen) -> bool| readers().flat_map(|of| &of.seen).filter(|(_, seen)| which(seen)).count();
    let answers =
        |which: fn(&Answer) -> bool| history.answers.iter().filter(|(.., answer)| which(answer)).count();
    [
        ("versions", got().count()),
        ("skips", got().filter(|got| got.skipped > 0).count()),
        ("gaps", seen(|seen| matches!(seen, Seen::Gap { .. }))),
        ("chunks sent again", got().filter(|got| got.wire_bytes > got.payload_bytes).count()),
        (
            "places",
            (0..history.readers.len())
                .filter(|number| history.kept_place(*number).is_some())
                .count(),
        ),
        ("evictions", seen(|seen| matches!(seen, Seen::Ended(End::TooSlow)))),
        ("rights lost", seen(|seen| matches!(seen, Seen::Ended(End::Unauthorised)))),
        ("refusals", answers(|answer| matches!(answer, Answer::Refused))),
        ("lists", answers(|answer| matches!(answer, Answer::Listed(topics) if !topics.is_empty()))),
    ]
}

struct Breaches(Vec<Breach>);

impl Breaches {
    fn check(&mut self, holds: bool, promise: Promise, what: impl FnOnce() -> String) {
        if !holds {
            self.0.push(Breach { promise, what: what() });
        }
    }

    fn of_bytes(&mut self, number: usize, reader: &Reader) {
        for got in reader.versions() {
            self.check(got.torn.is_none(), Promise::Untorn, || {
                format!("reader {number}, {}: {:?}", got.id, got.torn)
            });
            let most = got.payload_bytes + got.cuts * reader.cut_bytes;
            self.check(got.wire_bytes <= most, Promise::ResumedOnlyMissing, || {
                format!("reader {number}, {}: {} of at most {most} bytes", got.id, got.wire_bytes)
            });
        }
    }

    fn of_latest(&mut self, number: usize, reader: &Reader) {
        let versions: Vec<_> = reader.versions().collect();
        for (before, got) in versions.iter().zip(versions.iter().skip(1)) {
            let follows = match before.id.epoch == got.id.epoch {
                true => !got.is_new_epoch && got.id.version == before.id.version + 1 + got.skipped,
                false => got.is_new_epoch && got.id > before.id,
            };
            self.check(follows, Promise::LatestMonotonic, || {
                format!("reader {number}: {} and {} skipped after {}", got.id, got.skipped, before.id)
            });
        }
    }

    fn of_every(&mut self, number: usize, reader: &Reader) {
        let (mut last, mut told) = (reader.after, None);
        for (_, seen) in &reader.seen {
            match seen {
                Seen::Gap { after, found } => {
                    self.check(*after == last && last.is_some(), Promise::GapFree, || {
                        format!("reader {number}: a gap after {after:?} is reported, it was at {last:?}")
                    });
                    told = Some(*found);
                }
                Seen::Version(got) => {
                    self.check(last.is_none_or(|last| last < got.id), Promise::Ordered, || {
                        format!("reader {number}: {} after {last:?}", got.id)
                    });
                    let follows = last.is_none_or(|last| last.next() == got.id);
                    self.check(told.map_or(follows, |found| found == got.id), Promise::GapFree, || {
                        format!("reader {number}: {} after {last:?}, reported {told:?}", got.id)
                    });
                    (last, told) = (Some(got.id), None);
                }
                Seen::Ended(_) => {}
            }
        }
    }

    fn of_places(&mut self, history: &History) {
        for number in 0..history.readers.len() {
            let Some((last, first)) = history.kept_place(number) else { continue };
            self.check(first <= last.next(), Promise::PlaceKept, || {
                format!("reader {number}: began with {first}, it had left at {last}")
            });
        }
    }

    fn of_reader_rights(&mut self, history: &History, number: usize, reader: &Reader) {
        for (at, seen) in &reader.seen {
            match seen {
                Seen::Version(got) => {
                    let published = history.published.iter();
                    let published = published.filter(|one| (one.topic, one.id) == (reader.topic, got.id));
                    let earliest = published.map(|one| one.at_ms).min().unwrap_or(0);
                    // What arrived in time may be taken late.
                    let arrived = if got.was_awaited { *at } else { earliest.max(reader.opened_ms) };
                    let had_right = history.had_right(reader.principal, reader.topic, arrived, *at);
                    self.check(had_right, Promise::NobodyUnauthorised, || {
                        format!("reader {number}: {} came at {arrived} to {at} ms, without a right", got.id)
                    });
                }
                Seen::Gap { .. } => {}
                Seen::Ended(End::Unauthorised) => {
                    let has_right = history.had_right_all(reader, reader.opened_ms, *at);
                    self.check(!has_right, Promise::NobodyCutOff, || {
                        format!("reader {number} was cut off at {at} ms and had the right")
                    });
                }
                Seen::Ended(end) => {
                    let is_good = match end {
                        End::Failed(_) => false,
                        End::TooSlow => !reader.has_place,
                        _ => true,
                    };
                    self.check(is_good, Promise::NobodyCutOff, || {
                        format!("reader {number} ended at {at} ms: {end:?}")
                    });
                }
            }
        }
    }

    fn of_answers(&mut self, history: &History) {
        for (at, principal, answer) in &history.answers {
            let had_right = |topic| history.had_right(*principal, topic, *at, *at);
            let topics = 0..history.last.len();
            let (holds, promise) = match answer {
                Answer::LetIn => (topics.into_iter().any(had_right), Promise::NobodyUnauthorised),
                Answer::Listed(listed) => {
                    (listed.iter().copied().all(had_right), Promise::NobodyUnauthorised)
                }
                Answer::Refused => {
                    let now = |right: &&Right| right.principal == *principal && right.covers(*at, *at + 1);
                    (!history.rights.iter().any(|right| now(&right)), Promise::NobodyCutOff)
                }
            };
            self.check(holds, promise, || format!("principal {principal} at {at} ms: {answer:?}"));
        }
    }

    fn of_starving(&mut self, history: &History, number: usize, reader: &Reader) {
        let has_ended = reader.seen.iter().any(|(_, seen)| matches!(seen, Seen::Ended(_)));
        let Some(Some((published_ms, last))) = history.last.get(reader.topic).filter(|_| !has_ended) else {
            return;
        };
        if !history.had_right_all(reader, reader.opened_ms, history.ended_ms) {
            let over_ms = history.right_over_ms(reader).saturating_add(RIGHT_LINGERS_MS);
            self.check(
                over_ms.saturating_add(STARVED_MS) > history.ended_ms,
                Promise::NobodyUnauthorised,
                || format!("reader {number} lives on without a right since {over_ms} ms"),
            );
            return;
        }
        let got = reader.seen.iter().find_map(|(at, seen)| match seen {
            Seen::Version(got) if got.id == *last => Some(*at),
            _ => None,
        });
        self.check(got.is_some_and(|at| at <= published_ms + STARVED_MS), Promise::NobodyStarved, || {
            format!("reader {number} got {last}, published at {published_ms} ms, at {got:?}")
        });
    }
}

impl History {
    /// Whether the right was there at some time between these, or short enough before.
    fn had_right(&self, principal: usize, topic: usize, from_ms: u64, until_ms: u64) -> bool {
        let mut rights = self
            .rights
            .iter()
            .filter(|right| (right.principal, right.topic) == (principal, topic));
        rights.any(|right| {
            right.from_ms <= until_ms && from_ms <= right.until_ms.saturating_add(RIGHT_LINGERS_MS)
        })
    }

    /// Where a reader was when it left, and where it began when it came back, if its place must have been kept.
    fn kept_place(&self, number: usize) -> Option<(Id, Id)> {
        let reader = &self.readers[number];
        let mut before = self.readers[..number].iter().rev();
        let before =
            before.find(|other| (other.principal, other.topic) == (reader.principal, reader.topic))?;
        let began = reader.seen.iter().find(|(_, seen)| matches!(seen, Seen::Version(_)))?.0;
        // Whether a server has heard of a reader that was cut off is known from its first version alone.
        let is_cut = reader.cuts_ms.iter().any(|at| (reader.opened_ms..=began).contains(at));
        let (left, back) = (before.away_since_ms()?, if is_cut { began } else { reader.opened_ms });
        let (last, first) = (before.versions().last()?.id, reader.versions().next()?.id);
        let is_kept = (reader.has_place && before.has_place)
            && back < left + self.linger_ms
            && !self.stops_ms.iter().any(|stop| (before.opened_ms..=began).contains(stop))
            && self.had_right_all(reader, left, back)
            && first.epoch == last.epoch;
        is_kept.then_some((last, first))
    }

    /// Whether the right was there all the time.
    fn had_right_all(&self, reader: &Reader, from_ms: u64, until_ms: u64) -> bool {
        let mut rights = self.rights_of(reader);
        rights.any(|right| right.covers(from_ms, until_ms))
    }

    fn right_over_ms(&self, reader: &Reader) -> u64 {
        self.rights_of(reader).map(|right| right.until_ms).max().unwrap_or(0)
    }

    fn rights_of(&self, reader: &Reader) -> impl Iterator<Item = &Right> {
        let of = (reader.principal, reader.topic);
        self.rights.iter().filter(move |right| (right.principal, right.topic) == of)
    }
}

impl Reader {
    fn versions(&self) -> impl Iterator<Item = &Got> {
        self.seen.iter().filter_map(|(_, seen)| match seen {
            Seen::Version(got) => Some(got),
            _ => None,
        })
    }

    /// Since when the server may take it for away, if it ended: since then, or since a cut after which nothing arrived.
    /// What was not waited for may have arrived before.
    fn away_since_ms(&self) -> Option<u64> {
        let has_ended = |(_, seen): &&(u64, Seen)| matches!(seen, Seen::Ended(_));
        let left_ms = self.seen.iter().find(has_ended)?.0;
        let has_arrived = |seen: &Seen| matches!(seen, Seen::Version(got) if got.was_awaited);
        let mut arrived = self.seen.iter().filter(|(_, seen)| has_arrived(seen));
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
