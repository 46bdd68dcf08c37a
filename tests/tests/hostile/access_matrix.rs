//! The access matrix: one cell for each credential, transport and request.
//!
//! The expected rights are in a table that is independent of the server's code ([`credentials`]). The client reads raw
//! bytes, so it sees everything that a server sends. A refused client must receive the close and nothing else, and must
//! not learn which topics exist.

mod changes;
mod credentials;
mod raw_client;
mod socket;

use crate::raw::{End, hello};
use credentials::{Credential, Rights, START_S, clock, set_clock};
use raw_client::{RawClient, Received, TRANSPORTS};
use std::{sync::Arc, time::Duration};
use tensor_relay_protocol::{
    ClientMessage, CloseCode, EndReason, Glob, Hello, LaneGrant, LaneId, ServerMessage, Subscribe,
    SubscriptionId, Topic, WatchId, Welcome,
};
use tensor_relay_server::{Access, Listener, Publisher, Rules, Server};
use tensor_relay_tests::pair::{Sim, publish, retaining, server_config, simulate, topic};
use tensor_relay_transport::Transport;
use tokio::{sync::watch, time::sleep};

/// The initial topics of the server.
const TOPICS: [&str; 2] = ["mine/a", "other/a"];

/// The topics that the server publishes later.
const LATER: [&str; 2] = ["mine/later", "other/later"];

/// The duration of a wait for answers, longer than a close takes.
const ANSWER_WAIT: Duration = Duration::from_secs(3);

const SUBSCRIPTION: SubscriptionId = SubscriptionId(1);
const WATCH: WatchId = WatchId(1);

/// One request of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    List,
    Watch,
    Subscribe(&'static str),
    /// A further lane with a guessed grant, for an existing session.
    JoinGuessed,
    /// A further lane with a guessed grant, for a session that does not exist.
    JoinNonexistent,
}

const REQUESTS: [Request; 8] = [
    Request::List,
    Request::Watch,
    Request::Subscribe("mine/a"),
    Request::Subscribe("other/a"),
    Request::Subscribe("mine/none"),
    Request::Subscribe("none"),
    Request::JoinGuessed,
    Request::JoinNonexistent,
];

/// A server over both transports, with its publishers.
struct Fixture {
    sim: Sim,
    server: Server,
    rules: watch::Sender<Arc<Rules>>,
    access: Access,
    publishers: Vec<Publisher>,
}

impl Fixture {
    async fn new(sim: Sim, topics: &[&str]) -> Self {
        set_clock(START_S);
        let rules = watch::Sender::new(Arc::new(credentials::rules()));
        let access = Access::following(rules.subscribe()).with_clock(clock);
        let (host, address) = (Arc::new(sim.server_host()), sim.server_address());
        let listener = Listener::bind_on(host, Transport::Auto, address, &sim.identity(), sim.tuning.clone());
        let server = Server::start(listener.unwrap(), access.clone(), server_config());
        let mut fixture = Self { sim, server, rules, access, publishers: vec![] };
        for name in topics {
            fixture.publish(name).await;
        }
        fixture
    }

    async fn publish(&mut self, name: &str) {
        let mut publisher = self.server.publisher_with(topic(name), None, retaining(2)).unwrap();
        publish(&self.server, &mut publisher, 1, 1000).await;
        self.publishers.push(publisher);
    }

    /// Opens a session without rights. The cells use its id where they need an existing session.
    async fn bystander(&self, number: u8) -> (RawClient, Welcome) {
        let client = RawClient::new(&self.sim, number, Transport::Quic, None).await;
        let token = Some(credentials::sealed(credentials::claims(8, vec![])));
        client.send(ClientMessage::Hello(Hello { token, ..hello() }));
        sleep(ANSWER_WAIT).await;
        let ServerMessage::Welcome(welcome) = client.received().messages().remove(0) else { panic!() };
        (client, welcome)
    }
}

