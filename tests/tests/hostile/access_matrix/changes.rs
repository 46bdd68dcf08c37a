//! Changes of the access rules during a session with a watch, a subscription and a further lane.

use super::{
    ANSWER_WAIT, Fixture, SUBSCRIPTION, TOPICS, WATCH,
    credentials::{
        self, ClientIdentity, Rights, START_S, THEIRS, TRUSTED, authorities, claims, fingerprint, grant, key,
        reader, sealed, secret, set_clock,
    },
    raw_client::{RawClient, Received, TRANSPORTS, tls_of},
    rights_to,
};
use crate::raw::{Connection, End, hello};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};
use tensor_relay_protocol::{
    Claims, ClientMessage, CloseCode, EndReason, Glob, Hello, LaneId, ServerMessage, Subscribe, TicketId,
    Token, Verbs, WATCHES_MAX, WatchId, Welcome, encode_client,
};
use tensor_relay_server::Rules;
use tensor_relay_tests::pair::{publish, simulate, topic};
use tensor_relay_transport::Transport;
use tokio::time::{sleep, timeout};

const UNAUTHORISED: Option<End> = Some(End::Closed(Some(CloseCode::Unauthorised), String::new()));

/// A change of the rules, and its effect on an existing session.
struct Change {
    name: &'static str,
    token: Option<Token>,
    certificate: Option<ClientIdentity>,
    apply: fn(&mut Rules),
    /// How far the server's clock advances, in seconds.
    clock_advance_s: u64,
    /// Whether the existing session is closed.
    is_closed: bool,
    /// The rights after the change: of a later login, and of the existing session if it is not closed.
    rights: Rights,
}

const REFUSED: Rights = Rights::Nothing(CloseCode::Unauthorised);
const NO_RIGHTS: Rights = Rights::Session { lists: &[], receives: &[] };
const MINE: Rights = Rights::Session { lists: &["mine/"], receives: &["mine/"] };
const ALL: Rights = Rights::Session { lists: &[""], receives: &[""] };

fn changes() -> Vec<Change> {
    let good = claims(9, vec![grant("**", Verbs::CONSUME)]);
    let expiring = sealed(Claims { expires_s: Some(START_S + 3600), ..good.clone() });
    let token = Some(sealed(good));
    let no_change = |_: &mut Rules| {};
    let with_token = |name, apply: fn(&mut Rules), is_closed, rights| {
        let token = token.clone();
        Change { name, token, certificate: None, apply, clock_advance_s: 0, is_closed, rights }
    };
    let with_key = |name, apply: fn(&mut Rules), is_closed, rights| Change {
        certificate: Some(key(TRUSTED)),
        token: None,
        ..with_token(name, apply, is_closed, rights)
    };
    let with_certificate = |name, apply: fn(&mut Rules), is_closed, rights| Change {
        certificate: Some(reader()),
        ..with_key(name, apply, is_closed, rights)
    };
    vec![
        with_token("nothing changes", no_change, false, ALL),
        with_token("its ticket is revoked", |rules| revoke_ticket(rules, 9), true, REFUSED),
        with_token("another ticket is revoked", |rules| revoke_ticket(rules, 8), false, ALL),
        with_token(
            "the secret is rotated",
            |rules| rules.secrets = vec![secret(3, 5), secret(1, 7)],
            false,
            ALL,
        ),
        with_token(
            "the secret is rotated twice",
            |rules| rules.secrets = vec![secret(4, 4), secret(3, 5)],
            true,
            REFUSED,
        ),
        Change {
            clock_advance_s: 3599,
            token: Some(expiring.clone()),
            ..with_token("its ticket expires later", no_change, false, ALL)
        },
        Change {
            clock_advance_s: 3600,
            token: Some(expiring),
            ..with_token("its ticket expires", no_change, true, REFUSED)
        },
        with_key("another key is revoked", |rules| revoke_key(rules, credentials::UNLISTED), false, MINE),
        with_key("its key is revoked", |rules| revoke_key(rules, TRUSTED), true, REFUSED),
        with_key("its key is removed", |rules| rules.keys.clear(), true, REFUSED),
        Change {
            token: token.clone(),
            ..with_key("its key is removed, not its token", |rules| rules.keys.clear(), true, ALL)
        },
        Change {
            token: token.clone(),
            ..with_key("its key is revoked, not its token", |rules| revoke_key(rules, TRUSTED), true, REFUSED)
        },
        with_key("its key has another name", |rules| rename_key(rules, "other"), true, NO_RIGHTS),
        with_key("its line is removed", |rules| set_acl(rules, ""), false, NO_RIGHTS),
        with_key(
            "its line grants less",
            |rules| set_acl(rules, "key:trusted list mine/*"),
            false,
            Rights::Session { lists: &["mine/"], receives: &[] },
        ),
        with_key("its line grants more", |rules| set_acl(rules, "key:trusted list,subscribe **"), false, ALL),
        with_certificate(
            "its authority is replaced",
            |rules| rules.authorities = authorities(THEIRS),
            true,
            REFUSED,
        ),
        with_certificate("its names have no line", |rules| set_acl(rules, ""), false, NO_RIGHTS),
        with_certificate(
            "the line of another credential is removed",
            |rules| set_acl(rules, "dns:reader.example list,subscribe mine/*"),
            false,
            MINE,
        ),
        Change {
            clock_advance_s: 864_001,
            ..with_certificate("its certificate expires", no_change, true, REFUSED)
        },
    ]
}

