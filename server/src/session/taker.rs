//! A session of a taker: no ticket admits it, but the grants of an origin for single versions (PROTOCOL.md §3.15).

use super::{Session, error::SessionError};
use crate::{
    forwarding::{GrantedPlace, Take, TakerPlaces},
    logins::Login,
    shares::Eviction,
    taking::{Taking, TakingHost},
};
use std::{net::IpAddr, sync::Arc, time::Duration};
use tensor_relay_protocol::{
    CodecChoice, EndReason, Epoch, LaneGrant, Mode, ProtocolViolation, Start, Subscribe, Version,
};
use tensor_relay_transport::{
    ClientCertificate, Lane,
    sending::{Coding, Route, Selector},
};
use tokio::time::Instant;
use tracing::Instrument;

/// The time from connecting to the first valid grant.
const GRANT_TIMEOUT: Duration = Duration::from_secs(5);

/// The time without a take after which a taker has to connect again: the next version may be minutes away.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// The most takes of one session at once.
const TAKES_MAX: usize = 8;

/// The client of a session that is admitted by grants.
#[derive(Debug)]
pub(super) struct Taker {
    standing: Standing,
    /// When it is disconnected, unless it takes something.
    ends_at: Option<Instant>,
}

/// Whether it has shown a valid grant.
#[derive(Debug)]
enum Standing {
    Ungranted { _login: Login, eviction: Eviction },
    Granted { _place: GrantedPlace },
}

impl Taker {
    /// A taker that connected from `address` now, and has shown no grant.
    pub(super) fn new(places: &TakerPlaces, address: IpAddr) -> Self {
        let (login, eviction) = places.enter(address);
        let standing = Standing::Ungranted { _login: login, eviction };
        Self { standing, ends_at: Some(Instant::now() + GRANT_TIMEOUT) }
    }

    /// Waits until it has to be disconnected, and returns why. Cancel safe.
    pub(super) async fn ended(&mut self) -> SessionError {
        let timeout = async |ends_at: Option<Instant>| match ends_at {
            Some(ends_at) => tokio::time::sleep_until(ends_at).await,
            None => std::future::pending().await,
        };
        match &mut self.standing {
            Standing::Ungranted { eviction, .. } => tokio::select! {
                () = timeout(self.ends_at) => SessionError::NoGrant,
                () = eviction.evicted() => SessionError::TooManyTakers,
            },
            Standing::Granted { .. } => {
                timeout(self.ends_at).await;
                SessionError::IdleTaker
            }
        }
    }

    /// Handles a valid grant for `key`.
    fn handle_granted(&mut self, places: &TakerPlaces, key: [u8; 32]) -> Result<(), SessionError> {
        if matches!(self.standing, Standing::Ungranted { .. }) {
            let place = places.grant(key).ok_or(SessionError::TooManyTakers)?;
            self.standing = Standing::Granted { _place: place };
        }
        self.ends_at = None;
        Ok(())
    }

    /// Handles that it takes nothing any more.
    pub(super) fn handle_idle(&mut self) {
        if matches!(self.standing, Standing::Granted { .. }) {
            self.ends_at = Some(Instant::now() + IDLE_TIMEOUT);
        }
    }
}

/// Waits until a session's taker has to be disconnected, if it is one. Cancel safe.
pub(super) async fn ended(taker: &mut Option<Taker>) -> SessionError {
    match taker {
        Some(taker) => taker.ended().await,
        None => std::future::pending().await,
    }
}

/// The key that the client of a lane has proved to have.
pub(super) fn key_of(lane: &Lane) -> Option<[u8; 32]> {
    lane.client_certificate().map(ClientCertificate::key).map(|key| key.0)
}

impl Session {
    /// Handles a subscription with a grant.
    pub(super) async fn handle_take(
        &mut self,
        subscribe: Subscribe,
        grant: LaneGrant,
    ) -> Result<(), SessionError> {
        let (id, topic) = (subscribe.subscription, subscribe.topic.clone());
        let version = version_of(&subscribe)?;
        let taker = key_of(self.lanes.control()).ok_or(SessionError::WrongGrant)?;
        let forwarding = Arc::clone(&self.shared.forwarding);
        let take = Take { topic, version, taker };
        let granted = forwarding.check(&take, &grant).ok_or(SessionError::WrongGrant)?;
        if let Some(session) = &mut self.taker {
            session.handle_granted(&forwarding.places, taker)?;
        }
        let Some(mut inbox) = self.inboxes.open(id, &take.topic, TAKES_MAX)? else {
            self.handle_take_ended();
            return self.refuse(id, EndReason::TooManySubscriptions).await;
        };
        let place = self.shared.places.subscriptions.enter_fairly(Arc::clone(&self.share));
        let Some((place, eviction)) = place else {
            self.inboxes.close(id);
            self.handle_take_ended();
            return self.refuse(id, EndReason::TooManySubscriptions).await;
        };
        inbox.eviction = Some(eviction);
        let control = self.lanes.control();
        let taking = Taking {
            selector: Selector::new(&subscribe, self.shared.config.workers),
            subscribe,
            features: self.features,
            route: Route { subscription: id, lanes: Arc::clone(&self.lanes) },
            sender: self.sender.clone(),
            coding: Coding {
                choice: CodecChoice::Auto,
                offered: self.codecs,
                effort: self.shared.effort_meters.get(control.peer().ip(), control.kind()),
            },
            egress: Arc::clone(&self.shared.egress),
            host: TakingHost::new(granted, &forwarding, inbox),
        };
        tracing::debug!(subscription = %id, topic = take.topic.as_str(), "A peer takes a version.");
        let run = async move {
            let ended = taking.run().await;
            drop(place);
            (id, ended)
        };
        self.running.spawn(run.in_current_span());
        Ok(())
    }

    /// Handles the end of a subscription of a taker.
    pub(super) fn handle_take_ended(&mut self) {
        if self.running.is_empty()
            && let Some(taker) = &mut self.taker
        {
            taker.handle_idle();
        }
    }
}

/// The version of a subscription with a grant, which wants this version alone, by requests.
fn version_of(subscribe: &Subscribe) -> Result<(Epoch, Version), ProtocolViolation> {
    let is_plain = subscribe.once
        && subscribe.credit == 0
        && subscribe.mode == Mode::Latest
        && subscribe.have.is_none()
        && subscribe.partial.is_none()
        && !subscribe.describe
        && !subscribe.memory;
    match subscribe.start {
        Start::Exactly(Some(epoch), version) if is_plain => Ok((epoch, version)),
        _ => {
            let found = "a grant";
            Err(ProtocolViolation::OutOfTurn { found, expected: "a take of one version without credit" })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_protocol::{SubscriptionId, Topic};

    #[test]
    fn a_grant_is_for_one_version_alone() {
        let version = (Epoch(3), Version(7));
        let plain = || Subscribe {
            start: Start::Exactly(Some(version.0), version.1),
            once: true,
            ..Subscribe::latest(SubscriptionId(1), Topic::new("m").unwrap(), 0)
        };
        assert_eq!(version_of(&plain()), Ok(version));
        for other in [
            Subscribe { once: false, ..plain() },
            Subscribe { credit: 1, ..plain() },
            Subscribe { mode: Mode::Every, ..plain() },
            Subscribe { memory: true, ..plain() },
            Subscribe { describe: true, ..plain() },
            Subscribe { start: Start::Exactly(None, version.1), ..plain() },
            Subscribe { start: Start::Newest, ..plain() },
        ] {
            assert!(version_of(&other).is_err(), "{other:?}");
        }
    }
}