/// Goal: each cell of the matrix matches the table, and a refused client receives only its close. Method: one
/// connection for each credential, transport and request, to a server with topics; more topics appear later.
#[test]
fn every_cell_matches_the_table() {
    let mut wrong = vec![];
    for credential in credentials::all() {
        for (cell, received) in answers(&credential, true) {
            if let Err(error) = check_answer(credential.rights, cell.1, &received) {
                wrong.push(format!("{} over {cell:?}: {error}", credential.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{} cells are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// Goal: a client without a right to a topic receives the same bytes whether or not the topic exists. Method: for each
/// credential, compare the answers for all refused topics; for each credential without rights, compare the answers of a
/// server with topics and of one without.
#[test]
fn refused_topics_look_nonexistent() {
    let mut wrong = vec![];
    for credential in credentials::all() {
        let full = answers(&credential, true);
        for transport in TRANSPORTS {
            let refused = |(cell, _): &&((Transport, Request), Received)| {
                cell.0 == transport
                    && matches!(cell.1, Request::Subscribe(name) if !rights_to(credential.rights, name).1)
            };
            let mut received = full.iter().filter(refused).map(|(_, received)| without_welcome(received));
            let first = received.next();
            if received.any(|other| Some(other) != first) {
                wrong.push(format!(
                    "{} over {transport:?}: existing topics are refused differently",
                    credential.name
                ));
            }
        }
        if ["mine/a", "other/a"]
            .iter()
            .all(|name| rights_to(credential.rights, name) == (false, false))
        {
            for ((cell, received), (_, empty)) in full.iter().zip(&answers(&credential, false)) {
                if without_welcome(received) != without_welcome(empty) {
                    wrong.push(format!("{} over {cell:?}: {received:?}, and {empty:?}", credential.name));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} cells are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// Everything that was received except `Welcome`, which contains random numbers.
fn without_welcome(received: &Received) -> Received {
    let welcome_bytes = match received.frames().first() {
        Some(first) if matches!(received.messages()[0], ServerMessage::Welcome(_)) => first.len(),
        _ => 0,
    };
    Received { control: received.control[welcome_bytes..].to_vec(), ..received.clone() }
}

/// The answers to each request over each transport, with one connection for each.
fn answers(credential: &Credential, with_topics: bool) -> Vec<((Transport, Request), Received)> {
    simulate(1, async |sim| {
        let mut fixture = Fixture::new(sim, if with_topics { &TOPICS } else { &[] }).await;
        let (_bystander, session) = fixture.bystander(250).await;
        let mut clients = vec![];
        for (number, cell) in (1..).zip(
            TRANSPORTS
                .iter()
                .flat_map(|transport| REQUESTS.map(|request| (*transport, request))),
        ) {
            let client = RawClient::new(&fixture.sim, number, cell.0, credential.certificate.as_ref()).await;
            messages(credential, cell.1, &session)
                .into_iter()
                .for_each(|message| client.send(message));
            clients.push((cell, client));
        }
        sleep(ANSWER_WAIT).await;
        if with_topics {
            for name in LATER {
                fixture.publish(name).await;
            }
            sleep(ANSWER_WAIT).await;
        }
        clients.into_iter().map(|(cell, client)| (cell, client.received())).collect()
    })
}

/// The messages of a request. `other` is an existing session.
fn messages(credential: &Credential, request: Request, other: &Welcome) -> Vec<ClientMessage> {
    let login = ClientMessage::Hello(Hello { token: credential.token.clone(), ..hello() });
    let join = |session| ClientMessage::Join {
        session,
        lane: LaneId(1),
        grant: LaneGrant::new([0; 32]),
        instance: other.instance,
    };
    match request {
        Request::List => vec![login, ClientMessage::List],
        Request::Watch => {
            vec![login, ClientMessage::Watch { watch: WATCH, glob: Glob::new("**").unwrap() }]
        }
        Request::Subscribe(name) => {
            let subscribe = Subscribe::latest(SUBSCRIPTION, topic(name), 8);
            vec![login, ClientMessage::Subscribe(subscribe)]
        }
        Request::JoinGuessed => vec![join(other.session)],
        Request::JoinNonexistent => vec![join(other.session ^ 1)],
    }
}

/// Returns whether the rights include listing the topic `name`, and whether they include receiving it.
fn rights_to(rights: Rights, name: &str) -> (bool, bool) {
    let has_prefix = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    match rights {
        Rights::NoHandshake | Rights::Nothing(_) => (false, false),
        Rights::Session { lists, receives } => (has_prefix(lists), has_prefix(receives)),
    }
}

/// Checks an answer against the table.
fn check_answer(rights: Rights, request: Request, received: &Received) -> Result<(), String> {
    let refusal = match (rights, request) {
        (Rights::NoHandshake, _) => Some(End::Alert),
        (_, Request::JoinGuessed | Request::JoinNonexistent) => {
            Some(End::Closed(Some(CloseCode::Unauthorised), String::new()))
        }
        (Rights::Nothing(code), _) => Some(End::Closed(Some(code), String::new())),
        (Rights::Session { .. }, _) => None,
    };
    if let Some(end) = refusal {
        let is_good = received.is_empty() && received.end.as_ref() == Some(&end);
        return is_good
            .then_some(())
            .ok_or_else(|| format!("expected only {end:?}: {received:?}"));
    }
    let mut messages = received.messages().into_iter();
    if !matches!(messages.next(), Some(ServerMessage::Welcome(_))) || received.end.is_some() {
        return Err(format!("expected a session: {received:?}"));
    }
    let answers: Vec<_> = messages.collect();
    let is_good = match request {
        Request::List => {
            listed_topics(&answers) == visible(rights, &TOPICS) && answers.len() == 1 && received.streams == 0
        }
        Request::Watch => {
            listed_topics(&answers) == visible(rights, &[TOPICS, LATER].concat()) && received.streams == 0
        }
        Request::Subscribe(name) if !rights_to(rights, name).1 => {
            let end = ServerMessage::End { subscription: SUBSCRIPTION, reason: EndReason::Forbidden };
            answers == [end] && received.streams == 0
        }
        Request::Subscribe(name) if !TOPICS.contains(&name) => answers.is_empty() && received.streams == 0,
        Request::Subscribe(name) => {
            let expected = |answer: &ServerMessage| match answer {
                ServerMessage::Announce(announce) => announce.id.topic == topic(name),
                ServerMessage::Complete { .. } => true,
                _ => false,
            };
            answers.len() == 2 && answers.iter().all(expected) && received.streams > 0 && received.data > 1000
        }
        Request::JoinGuessed | Request::JoinNonexistent => false,
    };
    is_good
        .then_some(())
        .ok_or_else(|| format!("{answers:?}, {} streams", received.streams))
}

/// The topics in `names` that the rights permit to list.
fn visible(rights: Rights, names: &[&str]) -> Vec<Topic> {
    names
        .iter()
        .filter(|name| rights_to(rights, name).0)
        .map(|name| topic(name))
        .collect()
}

/// The topics in answers to lists and watches.
fn listed_topics(answers: &[ServerMessage]) -> Vec<Topic> {
    let names = answers.iter().flat_map(|answer| match answer {
        ServerMessage::Topics { topics, .. } => topics.iter().map(|entry| entry.id.topic.clone()).collect(),
        ServerMessage::Found { watch: WATCH, topics } => topics.clone(),
        other => panic!("{other:?}"),
    });
    names.collect()
}
