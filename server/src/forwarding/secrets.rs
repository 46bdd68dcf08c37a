//! [`Secrets`]: what a member and its origin have in common, by sessions.

use std::{collections::VecDeque, time::Duration};
use tensor_relay_protocol::{Epoch, LaneGrant, PeerSecret, Topic, Version};
use tensor_relay_transport::forwarding::Origin;
use tokio::time::Instant;

/// The time for which the grants of a lost session are accepted.
const LOST_TIMEOUT: Duration = Duration::from_secs(600);

/// The most lost sessions that are remembered: a member that reconnects more often keeps the last ones.
const LOST_MAX: usize = 16;

/// The secret of the member's session with its origin, and those of the sessions before it that were lost. Pure.
#[derive(Debug, Default)]
pub(crate) struct Secrets {
    current: Option<(u64, PeerSecret)>,
    lost: VecDeque<Lost>,
}

#[derive(Debug)]
struct Lost {
    session: u64,
    secret: PeerSecret,
    at: Instant,
}

/// Until when what a grant permitted is permitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Validity {
    /// The session with the origin lives.
    Valid,
    /// It was lost.
    Until(Instant),
    /// It was ended, by the origin or the member.
    Ended,
}

impl Secrets {
    /// Handles a change of the connection to the origin.
    pub(super) fn set(&mut self, origin: Origin, now: Instant) {
        let (next, is_lost) = match origin {
            Origin::Session(session, grant) => (Some((session, PeerSecret::of(&grant))), true),
            Origin::Lost => (None, true),
            Origin::Ended => (None, false),
        };
        match std::mem::replace(&mut self.current, next) {
            _ if !is_lost => self.lost.clear(),
            Some((session, secret)) => {
                self.lost.truncate(LOST_MAX - 1);
                self.lost.push_front(Lost { session, secret, at: now });
            }
            None => {}
        }
    }

    /// The session whose origin made `grant` for this taker and version, if there is one.
    pub(super) fn granted_by(
        &self,
        topic: &Topic,
        version: (Epoch, Version),
        taker: &[u8; 32],
        grant: &LaneGrant,
        now: Instant,
    ) -> Option<u64> {
        let lost = self.lost.iter().filter(|lost| now < lost.at + LOST_TIMEOUT);
        let lost = lost.map(|lost| (lost.session, &lost.secret));
        let current = self.current.iter().map(|(session, secret)| (*session, secret));
        let mut sessions = current.chain(lost);
        let granted = sessions.find(|(_, secret)| secret.grant(topic, version, taker) == *grant);
        granted.map(|(session, _)| session)
    }

    /// Until when the grants of a session are valid.
    pub(super) fn validity(&self, session: u64) -> Validity {
        if self.current.as_ref().is_some_and(|(current, _)| *current == session) {
            return Validity::Valid;
        }
        let lost = self.lost.iter().find(|lost| lost.session == session);
        lost.map_or(Validity::Ended, |lost| Validity::Until(lost.at + LOST_TIMEOUT))
    }

    /// The last session, unless it was ended.
    pub(super) fn session(&self) -> Option<u64> {
        self.sessions().next()
    }

    /// Whether a session is `last` or was before it, as far as they are remembered.
    pub(super) fn is_until(&self, session: u64, last: u64) -> bool {
        let mut from_last = self.sessions().skip_while(|known| *known != last);
        from_last.any(|known| known == session)
    }

