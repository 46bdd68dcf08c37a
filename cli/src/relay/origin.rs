//! [`Origin`]: one server whose topics are relayed.

use super::{
    follower::Following,
    status::OriginStatus,
    topics::{Over, Topics},
};
use crate::{exit::message_of, sharing::Sharing};
use std::{convert::Infallible, sync::Arc, time::Duration};
use tensor_relay_client::{Client, ClientError, Config, EndReason, Glob, Ticket, Topic};
use tokio::{sync::mpsc, task::JoinSet};

/// The longest pause between two attempts to connect.
const RETRY_MAX: Duration = Duration::from_secs(10);

/// The time in which an origin names the topics that it has.
const NAMED_TIMEOUT: Duration = Duration::from_secs(5);

/// The interval at which the connection is looked at, for the status.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The time without a connection after which topics come from other origins that have them: a connection that is
/// restored sooner continues a version under way.
const FAILOVER_AFTER: Duration = Duration::from_secs(10);

/// The time with a connection after which topics come from an origin again: one that is lost again and again would
/// interrupt a version each time.
const RETURN_AFTER: Duration = Duration::from_secs(10);

/// The interval at which the origin's list is looked at: for topics that ended and have returned, for those that it does
/// not have or is behind with, and after its restart.
const LIST_INTERVAL: Duration = Duration::from_secs(5);

/// The most names of topics that wait to be followed.
const FOUND_MAX: usize = 256;

/// The tasks that follow topics.
type Followers = JoinSet<(Topic, Result<Over, ClientError>)>;

/// A server, and what is taken from it.
pub(super) struct Origin {
    /// Its place among the origins.
    pub(super) number: usize,
    pub(super) ticket: Ticket,
    pub(super) topics: Vec<Glob>,
    pub(super) config: Config,
    /// Serves the origin's other clients, while this lives.
    pub(super) sharing: Sharing,
    pub(super) status: OriginStatus,
    pub(super) following: Arc<Following>,
    pub(super) connect_timeout: Duration,
}

impl Origin {
    /// Relays its topics for as long as the process runs.
    pub(super) async fn run(self) -> Infallible {
        let _sharing = &self.sharing;
        let mut pause = Duration::from_millis(250);
        let mut said = String::new();
        loop {
            let connecting = Client::connect_within(self.connect_timeout, &self.ticket, self.config.clone());
            let error = match connecting.await {
                Ok(client) => {
                    pause = Duration::from_millis(250);
                    self.status.handle_connected(client.status_reader());
                    let ended = self.follow(Arc::new(client)).await;
                    self.following.set_lost(self.number, true);
                    ended.err().unwrap_or_else(|| anyhow::anyhow!("its session ended"))
                }
                Err(error) => error.into(),
            };
            let text = message_of(&error);
            if error.downcast_ref().is_some_and(ClientError::is_unauthorised) {
                self.handle_refused().await;
            }
            self.status.handle_lost(&text);
            if said != text {
                tracing::warn!(origin = %self.status.name(), error = %text, "An origin cannot be reached; what is here is served on.");
                said = text;
            }
            tokio::time::sleep(pause.mul_f64(0.5 + rand::random::<f64>() / 2.0)).await;
            pause = (2 * pause).min(RETRY_MAX);
        }
    }

    /// Ends the topics from an origin that has revoked this relay's right.
    async fn handle_refused(&self) {
        for topic in self.following.unclaimed(self.number, &self.topics) {
            tracing::error!(
                %topic, origin = %self.status.name(),
                "The origin refuses this relay: its right to a topic was revoked or has expired. The topic ends here too."
            );
            self.following.end(&topic, EndReason::Forbidden).await;
        }
    }

