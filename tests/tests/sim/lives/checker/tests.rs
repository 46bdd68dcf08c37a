//! Tests of the checker with forged histories, each of which breaks a known promise.

use super::*;

/// A snapshot that breaks no promise.
fn received(epoch: u64, version: u64) -> Received {
    Received {
        id: Id { epoch, version },
        content: epoch * 10 + version,
        skipped: 0,
        is_new_epoch: false,
        torn: None,
        was_awaited: true,
        wire_bytes: 100,
        payload_bytes: 100,
        cuts: 0,
    }
}

fn published(at_ms: u64, epoch: u64, version: u64) -> Published {
    Published { at_ms, topic: 0, id: Id { epoch, version }, content: epoch * 10 + version }
}

fn gap(after: (u64, u64), found: (u64, u64)) -> Event {
    let id = |(epoch, version)| Id { epoch, version };
    Event::Gap { after: Some(id(after)), found: id(found) }
}

/// A history of 100 s with one reader, in which versions 1 to 3 were published at 1, 2 and 3 s, and one of an earlier
/// epoch before.
fn history(mode: Mode, events: Vec<Event>) -> History {
    let published = (1..=3)
        .map(|version| published(version * 1_000, 1, version))
        .chain([published(0, 0, 9)]);
    let reader = Reader {
        principal: 0,
        topic: 0,
        mode,
        after: None,
        is_named: false,
        has_place: false,
        opened_ms: 0,
        cuts_ms: vec![],
        cut_bytes: 10,
        events: (1..).map(|number| number * 1_000 + 1).zip(events).collect(),
    };
    History {
        linger_ms: 20_000,
        stops_ms: vec![],
        restored_ms: None,
        readers: vec![reader],
        published: published.collect(),
        unreadable: [].into(),
        rights: vec![Right { principal: 0, topic: 0, from_ms: 0, until_ms: u64::MAX }],
        answers: vec![],
        current: vec![Some(self::published(2_000, 1, 2))],
        last: vec![Some(self::published(3_000, 1, 3))],
        ended_ms: 100_000,
    }
}

fn versions(all: impl IntoIterator<Item = u64>) -> Vec<Event> {
    all.into_iter().map(|version| Event::Version(received(1, version))).collect()
}

/// As [`history`], without a current version.
fn without_current(mode: Mode, events: Vec<Event>) -> History {
    History { current: vec![None], ..history(mode, events) }
}

/// A history that breaks no promise.
fn good() -> History {
    history(Mode::Every, versions(1..=3))
}

#[track_caller]
fn assert_breaches(history: &History, expected: &[Promise]) {
    let breaches = check(history);
    let promises: Vec<_> = breaches.iter().map(|breach| breach.promise).collect();
    assert_eq!(promises, expected, "{breaches:?}");
}

/// The forged histories of the other tests differ from these.
#[test]
fn good_histories_have_no_breaches() {
    assert_breaches(&good(), &[]);
    assert_breaches(&history(Mode::Latest, versions(1..=3)), &[]);
    let skipping = Event::Version(Received { skipped: 1, ..received(1, 3) });
    let skipping = without_current(Mode::Latest, vec![Event::Version(received(1, 1)), skipping]);
    assert_breaches(&skipping, &[]);
    let explained = [versions([1]), vec![gap((1, 1), (1, 3))], versions([3])].concat();
    assert_breaches(&without_current(Mode::Every, explained), &[]);
}

/// A server continues from an older record after version 3, and publishes other content as version 2.
#[test]
fn numbers_fall_only_after_a_restoration() {
    let other = Received { content: 99, is_new_epoch: true, ..received(1, 2) };
    let events = vec![Event::Version(received(1, 3)), Event::Version(other)];
    for (mode, promise) in [(Mode::Latest, Promise::LatestMonotonic), (Mode::Every, Promise::Ordered)] {
        let mut events = events.clone();
        if mode == Mode::Every {
            events.insert(1, gap((1, 3), (1, 2)));
        }
        let mut fallen = without_current(mode, events);
        fallen.published.push(Published { content: 99, ..published(2_000, 1, 2) });
        assert_breaches(&fallen, &[promise]);
        fallen.restored_ms = Some(1_500);
        assert_breaches(&fallen, &[]);
    }
}

