//! One watch of a session: tells the client the names of topics that match, those of now and those that appear.

use crate::{access::Holder, catalogue::Catalogue};
use std::sync::Arc;
use tensor_relay_protocol::{Glob, ServerMessage, Topic, Verb, WatchId};
use tensor_relay_transport::{LaneError, control};
use tokio::sync::broadcast::error::{RecvError, TryRecvError};

/// How many names one message carries: as many of the longest as fit a frame.
const PER_MESSAGE: usize = 240;

/// Tells `sender` of matching topics that `holder` may list, until the lane ends. A name may be sent twice, but is
/// never missed.
pub(crate) async fn run(
    catalogue: Arc<Catalogue>,
    holder: Holder,
    watch: WatchId,
    glob: Glob,
    sender: control::Sender<ServerMessage>,
) -> Result<(), LaneError> {
    // Listened to first, so that nothing appears between the list and the news.
    let mut appearances = catalogue.appearances();
    let mut names = catalogue.names();
    loop {
        names.retain(|name| glob.matches(name.as_str()) && holder.may(Verb::List, name));
        for part in names.chunks(PER_MESSAGE) {
            // Again for each part: it may wait between them.
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
                        Err(TryRecvError::Lagged(_)) => break catalogue.names(),
                        Err(TryRecvError::Empty | TryRecvError::Closed) => break names,
                    }
                }
            }
            Err(RecvError::Lagged(_)) => catalogue.names(),
            Err(RecvError::Closed) => return Ok(()),
        };
    }
}