fn revoke_ticket(rules: &mut Rules, id: u8) {
    rules.revoked.insert(TicketId([id; 8]));
}

fn revoke_key(rules: &mut Rules, seed: u64) {
    rules.keys.remove(&fingerprint(seed));
    rules.revoked_keys = HashSet::from([fingerprint(seed)]);
}

fn rename_key(rules: &mut Rules, name: &str) {
    rules.keys.insert(fingerprint(TRUSTED), name.into());
}

fn set_acl(rules: &mut Rules, acl: &str) {
    rules.acl = acl.parse().unwrap();
}

/// Goal: a session whose credential is no longer valid, or identifies another client, is closed and receives nothing
/// more on any lane; other sessions continue with the rights that the new rules give them, even with none; a later
/// login is accepted or refused by the new rules. Method: over each transport, each change during a session that
/// watches all topics, receives one and has a further lane; then publish another version and another topic, and send a
/// request, a login and a join.
#[test]
fn live_sessions_follow_every_change() {
    let mut wrong = vec![];
    for change in changes() {
        for transport in TRANSPORTS {
            if let Err(error) = check_change(&change, transport) {
                wrong.push(format!("{} over {transport:?}: {error}", change.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{} cells are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

fn check_change(change: &Change, transport: Transport) -> Result<(), String> {
    simulate(2, async |sim| {
        let mut fixture = Fixture::new(sim, &TOPICS).await;
        let mut live = LiveSession::new(&fixture, change, transport).await;
        match change.clock_advance_s {
            0 => fixture.rules.send_modify(|rules| change.apply_to(rules)),
            // Without new rules, which would make sessions read the clock.
            seconds => set_clock(START_S + seconds),
        }
        sleep(ANSWER_WAIT).await;
        let before = live.received();
        publish(&fixture.server, &mut fixture.publishers[0], 2, 1000).await;
        fixture.publish("mine/later").await;
        live.session.send(ClientMessage::List);
        sleep(ANSWER_WAIT).await;
        let after = live.received();
        match change.is_closed {
            true => check_closed(&before, &after)?,
            false => check_continues(change.rights, &before, &after)?,
        }
        live.reconnect(&fixture, change, transport).await
    })
}

impl Change {
    fn apply_to(&self, rules: &mut Arc<Rules>) {
        let mut changed = (**rules).clone();
        (self.apply)(&mut changed);
        *rules = Arc::new(changed);
    }
}

/// Goal: an answer that is being sent follows a change of rights from its next message on. Method: many topics with long
/// names, and a client that requests lists or watches and reads only after it has lost its right to list.
#[test]
fn answers_in_progress_follow_changes() {
    const TOPICS: usize = 2_400;
    simulate(3, async |sim| {
        let mut fixture = Fixture::new(sim, &[]).await;
        let set_acl_to = |fixture: &Fixture, acl: &str| {
            fixture.rules.send_modify(|rules| {
                let mut changed = (**rules).clone();
                set_acl(&mut changed, acl);
                *rules = Arc::new(changed);
            });
        };
        for number in 0..TOPICS {
            fixture.publish(&format!("{number}/{}", "x".repeat(200))).await;
        }
        let watches = (1..=WATCHES_MAX as u32)
            .map(|id| ClientMessage::Watch { watch: WatchId(id), glob: Glob::new("**").unwrap() });
        for (number, requests) in [(1, vec![ClientMessage::List; 16]), (2, watches.collect())] {
            set_acl_to(&fixture, "key:trusted list **");
            let tls = tls_of(Some(&key(TRUSTED)));
            let connection = Connection::open_over(Transport::Quic, &fixture.sim, number, tls).await;
            let mut control = connection.open_control().await.unwrap();
            control
                .write(&encode_client(ClientMessage::Hello(Hello { token: None, ..hello() })))
                .await;
            for request in requests {
                control.write(&encode_client(request)).await;
            }
            sleep(ANSWER_WAIT).await;
            set_acl_to(&fixture, "key:trusted subscribe **");
            sleep(ANSWER_WAIT).await;
            let mut received = Received::default();
            while let Ok(Some(bytes)) = timeout(ANSWER_WAIT, control.read()).await {
                received.control.extend(bytes);
            }
            let answers = names_in_answers(&received);
            let cut_off = answers.iter().filter(|names| (1..TOPICS).contains(names));
            assert!(cut_off.count() > 0, "{answers:?}");
        }
    });
}

/// The number of names in each list, or of each watch.
fn names_in_answers(received: &Received) -> Vec<usize> {
    let (mut lists, mut watches) = (vec![0], HashMap::<_, usize>::new());
    for message in received.messages() {
        match message {
            ServerMessage::Topics { topics, more } => {
                *lists.last_mut().unwrap() += topics.len();
                if !more {
                    lists.push(0);
                }
            }
            ServerMessage::Found { watch, topics } => *watches.entry(watch).or_default() += topics.len(),
            _ => {}
        }
    }
    lists.into_iter().chain(watches.into_values()).collect()
}

/// A session, its further lane, and the `Welcome` that lets lanes join it.
struct LiveSession {
    session: RawClient,
    lane: RawClient,
    welcome: Welcome,
}

impl LiveSession {
    async fn new(fixture: &Fixture, change: &Change, transport: Transport) -> Self {
        let session = RawClient::new(&fixture.sim, 1, transport, change.certificate.as_ref()).await;
        session.send(change.login());
        session.send(ClientMessage::Watch { watch: WATCH, glob: Glob::new("**").unwrap() });
        sleep(ANSWER_WAIT).await;
        let ServerMessage::Welcome(welcome) = session.received().messages().remove(0) else { panic!() };
        let lane = RawClient::new(&fixture.sim, 2, transport, change.certificate.as_ref()).await;
        lane.send(join(&welcome, 1));
        sleep(ANSWER_WAIT).await;
        assert_eq!(lane.received().messages(), [ServerMessage::Joined]);
        session.send(ClientMessage::Subscribe(Subscribe::latest(SUBSCRIPTION, topic("mine/a"), 8)));
        sleep(ANSWER_WAIT).await;
        let live = Self { session, lane, welcome };
        live.commit();
        let [session, lane] = live.received();
        assert!(session.streams + lane.streams >= 2, "the manifest and a chunk arrived");
        live
    }

    /// Reports the first version as committed, so that the server sends the next one.
    fn commit(&self) {
        for message in self.session.received().messages() {
            if let ServerMessage::Announce(announce) = message {
                let (subscription, epoch, version) = (SUBSCRIPTION, announce.id.epoch, announce.id.version);
                self.session
                    .send(ClientMessage::Committed { subscription, epoch, version, kept: false });
            }
        }
    }

    fn received(&self) -> [Received; 2] {
        [self.session.received(), self.lane.received()]
    }

    /// Logs in again, joins another lane to the existing session, and checks both answers.
    async fn reconnect(
        &mut self,
        fixture: &Fixture,
        change: &Change,
        transport: Transport,
    ) -> Result<(), String> {
        let again = RawClient::new(&fixture.sim, 3, transport, change.certificate.as_ref()).await;
        again.send(change.login());
        let joins = RawClient::new(&fixture.sim, 4, transport, change.certificate.as_ref()).await;
        joins.send(join(&self.welcome, 2));
        sleep(ANSWER_WAIT).await;
        let (again, joins) = (again.received(), joins.received());
        let has_session = match change.rights {
            Rights::Session { .. } => again.messages().len() == 1 && again.end.is_none(),
            _ => again.is_empty() && again.end == UNAUTHORISED,
        };
        let has_joined = match change.is_closed {
            true => joins.is_empty() && joins.end == UNAUTHORISED,
            false => joins.messages() == [ServerMessage::Joined] && joins.end.is_none(),
        };
        (has_session && has_joined)
            .then_some(())
            .ok_or_else(|| format!("second login: {again:?}, second lane: {joins:?}"))
    }
}

impl Change {
    fn login(&self) -> ClientMessage {
        ClientMessage::Hello(Hello { token: self.token.clone(), ..hello() })
    }
}

fn join(welcome: &Welcome, lane: u32) -> ClientMessage {
    let grant = welcome.lanes.as_ref().unwrap().grant;
    ClientMessage::Join { session: welcome.session, lane: LaneId(lane), grant, instance: welcome.instance }
}

/// Checks that the session was closed, and that neither lane received a byte afterwards.
fn check_closed([session, lane]: &[Received; 2], after: &[Received; 2]) -> Result<(), String> {
    let is_good = session.end == UNAUTHORISED && lane.end.is_some() && [session, lane] == after.each_ref();
    is_good
        .then_some(())
        .ok_or_else(|| format!("expected to be closed: {session:?}, {lane:?}; then {after:?}"))
}

/// Checks that the session continues with its remaining rights.
fn check_continues(rights: Rights, before: &[Received; 2], after: &[Received; 2]) -> Result<(), String> {
    let streams = |received: &[Received; 2]| received[0].streams + received[1].streams;
    let all = after[0].messages();
    let (lists, receives) = rights_to(rights, "mine/later");
    let forbidden = ServerMessage::End { subscription: SUBSCRIPTION, reason: EndReason::Forbidden };
    let found = ServerMessage::Found { watch: WATCH, topics: vec![topic("mine/later")] };
    let listed = all.iter().find_map(|message| match message {
        ServerMessage::Topics { topics, .. } => Some(topics.len()),
        _ => None,
    });
    let names = ["mine/a", "mine/later", "other/a"];
    let is_good = after.iter().all(|received| received.end.is_none())
        && before[0].messages().contains(&forbidden) != receives
        && all.contains(&found) == lists
        && listed == Some(names.iter().filter(|name| rights_to(rights, name).0).count())
        && (streams(after) > streams(before)) == receives;
    is_good
        .then_some(())
        .ok_or_else(|| format!("before {before:?}; then {after:?}"))
}