#[test]
fn nobody_stale() {
    assert_breaches(&history(Mode::Latest, versions([1])), &[Promise::NobodyStale, Promise::NobodyStarved]);
    let mut stale = good();
    stale.current = vec![Some(Published { content: 99, ..published(2_000, 1, 2) })];
    assert_breaches(&stale, &[Promise::NobodyStale]);
    // It requested a later version than the current one.
    stale.readers[0].after = Some(Id { epoch: 1, version: 2 });
    stale.readers[0].events.drain(..2);
    assert_breaches(&stale, &[]);
}

#[test]
fn ordered() {
    assert_breaches(&history(Mode::Every, versions([1, 2, 2, 3])), &[Promise::Ordered, Promise::GapFree]);
}

#[test]
fn gap_free() {
    assert_breaches(&without_current(Mode::Every, versions([1, 3])), &[Promise::GapFree]);
    let wrong_place = [versions([1]), vec![gap((1, 0), (1, 3))], versions([3])].concat();
    assert_breaches(&without_current(Mode::Every, wrong_place), &[Promise::GapFree]);
    let wrong_end = [versions([1]), vec![gap((1, 1), (1, 4))], versions([3])].concat();
    assert_breaches(&without_current(Mode::Every, wrong_end), &[Promise::GapFree]);
    let mut began_late = history(Mode::Every, versions([2, 3]));
    began_late.readers[0].after = Some(Id { epoch: 1, version: 0 });
    assert_breaches(&began_late, &[Promise::GapFree]);
}

/// A named reader comes back long after its place was given up.
#[test]
fn gap_free_over_a_lost_place() {
    let mut away = without_current(Mode::Every, [versions([1]), vec![Event::Ended(End::Left)]].concat());
    away.readers[0].is_named = true;
    let mut back = history(Mode::Every, versions([3])).readers.remove(0);
    (back.is_named, back.opened_ms, back.events[0].0) = (true, 60_000, 60_100);
    away.readers.push(back);
    away.last = vec![Some(published(50_000, 1, 3))];
    assert_breaches(&away, &[Promise::GapFree]);
    away.readers[1].events.insert(0, (60_100, gap((1, 1), (1, 3))));
    assert_breaches(&away, &[]);
}

#[test]
fn gap_free_over_an_epoch() {
    let mut silent =
        without_current(Mode::Every, vec![Event::Version(received(0, 9)), Event::Version(received(1, 3))]);
    assert_breaches(&silent, &[Promise::GapFree]);
    silent.readers[0].events.insert(1, (1_500, gap((0, 9), (1, 3))));
    assert_breaches(&silent, &[]);
}

#[test]
fn latest_monotonic() {
    assert_breaches(&history(Mode::Latest, versions([2, 1, 3])), &[Promise::LatestMonotonic; 2]);
    assert_breaches(&without_current(Mode::Latest, versions([1, 3])), &[Promise::LatestMonotonic]);
    let unreported_epoch = vec![Event::Version(received(0, 9)), Event::Version(received(1, 3))];
    assert_breaches(&without_current(Mode::Latest, unreported_epoch), &[Promise::LatestMonotonic]);
}

#[test]
fn untorn() {
    let torn = Event::Version(Received { torn: Some("a word".into()), ..received(1, 3) });
    assert_breaches(&without_current(Mode::Every, vec![torn]), &[Promise::Untorn]);
}

#[test]
fn resumed_only_missing() {
    for (cuts, wire_bytes, expected) in [
        (0, 101, &[Promise::ResumedOnlyMissing][..]),
        (1, 110, &[]),
        (1, 111, &[Promise::ResumedOnlyMissing]),
    ] {
        let resumed = Event::Version(Received { cuts, wire_bytes, ..received(1, 3) });
        assert_breaches(&without_current(Mode::Every, vec![resumed]), expected);
    }
}

#[test]
fn nobody_starved() {
    assert_breaches(&history(Mode::Every, versions(1..=2)), &[Promise::NobodyStarved]);
    let mut late = good();
    late.readers[0].events[2].0 = 3_000 + DELIVERY_TIMEOUT_MS + 1;
    assert_breaches(&late, &[Promise::NobodyStarved]);
    let mut stuck = good();
    stuck.last = vec![None];
    assert_breaches(&stuck, &[Promise::NobodyStarved]);
    // A reader that ended with a valid reason does not wait.
    let explained = [versions(1..=2), vec![Event::Ended(End::Explained)]].concat();
    assert_breaches(&history(Mode::Every, explained), &[]);
}