    /// Follows the origin's topics until the session ends.
    async fn follow(&self, client: Arc<Client>) -> anyhow::Result<()> {
        let (found, mut names) = mpsc::channel(FOUND_MAX);
        let mut watching = JoinSet::new();
        for glob in &self.topics {
            let (mut watch, found) = (client.watch(glob).await?, found.clone());
            watching.spawn(async move {
                while let Some(topic) = watch.next().await
                    && found.send(topic).await.is_ok()
                {}
            });
        }
        drop(found);
        // What was restored, and the origin has not named: it may have become forbidden meanwhile.
        let mut unnamed = std::pin::pin!(tokio::time::sleep(NAMED_TIMEOUT));
        let mut is_waiting = true;
        let mut checking = tokio::time::interval(CHECK_INTERVAL);
        let mut returning = tokio::time::interval(LIST_INTERVAL);
        let (mut followers, mut listing, mut topics) = (Followers::new(), JoinSet::new(), Topics::default());
        let (mut instance, mut is_stale) = (client.instance(), false);
        loop {
            let named = tokio::select! {
                topic = names.recv() => match topic {
                    Some(topic) => vec![topic],
                    None => return client.list().await.map(drop).map_err(Into::into), // The session has ended: why?
                },
                () = &mut unnamed, if is_waiting => {
                    is_waiting = false;
                    self.following.unclaimed(self.number, &self.topics)
                }
                _ = checking.tick() => {
                    self.status.check();
                    let (lost_for, connected_for) = (self.status.lost_for(), self.status.connected_for());
                    let was_lost = self.following.is_lost(self.number);
                    self.following.set_lost(self.number, is_lost(was_lost, lost_for, connected_for));
                    continue;
                }
                _ = returning.tick() => {
                    let connected_to = client.instance();
                    is_stale |= std::mem::replace(&mut instance, connected_to) != connected_to;
                    let is_wanted = is_stale || topics.may_return() || self.following.is_waiting(self.number);
                    if is_wanted && listing.is_empty() {
                        is_stale = false;
                        let client = Arc::clone(&client);
                        listing.spawn(async move { client.list().await });
                    }
                    continue;
                }
                Some(listed) = listing.join_next() => {
                    let Ok(entries) = listed? else {
                        is_stale = true; // A session that has ended is noticed by the watches.
                        continue;
                    };
                    self.following.handle_listed(self.number, &entries);
                    for entry in entries {
                        if topics.handle_listed(&entry.id, self.following.newest(&entry.id.topic)) {
                            self.begin(&client, entry.id.topic, &mut followers);
                        }
                    }
                    continue;
                }
                Some(over) = followers.join_next() => {
                    let (topic, over) = over?;
                    self.status.remove_topic(&topic);
                    if topics.handle_over(&topic, over?) {
                        self.begin(&client, topic, &mut followers);
                    }
                    continue;
                }
            };
            for topic in named {
                if topics.handle_named(&topic) {
                    self.begin(&client, topic, &mut followers);
                }
            }
        }
    }

    /// Begins to follow a topic.
    fn begin(&self, client: &Arc<Client>, topic: Topic, followers: &mut Followers) {
        self.status.add_topic(&topic);
        let (following, client) = (Arc::clone(&self.following), Arc::clone(client));
        let (number, status) = (self.number, self.status.clone());
        followers.spawn(async move {
            let over = following.follow(&client, &topic, number, &status).await;
            (topic, over)
        });
    }
}

/// Whether topics come from other origins that have them: after a while without a connection, until it is back for a while.
fn is_lost(was_lost: bool, lost_for: Duration, connected_for: Duration) -> bool {
    match was_lost {
        true => connected_for < RETURN_AFTER,
        false => lost_for > FAILOVER_AFTER,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_origin_is_back_once_it_stays_connected() {
        let (second, zero) = (Duration::from_secs(1), Duration::ZERO);
        assert!(!is_lost(false, FAILOVER_AFTER, zero), "it may continue a version");
        assert!(is_lost(false, FAILOVER_AFTER + second, zero));
        assert!(is_lost(true, second, zero) && is_lost(true, zero, RETURN_AFTER - second));
        assert!(!is_lost(true, zero, RETURN_AFTER));
    }
}
