//! Access control of the publish socket, where a process's user id is its credential; and replayed logins.

use super::{
    ANSWER_WAIT, Fixture, TOPICS, clock,
    credentials::{START_S, claims, grant, sealed, set_clock},
};
use crate::raw::{client_tls, hello};
use rustls::crypto::aws_lc_rs;
use std::{
    io,
    net::Ipv4Addr,
    pin::{Pin, pin},
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};
use tensor_relay_client::{Client, Request};
use tensor_relay_protocol::{
    ClientMessage, Dtype, Hello, Shape, TensorName, TensorSpec, Ticket, Topic, Verbs, encode_client,
};
use tensor_relay_server::{
    Access, Identity, Listener, Rules, Server, TopicOptions, Tuning, WhenFull,
    sidecar::{Producer, PublishError, PublishSocket, Refusal, SealedVersion, TensorWriter},
};
use tensor_relay_tests::pair::{retaining, simulate, topic};
use tensor_relay_transport::{ByteStream, Network};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    sync::watch,
    time::{sleep, timeout},
};
use tokio_rustls::TlsConnector;

/// The wait for a publish to complete.
const PUBLISH_WAIT: Duration = Duration::from_millis(500);

/// Access control lists, with `ME` for the user of this process, and the topics into which each permits it to publish.
const LISTS: [(&str, &[&str]); 9] = [
    ("", &["mine/a", "mine/b", "other"]),
    ("key:trusted list,subscribe **", &["mine/a", "mine/b", "other"]),
    ("uid:ME publish **", &["mine/a", "mine/b", "other"]),
    ("uid:* publish **", &["mine/a", "mine/b", "other"]),
    ("uid:ME publish mine/*", &["mine/a", "mine/b"]),
    ("uid:ME publish mine/a", &["mine/a"]),
    ("uid:4242 publish **\nuid:ME publish other", &["other"]),
    ("uid:4242 publish **", &[]),
    ("uid:ME1 publish **", &[]),
];

/// Goal: each verb of the publish socket is permitted or refused as the list says; a refusal is the same whether or not
/// the topic is open. Method: each list with one producer, which opened one of the topics before.
#[test]
fn every_acl_is_obeyed() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let wrong = runtime.block_on(async {
        let mut wrong = vec![];
        for (list, allowed) in LISTS {
            for open in ["mine/a", "other"] {
                for (cell, error) in publish_under(list, allowed, open).await {
                    wrong.push(format!("{list:?}, {open} is open, {cell}: {error}"));
                }
            }
        }
        wrong
    });
    assert!(wrong.is_empty(), "{} cells are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// Runs each verb on each topic under `list`, while the topic `open` is open; returns the cells whose results
/// contradict the list, with the error of each.
async fn publish_under(list: &str, allowed: &[&str], open: &str) -> Vec<(String, String)> {
    let home = tempfile::tempdir().unwrap();
    let identity = Identity::load_or_create(&home.path().join("state")).unwrap();
    let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), &identity, Tuning::default()).unwrap();
    let rules = watch::Sender::new(Arc::new(Rules::default()));
    let server = Server::start(listener, Access::following(rules.subscribe()), Default::default());
    let path = home.path().join("s");
    let socket = PublishSocket::open(&path, &[]).unwrap();
    let _accepting = server.publish_from(socket, TopicOptions::default(), None, |_| {});
    let producer = Producer::connect(&path).await.unwrap();
    publish(&producer, topic(open)).await.unwrap();

    let user = rustix::process::geteuid().as_raw().to_string();
    let acl = list.replace("ME", &user).parse().unwrap();
    rules.send_replace(Arc::new(Rules { acl, ..Rules::default() }));
    let mut wrong = vec![];
    for name in ["mine/a", "mine/b", "other"] {
        let ended = producer.end(topic(name), false).await;
        let withdrawn = producer.end(topic(name), true).await;
        let published = publish(&producer, topic(name)).await;
        let is_allowed = allowed.contains(&name);
        let results = [("end", ended), ("withdraw", withdrawn), ("publish", published)];
        for (verb, result) in results {
            let is_first_end = verb == "end" && name == open;
            // A topic that is not open, or was just ended, cannot be ended.
            let expected = match is_allowed {
                true if verb == "publish" || is_first_end => Ok(()),
                true => Err((Refusal::TopicEnded, None)),
                false => Err((Refusal::Forbidden, Some(refusal(&user, name)))),
            };
            let found = match result {
                Ok(()) => Ok(()),
                Err(PublishError::Refused { reason, text }) => Err((reason, (!is_allowed).then_some(text))),
                Err(other) => panic!("{other}"),
            };
            if found != expected {
                wrong.push((format!("{verb} {name}"), format!("{found:?}, not {expected:?}")));
            }
        }
    }
    wrong
}

