//! Watches: the names of topics that match a glob, present and future.

use crate::command::{Command, Watching};
use std::collections::{BTreeMap, HashSet};
use tensor_relay_protocol::{ClientMessage, Glob, ProtocolViolation, Topic, WATCHES_MAX, WatchId};
use tokio::sync::{mpsc, oneshot};

/// The maximum number of topics stored for each watch. A server that sends more is broken or hostile.
const TOPICS_MAX: usize = 1 << 20;

/// Delivers the name of each matching topic once, as it appears, and again when the topic returns after a subscription
/// of this client ended with it. Dropping the watch ends it.
#[derive(Debug)]
pub struct TopicWatch(Watching);

impl TopicWatch {
    pub(crate) fn new(watching: Watching) -> Self {
        Self(watching)
    }

    /// Waits for the next topic; `None` when the session has ended. Cancel safe. Waits without bound for topics that
    /// may never appear.
    pub async fn next(&mut self) -> Option<Topic> {
        self.0.found.recv().await
    }
}

/// The watches of a session. They outlive connections.
#[derive(Debug, Default)]
pub(crate) struct Watches {
    by_id: BTreeMap<u32, Watch>,
    last_id: u32,
}

#[derive(Debug)]
struct Watch {
    glob: Glob,
    /// The names delivered to the user. They bound the queue: each name is in it at most once, and once more for each
    /// subscription of this client that ended with its topic.
    delivered: HashSet<Topic>,
    /// Delivered names that the server repeated: such a topic may have returned when its end is reported.
    repeated: HashSet<Topic>,
    user: mpsc::UnboundedSender<Topic>,
}

impl Watches {
    /// Whether there are no watches.
    pub(crate) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// Starts a watch, and returns its message to the server; `None` at the limit of watches.
    pub(crate) fn begin(
        &mut self,
        glob: Glob,
        reply: oneshot::Sender<Option<Watching>>,
        commands: &mpsc::UnboundedSender<Command>,
    ) -> Option<ClientMessage> {
        if self.by_id.len() >= WATCHES_MAX {
            let _ = reply.send(None);
            return None;
        }
        self.last_id += 1;
        #[expect(clippy::disallowed_methods, reason = "`delivered` bounds the queue")]
        let (user, found) = mpsc::unbounded_channel();
        let watch = WatchId(self.last_id);
        self.by_id.insert(
            self.last_id,
            Watch { glob: glob.clone(), delivered: HashSet::new(), repeated: HashSet::new(), user },
        );
        // If the user is gone, dropping the handle ends the watch.
        let _ = reply.send(Some(Watching { id: watch, found, commands: commands.clone() }));
        Some(ClientMessage::Watch { watch, glob })
    }

    /// Ends a watch, and returns its message to the server.
    pub(crate) fn end(&mut self, watch: WatchId) -> Option<ClientMessage> {
        self.by_id.remove(&watch.0).map(|_| ClientMessage::Unwatch(watch))
    }

    /// The messages that set up all watches at a new server.
    pub(crate) fn messages(&self) -> impl Iterator<Item = ClientMessage> {
        let watches = self.by_id.iter();
        watches.map(|(id, watch)| ClientMessage::Watch { watch: WatchId(*id), glob: watch.glob.clone() })
    }

    /// Handles found names. Some may have been delivered already: servers repeat all names after a lost connection.
    pub(crate) fn handle_found(
        &mut self,
        watch: WatchId,
        topics: Vec<Topic>,
    ) -> Result<(), ProtocolViolation> {
        if watch.0 == 0 || watch.0 > self.last_id {
            return Err(ProtocolViolation::UnknownWatch(watch));
        }
        let Some(watch) = self.by_id.get_mut(&watch.0) else { return Ok(()) };
        for topic in topics {
            if watch.delivered.len() >= TOPICS_MAX {
                return Err(ProtocolViolation::TooManyTopics(TOPICS_MAX));
            }
            if !watch.glob.matches(topic.as_str()) {
                continue;
            }
            if watch.delivered.insert(topic.clone()) {
                let _ = watch.user.send(topic); // Fails only if the user dropped the handle, which ends the watch.
            } else {
                watch.repeated.insert(topic);
            }
        }
        Ok(())
    }

    /// Records that a topic ended: its name is delivered again when it returns.
    pub(crate) fn handle_topic_ended(&mut self, topic: &Topic) {
        for watch in self.by_id.values_mut().filter(|watch| watch.delivered.contains(topic)) {
            match watch.repeated.remove(topic) {
                true => drop(watch.user.send(topic.clone())),
                false => drop(watch.delivered.remove(topic)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    #[expect(clippy::disallowed_methods, reason = "a test sends few messages")]
    async fn a_name_is_delivered_once_until_its_topic_ends() {
        let (commands, _inbox) = mpsc::unbounded_channel();
        let (reply, mut answer) = oneshot::channel();
        let mut watches = Watches::default();
        watches.begin(Glob::new("kv/*").unwrap(), reply, &commands);
        let mut watch = TopicWatch::new(answer.try_recv().unwrap().unwrap());
        let topic = |name: &str| Topic::new(name).unwrap();
        for _ in 0..2 {
            watches
                .handle_found(watch.0.id, vec![topic("kv/a"), topic("other"), topic("kv/b")])
                .unwrap();
        }
        // The server repeated the name: its topic may have returned before its end was reported. It is delivered once
        // more.
        watches.handle_topic_ended(&topic("kv/a"));
        watches.handle_topic_ended(&topic("kv/a"));
        watches.handle_found(watch.0.id, vec![topic("kv/a")]).unwrap();
        for name in ["kv/a", "kv/b", "kv/a", "kv/a"] {
            assert_eq!(watch.next().await, Some(topic(name)));
        }
        assert!(watches.handle_found(WatchId(9), vec![]).is_err());
        assert!(watches.end(watch.0.id).is_some());
        assert_eq!(
            watches.handle_found(watch.0.id, vec![topic("kv/c")]),
            Ok(()),
            "the server may not know yet"
        );
        assert_eq!(watch.next().await, None);
    }
}
