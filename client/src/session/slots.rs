//! The number of slots for encoded chunks.

use crate::peers::PEERS_MAX;
use tensor_relay_protocol::Credit;

/// The planned maximum of concurrent decodes: each reserves address space for the largest chunk.
const DECODING_MAX: usize = 16;

/// The additional chunks received while others are decoded, so that no processor waits for bytes.
const SLOTS_SPARE: usize = 4;

/// The additional slots of a client that shares: peers that send slowly occupy so many before they hinder others.
pub(super) const FOR_PEERS: usize = 2 * PEERS_MAX;

/// The number of slots: one for each chunk of credit on all lanes, but not many more than processors for decoding, and
/// at least the credit of one lane. A chunk without a slot waits within the lanes' unread limit.
pub(super) fn count(credit: u32, lanes: u32, processors: usize) -> usize {
    let wanted = credit.saturating_mul(lanes).clamp(1, Credit::MAX) as usize;
    wanted.min((credit as usize).max(processors.min(DECODING_MAX) + SLOTS_SPARE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_follow_processors_and_not_lanes() {
        assert_eq!([count(4, 1, 2), count(4, 16, 2), count(4, 16, 64)], [4, 6, 20]);
        assert_eq!(
            [count(9, 16, 2), count(1, 1, 64), count(0, 1, 1)],
            [9, 1, 1],
            "one lane keeps its credit"
        );
    }
}