    /// The sessions that are remembered, the last one first.
    fn sessions(&self) -> impl Iterator<Item = u64> + '_ {
        let current = self.current.iter().map(|(session, _)| *session);
        current.chain(self.lost.iter().map(|lost| lost.session))
    }

    /// The proof that this member has `session`, which lives, and the port with `key`.
    pub(super) fn proof(&self, session: u64, nonce: &[u8; 32], key: &[u8; 32]) -> Option<[u8; 32]> {
        let (_, secret) = self.current.as_ref().filter(|(current, _)| *current == session)?;
        Some(secret.proof(nonce, key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: (Epoch, Version) = (Epoch(1), Version(2));
    const TAKER: [u8; 32] = [7; 32];

    fn topic() -> Topic {
        Topic::new("m").unwrap()
    }

    fn lanes(byte: u8) -> LaneGrant {
        LaneGrant::new([byte; 32])
    }

    fn granted(secrets: &Secrets, byte: u8, now: Instant) -> Option<u64> {
        let grant = PeerSecret::of(&lanes(byte)).grant(&topic(), VERSION, &TAKER);
        secrets.granted_by(&topic(), VERSION, &TAKER, &grant, now)
    }

    #[test]
    fn grants_of_a_lost_session_are_accepted_for_ten_minutes() {
        let (mut secrets, now) = (Secrets::default(), Instant::now());
        assert_eq!(granted(&secrets, 1, now), None);
        secrets.set(Origin::Session(1, lanes(1)), now);
        assert_eq!((granted(&secrets, 1, now), granted(&secrets, 2, now)), (Some(1), None));
        assert_eq!(secrets.validity(1), Validity::Valid);
        secrets.set(Origin::Lost, now);
        secrets.set(Origin::Lost, now + Duration::from_secs(5));
        secrets.set(Origin::Session(2, lanes(2)), now + Duration::from_secs(10));
        let late = now + LOST_TIMEOUT;
        assert_eq!(secrets.validity(1), Validity::Until(late));
        assert_eq!(
            (granted(&secrets, 1, late - Duration::from_secs(1)), granted(&secrets, 1, late)),
            (Some(1), None)
        );
        assert_eq!(granted(&secrets, 2, late), Some(2));
    }

    #[test]
    fn a_session_that_replaces_another_makes_that_a_lost_one() {
        let (mut secrets, now) = (Secrets::default(), Instant::now());
        for number in 0..LOST_MAX as u64 + 3 {
            secrets.set(Origin::Session(number, lanes(number as u8)), now);
        }
        assert_eq!(secrets.lost.len(), LOST_MAX);
        assert_eq!((secrets.validity(0), secrets.validity(1)), (Validity::Ended, Validity::Ended));
        assert_eq!(secrets.validity(2), Validity::Until(now + LOST_TIMEOUT));
    }

    #[test]
    fn sessions_are_known_in_their_order() {
        let (mut secrets, now) = (Secrets::default(), Instant::now());
        assert_eq!((secrets.session(), secrets.is_until(1, 1)), (None, false));
        (1..=3).for_each(|number| secrets.set(Origin::Session(number, lanes(number as u8)), now));
        let is_until =
            [(1, 2), (2, 2), (3, 2), (1, 9)].map(|(session, last)| secrets.is_until(session, last));
        assert_eq!((secrets.session(), is_until), (Some(3), [true, true, false, false]));
        secrets.set(Origin::Lost, now);
        assert_eq!(secrets.session(), Some(3));
    }

    #[test]
    fn an_ended_session_takes_all_grants_with_it() {
        let (mut secrets, now) = (Secrets::default(), Instant::now());
        secrets.set(Origin::Session(1, lanes(1)), now);
        secrets.set(Origin::Session(2, lanes(2)), now);
        secrets.set(Origin::Ended, now);
        assert_eq!((granted(&secrets, 1, now), granted(&secrets, 2, now)), (None, None));
        assert_eq!((secrets.validity(1), secrets.validity(2)), (Validity::Ended, Validity::Ended));
    }

    #[test]
    fn only_the_session_that_lives_is_proved() {
        let (mut secrets, now) = (Secrets::default(), Instant::now());
        secrets.set(Origin::Session(1, lanes(1)), now);
        let expected = PeerSecret::of(&lanes(1)).proof(&[9; 32], &TAKER);
        assert_eq!(secrets.proof(1, &[9; 32], &TAKER), Some(expected));
        assert_eq!(secrets.proof(2, &[9; 32], &TAKER), None);
        secrets.set(Origin::Session(2, lanes(2)), now);
        assert_eq!(secrets.proof(1, &[9; 32], &TAKER), None);
    }
}
