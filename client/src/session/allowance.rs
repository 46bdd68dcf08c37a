//! [`Allowance`]: how many chunks may be outstanding on a session, and how many unread bytes that takes.

use tensor_relay_protocol::Credit;

/// The smallest chunk size for which flow-control windows are set, also before the first manifest: the default of
/// servers.
const ASSUMED_CHUNK_BYTES_MIN: u32 = 4 << 20;

/// The chunks that may be outstanding on each subscription. Pure.
#[derive(Debug)]
pub(super) struct Allowance {
    of_lane: u32,
    credit: u32,
    further: u32,
}

impl Allowance {
    /// `of_lane` chunks for each lane; at first for one lane to the origin.
    pub(super) fn new(of_lane: u32) -> Self {
        Self { of_lane, credit: of_lane, further: 0 }
    }

    /// The credit of each subscription: for the largest number of lanes that this connection has had. It is not lowered
    /// when a lane ends, because the remaining lanes use it.
    pub(super) fn credit(&self) -> u32 {
        self.credit
    }

    /// The chunks beyond the credit that may be outstanding while a version comes from several servers: as many for
    /// each of their lanes.
    pub(super) fn further(&self) -> u32 {
        self.further
    }

    /// Handles the loss of the connection to the origin.
    pub(super) fn handle_detached(&mut self) {
        self.credit = self.of_lane;
    }

    /// Handles a change of the numbers of lanes, to the origin and to all other servers.
    pub(super) fn handle_lanes(&mut self, of_origin: u32, of_others: u32) {
        self.credit = self.credit.max(self.of(of_origin));
        self.further = self.of(of_others);
    }

    fn of(&self, lanes: u32) -> u32 {
        self.of_lane.saturating_mul(lanes).min(Credit::MAX)
    }

    /// The bytes that may arrive and stay unread: all outstanding chunks of subscriptions with these chunk sizes. So
    /// chunks that wait for memory never block the control stream, and no subscription starves another.
    pub(super) fn unread_bytes(&self, chunk_bytes: impl Iterator<Item = Option<u32>>) -> u64 {
        let chunks = u64::from(self.credit) + u64::from(self.further);
        let sizes = chunk_bytes.map(|bytes| bytes.unwrap_or(0).max(ASSUMED_CHUNK_BYTES_MIN));
        sizes.map(|bytes| chunks * u64::from(bytes)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_credit_follows_the_lanes_and_is_not_lowered() {
        let mut allowance = Allowance::new(8);
        let mut with_lanes = |of_origin, of_others| {
            allowance.handle_lanes(of_origin, of_others);
            (allowance.credit(), allowance.further())
        };
        assert_eq!(with_lanes(1, 0), (8, 0));
        assert_eq!(with_lanes(4, 2), (32, 16));
        assert_eq!(with_lanes(2, 1), (32, 8), "lanes ended");
        assert_eq!(with_lanes(u32::MAX, u32::MAX), (Credit::MAX, Credit::MAX));
        assert_eq!(with_lanes(0, 3), (Credit::MAX, 24), "the origin is lost");
        allowance.handle_detached();
        assert_eq!((allowance.credit(), allowance.further()), (8, 24));
    }

    #[test]
    fn all_outstanding_chunks_may_stay_unread() {
        let mut allowance = Allowance::new(8);
        allowance.handle_lanes(1, 2);
        assert_eq!(allowance.unread_bytes([].into_iter()), 0);
        let sizes = [None, Some(1), Some(16 << 20)];
        assert_eq!(allowance.unread_bytes(sizes.into_iter()), 24 * ((4 + 4 + 16) << 20));
    }
}
