//! Further lanes: how they find their session, and what becomes of each.

use crate::{
    lanes::{Lanes, Member, NoPlace, Place, Silence, Standing},
    session::Shared,
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    time::Duration,
};
use tensor_relay_protocol::{ClientMessage, CloseCode, LaneGrant, LaneOffer, ServerMessage};
use tensor_relay_transport::{
    Lane, LaneError,
    control::{self, ControlError},
};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

/// How often a further lane is looked at. One that is [silent](Silence) for two looks loses its chunks to others: two to
/// three seconds after it was heard last, where QUIC's idle timeout takes ten. Longer than any round trip.
const LOOK: Duration = Duration::from_secs(1);

/// The sessions that further lanes can join.
#[derive(Debug, Default)]
pub(crate) struct Joinable {
    sessions: Mutex<HashMap<u64, (LaneGrant, Arc<Lanes>)>>,
}

/// A session that can be joined until this is dropped. Its further lanes end with it.
#[derive(Debug)]
pub(crate) struct Open {
    shared: Arc<Shared>,
    session: u64,
    lanes: Arc<Lanes>,
}

impl Open {
    /// Opens `session` to whoever shows what is returned, if sessions may have further lanes.
    pub(crate) fn new(shared: &Arc<Shared>, session: u64, lanes: &Arc<Lanes>) -> (Self, Option<LaneOffer>) {
        let lanes_max = shared.config.lanes_max;
        let offer = (lanes_max > 1).then(|| LaneOffer { lanes_max, grant: LaneGrant::new(rand::random()) });
        if let Some(LaneOffer { grant, .. }) = offer {
            shared.joinable.sessions().insert(session, (grant, Arc::clone(lanes)));
        }
        (Self { shared: Arc::clone(shared), session, lanes: Arc::clone(lanes) }, offer)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.shared.joinable.sessions().remove(&self.session);
        self.lanes.close_further(CloseCode::Done);
    }
}

impl Joinable {
    /// The lanes of `session`, for who shows its grant.
    fn find(&self, session: u64, grant: &LaneGrant) -> Option<Arc<Lanes>> {
        let sessions = self.sessions();
        let (expected, lanes) = sessions.get(&session)?;
        (expected == grant).then(|| Arc::clone(lanes))
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<u64, (LaneGrant, Arc<Lanes>)>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a further lane ended, for the log and the client.
#[derive(Debug, thiserror::Error)]
enum JoinError {
    /// The same for a session that does not exist and for a grant that is not its own: nobody learns which.
    #[error("it showed no grant for a session of this server")]
    NoSuchSession,
    #[error("its session has as many lanes as it may")]
    TooMany,
    #[error("it spoke after it had joined, where only the first lane speaks")]
    Spoke,
    #[error("its client is done with it")]
    Left,
    #[error("its session is over")]
    Over,
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Lane(#[from] LaneError),
}

impl JoinError {
    fn close_code(&self) -> CloseCode {
        match self {
            Self::NoSuchSession => CloseCode::Unauthorised,
            Self::TooMany => CloseCode::TooBusy,
            Self::Spoke => CloseCode::Misbehaved,
            Self::Control(ControlError::Message(error)) => error.into(),
            Self::Left | Self::Over | Self::Control(ControlError::Lane(_)) | Self::Lane(_) => CloseCode::Done,
        }
    }

    /// What the client is told: which rule it broke, and nothing else.
    fn close_text(&self) -> String {
        match self {
            Self::Spoke | Self::Control(ControlError::Message(_)) => self.to_string(),
            _ => String::new(),
        }
    }
}

/// A lane that joined, with what it has for as long as it stays.
struct Joined {
    member: Arc<Member>,
    _place: Place,
    _counted: Counted,
}

/// Counts a further lane for as long as it lives.
struct Counted(Arc<Shared>);

impl Counted {
    fn begin(shared: &Arc<Shared>) -> Self {
        shared.further_lanes.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(shared))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.further_lanes.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Lets `lane` join the session that it names, and serves it until one of the two ends.
pub(crate) async fn serve(
    lane: Lane,
    sender: control::Sender<ServerMessage>,
    mut receiver: control::Receiver<ClientMessage>,
    (session, grant): (u64, LaneGrant),
    shared: &Arc<Shared>,
) {
    let error = match join(&lane, &sender, session, &grant, shared).await {
        Ok(joined) => run(&joined.member, &mut receiver, shared.config.stall_timeout).await,
        Err(error) => {
            lane.settle().await; // What the client says is acknowledged before it hears that it was in vain.
            error
        }
    };
    tracing::info!(%error, "A further lane ended.");
    lane.close(error.close_code(), &error.close_text());
    // The control stream ended with the lane and not before it.
    drop((sender, receiver));
}

/// Finds the session, keeps a place there, tells the client, and only then lets chunks come: none goes out before the
/// word that the lane has joined.
async fn join(
    lane: &Lane,
    sender: &control::Sender<ServerMessage>,
    session: u64,
    grant: &LaneGrant,
    shared: &Arc<Shared>,
) -> Result<Joined, JoinError> {
    let lanes = shared.joinable.find(session, grant).ok_or(JoinError::NoSuchSession)?;
    let mut place = lanes.reserve(shared.config.lanes_max as usize).map_err(|error| match error {
        NoPlace::Full => JoinError::TooMany,
        NoPlace::Over => JoinError::NoSuchSession,
    })?;
    let lane = lane.clone().spread(&shared.lane_threads);
    sender.send(ServerMessage::Joined).await?;
    let member = place.take(lane).ok_or(JoinError::Over)?;
    Ok(Joined { member, _place: place, _counted: Counted::begin(shared) })
}

/// Looks after a lane until it is gone; its chunks are the subscriptions' affair.
async fn run(
    member: &Member,
    receiver: &mut control::Receiver<ClientMessage>,
    leave_timeout: Duration,
) -> JoinError {
    tracing::debug!("A further lane joined.");
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut silence = Silence::new(&member.lane.stats());
    loop {
        tokio::select! {
            error = member.lane.closed() => return error.into(),
            said = receiver.next() => match said {
                Ok(_) => return JoinError::Spoke,
                Err(ControlError::Lane(LaneError::StreamGivenUp)) => return leave(member, leave_timeout).await,
                Err(error) => return error.into(),
            },
            _ = look.tick() => {
                if let Some(standing) = silence.look(&member.lane.stats()) {
                    member.stand(standing);
                }
            }
        }
    }
}

/// Lets a lane end that its client is done with, once what it has on its way has arrived.
async fn leave(member: &Member, patience: Duration) -> JoinError {
    member.stand(Standing::Leaving);
    let deadline = Instant::now() + patience;
    while member.has_chunks() && Instant::now() < deadline {
        if let Ok(error) = timeout(LEAVING_LOOK, member.lane.closed()).await {
            return error.into();
        }
    }
    JoinError::Left
}

/// How often a lane that is to end is asked whether it is done.
const LEAVING_LOOK: Duration = Duration::from_millis(20);
