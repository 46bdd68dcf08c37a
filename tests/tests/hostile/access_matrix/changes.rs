//! Sessions whose rights change while they have a watch, a subscription and a further lane.

use super::{
    A_WHILE, SUBSCRIPTION, Stage, TOPICS, WATCH,
    credentials::{
        self, BEGAN_S, Shown, THEIRS, TRUSTED, Worth, authorities, claims, fingerprint, grant, key, reader,
        sealed, secret, set_clock,
    },
    has,
    ways::{End, Guest, Heard, WAYS, Way},
};
use crate::raw::hello;
use std::{collections::HashSet, sync::Arc};
use tensor_relay_protocol::{
    Claims, ClientMessage, CloseCode, EndReason, Glob, Hello, LaneId, ServerMessage, Subscribe, TicketId,
    Token, Verbs, Welcome,
};
use tensor_relay_server::Rules;
use tensor_relay_tests::pair::{publish, simulate, topic};
use tokio::time::sleep;

const UNAUTHORISED: Option<End> = Some(End::Closed(Some(CloseCode::Unauthorised), String::new()));

/// A change of the rules, and its effect on an existing session.
struct Change {
    name: &'static str,
    token: Option<Token>,
    certificate: Option<Shown>,
    make: fn(&mut Rules),
    /// By how many seconds the server's clock advances.
    later_s: u64,
    is_cut: bool,
    /// The rights of its credential from then on.
    worth: Worth,
}

const REFUSED: Worth = Worth::Nothing(CloseCode::Unauthorised);
const NO_RIGHTS: Worth = Worth::Session { sees: &[], receives: &[] };
const MINE: Worth = Worth::Session { sees: &["mine/"], receives: &["mine/"] };
const ALL: Worth = Worth::Session { sees: &[""], receives: &[""] };

fn changes() -> Vec<Change> {
    let good = claims(9, vec![grant("**", Verbs::CONSUME)]);
    let brief = sealed(Claims { expires_s: Some(BEGAN_S + 3600), ..good.clone() });
    let token = Some(sealed(good));
    let none = |_: &mut Rules| {};
    let of_token = |name, make: fn(&mut Rules), is_cut, worth| {
        let token = token.clone();
        Change { name, token, certificate: None, make, later_s: 0, is_cut, worth }
    };
    let of_key = |name, make: fn(&mut Rules), is_cut, worth| Change {
        certificate: Some(key(TRUSTED)),
        token: None,
        ..of_token(name, make, is_cut, worth)
    };
    let of_reader = |name, make: fn(&mut Rules), is_cut, worth| Change {
        certificate: Some(reader()),
        ..of_key(name, make, is_cut, worth)
    };
    vec![
        of_token("nothing changes", none, false, ALL),
        of_token("its ticket is revoked", |rules| revoke(rules, 9), true, REFUSED),
        of_token("another's ticket is revoked", |rules| revoke(rules, 8), false, ALL),
        of_token(
            "the secret is rotated",
            |rules| rules.secrets = vec![secret(3, 5), secret(1, 7)],
            false,
            ALL,
        ),
        of_token(
            "it is rotated twice",
            |rules| rules.secrets = vec![secret(4, 4), secret(3, 5)],
            true,
            REFUSED,
        ),
        Change { later_s: 3599, token: Some(brief.clone()), ..of_token("it may yet stay", none, false, ALL) },
        Change { later_s: 3600, token: Some(brief), ..of_token("its ticket expires", none, true, REFUSED) },
        of_key("another key is revoked", |rules| distrust(rules, credentials::UNLISTED), false, MINE),
        of_key("its key is revoked", |rules| distrust(rules, TRUSTED), true, REFUSED),
        of_key("its key is gone", |rules| rules.keys.clear(), true, REFUSED),
        Change {
            token: token.clone(),
            ..of_key("its key is gone, not its token", |rules| rules.keys.clear(), true, ALL)
        },
        Change {
            token: token.clone(),
            ..of_key("its key is revoked, not its token", |rules| distrust(rules, TRUSTED), true, REFUSED)
        },
        of_key("its key has another name", |rules| call(rules, "other"), true, NO_RIGHTS),
        of_key("its line is gone", |rules| list(rules, ""), false, NO_RIGHTS),
        of_key(
            "its line says less",
            |rules| list(rules, "key:trusted list mine/*"),
            false,
            Worth::Session { sees: &["mine/"], receives: &[] },
        ),
        of_key("its line says more", |rules| list(rules, "key:trusted list,subscribe **"), false, ALL),
        of_reader(
            "its authority is replaced",
            |rules| rules.authorities = authorities(THEIRS),
            true,
            REFUSED,
        ),
        of_reader("its names have no line", |rules| list(rules, ""), false, NO_RIGHTS),
        of_reader(
            "another's line is gone",
            |rules| list(rules, "dns:reader.example list,subscribe mine/*"),
            false,
            MINE,
        ),
        Change { later_s: 864_001, ..of_reader("its certificate expires", none, true, REFUSED) },
    ]
}

