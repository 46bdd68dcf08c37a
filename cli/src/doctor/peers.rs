//! Checks of the paths to other subscribers that share chunks of the ticket's topic.

use super::finding::{Finding, Fix, State};
use crate::{
    sharing::{Sharing, SharingOptions, SwarmOptions},
    units,
};
use std::{sync::Arc, time::Duration};
use tensor_relay_client::{
    Client, Config, Identity, PeerReport, PeerState, Progress, Request, Ticket, Topic,
};

/// The deadline for connecting to the server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The time for the server to name others, and for these to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(6);

/// What is received at most meanwhile.
const RECEIVED_BYTES_MAX: u64 = 256 << 20;

/// The interval at which the answers are looked at.
const POLL: Duration = Duration::from_millis(100);

/// Begins to take the newest version of the ticket's topic as `subscribe --share=take` does, until every subscriber that the
/// server names has answered or cannot be reached; then gives it up. `None` for a ticket without a topic, or if the server
/// cannot be reached, which other findings say.
pub(super) async fn check(ticket: &Ticket, identity: Option<Arc<Identity>>) -> Option<Finding> {
    let topic = ticket.topic()?.clone();
    let options = SharingOptions { swarm: Some(SwarmOptions::default()), ..SharingOptions::default() };
    let sharing = Sharing::open(&options).ok()?;
    let config = sharing.configure(Config { identity, base_bytes: 0, ..Config::default() });
    let client = Client::connect_within(CONNECT_TIMEOUT, ticket, config).await.ok()?;
    let peers = peers(&client, topic).await;
    client.close().await;
    Some(judge(&peers))
}

/// What became of the subscribers that the server named.
async fn peers(client: &Client, topic: Topic) -> Vec<PeerReport> {
    let Ok(mut subscription) = client.subscribe_to(Request::latest(topic)).await else { return vec![] };
    let progress = subscription.progress_reader();
    let answered = async {
        loop {
            tokio::time::sleep(POLL).await;
            let peers = client.peers();
            let is_connecting = peers.iter().any(|peer| peer.state == PeerState::Connecting);
            let Progress { verified_bytes, .. } = progress();
            if !peers.is_empty() && !is_connecting || verified_bytes > RECEIVED_BYTES_MAX {
                return;
            }
        }
    };
    tokio::select! {
        () = answered => {}
        _ = subscription.next() => {}
        () = tokio::time::sleep(ANSWER_TIMEOUT) => {}
    }
    client.peers()
}

fn judge(peers: &[PeerReport]) -> Finding {
    const NAME: &str = "peers";
    let wanted = "an answer from every subscriber that shares, so that the server need not send everything";
    let is_used = |peer: &&PeerReport| peer.state == PeerState::Connected;
    let answered = peers.iter().filter(is_used).count();
    if peers.is_empty() {
        let measured = "the server names no other subscriber: none shares the newest version now, it is small, or the \
                        server does not permit sharing";
        return Finding::ok(NAME, measured, wanted);
    }
    let others = units::count(peers.len(), "other subscriber");
    let mut measured = format!("{answered} of {others} answered");
    for PeerReport { addresses, state, .. } in peers.iter().filter(|peer| !is_used(peer)) {
        // A port is the same over both transports.
        let address = addresses.first().map(|it| it.address.to_string()).unwrap_or_default();
        measured += &format!("; {address}: {state}");
    }
    let fix = Fix {
        host: "let hosts of subscribers reach each other: fix the port with --share-listen ADDR:PORT there, and allow it \
               over UDP and TCP in firewalls",
        docker: "the same, and publish that port for UDP and TCP: -p PORT:PORT/udp -p PORT:PORT/tcp",
        kubernetes: "the same, and allow it for UDP and TCP between the pods in every NetworkPolicy",
    };
    Finding::new(NAME, State::Warn.unless(answered == peers.len()), measured, wanted, fix)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_client::{Fingerprint, PeerAddress, PeerTransport};

    fn report(number: u8, state: PeerState) -> PeerReport {
        let address = format!("10.0.0.{number}:4747").parse().unwrap();
        let addresses = vec![PeerAddress { transport: PeerTransport::Tcp, address }];
        PeerReport { key: Fingerprint([number; 32]), addresses, state }
    }

    #[test]
    fn subscribers_that_do_not_answer_are_named_with_the_reason() {
        assert_eq!(judge(&[]).state, State::Ok);
        let answers = report(1, PeerState::Connected);
        assert_eq!(judge(std::slice::from_ref(&answers)).state, State::Ok);
        let refuses = report(2, PeerState::NotUsed("connection refused".into()));
        let finding = judge(&[answers, refuses]);
        assert_eq!(finding.state, State::Warn);
        assert!(finding.measured.starts_with("1 of 2 other subscribers answered"), "{finding:?}");
        assert!(finding.measured.contains("10.0.0.2:4747: not used: connection refused"), "{finding:?}");
    }
}
