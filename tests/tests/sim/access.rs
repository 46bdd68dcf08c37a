//! Access control of sessions over either transport, and changes of rights during sessions.

use std::{sync::Arc, time::Duration};
use tensor_relay_client::{Client, ClientError, EndReason, ReaderName, Request, SubscriptionError};
use tensor_relay_protocol::{Glob, Grant, Ticket, TicketId, Verbs};
use tensor_relay_server::{Access, Identity, Rules};
use tensor_relay_tests::pair::{
    Sim, client_config, eventually, publish, retaining, rules, server_config, simulate, token_with, topic,
};
use tokio::sync::watch;

async fn connect(sim: &Sim, number: u8, ticket: &Ticket) -> Result<Client, ClientError> {
    Client::connect_with(&sim.connector(number), ticket, client_config()).await
}

/// A ticket for the topics below `a/`, with this ticket id.
fn narrow_ticket(sim: &Sim, id: u8) -> Ticket {
    let grant = Grant { topics: Glob::new("a/*").unwrap(), verbs: Verbs::CONSUME };
    sim.bare_ticket().with_token(token_with(id, vec![grant]))
}

/// Goal: a ticket without a token, or with an invalid one, is refused; the message says what to do.
/// Method: connect with either, and with a valid ticket.
#[test]
fn only_valid_tickets_are_admitted() {
    simulate(1, async |sim| {
        let _server = sim.server(server_config());
        let bare = connect(&sim, 1, &sim.bare_ticket()).await.unwrap_err();
        assert!(matches!(bare, ClientError::Unauthorised { with_token: false, .. }), "{bare}");
        assert!(bare.to_string().contains("carries no token"), "{bare}");
        let forged = sim.bare_ticket().with_token(tensor_relay_protocol::Token::new("AQAA").unwrap());
        let forged = connect(&sim, 1, &forged).await.unwrap_err();
        assert!(matches!(forged, ClientError::Unauthorised { with_token: true, .. }), "{forged}");
        assert!(forged.to_string().contains("tickets create"), "{forged}");
        let client = connect(&sim, 1, &narrow_ticket(&sim, 1)).await.unwrap();
        assert!(client.list().await.unwrap().is_empty());
    });
}

/// Goal: revoking a ticket ends its sessions, and no others; removing the secret ends all, and refuses new ones.
/// Method: two clients with subscriptions; revoke the ticket of one client, then remove the secret.
#[test]
fn a_revoked_ticket_ends_its_sessions() {
    simulate(2, async |sim| {
        let sender = watch::Sender::new(Arc::new(rules()));
        let server = sim.server_with(Access::following(sender.subscribe()), server_config());
        let mut publisher = server.publisher_with(topic("a/t"), None, retaining(1)).unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        let one = connect(&sim, 1, &narrow_ticket(&sim, 1)).await.unwrap();
        let two = connect(&sim, 2, &narrow_ticket(&sim, 2)).await.unwrap();
        let (mut first, mut second) =
            (one.subscribe(&topic("a/t")).await.unwrap(), two.subscribe(&topic("a/t")).await.unwrap());
        first.next().await.unwrap();
        second.next().await.unwrap();

        sender.send_replace(Arc::new(Rules { revoked: [TicketId([1; 8])].into(), ..rules() }));
        let lost = first.next().await.unwrap_err();
        let SubscriptionError::Disconnected { source, .. } = &lost else { panic!("{lost}") };
        assert!(source.is_unauthorised(), "{lost}");
        eventually("the first session has ended", || server.stats().sessions == 1).await;
        publish(&server, &mut publisher, 2, 1000).await;
        assert_eq!(second.next().await.unwrap().id().version.0, 2, "the second session continues");

        sender.send_replace(Arc::new(Rules { secrets: vec![], ..rules() }));
        assert!(second.next().await.is_err());
        eventually("the second session has ended", || server.stats().sessions == 0).await;
        assert!(connect(&sim, 2, &narrow_ticket(&sim, 2)).await.unwrap_err().is_unauthorised());
    });
}

