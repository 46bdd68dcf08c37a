//! [`Joinable`]: the sessions that lanes can join.

use std::{collections::HashMap, sync::Arc};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{LaneGrant, LaneOffer};
use tensor_relay_transport::sending::Lanes;

/// The sessions of a server that lanes can join, by their numbers.
#[derive(Debug, Default)]
pub(crate) struct Joinable {
    sessions: Lock<HashMap<u64, (LaneGrant, SharedLanes)>>,
}

/// The lanes of a session.
#[derive(Debug, Clone)]
pub(crate) struct SharedLanes {
    pub(crate) lanes: Arc<Lanes>,
    /// The holder whose share of the server the session and its lanes take.
    pub(crate) holder: Arc<str>,
}

/// A client that shares the further lanes: its principal, and the number of its session.
pub(crate) type LaneHolder = (Arc<str>, u64);

/// A session that lanes can join until this is dropped, which ends its lanes.
#[derive(Debug)]
pub(crate) struct JoinableSession {
    joinable: Arc<Joinable>,
    session: u64,
    lanes: Arc<Lanes>,
}

impl Joinable {
    /// Registers `session`, so that up to `lanes_max` lanes can be in it with the returned grant; `None` if sessions
    /// have only one lane.
    pub(crate) fn register(
        self: &Arc<Self>,
        session: u64,
        lanes: SharedLanes,
        lanes_max: u32,
    ) -> (JoinableSession, Option<LaneOffer>) {
        let offer = (lanes_max > 1).then(|| LaneOffer { lanes_max, grant: LaneGrant::new(rand::random()) });
        if let Some(LaneOffer { grant, .. }) = offer {
            self.sessions.lock().insert(session, (grant, lanes.clone()));
        }
        (JoinableSession { joinable: Arc::clone(self), session, lanes: lanes.lanes }, offer)
    }

    /// The lanes of `session`, for a client with its grant.
    pub(crate) fn find(&self, session: u64, grant: &LaneGrant) -> Option<SharedLanes> {
        let sessions = self.sessions.lock();
        let (expected, lanes) = sessions.get(&session)?;
        (expected == grant).then(|| lanes.clone())
    }
}

impl Drop for JoinableSession {
    fn drop(&mut self) {
        self.joinable.sessions.lock().remove(&self.session);
        self.lanes.close();
    }
}
