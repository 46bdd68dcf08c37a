//! Lanes over a byte stream: TLS 1.3 over TCP, or a Unix socket without TLS; both framed in [segments](segment). rustls does
//! the [handshake]; [records] implements the record layer.
//!
//! One task per connection, the [driver], does all reading and writing. Senders pass complete segments to it through
//! short channels, so that a cancelled sender leaves no partial segment. The driver reads eagerly, so that an unread
//! data stream blocks neither the next one nor control messages, up to the limits of unread bytes.

mod batch;
mod buffers;
mod driver;
mod handshake;
mod inbox;
mod receiving;
mod records;
mod segment;
mod sending;
mod stream;

use rustls::AlertDescription;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::CloseCode;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::{Mutex as AsyncMutex, mpsc, watch},
    time::Instant,
};

use super::{LaneError, LaneStats};
use crate::{Peer, Tuning, network::moving::TaskMover, unix::Descriptors};
use driver::Driver;
use receiving::{Incoming, Unread};
use sending::{Outbox, Queues};

pub(crate) use handshake::Secured;
pub(crate) use receiving::{ControlIn, DataIn};
pub(crate) use sending::{ControlOut, DataOut};

/// The maximum size of the buffers of a server's connection: output batch, input, and unread control messages. Excludes
/// the segment that is being received.
pub(crate) const SERVER_BYTES_MAX: usize =
    batch::ROOM_MAX + batch::SHORT_BYTES_MAX + inbox::READ_BYTES_MIN + receiving::CONTROL_PIPE_BYTES;

/// The role in the connection. Data flows from the server to the client only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Client,
    Server,
}

/// The timeouts of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    /// The time without received bytes after which the connection fails.
    idle_timeout: Duration,
    /// The interval of pings.
    keep_alive: Duration,
}

impl From<&Tuning> for Settings {
    fn from(tuning: &Tuning) -> Self {
        Self {
            idle_timeout: tuning.idle_timeout(),
            keep_alive: Duration::from_millis(tuning.keep_alive_ms.into()),
        }
    }
}

/// One connection. Cheap to clone; dropping the last clone closes it.
#[derive(Debug, Clone)]
pub(crate) struct Connection(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    shared: Arc<Shared>,
    /// Moves the driver to another thread; taken at the first move.
    mover: Lock<Option<TaskMover>>,
    /// The halves of the control stream, until they are taken.
    control: Lock<Option<(mpsc::Sender<sending::ControlPart>, receiving::ControlPipe)>>,
    /// Data streams not yet accepted.
    arrived: AsyncMutex<mpsc::UnboundedReceiver<Incoming>>,
}

/// The state shared by the driver and the connection's handles.
#[derive(Debug)]
struct Shared {
    peer: Peer,
    end: watch::Sender<Option<End>>,
    /// Whether the driver has ended.
    driver_ended: watch::Sender<bool>,
    outbox: Outbox,
    unread: Unread,
    descriptors: Option<Descriptors>,
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
    rtt_us: AtomicU64,
    began: Instant,
}

/// Why a connection ends, and the notice to the peer.
#[derive(Debug, Clone)]
struct End {
    error: LaneError,
    notice: CloseNotice,
}

/// The last message to the peer.
#[derive(Debug, Clone, PartialEq, Eq)]
enum CloseNotice {
    /// No message, since the peer closed the connection or is unreachable.
    None,
    Close(CloseCode, String),
    /// A TLS alert, for invalid records.
    Alert(AlertDescription),
}

