//! Forged histories: a judge that lets one of them pass would let every scenario pass.

use super::*;

/// A snapshot that is as it should be.
fn got(epoch: u64, version: u64) -> Got {
    Got {
        id: Id { epoch, version },
        skipped: 0,
        is_new_epoch: false,
        torn: None,
        was_awaited: true,
        wire_bytes: 100,
        payload_bytes: 100,
        cuts: 0,
    }
}

fn gap(after: (u64, u64), found: (u64, u64)) -> Seen {
    let id = |(epoch, version)| Id { epoch, version };
    Seen::Gap { after: Some(id(after)), found: id(found) }
}

/// A history of one reader, in which versions 1 to 3 were published at 1, 2 and 3 s, and which ended at 100 s.
fn history(mode: Mode, seen: Vec<Seen>) -> History {
    let published =
        (1..=3).map(|version| Published { at_ms: version * 1_000, topic: 0, id: Id { epoch: 1, version } });
    let reader = Reader {
        principal: 0,
        topic: 0,
        mode,
        after: None,
        has_place: false,
        opened_ms: 0,
        cuts_ms: vec![],
        cut_bytes: 10,
        seen: (1..).map(|number| number * 1_000 + 1).zip(seen).collect(),
    };
    History {
        linger_ms: 20_000,
        stops_ms: vec![],
        readers: vec![reader],
        published: published.collect(),
        rights: vec![Right { principal: 0, topic: 0, from_ms: 0, until_ms: u64::MAX }],
        answers: vec![],
        last: vec![Some((3_000, Id { epoch: 1, version: 3 }))],
        ended_ms: 100_000,
    }
}

fn versions(all: impl IntoIterator<Item = u64>) -> Vec<Seen> {
    all.into_iter().map(|version| Seen::Version(got(1, version))).collect()
}

fn good() -> History {
    history(Mode::Every, versions(1..=3))
}

#[track_caller]
fn broken(history: &History, expected: &[Promise]) {
    let breaches = judge(history);
    let promises: Vec<_> = breaches.iter().map(|breach| breach.promise).collect();
    assert_eq!(promises, expected, "{breaches:?}");
}

/// The forgeries below differ from these by one thing each.
#[test]
fn nothing_is_said_of_what_is_good() {
    broken(&good(), &[]);
    broken(&history(Mode::Latest, versions(1..=3)), &[]);
    let skipping = Seen::Version(Got { skipped: 1, ..got(1, 3) });
    broken(&history(Mode::Latest, vec![Seen::Version(got(1, 1)), skipping]), &[]);
    let told = [versions([1]), vec![gap((1, 1), (1, 3))], versions([3])].concat();
    broken(&history(Mode::Every, told), &[]);
}

#[test]
fn ordered() {
    broken(&history(Mode::Every, versions([1, 2, 2, 3])), &[Promise::Ordered, Promise::GapFree]);
}

#[test]
fn gap_free() {
    broken(&history(Mode::Every, versions([1, 3])), &[Promise::GapFree]);
    let wrong_place = [versions([1]), vec![gap((1, 0), (1, 3))], versions([3])].concat();
    broken(&history(Mode::Every, wrong_place), &[Promise::GapFree]);
    let wrong_end = [versions([1]), vec![gap((1, 1), (1, 4))], versions([3])].concat();
    broken(&history(Mode::Every, wrong_end), &[Promise::GapFree]);
    let mut began_late = history(Mode::Every, versions([2, 3]));
    began_late.readers[0].after = Some(Id { epoch: 1, version: 0 });
    broken(&began_late, &[Promise::GapFree]);
}

#[test]
fn gap_free_over_an_epoch() {
    let mut silent = history(Mode::Every, vec![Seen::Version(got(0, 9)), Seen::Version(got(1, 3))]);
    broken(&silent, &[Promise::GapFree]);
    silent.readers[0].seen.insert(1, (1_500, gap((0, 9), (1, 3))));
    broken(&silent, &[]);
}

#[test]
fn latest_monotonic() {
    broken(&history(Mode::Latest, versions([2, 1, 3])), &[Promise::LatestMonotonic; 2]);
    broken(&history(Mode::Latest, versions([1, 3])), &[Promise::LatestMonotonic]);
    let epoch_untold = vec![Seen::Version(got(0, 9)), Seen::Version(got(1, 3))];
    broken(&history(Mode::Latest, epoch_untold), &[Promise::LatestMonotonic]);
}

#[test]
fn untorn() {
    let torn = Seen::Version(Got { torn: Some("a word".into()), ..got(1, 3) });
    broken(&history(Mode::Every, vec![torn]), &[Promise::Untorn]);
}

#[test]
fn resumed_only_missing() {
    for (cuts, wire_bytes, expected) in [
        (0, 101, &[Promise::ResumedOnlyMissing][..]),
        (1, 110, &[]),
        (1, 111, &[Promise::ResumedOnlyMissing]),
    ] {
        let resumed = Seen::Version(Got { cuts, wire_bytes, ..got(1, 3) });
        broken(&history(Mode::Every, vec![resumed]), expected);
    }
}

