//! What operators see of swarms: [`SwarmStatus`].

use std::time::Duration;
use tensor_relay_device::Lock;
use tensor_relay_protocol::{Epoch, Site, Version};
use tensor_relay_transport::Peer;

/// The swarms of one topic.
#[derive(Debug, Clone, Default)]
pub struct SwarmStatus {
    /// The clients that share its newest shared version.
    pub members_count: u64,
    /// The bytes of chunks that members said to have and that this server did not push to them, of all versions.
    pub from_peers_bytes: u64,
    /// The newest shared version that every member has committed.
    pub replicated: Option<Version>,
    /// The time from its publishing to the last of these commits.
    pub last_replica: Duration,
    /// At most 64 members of the newest version.
    pub members: Vec<MemberStatus>,
}

/// A client that shares a version.
#[derive(Debug, Clone)]
pub struct MemberStatus {
    /// Its address.
    pub peer: Peer,
    /// Where it is, as it says.
    pub site: Site,
    /// Whether others are told of its port.
    pub serves: bool,
    /// The chunks that it says it can send.
    pub held_chunks: u32,
    /// The chunks that it wants.
    pub selected_chunks: u32,
    /// Whether it has the version.
    pub has_committed: bool,
    /// The peers that it was told of.
    pub sources: Vec<Peer>,
}

/// The counters of a topic's swarms.
#[derive(Debug, Default)]
pub(crate) struct SwarmCounters(Lock<Counts>);

#[derive(Debug, Default)]
struct Counts {
    from_peers_bytes: u64,
    /// The newest shared version, with its members that have and have not committed.
    newest: Option<(Epoch, Version)>,
    committed: u64,
    waiting: u64,
    replicated: Option<(Version, Duration)>,
}

impl SwarmCounters {
    pub(super) fn handle_joined(&self, version: (Epoch, Version)) {
        let mut counts = self.0.lock();
        let is_newer = counts
            .newest
            .is_none_or(|(epoch, newest)| epoch != version.0 || newest < version.1);
        if is_newer {
            (counts.newest, counts.committed, counts.waiting) = (Some(version), 0, 0);
        }
        if counts.newest == Some(version) {
            counts.waiting += 1;
        }
    }

    pub(super) fn handle_left(&self, version: (Epoch, Version), had_committed: bool) {
        let mut counts = self.0.lock();
        if counts.newest == Some(version) {
            let count = if had_committed { &mut counts.committed } else { &mut counts.waiting };
            *count = count.saturating_sub(1);
        }
    }

    /// Handles a member's commit, this long after the version was published.
    pub(super) fn handle_committed(&self, version: (Epoch, Version), after: Duration) {
        let mut counts = self.0.lock();
        if counts.newest == Some(version) {
            (counts.committed, counts.waiting) = (counts.committed + 1, counts.waiting.saturating_sub(1));
            if counts.waiting == 0 {
                counts.replicated = Some((version.1, after));
            }
        }
    }

    pub(super) fn handle_from_peers(&self, bytes: u64) {
        self.0.lock().from_peers_bytes += bytes;
    }

    /// The status, without members.
    pub(crate) fn status(&self) -> SwarmStatus {
        let counts = self.0.lock();
        SwarmStatus {
            members_count: counts.committed + counts.waiting,
            from_peers_bytes: counts.from_peers_bytes,
            replicated: counts.replicated.map(|(version, _)| version),
            last_replica: counts.replicated.map(|(_, after)| after).unwrap_or_default(),
            members: vec![],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_replica_is_that_of_all_members() {
        let (counters, second) = (SwarmCounters::default(), Duration::from_secs(1));
        let (first, next) = ((Epoch(1), Version(1)), (Epoch(1), Version(2)));
        (0..3).for_each(|_| counters.handle_joined(first));
        counters.handle_committed(first, second);
        assert_eq!(counters.status().replicated, None, "two have not committed");
        counters.handle_left(first, false);
        counters.handle_committed(first, 2 * second);
        let status = counters.status();
        assert_eq!((status.replicated, status.last_replica), (Some(Version(1)), 2 * second));
        counters.handle_joined(next);
        counters.handle_committed(first, 9 * second);
        let status = counters.status();
        assert_eq!((status.members_count, status.last_replica), (1, 2 * second), "an older version is past");
        counters.handle_committed(next, 3 * second);
        assert_eq!(counters.status().last_replica, 3 * second);
        counters.handle_left(next, true);
        assert_eq!(counters.status().members_count, 0);
    }
}
