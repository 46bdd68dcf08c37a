//! The access matrix: every credential over each transport with every request.
//!
//! The expected results are an independent table ([`credentials`]). The client works on raw bytes, so it sees
//! everything that a server sends. A refused client must get the close and nothing else, and must not learn which
//! topics exist.

mod credentials;
mod losses;
mod socket;
mod ways;

use crate::raw::hello;
use credentials::{BEGAN_S, Credential, Worth, clock, set_clock};
use std::{sync::Arc, time::Duration};
use tensor_relay_protocol::{
    ClientMessage, CloseCode, EndReason, Glob, Hello, LaneGrant, LaneId, ServerMessage, Subscribe,
    SubscriptionId, Topic, WatchId, Welcome,
};
use tensor_relay_server::{Access, Listener, Publisher, Rules, Server};
use tensor_relay_tests::pair::{Sim, publish, retaining, server_config, simulate, topic};
use tensor_relay_transport::Transport;
use tokio::{sync::watch, time::sleep};
use ways::{End, Guest, Heard, WAYS, Way};

/// The initial topics of the server, and those that it publishes later.
const TOPICS: [&str; 2] = ["mine/a", "other/a"];
const LATER: [&str; 2] = ["mine/later", "other/later"];

/// Long enough for every answer: a second, plus the time of a close.
const A_WHILE: Duration = Duration::from_secs(3);

const SUBSCRIPTION: SubscriptionId = SubscriptionId(1);
const WATCH: WatchId = WatchId(1);

/// One request of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ask {
    List,
    Watch,
    Subscribe(&'static str),
    /// Join, as a further lane with a guessed grant, an existing session or one that does not exist.
    JoinGuessed,
    JoinNothing,
}

const ASKS: [Ask; 8] = [
    Ask::List,
    Ask::Watch,
    Ask::Subscribe("mine/a"),
    Ask::Subscribe("other/a"),
    Ask::Subscribe("mine/none"),
    Ask::Subscribe("none"),
    Ask::JoinGuessed,
    Ask::JoinNothing,
];

/// A server over both transports, and what it publishes.
struct Stage {
    sim: Sim,
    server: Server,
    rules: watch::Sender<Arc<Rules>>,
    access: Access,
    publishers: Vec<Publisher>,
}

impl Stage {
    async fn new(sim: Sim, topics: &[&str]) -> Self {
        set_clock(BEGAN_S);
        let rules = watch::Sender::new(Arc::new(credentials::rules()));
        let access = Access::following(rules.subscribe()).with_clock(clock);
        let (host, address) = (Arc::new(sim.server_host()), sim.server_address());
        let listener = Listener::bind_on(host, Transport::Auto, address, &sim.identity(), sim.tuning.clone());
        let server = Server::start(listener.unwrap(), access.clone(), server_config());
        let mut stage = Self { sim, server, rules, access, publishers: vec![] };
        for name in topics {
            stage.publish(name).await;
        }
        stage
    }

    async fn publish(&mut self, name: &str) {
        let mut publisher = self.server.publisher_with(topic(name), None, retaining(2)).unwrap();
        publish(&self.server, &mut publisher, 1, 1000).await;
        self.publishers.push(publisher);
    }

    /// A session with all rights.
    async fn bystander(&self, number: u8) -> (Guest, Welcome) {
        let guest = Guest::new(&self.sim, number, Way::Quic, None).await;
        let token = Some(credentials::sealed(credentials::claims(8, vec![])));
        guest.say(ClientMessage::Hello(Hello { token, ..hello() }));
        sleep(A_WHILE).await;
        let ServerMessage::Welcome(welcome) = guest.heard().messages().remove(0) else { panic!() };
        (guest, welcome)
    }
}