#[test]
fn nobody_unauthorised() {
    let mut late = history(Mode::Every, [versions(1..=3), vec![Event::Ended(End::Unauthorised)]].concat());
    late.rights[0].until_ms = 2_000;
    late.readers[0].events[2].0 = 2_000 + RIGHT_LINGER_MS;
    assert_breaches(&late, &[]);
    late.readers[0].events[2].0 += 1;
    assert_breaches(&late, &[Promise::NobodyUnauthorised]);
    late.published[2].at_ms = 12_001;
    if let Event::Version(received) = &mut late.readers[0].events[2].1 {
        received.was_awaited = false;
    }
    assert_breaches(&late, &[Promise::NobodyUnauthorised]);
    late.published[2].at_ms = 12_000; // The version may have arrived while the right could still be used.
    assert_breaches(&late, &[]);

    let mut without = good();
    without.rights.clear();
    // One for each version, and one because the reader has not ended.
    assert_breaches(&without, &[Promise::NobodyUnauthorised; 4]);
    let mut answered = good();
    answered.answers =
        vec![(1, 1, Answer::Admitted), (1, 1, Answer::Listed(vec![0])), (1, 0, Answer::Listed(vec![0, 1]))];
    assert_breaches(&answered, &[Promise::NobodyUnauthorised; 3]);
}

#[test]
fn nobody_cut_off() {
    let cut = [versions(1..=2), vec![Event::Ended(End::Unauthorised)]].concat();
    assert_breaches(&history(Mode::Every, cut), &[Promise::NobodyCutOff]);
    let mut refused = good();
    refused.answers = vec![(1, 0, Answer::Refused), (1, 1, Answer::Refused)];
    assert_breaches(&refused, &[Promise::NobodyCutOff]);
    let failed = [versions(1..=2), vec![Event::Ended(End::Failed("it stalled".into()))]].concat();
    assert_breaches(&history(Mode::Every, failed), &[Promise::NobodyCutOff]);
    let evicted = [versions(1..=2), vec![Event::Ended(End::TooSlow)]].concat();
    let mut evicted = history(Mode::Every, evicted);
    assert_breaches(&evicted, &[]);
    evicted.readers[0].has_place = true;
    assert_breaches(&evicted, &[Promise::NobodyCutOff]);
}

#[test]
fn place_kept() {
    let mut away = without_current(Mode::Every, [versions([1]), vec![Event::Ended(End::Left)]].concat());
    away.readers[0].has_place = true;
    let mut back = history(Mode::Every, versions([3])).readers.remove(0);
    (back.has_place, back.opened_ms, back.events[0].0) = (true, 3_000, 3_100);
    away.readers.push(back);
    assert_breaches(&away, &[Promise::PlaceKept]);
    // Each of these changes gives a valid reason why the place was not kept.
    let not_broken = |change: fn(&mut History)| {
        let mut away = away.clone();
        change(&mut away);
        assert_breaches(&away, &[]);
    };
    not_broken(|away| away.stops_ms = vec![3_050]);
    not_broken(|away| away.readers[1].has_place = false);
    not_broken(|away| away.readers[1].opened_ms = 60_000);
    not_broken(|away| {
        (away.readers[1].cuts_ms, away.readers[1].events[0].0) = (vec![3_050], 23_000);
    });
    not_broken(|away| {
        let right = |from_ms, until_ms| Right { principal: 0, topic: 0, from_ms, until_ms };
        away.rights = vec![right(0, 2_000), right(21_000, u64::MAX)];
        away.readers[0].events =
            vec![(1_001, Event::Version(received(1, 1))), (2_001, Event::Ended(End::Unauthorised))];
        away.readers[0].events.push((21_500, Event::Ended(End::Left)));
        away.readers[1].opened_ms = 22_100;
        away.readers[1].events[0].0 = 22_200;
    });
    not_broken(|away| (away.readers[0].cuts_ms, away.readers[1].opened_ms) = (vec![1_500], 21_600));
    not_broken(|away| {
        (away.readers[0].cuts_ms, away.readers[1].opened_ms) = (vec![500], 20_600);
        away.readers[0].events[0].1 = Event::Version(Received { was_awaited: false, ..received(1, 1) });
    });
    not_broken(|away| away.readers[1].events.insert(0, (3_050, Event::Version(received(1, 2)))));
    // A gap is not a reason by itself, but that the missing version could not be read.
    let mut told = away.clone();
    told.readers[1].is_named = true;
    told.readers[1].events.insert(0, (3_050, gap((1, 1), (1, 3))));
    assert_breaches(&told, &[Promise::PlaceKept]);
    told.unreadable = [received(1, 2).content].into();
    assert_breaches(&told, &[]);
    told.readers[1].events.remove(0);
    assert_breaches(&told, &[Promise::PlaceKept]);
}
