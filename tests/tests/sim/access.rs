//! Who may come in, over whichever transport; and what becomes of sessions when that changes.

use std::sync::Arc;
use tensor_relay_client::{Client, ClientError, EndReason, SubscriptionError};
use tensor_relay_protocol::{Glob, Grant, Ticket, TicketId, Verbs};
use tensor_relay_server::{Access, Rules};
use tensor_relay_tests::pair::{
    Sim, client_config, eventually, keeping, publish, rules, sealed, server_config, simulate, topic,
};
use tokio::sync::watch;

async fn connect(sim: &Sim, number: u8, ticket: &Ticket) -> Result<Client, ClientError> {
    Client::connect_with(&sim.connector(number), ticket, client_config()).await
}

/// A ticket for the topics below `a/`, with this identity.
fn narrow(sim: &Sim, id: u8) -> Ticket {
    let grant = Grant { topics: Glob::new("a/*").unwrap(), verbs: Verbs::CONSUME };
    sim.bare_ticket().with_token(sealed(id, vec![grant]))
}

/// Goal: a ticket without a token, or with one that is not valid here, is refused at once and for good; the message says
/// what to do. Method: both, beside a valid one.
#[test]
fn who_is_let_in() {
    simulate(1, async |sim| {
        let _server = sim.server(server_config());
        let bare = connect(&sim, 1, &sim.bare_ticket()).await.unwrap_err();
        assert!(matches!(bare, ClientError::Unauthorised { with_token: false, .. }), "{bare}");
        assert!(bare.to_string().contains("carries no token"), "{bare}");
        let forged = sim.bare_ticket().with_token(tensor_relay_protocol::Token::new("AQAA").unwrap());
        let forged = connect(&sim, 1, &forged).await.unwrap_err();
        assert!(matches!(forged, ClientError::Unauthorised { with_token: true, .. }), "{forged}");
        assert!(forged.to_string().contains("tickets create"), "{forged}");
        let client = connect(&sim, 1, &narrow(&sim, 1)).await.unwrap();
        assert!(client.list().await.unwrap().is_empty());
    });
}

/// Goal: a ticket that is revoked ends the sessions that came with it, and no others, without waiting; none of them connects
/// again. Method: two clients in mid-stream; revoke one's ticket, then rotate the secret away.
#[test]
fn who_loses_its_right_is_cut_off() {
    simulate(2, async |sim| {
        let sender = watch::Sender::new(Arc::new(rules()));
        let server = sim.server_with(Access::following(sender.subscribe()), server_config());
        let mut publisher = server.publisher_with(topic("a/t"), None, keeping(1)).unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        let one = connect(&sim, 1, &narrow(&sim, 1)).await.unwrap();
        let two = connect(&sim, 2, &narrow(&sim, 2)).await.unwrap();
        let (mut first, mut second) =
            (one.subscribe(&topic("a/t")).await.unwrap(), two.subscribe(&topic("a/t")).await.unwrap());
        first.next().await.unwrap();
        second.next().await.unwrap();

        sender.send_replace(Arc::new(Rules { revoked: [TicketId([1; 8])].into(), ..rules() }));
        let lost = first.next().await.unwrap_err();
        let SubscriptionError::Disconnected { source, .. } = &lost else { panic!("{lost}") };
        assert!(source.is_unauthorised(), "{lost}");
        eventually("its session is gone", || server.stats().sessions == 1).await;
        publish(&server, &mut publisher, 2, 1000).await;
        assert_eq!(second.next().await.unwrap().id().version.0, 2, "the other goes on");

        sender.send_replace(Arc::new(Rules { secrets: vec![], ..rules() }));
        assert!(second.next().await.is_err());
        eventually("nobody is left", || server.stats().sessions == 0).await;
        assert!(connect(&sim, 2, &narrow(&sim, 2)).await.unwrap_err().is_unauthorised());
    });
}

/// Goal: a subscription to a topic that is not granted ends with the reason, others of the same session go on.
/// Method: one topic that is granted, one that is not and exists, one that does not exist.
#[test]
fn a_subscription_that_is_not_granted() {
    simulate(3, async |sim| {
        let server = sim.server(server_config());
        let mut publishers = vec![];
        for name in ["a/t", "b/t"] {
            let mut publisher = server.publisher(topic(name)).unwrap();
            publish(&server, &mut publisher, 1, 1000).await;
            publishers.push(publisher);
        }
        let client = connect(&sim, 1, &narrow(&sim, 1)).await.unwrap();
        let mut granted = client.subscribe(&topic("a/t")).await.unwrap();
        for name in ["b/t", "c/t"] {
            let refused = client.subscribe(&topic(name)).await;
            let error = match refused {
                Ok(mut subscription) => subscription.next().await.unwrap_err(),
                Err(error) => panic!("{error}"),
            };
            assert!(
                matches!(error, SubscriptionError::Ended { reason: EndReason::Forbidden, .. }),
                "{error}"
            );
        }
        granted.next().await.unwrap();
        let listed = client.list().await.unwrap();
        assert_eq!(listed.len(), 1, "{listed:?}");
    });
}