/// Goal: a subscription to a topic that is not granted ends with the reason; other subscriptions of the session
/// continue.
/// Method: a granted topic, an existing topic that is not granted, and a topic that does not exist.
#[test]
fn a_subscription_without_a_grant_ends() {
    simulate(3, async |sim| {
        let server = sim.server(server_config());
        let mut publishers = vec![];
        for name in ["a/t", "b/t"] {
            let mut publisher = server.publisher(topic(name)).unwrap();
            publish(&server, &mut publisher, 1, 1000).await;
            publishers.push(publisher);
        }
        let client = connect(&sim, 1, &narrow_ticket(&sim, 1)).await.unwrap();
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

/// Goal: reader names are per principal: a reader does not take over the place of another principal's reader of that
/// name. Method: two tickets, one name, mode `every`; each reader gets every version, and a second session with the
/// first ticket takes over the first place.
#[test]
fn readers_of_two_principals_share_no_place() {
    simulate(4, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher_with(topic("a/t"), None, retaining(3)).unwrap();
        let request = Request::every(topic("a/t")).reader(ReaderName::new("r").unwrap());
        let mut readers = vec![];
        for number in [1, 2] {
            let client = connect(&sim, number, &narrow_ticket(&sim, number)).await.unwrap();
            readers.push((client.subscribe_to(request.clone()).await.unwrap(), client));
        }
        for (_, client) in &readers {
            client.list().await.unwrap(); // Handled after the subscription, which therefore exists.
        }
        for version in 1..=2 {
            publish(&server, &mut publisher, version, 1000).await;
            for (reader, _) in &mut readers {
                assert_eq!(reader.next().await.unwrap().id().version.0, version);
            }
        }
        let again = connect(&sim, 3, &narrow_ticket(&sim, 1)).await.unwrap();
        let _again = again.subscribe_to(request).await.unwrap();
        let replaced = readers[0].0.next().await.unwrap_err();
        assert!(
            matches!(replaced, SubscriptionError::Ended { reason: EndReason::Replaced, .. }),
            "{replaced}"
        );
        publish(&server, &mut publisher, 3, 1000).await;
        assert_eq!(
            readers[1].0.next().await.unwrap().id().version.0,
            3,
            "the reader of the second principal continues"
        );
    });
}

/// Goal: a change of the access control list applies to existing watches and subscriptions; a session ends when its key
/// is revoked, even with a valid token. Method: a key with a valid token; narrow the list during a watch, publish, and
/// revoke the key.
#[test]
fn changed_rights_apply_to_live_sessions() {
    simulate(5, async |sim| {
        let identity = Arc::new(Identity::ephemeral().unwrap());
        let key = identity.fingerprint();
        let with = |acl: &str| {
            let keys = [(key, "k".to_owned())].into();
            Arc::new(Rules { keys, acl: acl.parse().unwrap(), ..rules() })
        };
        let sender = watch::Sender::new(with("key:k list,subscribe **"));
        let server = sim.server_with(Access::following(sender.subscribe()), server_config());
        let mut publisher = server.publisher_with(topic("a/t"), None, retaining(1)).unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        let config = tensor_relay_client::Config { identity: Some(identity), ..client_config() };
        let client = Client::connect_with(&sim.connector(1), &sim.ticket(), config.clone())
            .await
            .unwrap();
        let mut watch = client.watch(&Glob::new("**").unwrap()).await.unwrap();
        assert_eq!(watch.next().await, Some(topic("a/t")));
        let mut lost = client.subscribe(&topic("a/t")).await.unwrap();
        lost.next().await.unwrap();

        sender.send_replace(with("key:k list,subscribe b/*"));
        let error = lost.next().await.unwrap_err();
        assert!(matches!(error, SubscriptionError::Ended { reason: EndReason::Forbidden, .. }), "{error}");
        let mut publishers = vec![];
        for name in ["a/u", "b/u"] {
            let mut publisher = server.publisher(topic(name)).unwrap();
            publish(&server, &mut publisher, 1, 1000).await;
            publishers.push(publisher);
        }
        assert_eq!(watch.next().await, Some(topic("b/u")), "the watch does not name `a/u`");
        assert_eq!(client.list().await.unwrap().len(), 1);

        let revoked_keys = [key].into();
        sender.send_replace(Arc::new(Rules { revoked_keys, ..rules() }));
        eventually("the key's session has ended", || server.stats().sessions == 0).await;
        let again = Client::connect_with(&sim.connector(1), &sim.ticket(), config).await;
        assert!(again.unwrap_err().is_unauthorised());
        connect(&sim, 2, &sim.ticket()).await.expect("the token alone is valid");
        assert!(sim.elapsed() < Duration::from_secs(30));
    });
}
