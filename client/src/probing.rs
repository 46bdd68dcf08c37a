//! The probes of a session: filler bytes that measure the rate of a lane.

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
    /// The id of the next probe of this connection.
    next_id: u32,
    under_way: Option<(u32, ProbeBytes, ProbeReply)>,
}

impl Probing {
    /// Starts a probe. If one is under way, `reply` is dropped: the server would refuse a second probe.
    pub(crate) fn begin(&mut self, bytes: ProbeBytes, reply: ProbeReply) -> Option<ClientMessage> {
        if self.under_way.is_some() {
            return None;
        }
        let probe = self.next_id;
        self.next_id += 1;
        self.under_way = Some((probe, bytes, reply));
        Some(ClientMessage::Probe { probe, lane: LaneId(0), bytes })
    }

    /// Whether the probe with this header was requested.
    pub(crate) fn expects(&self, header: &ProbeHeader) -> bool {
        let is_expected =
            |(probe, bytes, _): &(u32, ProbeBytes, _)| *probe == header.probe && header.bytes <= bytes.get();
        self.under_way.as_ref().is_some_and(is_expected)
    }

    pub(crate) fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Hands over the result.
    pub(crate) fn handle_result(&mut self, result: Result<ProbeResult, LaneError>) {
        if let Some((.., reply)) = self.under_way.take() {
            let _ = reply.send(result); // Fails if the caller has given up.
        }
    }

    /// Forgets the probe of a lost connection.
    pub(crate) fn handle_detached(&mut self) {
        *self = Self::default();
    }
}
