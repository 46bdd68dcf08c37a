//! Additional lanes: joining a session, and the task that serves each lane until it is retired.

use crate::{
    failures::FailedAt,
    joinable::SharedLanes,
    logins::Login,
    refusals::Reason,
    shared::{ConnectionMemory, Shared},
    shares::{Eviction, Place},
};
use std::{sync::Arc, time::Duration};
use tensor_relay_device::AllocError;
use tensor_relay_protocol::{ClientMessage, CloseCode, InstanceId, LaneGrant, LaneId, ServerMessage};
use tensor_relay_transport::{
    Lane, LaneError,
    control::{self, ControlError},
    sending::{JoinRefused, Lanes, LiveLane, Silence},
};
use tokio::time::{Instant, MissedTickBehavior, interval};

/// The interval at which a lane is checked, longer than any round trip. A [silent](Silence) lane is retired: two to
/// three seconds after the last packet received on it, while QUIC's idle timeout takes ten. The connection of the
/// control stream is not checked: if that is silent, the client could not be informed.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A client's `Join` message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Join {
    pub(crate) session: u64,
    pub(crate) lane: LaneId,
    pub(crate) grant: LaneGrant,
    /// The instance of the session's server process.
    pub(crate) instance: InstanceId,
}

/// Why a lane ended, for the log and the client.
#[derive(Debug, thiserror::Error)]
enum LaneEnd {
    /// There is no such session, or the grant is wrong: the client is not told which.
    #[error("it has no valid grant for a session of this server")]
    NoSuchSession,
    #[error(
        "it belongs to a session of server process {0}; a load balancer or similar device distributes the lanes of one \
         session over several servers"
    )]
    WrongInstance(InstanceId),
    #[error(
        "its session has, or all sessions together have, the maximum number of lanes, or others need its share"
    )]
    TooMany,
    #[error("there is no memory for another lane: {0}")]
    NoMemory(AllocError),
    #[error("its number is in use in its session, or too large")]
    NumberUnavailable,
    #[error(
        "it sent a message after it had joined; only the control stream of the session's first connection carries \
         messages"
    )]
    SentMessage,
    #[error("it is silent")]
    Silent,
    #[error("its client retired it, or its session ended")]
    Retired,
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Lane(#[from] LaneError),
}

impl From<JoinRefused> for LaneEnd {
    fn from(refused: JoinRefused) -> Self {
        match refused {
            JoinRefused::Full => Self::TooMany,
            JoinRefused::Ended => Self::NoSuchSession,
            JoinRefused::NumberUnavailable => Self::NumberUnavailable,
            JoinRefused::Retired => Self::Retired,
        }
    }
}

impl LaneEnd {
    fn close_code(&self) -> CloseCode {
        match self {
            Self::NoSuchSession => CloseCode::Unauthorised,
            Self::WrongInstance(_) => CloseCode::WrongInstance,
            Self::TooMany | Self::NoMemory(_) => CloseCode::TooBusy,
            Self::NumberUnavailable | Self::SentMessage => CloseCode::ProtocolViolation,
            Self::Control(ControlError::Message(error)) => error.into(),
            Self::Silent | Self::Retired | Self::Control(ControlError::Lane(_)) | Self::Lane(_) => {
                CloseCode::Done
            }
        }
    }

    /// The text for the client: the rule that it broke. Empty otherwise.
    fn close_text(&self) -> String {
        match self {
            Self::NumberUnavailable | Self::SentMessage | Self::Control(ControlError::Message(_)) => {
                self.to_string()
            }
            _ => String::new(),
        }
    }
}

/// Joins `lane` to the session named in `join`, and serves it until either ends.
pub(crate) async fn serve(
    lane: Lane,
    login: Login,
    sender: control::Sender<ServerMessage>,
    mut receiver: control::Receiver<ClientMessage>,
    join: Join,
    shared: &Arc<Shared>,
) {
    let end = match admit(&lane, &sender, join, shared).await {
        Ok((lanes, live, _admission, mut evictions)) => {
            drop(login); // The lane is authenticated now.
            tracing::debug!(lane = %join.lane, "A lane joined.");
            let end = tokio::select! {
                end = watch(&live, &mut receiver) => end,
                () = Eviction::of_either(&mut evictions) => LaneEnd::TooMany,
            };
            // Fails only if the session's control stream has ended.
            let _ = lanes.retire(join.lane).await;
            end
        }
        Err(end) => {
            shared.failures.note(FailedAt::Connection, "join_refused");
            match shared
                .refusals
                .note(lane.peer().ip(), Reason::Named("join_refused"), Instant::now())
            {
                Some(unlogged) => tracing::info!(lane = %join.lane, %end, unlogged, "A lane was refused."),
                None => tracing::debug!(lane = %join.lane, %end, "A lane was refused."),
            }
            lane.flush().await; // Acknowledges the client's messages before the close.
            lane.close(end.close_code(), &end.close_text());
            lane.lingered().await;
            return drop((login, sender, receiver)); // It counts as a login until it is closed.
        }
    };
    tracing::info!(lane = %join.lane, %end, "A lane ended.");
    lane.close(end.close_code(), &end.close_text());
    // The control stream must not end before the lane.
    drop((sender, receiver));
}

/// Finds the session and answers `Joined` before any chunk may use the lane.
async fn admit(
    lane: &Lane,
    sender: &control::Sender<ServerMessage>,
    join: Join,
    shared: &Arc<Shared>,
) -> Result<(Arc<Lanes>, Arc<LiveLane>, (Place<Arc<str>>, ConnectionMemory), [Eviction; 2]), LaneEnd> {
    if join.instance != shared.instance {
        return Err(LaneEnd::WrongInstance(join.instance));
    }
    let found = shared.joinable.find(join.session, &join.grant);
    let SharedLanes { lanes, holder } = found.ok_or(LaneEnd::NoSuchSession)?;
    let max = shared.config.lanes_max as usize;
    lanes.check_join(join.lane, max)?;
    let reserved = shared.places.reserve(Arc::clone(&holder), lane.kind()).await;
    let (memory, memory_eviction) = reserved.map_err(LaneEnd::NoMemory)?;
    let (place, eviction) = shared.places.lanes.enter_fairly(holder).ok_or(LaneEnd::TooMany)?;
    let lane = lane.clone().spread(&shared.lane_threads);
    sender.send(ServerMessage::Joined).await?;
    let live = lanes.join(join.lane, lane, max)?;
    Ok((lanes, live, (place, memory), [eviction, memory_eviction]))
}

/// Watches a lane until it ends. Its chunks are sent by subscriptions.
async fn watch(live: &LiveLane, receiver: &mut control::Receiver<ClientMessage>) -> LaneEnd {
    let mut ticks = interval(CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut silence = Silence::new(&live.lane.stats());
    loop {
        tokio::select! {
            () = live.retired() => return LaneEnd::Retired,
            error = live.lane.closed() => return error.into(),
            message = receiver.next() => return match message {
                Ok(_) => LaneEnd::SentMessage,
                Err(ControlError::Lane(LaneError::StreamAborted)) => LaneEnd::Retired,
                Err(error) => error.into(),
            },
            _ = ticks.tick() => {
                if silence.check(&live.lane.stats()) {
                    return LaneEnd::Silent;
                }
            }
        }
    }
}