#[test]
fn nobody_starved() {
    broken(&history(Mode::Every, versions(1..=2)), &[Promise::NobodyStarved]);
    let mut late = good();
    late.readers[0].seen[2].0 = 3_000 + STARVED_MS + 1;
    broken(&late, &[Promise::NobodyStarved]);
    let mut stuck = good();
    stuck.last = vec![None];
    broken(&stuck, &[Promise::NobodyStarved]);
    // Whoever was told so waits for nothing.
    let told = [versions(1..=2), vec![Seen::Ended(End::Told)]].concat();
    broken(&history(Mode::Every, told), &[]);
}

#[test]
fn nobody_unauthorised() {
    let mut late = history(Mode::Every, [versions(1..=3), vec![Seen::Ended(End::Unauthorised)]].concat());
    late.rights[0].until_ms = 2_000;
    late.readers[0].seen[2].0 = 2_000 + RIGHT_LINGERS_MS;
    broken(&late, &[]);
    late.readers[0].seen[2].0 += 1;
    broken(&late, &[Promise::NobodyUnauthorised]);
    late.published[2].at_ms = 12_001;
    if let Seen::Version(got) = &mut late.readers[0].seen[2].1 {
        got.was_awaited = false;
    }
    broken(&late, &[Promise::NobodyUnauthorised]);
    late.published[2].at_ms = 12_000; // It may have arrived before.
    broken(&late, &[]);

    let mut without = good();
    without.rights.clear();
    broken(&without, &[Promise::NobodyUnauthorised; 4]); // Each version, and that it lives on.
    let mut answered = good();
    answered.answers =
        vec![(1, 1, Answer::LetIn), (1, 1, Answer::Listed(vec![0])), (1, 0, Answer::Listed(vec![0, 1]))];
    broken(&answered, &[Promise::NobodyUnauthorised; 3]);
}

#[test]
fn nobody_cut_off() {
    let cut = [versions(1..=2), vec![Seen::Ended(End::Unauthorised)]].concat();
    broken(&history(Mode::Every, cut), &[Promise::NobodyCutOff]);
    let mut refused = good();
    refused.answers = vec![(1, 0, Answer::Refused), (1, 1, Answer::Refused)];
    broken(&refused, &[Promise::NobodyCutOff]);
    let failed = [versions(1..=2), vec![Seen::Ended(End::Failed("it stalled".into()))]].concat();
    broken(&history(Mode::Every, failed), &[Promise::NobodyCutOff]);
    let evicted = [versions(1..=2), vec![Seen::Ended(End::TooSlow)]].concat();
    let mut evicted = history(Mode::Every, evicted);
    broken(&evicted, &[]);
    evicted.readers[0].has_place = true;
    broken(&evicted, &[Promise::NobodyCutOff]);
}

#[test]
fn place_kept() {
    let mut away = history(Mode::Every, [versions([1]), vec![Seen::Ended(End::Left)]].concat());
    away.readers[0].has_place = true;
    let mut back = history(Mode::Every, versions([3])).readers.remove(0);
    (back.has_place, back.opened_ms, back.seen[0].0) = (true, 3_000, 3_100);
    away.readers.push(back);
    broken(&away, &[Promise::PlaceKept]);
    let unlike = |change: fn(&mut History)| {
        let mut away = away.clone();
        change(&mut away);
        broken(&away, &[]);
    };
    unlike(|away| away.stops_ms = vec![3_050]);
    unlike(|away| away.readers[1].has_place = false);
    unlike(|away| away.readers[1].opened_ms = 60_000);
    unlike(|away| {
        (away.readers[1].cuts_ms, away.readers[1].seen[0].0) = (vec![3_050], 23_000);
    });
    unlike(|away| {
        let right = |from_ms, until_ms| Right { principal: 0, topic: 0, from_ms, until_ms };
        away.rights = vec![right(0, 2_000), right(21_000, u64::MAX)];
        away.readers[0].seen =
            vec![(1_001, Seen::Version(got(1, 1))), (2_001, Seen::Ended(End::Unauthorised))];
        away.readers[0].seen.push((21_500, Seen::Ended(End::Left)));
        away.readers[1].opened_ms = 22_100;
        away.readers[1].seen[0].0 = 22_200;
    });
    unlike(|away| (away.readers[0].cuts_ms, away.readers[1].opened_ms) = (vec![1_500], 21_600));
    unlike(|away| {
        (away.readers[0].cuts_ms, away.readers[1].opened_ms) = (vec![500], 20_600);
        away.readers[0].seen[0].1 = Seen::Version(Got { was_awaited: false, ..got(1, 1) });
    });
    unlike(|away| away.readers[1].seen.insert(0, (3_050, Seen::Version(got(1, 2)))));
}
