//! Additional lanes: joining a session, and the task that serves each lane until it is retired.

mod end;

use crate::{
    failures::FailedAt,
    joinable::{LaneHolder, SharedLanes},
    logins::Login,
    refusals::Reason,
    shared::Shared,
    shares::{Eviction, Place},
};
use end::LaneEnd;
use std::{sync::Arc, time::Duration};
use tensor_relay_device::Reservation;
use tensor_relay_protocol::{ClientMessage, InstanceId, LaneGrant, LaneId, ServerMessage};
use tensor_relay_transport::{
    Lane, control,
    sending::{Lanes, LiveLane, Silence},
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
        Ok((lanes, live, _admission, mut eviction)) => {
            drop(login); // The lane is authenticated now.
            tracing::debug!(lane = %join.lane, "A lane joined.");
            let end = tokio::select! {
                end = watch(&live, &mut receiver) => end,
                () = eviction.evicted() => LaneEnd::TooMany,
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
) -> Result<(Arc<Lanes>, Arc<LiveLane>, (Place<LaneHolder>, Reservation), Eviction), LaneEnd> {
    if join.instance != shared.instance {
        return Err(LaneEnd::WrongInstance(join.instance));
    }
    let found = shared.joinable.find(join.session, &join.grant);
    let SharedLanes { lanes, holder } = found.ok_or(LaneEnd::NoSuchSession)?;
    let max = shared.config.lanes_max as usize;
    lanes.check_join(join.lane, max)?;
    let memory = Reservation::fitting(lane.kind().memory_bytes_max()).map_err(LaneEnd::NoMemory)?;
    let entered = shared.places.lanes.enter_within_share((holder, join.session));
    let (place, eviction) = entered.ok_or(LaneEnd::TooMany)?;
    let lane = lane.clone().spread(&shared.lane_threads);
    sender.send(ServerMessage::Joined).await?;
    let live = lanes.join(join.lane, lane, max)?;
    Ok((lanes, live, (place, memory), eviction))
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
            message = receiver.next() => return LaneEnd::from_message(message),
            _ = ticks.tick() => {
                if silence.check(&live.lane.stats()) {
                    return LaneEnd::Silent;
                }
            }
        }
    }
}
