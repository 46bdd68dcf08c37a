//! The probe of a session: bytes without meaning, to measure a lane.

use tensor_relay_protocol::{ClientMessage, LaneId, ProbeBytes, ProbeHeader};
use tensor_relay_transport::{LaneError, ProbeResult};
use tokio::sync::oneshot;

/// The result of a probe for its caller; the sender is dropped with the connection.
pub(crate) type ProbeReply = oneshot::Sender<Result<ProbeResult, LaneError>>;

/// The flow-control window of a probe: what a path of 100 ms needs for 2.7 Gbit/s.
pub(crate) const PROBE_UNREAD_BYTES: u64 = 32 << 20;

/// The probes of a session over the control lane, one at a time.
#[derive(Debug, Default)]
pub(crate) struct Probing {
    /// Ids rise within a connection.
    next: u32,
    under_way: Option<(u32, ProbeBytes, ProbeReply)>,
}

impl Probing {
    /// Asks for a probe. One that is under way already is given up by its user, and the server refuses a second one; so the
    /// reply is dropped.
    pub(crate) fn begin(&mut self, bytes: ProbeBytes, reply: ProbeReply) -> Option<ClientMessage> {
        if self.under_way.is_some() {
            return None;
        }
        let probe = self.next;
        self.next += 1;
        self.under_way = Some((probe, bytes, reply));
        Some(ClientMessage::Probe { probe, lane: LaneId(0), bytes })
    }

    /// Whether the probe with this header was asked for.
    pub(crate) fn expects(&self, header: &ProbeHeader) -> bool {
        let is_it =
            |(probe, bytes, _): &(u32, ProbeBytes, _)| *probe == header.probe && header.bytes <= bytes.get();
        self.under_way.as_ref().is_some_and(is_it)
    }

    pub(crate) fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Hands over the result.
    pub(crate) fn handle_result(&mut self, result: Result<ProbeResult, LaneError>) {
        if let Some((.., reply)) = self.under_way.take() {
            let _ = reply.send(result); // Its user may have given up.
        }
    }

    /// Forgets the probe of a lost connection.
    pub(crate) fn handle_detached(&mut self) {
        *self = Self::default();
    }
}
