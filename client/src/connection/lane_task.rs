//! The acceptor of a lane's streams, and the slots that keep the wanted number of lanes connected.

use super::{Event, Target, complete_handshake, first_message};
use crate::{ClientError, backoff::Backoff};
use futures_util::{StreamExt, stream::FuturesUnordered};
use std::{
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};
use tensor_relay_protocol::{
    ClientMessage, CloseCode, InstanceId, LaneGrant, LaneId, ProtocolViolation, ServerMessage,
};
use tensor_relay_transport::{DataIn, HeaderError, Lane, LaneError, LaneKind, control};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep},
};

/// The lifetime from which a lost lane resets the backoff.
const STABLE_AGE: Duration = Duration::from_secs(10);

/// An event from a slot's task.
#[derive(Debug)]
pub(super) enum LaneEvent {
    Joined(LaneId, Lane),
    Event(Event),
}

/// Accepts the data streams of one lane and reads their headers, until the lane ends.
#[derive(Debug)]
pub(super) struct StreamAcceptor {
    id: LaneId,
    lane: Lane,
    /// The streams whose headers are being read. QUIC's limit of streams bounds their number.
    headers: FuturesUnordered<Pin<Box<dyn Future<Output = Event> + Send>>>,
}

impl StreamAcceptor {
    pub(super) fn new(id: LaneId, lane: Lane) -> Self {
        Self { id, lane, headers: FuturesUnordered::new() }
    }

    /// The next data stream; `None` once the lane has ended. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<Event> {
        loop {
            tokio::select! {
                stream = self.lane.accept_data() => {
                    let header = read_header(self.id, stream.ok()?);
                    self.headers.push(Box::pin(header));
                }
                Some(event) = self.headers.next() => return Some(event),
            }
        }
    }

    /// Passes the data streams to `events`, until the lane or its connection ends.
    async fn run(mut self, events: mpsc::Sender<LaneEvent>) {
        while let Some(event) = self.next().await
            && events.send(LaneEvent::Event(event)).await.is_ok()
        {}
    }
}

/// Reads the header of a data stream. Without a deadline: the first bytes of a stream open all earlier ones too, and on a
/// slow path those may wait for minutes behind it. The end of the lane is reported separately.
async fn read_header(lane: LaneId, mut stream: DataIn) -> Event {
    match stream.read_header().await {
        Ok(header) => Event::Opened(lane, header, stream),
        Err(HeaderError::Lane(_)) => Event::Nothing,
        Err(error) => Event::Unreadable(error),
    }
}

/// Keeps one additional lane connected while it is wanted.
#[derive(Debug)]
pub(super) struct LaneSlot {
    /// The index of the slot, from 1. It selects the local address of the lane.
    pub(super) index: usize,
    pub(super) target: Target,
    pub(super) peer: SocketAddr,
    /// The transport of the control lane.
    pub(super) kind: LaneKind,
    pub(super) session: u64,
    pub(super) grant: LaneGrant,
    pub(super) instance: InstanceId,
    /// The id of the session's next lane.
    pub(super) next_lane: Arc<AtomicU32>,
    /// The wanted number of lanes, the control stream's included.
    pub(super) wanted: watch::Receiver<u32>,
    pub(super) events: mpsc::Sender<LaneEvent>,
}

impl LaneSlot {
    /// Joins a lane, and after its end another one, with backoff, until an error that a retry cannot mend.
    pub(super) async fn run_slot(mut self) {
        let mut backoff = Backoff::new();
        let mut has_warned = false;
        while self.wait_until_wanted().await {
            let began = Instant::now();
            match self.join_and_run().await {
                Ok(()) if began.elapsed() > STABLE_AGE => backoff = Backoff::new(),
                Ok(()) => {}
                Err(error) if !error.is_retryable() => {
                    tracing::warn!(slot = self.index, %error, "A lane cannot join; the session continues without it.");
                    return;
                }
                Err(error) if error.is_local() && !has_warned => {
                    has_warned = true; // One is enough.
                    tracing::warn!(slot = self.index, %error, "A lane cannot be opened on this machine; retrying.");
                }
                Err(error) => {
                    tracing::debug!(slot = self.index, %error, "A lane did not join; retrying.");
                }
            }
            sleep(backoff.next(rand::random())).await;
        }
    }

    /// Waits until the slot should have a lane; false if it never will.
    async fn wait_until_wanted(&mut self) -> bool {
        let index = self.index;
        self.wanted.wait_for(|lanes| *lanes as usize > index).await.is_ok()
    }

    /// Joins a lane and runs it until it ends. The end of a lane that was opened is always reported to the connection:
    /// the server may have begun chunks on it even if its answer was lost.
    ///
    /// # Errors
    /// [`ClientError`] when the lane cannot join, or the server broke a rule.
    async fn join_and_run(&mut self) -> Result<(), ClientError> {
        let Target { connector, keys, .. } = &self.target;
        let lane = connector.connect_further(self.peer, keys, self.index, self.kind).await?;
        let id = LaneId(self.next_lane.fetch_add(1, Ordering::AcqRel));
        let deadline = connector.tuning().control_timeout();
        let ended = match complete_handshake(&lane, deadline, self.exchange_join(id, &lane, deadline)).await {
            Ok(streams) => self.run(id, &lane, streams).await,
            Err(error) => Err(error),
        };
        let _ = self.events.send(LaneEvent::Event(Event::Ended(id))).await;
        ended
    }

    async fn exchange_join(
        &self,
        id: LaneId,
        lane: &Lane,
        deadline: Duration,
    ) -> Result<Streams, ClientError> {
        let (sender, mut receiver) = control::open(lane, deadline).await?;
        let Self { session, grant, instance, .. } = *self;
        let join = ClientMessage::Join { session, lane: id, grant, instance };
        sender.send(join).await?;
        match first_message(&mut receiver).await? {
            ServerMessage::Joined => Ok((sender, receiver)),
            _ => Err(ProtocolViolation::OutOfTurn { found: "another message", expected: "Joined" }.into()),
        }
    }

    /// Runs a joined lane until it ends, is no longer wanted, or receives a control message.
    async fn run(
        &mut self,
        id: LaneId,
        lane: &Lane,
        (sender, mut receiver): Streams,
    ) -> Result<(), ClientError> {
        if self.events.send(LaneEvent::Joined(id, lane.clone())).await.is_err() {
            return Ok(()); // The connection has ended.
        }
        let acceptor = StreamAcceptor::new(id, lane.clone());
        let index = self.index;
        let ended = tokio::select! {
            _ = lane.run(acceptor.run(self.events.clone())) => Ok(()),
            _ = self.wanted.wait_for(|lanes| *lanes as usize <= index) => {
                lane.close(CloseCode::Done, "");
                Ok(())
            }
            message = receiver.next() => match message {
                Ok(_) => {
                    lane.close(CloseCode::ProtocolViolation, "a lane receives no message after Joined");
                    let found = "another message";
                    Err(ProtocolViolation::OutOfTurn { found, expected: "nothing after Joined" }.into())
                }
                Err(_) => Ok(()),
            },
        };
        let why: Option<String> = lane.ended().map(|error: LaneError| error.to_string());
        tracing::info!(lane = %id, why, "A lane ended.");
        lane.close(CloseCode::Done, "");
        drop(sender);
        ended
    }
}

/// Both directions of a lane's control stream.
type Streams = (control::Sender<ClientMessage>, control::Receiver<ServerMessage>);