/// Goal: each cell of the matrix is as the table says, and a refused client gets only its close. Method: each
/// credential, transport and request in a connection of its own, to a server with topics; more topics appear later.
#[test]
fn every_credential_way_and_question() {
    let mut wrong = vec![];
    for credential in credentials::all() {
        for (cell, heard) in answers(&credential, true) {
            if let Err(why) = judge(credential.worth, cell.1, &heard) {
                wrong.push(format!("{} over {cell:?}: {why}", credential.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{} cells are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// Goal: a client without a right to a topic gets the same bytes whether or not the topic exists. Method: all
/// credentials without rights, at a server with topics and at one without; for each credential, the answers for refused
/// topics, some of which exist.
#[test]
fn what_is_refused_looks_the_same_whether_it_exists_or_not() {
    let mut wrong = vec![];
    for credential in credentials::all() {
        let full = answers(&credential, true);
        for way in WAYS {
            let refused = |(cell, _): &&((Way, Ask), Heard)| {
                cell.0 == way && matches!(cell.1, Ask::Subscribe(name) if !has(credential.worth, name).1)
            };
            let mut heard = full.iter().filter(refused).map(|(_, heard)| behind_welcome(heard));
            let first = heard.next();
            if heard.any(|other| Some(other) != first) {
                wrong.push(format!(
                    "{} over {way:?}: existing topics are refused differently",
                    credential.name
                ));
            }
        }
        if ["mine/a", "other/a"]
            .iter()
            .all(|name| has(credential.worth, name) == (false, false))
        {
            for ((cell, heard), (_, empty)) in full.iter().zip(&answers(&credential, false)) {
                if behind_welcome(heard) != behind_welcome(empty) {
                    wrong.push(format!("{} over {cell:?}: {heard:?}, and {empty:?}", credential.name));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} cells are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// Everything that was heard except `Welcome`, which contains random numbers.
fn behind_welcome(heard: &Heard) -> Heard {
    let greeting = match heard.frames().first() {
        Some(first) if matches!(heard.messages()[0], ServerMessage::Welcome(_)) => first.len(),
        _ => 0,
    };
    Heard { control: heard.control[greeting..].to_vec(), ..heard.clone() }
}

/// The answers to each request over each transport, each in a connection of its own.
fn answers(credential: &Credential, with_topics: bool) -> Vec<((Way, Ask), Heard)> {
    simulate(1, async |sim| {
        let mut stage = Stage::new(sim, if with_topics { &TOPICS } else { &[] }).await;
        let (_bystander, session) = stage.bystander(250).await;
        let mut guests = vec![];
        for (number, cell) in (1..).zip(WAYS.iter().flat_map(|way| ASKS.map(|ask| (*way, ask)))) {
            let guest = Guest::new(&stage.sim, number, cell.0, credential.certificate.as_ref()).await;
            words(credential, cell.1, &session).into_iter().for_each(|word| guest.say(word));
            guests.push((cell, guest));
        }
        sleep(A_WHILE).await;
        if with_topics {
            for name in LATER {
                stage.publish(name).await;
            }
            sleep(A_WHILE).await;
        }
        guests.into_iter().map(|(cell, guest)| (cell, guest.heard())).collect()
    })
}

fn words(credential: &Credential, ask: Ask, other: &Welcome) -> Vec<ClientMessage> {
    let greeting = ClientMessage::Hello(Hello { token: credential.token.clone(), ..hello() });
    let join = |session| ClientMessage::Join {
        session,
        lane: LaneId(1),
        grant: LaneGrant::new([0; 32]),
        instance: other.instance,
    };
    match ask {
        Ask::List => vec![greeting, ClientMessage::List],
        Ask::Watch => {
            vec![greeting, ClientMessage::Watch { watch: WATCH, glob: Glob::new("**").unwrap() }]
        }
        Ask::Subscribe(name) => {
            let subscribe = Subscribe::latest(SUBSCRIPTION, topic(name), 8);
            vec![greeting, ClientMessage::Subscribe(subscribe)]
        }
        Ask::JoinGuessed => vec![join(other.session)],
        Ask::JoinNothing => vec![join(other.session ^ 1)],
    }
}

/// Whether a credential of this worth lists a topic, and receives it.
fn has(worth: Worth, name: &str) -> (bool, bool) {
    let begins = |with: &[&str]| with.iter().any(|beginning| name.starts_with(beginning));
    match worth {
        Worth::NoHandshake | Worth::Nothing(_) => (false, false),
        Worth::Session { sees, receives } => (begins(sees), begins(receives)),
    }
}

/// Checks an answer against the table.
fn judge(worth: Worth, ask: Ask, heard: &Heard) -> Result<(), String> {
    let refusal = match (worth, ask) {
        (Worth::NoHandshake, _) => Some(End::Alert),
        (_, Ask::JoinGuessed | Ask::JoinNothing) => {
            Some(End::Closed(Some(CloseCode::Unauthorised), String::new()))
        }
        (Worth::Nothing(code), _) => Some(End::Closed(Some(code), String::new())),
        (Worth::Session { .. }, _) => None,
    };
    if let Some(end) = refusal {
        let is_good = heard.is_nothing() && heard.end.as_ref() == Some(&end);
        return is_good.then_some(()).ok_or_else(|| format!("expected only {end:?}: {heard:?}"));
    }
    let mut messages = heard.messages().into_iter();
    if !matches!(messages.next(), Some(ServerMessage::Welcome(_))) || heard.end.is_some() {
        return Err(format!("expected a session: {heard:?}"));
    }
    let said: Vec<_> = messages.collect();
    let is_good = match ask {
        Ask::List => named(&said) == visible(worth, &TOPICS) && said.len() == 1 && heard.streams == 0,
        Ask::Watch => named(&said) == visible(worth, &[TOPICS, LATER].concat()) && heard.streams == 0,
        Ask::Subscribe(name) if !has(worth, name).1 => {
            let end = ServerMessage::End { subscription: SUBSCRIPTION, reason: EndReason::Forbidden };
            said == [end] && heard.streams == 0
        }
        Ask::Subscribe(name) if !TOPICS.contains(&name) => said.is_empty() && heard.streams == 0,
        Ask::Subscribe(name) => {
            let announced = |said: &ServerMessage| match said {
                ServerMessage::Announce(announce) => announce.id.topic == topic(name),
                ServerMessage::Complete { .. } => true,
                _ => false,
            };
            said.len() == 2 && said.iter().all(announced) && heard.streams > 0 && heard.data > 1000
        }
        Ask::JoinGuessed | Ask::JoinNothing => false,
    };
    is_good
        .then_some(())
        .ok_or_else(|| format!("{said:?}, {} streams", heard.streams))
}

fn visible(worth: Worth, names: &[&str]) -> Vec<Topic> {
    names.iter().filter(|name| has(worth, name).0).map(|name| topic(name)).collect()
}

/// The topics that lists and watches name.
fn named(said: &[ServerMessage]) -> Vec<Topic> {
    let names = said.iter().flat_map(|said| match said {
        ServerMessage::Topics { topics, .. } => topics.iter().map(|entry| entry.id.topic.clone()).collect(),
        ServerMessage::Found { watch: WATCH, topics } => topics.clone(),
        other => panic!("{other:?}"),
    });
    names.collect()
}