fn revoke(rules: &mut Rules, id: u8) {
    rules.revoked.insert(TicketId([id; 8]));
}

fn distrust(rules: &mut Rules, seed: u64) {
    rules.keys.remove(&fingerprint(seed));
    rules.revoked_keys = HashSet::from([fingerprint(seed)]);
}

fn call(rules: &mut Rules, name: &str) {
    rules.keys.insert(fingerprint(TRUSTED), name.into());
}

fn list(rules: &mut Rules, acl: &str) {
    rules.acl = acl.parse().unwrap();
}

/// Goal: a client that loses its right gets a close, nothing more on any lane, and cannot return; one that loses a part
/// retains the rest; others are unaffected. Method: each change during a session of each transport that watches
/// everything, receives a topic and has a further lane; then another version and topic, a request, a login and a lane.
#[test]
fn every_change_under_way() {
    let mut wrong = vec![];
    for change in changes() {
        for way in WAYS {
            if let Err(why) = undergo(&change, way) {
                wrong.push(format!("{} over {way:?}: {why}", change.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{} cells are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

fn undergo(change: &Change, way: Way) -> Result<(), String> {
    simulate(2, async |sim| {
        let mut stage = Stage::new(sim, &TOPICS).await;
        let mut visit = Visit::new(&stage, change, way).await;
        match change.later_s {
            0 => stage.rules.send_modify(|rules| change.make_to(rules)),
            later_s => set_clock(BEGAN_S + later_s), // And nothing else, which could make sessions read the clock.
        }
        sleep(A_WHILE).await;
        let before = visit.heard();
        publish(&stage.server, &mut stage.publishers[0], 2, 1000).await;
        stage.publish("mine/later").await;
        visit.session.say(ClientMessage::List);
        sleep(A_WHILE).await;
        let after = visit.heard();
        match change.is_cut {
            true => judge_cut(&before, &after)?,
            false => judge_rest(change.worth, &before, &after)?,
        }
        visit.come_again(&stage, change, way).await
    })
}

impl Change {
    fn make_to(&self, rules: &mut Arc<Rules>) {
        let mut changed = (**rules).clone();
        (self.make)(&mut changed);
        *rules = Arc::new(changed);
    }
}

/// A session, its further lane, and the `Welcome` that lets lanes join it.
struct Visit {
    session: Guest,
    lane: Guest,
    welcome: Welcome,
}

impl Visit {
    async fn new(stage: &Stage, change: &Change, way: Way) -> Self {
        let session = Guest::new(&stage.sim, 1, way, change.certificate.as_ref()).await;
        session.say(change.greeting());
        session.say(ClientMessage::Watch { watch: WATCH, glob: Glob::new("**").unwrap() });
        sleep(A_WHILE).await;
        let ServerMessage::Welcome(welcome) = session.heard().messages().remove(0) else { panic!() };
        let lane = Guest::new(&stage.sim, 2, way, change.certificate.as_ref()).await;
        lane.say(join(&welcome, 1));
        sleep(A_WHILE).await;
        assert_eq!(lane.heard().messages(), [ServerMessage::Joined]);
        session.say(ClientMessage::Subscribe(Subscribe::latest(SUBSCRIPTION, topic("mine/a"), 8)));
        sleep(A_WHILE).await;
        let visit = Self { session, lane, welcome };
        visit.commit();
        let [session, lane] = visit.heard();
        assert!(session.streams + lane.streams >= 2, "the manifest and a chunk came");
        visit
    }

    /// Reports the first version as committed, so that the server may send the next one.
    fn commit(&self) {
        for said in self.session.heard().messages() {
            if let ServerMessage::Announce(announce) = said {
                let (subscription, epoch, version) = (SUBSCRIPTION, announce.id.epoch, announce.id.version);
                self.session
                    .say(ClientMessage::Committed { subscription, epoch, version, kept: false });
            }
        }
    }

    fn heard(&self) -> [Heard; 2] {
        [self.session.heard(), self.lane.heard()]
    }

    /// Logs in again, and joins a lane to the old session.
    async fn come_again(&mut self, stage: &Stage, change: &Change, way: Way) -> Result<(), String> {
        let again = Guest::new(&stage.sim, 3, way, change.certificate.as_ref()).await;
        again.say(change.greeting());
        let joins = Guest::new(&stage.sim, 4, way, change.certificate.as_ref()).await;
        joins.say(join(&self.welcome, 2));
        sleep(A_WHILE).await;
        let (again, joins) = (again.heard(), joins.heard());
        let is_in = match change.worth {
            Worth::Session { .. } => again.messages().len() == 1 && again.end.is_none(),
            _ => again.is_nothing() && again.end == UNAUTHORISED,
        };
        let has_joined = match change.is_cut {
            true => joins.is_nothing() && joins.end == UNAUTHORISED,
            false => joins.messages() == [ServerMessage::Joined] && joins.end.is_none(),
        };
        (is_in && has_joined)
            .then_some(())
            .ok_or_else(|| format!("it comes again: {again:?}, with a lane: {joins:?}"))
    }
}

impl Change {
    fn greeting(&self) -> ClientMessage {
        ClientMessage::Hello(Hello { token: self.token.clone(), ..hello() })
    }
}

fn join(welcome: &Welcome, lane: u32) -> ClientMessage {
    let grant = welcome.lanes.as_ref().unwrap().grant;
    ClientMessage::Join { session: welcome.session, lane: LaneId(lane), grant, instance: welcome.instance }
}

/// Checks that the session got its close in time, and no byte after it on either lane.
fn judge_cut([session, lane]: &[Heard; 2], after: &[Heard; 2]) -> Result<(), String> {
    let is_good = session.end == UNAUTHORISED && lane.end.is_some() && [session, lane] == after.each_ref();
    is_good
        .then_some(())
        .ok_or_else(|| format!("expected to be closed: {session:?}, {lane:?}; then {after:?}"))
}

/// Checks that the session continues with its remaining rights.
fn judge_rest(worth: Worth, before: &[Heard; 2], after: &[Heard; 2]) -> Result<(), String> {
    let streams = |heard: &[Heard; 2]| heard[0].streams + heard[1].streams;
    let all = after[0].messages();
    let (sees, receives) = has(worth, "mine/later");
    let forbidden = ServerMessage::End { subscription: SUBSCRIPTION, reason: EndReason::Forbidden };
    let found = ServerMessage::Found { watch: WATCH, topics: vec![topic("mine/later")] };
    let listed = all.iter().find_map(|said| match said {
        ServerMessage::Topics { topics, .. } => Some(topics.len()),
        _ => None,
    });
    let names = ["mine/a", "mine/later", "other/a"];
    let is_good = after.iter().all(|heard| heard.end.is_none())
        && before[0].messages().contains(&forbidden) != receives
        && all.contains(&found) == sees
        && listed == Some(names.iter().filter(|name| has(worth, name).0).count())
        && (streams(after) > streams(before)) == receives;
    is_good
        .then_some(())
        .ok_or_else(|| format!("before {before:?}; then {after:?}"))
}