/// Goal: a version is not published once its producer has lost the right. Method: a version that waits for a reader in
/// mode `every`, and one queued behind it; the right is revoked.
#[test]
fn a_queued_version_is_refused_after_revocation() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let home = tempfile::tempdir().unwrap();
        let identity = Identity::load_or_create(&home.path().join("state")).unwrap();
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), &identity, Tuning::default()).unwrap();
        let address = listener.local_address().to_string();
        let ticket = Ticket::new(vec![address], vec![identity.fingerprint().0], None).unwrap();
        let rules = |user: u32| {
            let acl = format!("uid:{user} publish **").parse().unwrap();
            Rules { acl, ..Rules::ephemeral() }
        };
        let user = rustix::process::geteuid().as_raw();
        let before = rules(user);
        let ticket = before.own_ticket(ticket);
        let sender = watch::Sender::new(Arc::new(before.clone()));
        let server = Server::start(listener, Access::following(sender.subscribe()), Default::default());
        let path = home.path().join("s");
        let options = TopicOptions { when_full: WhenFull::Block, ..retaining(1) };
        let socket = PublishSocket::open(&path, &[]).unwrap();
        let _accepting = server.publish_from(socket, options, None, |_| {});
        let producer = Producer::connect(&path).await.unwrap();
        publish(&producer, topic("t")).await.unwrap();
        let client = Client::connect(&ticket, Default::default()).await.unwrap();
        let mut reader = client.subscribe_to(Request::every(topic("t"))).await.unwrap();
        reader.next().await.unwrap(); // The next call of `next` would acknowledge this version.

        let other = Producer::connect(&path).await.unwrap();
        let mut first = pin!(publish(&producer, topic("t")));
        assert!(timeout(PUBLISH_WAIT, &mut first).await.is_err(), "the first version waits for the reader");
        // On a connection of its own, a version waits for its turn in the topic.
        let mut second = pin!(publish(&other, topic("t")));
        assert!(timeout(PUBLISH_WAIT, &mut second).await.is_err(), "the second version waits for the first");
        sender.send_replace(Arc::new(Rules { acl: rules(user + 1).acl, ..before }));
        for waiting in [first, second] {
            let refused = timeout(Duration::from_secs(60), waiting).await.unwrap();
            let Err(PublishError::Refused { reason: Refusal::Forbidden, .. }) = refused else {
                panic!("{refused:?}")
            };
        }
        drop(reader);
        client.close().await;
    });
}

/// The text of a refusal, which does not say whether the topic is open.
fn refusal(user: &str, name: &str) -> String {
    format!(
        "the server's access control list does not let user {user} publish into topic {name}: add a line `uid:{user} \
         publish {name}`"
    )
}

async fn publish(producer: &Producer, topic: Topic) -> Result<(), PublishError> {
    let specs = vec![TensorSpec::new(TensorName::new("w").unwrap(), Dtype::U8, Shape::new(&[64]).unwrap())];
    let fill = |_, out: &mut TensorWriter<'_>| -> io::Result<()> { out.write(&[7; 64]) };
    let version = SealedVersion::new(producer.terms(), specs, vec![], fill).unwrap();
    producer.publish(topic, version, vec![]).await.map(drop)
}

/// Goal: a replayed login gives no access, because TLS has new keys for each connection. QUIC uses the same TLS.
/// Method: replay all bytes of a client that logged in with its token and listed the topics, during its session and
/// afterwards.
#[test]
fn a_replayed_login_is_rejected() {
    simulate(3, async |sim| {
        let fixture = Fixture::new(sim, &TOPICS).await;
        let recorded_bytes = Arc::<Mutex<Vec<u8>>>::default();
        let host = fixture.sim.client_host(1);
        let stream = host
            .connect(Ipv4Addr::UNSPECIFIED.into(), fixture.sim.server_address(), None)
            .await
            .unwrap();
        let tls = Arc::new(client_tls(aws_lc_rs::default_provider()));
        let recorder = Recorder { stream, recorded_bytes: Arc::clone(&recorded_bytes) };
        let mut tls = TlsConnector::from(tls)
            .connect("tensor-relay".try_into().unwrap(), recorder)
            .await
            .unwrap();
        let id = claims(9, vec![grant("**", Verbs::CONSUME)]);
        let login = ClientMessage::Hello(Hello { token: Some(sealed(id.clone())), ..hello() });
        for message in [encode_client(login), encode_client(ClientMessage::List)] {
            let head = [&[1, 0, 0, 0][..], &(message.len() as u32).to_le_bytes()].concat();
            tls.write_all(&[head, message].concat()).await.unwrap();
        }
        tls.flush().await.unwrap();
        let mut answer = [0; 8 + 64];
        timeout(ANSWER_WAIT, tls.read_exact(&mut answer)).await.unwrap().unwrap();
        assert_eq!(fixture.server.stats().sessions, 1, "the recorded login succeeded");

        for (number, is_over) in [(2, false), (3, true)] {
            set_clock(START_S + u64::from(number));
            if is_over {
                let _ = tls.get_mut().0.stream.shutdown().await;
                sleep(Duration::from_secs(30)).await;
            }
            let host = fixture.sim.client_host(number);
            let mut replayed = host
                .connect(Ipv4Addr::UNSPECIFIED.into(), fixture.sim.server_address(), None)
                .await
                .unwrap();
            let bytes = recorded_bytes.lock().unwrap().clone();
            replayed.write_all(&bytes).await.unwrap();
            let mut answer = vec![];
            let end = timeout(Duration::from_secs(30), replayed.read_to_end(&mut answer)).await;
            assert!(end.is_ok(), "the connection did not end");
            assert!(answer.len() < 2048, "more than a handshake and an alert: {} bytes", answer.len());
            assert_eq!(fixture.server.stats().sessions, u64::from(!is_over));
            assert!(fixture.access.uses()[&id.id] < clock(), "the ticket was not used again");
        }
    });
}

/// Records the bytes that are written to a stream.
#[derive(Debug)]
struct Recorder {
    stream: Box<dyn ByteStream>,
    recorded_bytes: Arc<Mutex<Vec<u8>>>,
}

impl AsyncRead for Recorder {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Recorder {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(written)) = written {
            self.recorded_bytes.lock().unwrap().extend_from_slice(&bytes[..written]);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
