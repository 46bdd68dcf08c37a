//! The probes of a session: filler bytes that measure the rate of a lane.

use crate::ClientError;
use tensor_relay_protocol::{ClientMessage, LaneId, ProbeBytes, ProbeHeader};
use tensor_relay_transport::{LaneError, ProbeResult};
use tokio::sync::oneshot;

/// The channel to the caller of a probe. It is dropped unused if the connection is lost.
pub(crate) type ProbeReply = oneshot::Sender<Result<ProbeResult, ClientError>>;

/// The flow-control window of a probe: enough for 2.7 Gbit/s at a round-trip time of 100 ms.
pub(crate) const PROBE_UNREAD_BYTES: u64 = 32 << 20;

/// The probes of a session over the control lane, one at a time.
#[derive(Debug, Default)]
pub(crate) struct Probing {
    /// The id of the next probe of this connection.
    next_id: u32,
    in_progress: Option<(u32, ProbeBytes, ProbeReply)>,
}

impl Probing {
    /// Starts a probe. Refuses it if one is in progress, as the server would.
    pub(crate) fn begin(&mut self, bytes: ProbeBytes, reply: ProbeReply) -> Option<ClientMessage> {
        if self.in_progress.is_some() {
            let _ = reply.send(Err(ClientError::ProbeInProgress)); // Fails if the caller has given up.
            return None;
        }
        let probe = self.next_id;
        self.next_id += 1;
        self.in_progress = Some((probe, bytes, reply));
        Some(ClientMessage::Probe { probe, lane: LaneId(0), bytes })
    }

    /// Whether the probe with this header was requested.
    pub(crate) fn expects(&self, header: &ProbeHeader) -> bool {
        let is_expected =
            |(probe, bytes, _): &(u32, ProbeBytes, _)| *probe == header.probe && header.bytes <= bytes.get();
        self.in_progress.as_ref().is_some_and(is_expected)
    }

    pub(crate) fn is_in_progress(&self) -> bool {
        self.in_progress.is_some()
    }

    /// Sends the result to the caller.
    pub(crate) fn handle_result(&mut self, result: Result<ProbeResult, LaneError>) {
        if let Some((.., reply)) = self.in_progress.take() {
            let _ = reply.send(result.map_err(ClientError::Lane)); // Fails if the caller has given up.
        }
    }

    /// Forgets the probe of a lost connection.
    pub(crate) fn handle_detached(&mut self) {
        *self = Self::default();
    }
}