impl Connection {
    /// Starts a connection over a `secured` stream. The listener closes the connection through `closing`, which the
    /// driver holds until it ends.
    pub(crate) fn start(
        secured: Secured<impl AsyncRead + AsyncWrite + Send + 'static>,
        role: Role,
        peer: Peer,
        settings: Settings,
        closing: Option<watch::Receiver<Option<CloseCode>>>,
    ) -> Self {
        let (outbox, data_queue) = Outbox::new();
        let (control_out, control_queue) = mpsc::channel(sending::CONTROL_QUEUE_MAX);
        let (control_pipe, control_in) = receiving::control_pipe();
        #[expect(
            clippy::disallowed_methods,
            reason = "the limit of unread bytes bounds the queue: each stream in it has an unread first segment"
        )]
        let (begun, arrived) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            peer,
            end: watch::Sender::new(None),
            driver_ended: watch::Sender::new(false),
            outbox,
            unread: Unread::default(),
            descriptors: secured.descriptors.clone(),
            sent_bytes: AtomicU64::new(0),
            received_bytes: AtomicU64::new(0),
            rtt_us: AtomicU64::new(0),
            began: Instant::now(),
        });
        let driver = Driver {
            shared: Arc::clone(&shared),
            role,
            settings,
            queues: Queues { control: control_queue, data: data_queue },
            control: control_pipe,
            begun,
            closing,
        };
        let mover = Lock::new(Some(TaskMover::spawn(driver.run(secured))));
        let control = Lock::new(Some((control_out, control_in)));
        Self(Arc::new(Handle { shared, mover, control, arrived: AsyncMutex::new(arrived) }))
    }

    pub(crate) fn take_mover(&self) -> Option<TaskMover> {
        self.0.mover.lock().take()
    }

    pub(super) fn peer(&self) -> Peer {
        self.0.shared.peer
    }

    /// The descriptors passed beside the bytes, over a Unix socket.
    pub(super) fn descriptors(&self) -> Option<&Descriptors> {
        self.0.shared.descriptors.as_ref()
    }

    /// Takes the control stream, which is open from the start; fails if it was taken before.
    pub(super) fn control(&self) -> Result<(ControlOut, ControlIn), LaneError> {
        let taken = self.0.control.lock().take();
        let Some((queue, pipe)) = taken else {
            let detail = "its control stream was opened before".to_owned();
            return Err(LaneError::Protocol { peer: self.peer(), detail });
        };
        Ok((ControlOut::new(queue, self.clone()), ControlIn::new(pipe, self.clone())))
    }

    pub(super) async fn open_data(&self) -> Result<DataOut, LaneError> {
        DataOut::open(self.clone()).await
    }

    pub(super) async fn accept_data(&self) -> Result<DataIn, LaneError> {
        match self.0.arrived.lock().await.recv().await {
            Some(incoming) => Ok(DataIn::new(incoming, self.clone())),
            None => Err(self.closed().await),
        }
    }

    pub(super) fn close(&self, code: CloseCode, text: &str) {
        let notice = CloseNotice::Close(code, text.to_owned());
        self.0.shared.end(End { error: LaneError::ClosedLocally, notice });
    }

    pub(super) fn close_unread_control(&self, code: CloseCode, detail: &'static str) {
        let error = LaneError::ControlUnread { peer: self.peer(), detail };
        self.0
            .shared
            .end(End { error, notice: CloseNotice::Close(code, detail.to_owned()) });
    }

    pub(super) async fn close_answered(&self) {
        // Cannot fail: the handle holds the sender.
        let _ = self.0.shared.driver_ended.subscribe().wait_for(|ended| *ended).await;
    }

    pub(super) fn ended(&self) -> Option<LaneError> {
        self.0.shared.ended()
    }

    pub(super) async fn closed(&self) -> LaneError {
        self.0.shared.wait_for_end().await.error
    }

    pub(super) fn allow_unread(&self, bytes: u64) {
        self.0.shared.unread.allow(bytes);
    }

    pub(super) fn stats(&self) -> LaneStats {
        let shared = &self.0.shared;
        LaneStats {
            udp_payload_bytes: 0,
            rtt: Duration::from_micros(shared.rtt_us.load(Ordering::Relaxed)),
            sent_bytes: shared.sent_bytes.load(Ordering::Relaxed),
            received_bytes: shared.received_bytes.load(Ordering::Relaxed),
            sent_packets: 0,
            lost_packets: 0,
            eliciting_frames: 0,
        }
    }

    fn shared(&self) -> &Shared {
        &self.0.shared
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let notice = CloseNotice::Close(CloseCode::Done, String::new());
        self.shared.end(End { error: LaneError::ClosedLocally, notice });
    }
}

impl Shared {
    /// Ends the connection with `end`, unless it has ended already.
    fn end(&self, end: End) {
        self.end.send_if_modified(|first_end| {
            let is_first = first_end.is_none();
            first_end.get_or_insert(end);
            is_first
        });
    }

    fn ended(&self) -> Option<LaneError> {
        self.end.borrow().as_ref().map(|end| end.error.clone())
    }

    async fn wait_for_end(&self) -> End {
        let mut ends = self.end.subscribe();
        let end = ends.wait_for(Option::is_some).await.ok().and_then(|end| (*end).clone());
        end.expect("the sender is alive, and `wait_for` returned an end")
    }
}
