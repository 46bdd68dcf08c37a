//! [`Joinable`]: the sessions that lanes can join.

use crate::lanes::Lanes;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tensor_relay_protocol::{LaneGrant, LaneOffer};

/// The sessions of a server that lanes can join, by their numbers.
#[derive(Debug, Default)]
pub(crate) struct Joinable {
    sessions: Mutex<HashMap<u64, (LaneGrant, Arc<Lanes>)>>,
}

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
        lanes: &Arc<Lanes>,
        lanes_max: u32,
    ) -> (JoinableSession, Option<LaneOffer>) {
        let offer = (lanes_max > 1).then(|| LaneOffer { lanes_max, grant: LaneGrant::new(rand::random()) });
        if let Some(LaneOffer { grant, .. }) = offer {
            self.sessions().insert(session, (grant, Arc::clone(lanes)));
        }
        (JoinableSession { joinable: Arc::clone(self), session, lanes: Arc::clone(lanes) }, offer)
    }

    /// The lanes of `session`, for a client with its grant.
    pub(crate) fn find(&self, session: u64, grant: &LaneGrant) -> Option<Arc<Lanes>> {
        let sessions = self.sessions();
        let (expected, lanes) = sessions.get(&session)?;
        (expected == grant).then(|| Arc::clone(lanes))
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<u64, (LaneGrant, Arc<Lanes>)>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for JoinableSession {
    fn drop(&mut self) {
        self.joinable.sessions().remove(&self.session);
        self.lanes.close();
    }
}
