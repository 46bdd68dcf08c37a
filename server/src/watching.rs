//! Runs one watch of a session: sends the names of matching topics, existing and new.

use crate::{access::Holder, catalogue::Catalogue};
use std::sync::Arc;
use tensor_relay_protocol::{Glob, ServerMessage, Topic, Verb, WatchId};
use tensor_relay_transport::{LaneError, control};
use tokio::sync::broadcast::error::{RecvError, TryRecvError};

/// The maximum number of names in a message: even the longest names fit a frame.
const TOPICS_PER_MESSAGE: usize = 240;

/// Sends matching topics that `holder` may list, until the lane ends. A name may be sent twice, but is never missed,
/// unless `holder` was permitted to list it only after the topic was found.
pub(crate) async fn run(
    catalogue: Arc<Catalogue>,
    holder: Holder,
    watch: WatchId,
    glob: Glob,
    sender: control::Sender<ServerMessage>,
) -> Result<(), LaneError> {
    // Subscribed first, so that no topic is missed between the list and the signals.
    let mut appearances = catalogue.appearances();
    let is_wanted = |name: &Topic| glob.matches(name.as_str()) && holder.may(Verb::List, name);
    let mut names = catalogue.names(is_wanted);
    loop {
        for part in names.chunks(TOPICS_PER_MESSAGE) {
            // For each part: rights may change between them.
            let topics: Vec<_> = part.iter().filter(|name| holder.may(Verb::List, name)).cloned().collect();
            if !topics.is_empty() {
                sender.send(ServerMessage::Found { watch, topics }).await?;
            }
        }
        names = match appearances.recv().await {
            Ok(name) => {
                let mut names: Vec<Topic> = vec![name];
                loop {
                    match appearances.try_recv() {
                        Ok(name) => names.push(name),
                        Err(TryRecvError::Lagged(_)) => break catalogue.names(is_wanted),
                        Err(TryRecvError::Empty | TryRecvError::Closed) => {
                            names.retain(is_wanted);
                            break names;
                        }
                    }
                }
            }
            Err(RecvError::Lagged(_)) => catalogue.names(is_wanted),
            Err(RecvError::Closed) => return Ok(()),
        };
    }
}
