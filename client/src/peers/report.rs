//! [`PeerReports`]: what became of the peers that were named, for operators.

use std::{fmt, sync::Arc};
use tensor_relay_device::Lock;
use tensor_relay_protocol::PeerAddress;
use tensor_relay_transport::Fingerprint;

/// The most peers that are remembered, those in use included.
const REPORTS_MAX: usize = 64;

/// What became of a peer that the origin named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerReport {
    /// Its key.
    pub key: Fingerprint,
    /// Its addresses.
    pub addresses: Vec<PeerAddress>,
    /// Whether it is used.
    pub state: PeerState,
}

/// Whether a peer is used.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerState {
    /// It is being connected, for the first time or again.
    Connecting,
    /// It is connected.
    Connected,
    /// It is not used, for this reason. It may be tried again while the origin names it.
    NotUsed(String),
    /// It sent other bytes than the origin named, so it is not used in this session.
    Barred,
}

impl fmt::Display for PeerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connecting => f.write_str("connecting"),
            Self::Connected => f.write_str("connected"),
            Self::NotUsed(reason) => write!(f, "not used: {reason}"),
            Self::Barred => {
                f.write_str("not used in this session: it sent other bytes than the origin named")
            }
        }
    }
}

/// The peers that were named to a session lately, shared with the client's handles.
#[derive(Debug, Clone, Default)]
pub(crate) struct PeerReports(Arc<Lock<Vec<PeerReport>>>);

impl PeerReports {
    /// Records the state of a peer. Beyond the maximum, the peer that is not used for the longest time is forgotten.
    pub(crate) fn set(&self, report: PeerReport) {
        let mut reports = self.0.lock();
        let known = reports.iter().position(|it| it.key == report.key);
        let surplus = || {
            let is_unused = |it: &PeerReport| matches!(it.state, PeerState::NotUsed(_) | PeerState::Barred);
            reports.iter().position(is_unused).filter(|_| reports.len() >= REPORTS_MAX)
        };
        if let Some(index) = known.or_else(surplus) {
            reports.remove(index);
        }
        reports.push(report);
    }

    /// The latest states, the oldest first.
    pub(crate) fn get(&self) -> Vec<PeerReport> {
        self.0.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(number: u8, state: PeerState) -> PeerReport {
        PeerReport { key: Fingerprint([number; 32]), addresses: vec![], state }
    }

    #[test]
    fn the_latest_state_of_each_peer_is_kept_and_the_oldest_unused_is_forgotten() {
        let reports = PeerReports::default();
        reports.set(report(0, PeerState::Connecting));
        reports.set(report(1, PeerState::Barred));
        reports.set(report(0, PeerState::Connected));
        assert_eq!(reports.get(), [report(1, PeerState::Barred), report(0, PeerState::Connected)]);
        for number in 2..=REPORTS_MAX as u8 + 1 {
            reports.set(report(number, PeerState::NotUsed("it is gone".into())));
        }
        let kept = reports.get();
        assert_eq!(kept.len(), REPORTS_MAX);
        assert_eq!(kept[0], report(0, PeerState::Connected), "it is in use");
        assert_eq!(kept[1].key, Fingerprint([3; 32]));
    }
}
