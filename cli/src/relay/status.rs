//! [`OriginStatus`]: what is seen of an origin; and the status of a relay.

use super::cache::Cache;
use crate::admin::{DeviceMemory, Part, ServerSubject, Subject};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};
use tensor_relay_client::{StatusReader, Topic};
use tensor_relay_device::Lock;
use tensor_relay_server as server;

/// The status of one origin. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct OriginStatus(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    name: String,
    state: Lock<State>,
}

#[derive(Debug)]
struct State {
    client: Option<StatusReader>,
    /// Since when, and why, it is not connected.
    lost: Option<(Instant, String)>,
    /// When it was connected last.
    connected_at: Instant,
    /// The topics that it has, and why some are not relayed.
    topics: BTreeMap<Topic, Option<String>>,
}

impl OriginStatus {
    /// An origin at these addresses, which was not reached yet.
    pub(super) fn new(addresses: &[String]) -> Self {
        let now = Instant::now();
        let lost = Some((now, "it was not reached yet".into()));
        let state = Lock::new(State { client: None, lost, connected_at: now, topics: BTreeMap::new() });
        Self(Arc::new(Inner { name: addresses.join(","), state }))
    }

    pub(super) fn name(&self) -> &str {
        &self.0.name
    }

    pub(super) fn handle_connected(&self, client: StatusReader) {
        let mut state = self.0.state.lock();
        (state.client, state.lost, state.connected_at) = (Some(client), None, Instant::now());
    }

    pub(super) fn handle_lost(&self, why: &str) {
        let mut state = self.0.state.lock();
        state.client = None;
        state.lost.get_or_insert_with(|| (Instant::now(), why.into()));
    }

    /// Looks whether the client is connected.
    pub(super) fn check(&self) {
        let mut state = self.0.state.lock();
        let Some(client) = state.client.as_ref().and_then(StatusReader::read) else { return };
        match client.lost {
            Some(why) => drop(state.lost.get_or_insert_with(|| (Instant::now(), why))),
            None if state.lost.is_some() => (state.lost, state.connected_at) = (None, Instant::now()),
            None => {}
        }
    }

    pub(super) fn add_topic(&self, topic: &Topic) {
        self.0.state.lock().topics.insert(topic.clone(), None);
    }

    pub(super) fn remove_topic(&self, topic: &Topic) {
        self.0.state.lock().topics.remove(topic);
    }

    /// Records why a topic is not relayed, or that it is.
    pub(super) fn set_problem(&self, topic: &Topic, problem: Option<&str>) {
        if let Some(known) = self.0.state.lock().topics.get_mut(topic) {
            *known = problem.map(Into::into);
        }
    }

    /// For how long it has been lost; zero if it has not.
    pub(super) fn lost_for(&self) -> Duration {
        self.0
            .state
            .lock()
            .lost
            .as_ref()
            .map(|(since, _)| since.elapsed())
            .unwrap_or_default()
    }

    /// For how long it has been connected without interruption; zero while it is not.
    pub(super) fn connected_for(&self) -> Duration {
        let state = self.0.state.lock();
        match state.lost {
            Some(_) => Duration::ZERO,
            None => state.connected_at.elapsed(),
        }
    }

    fn as_object(&self) -> Value {
        let state = self.0.state.lock();
        let client = state.client.as_ref().and_then(StatusReader::read);
        let problems = state.topics.iter().filter_map(|(topic, why)| Some((topic, why.as_ref()?)));
        json!({
            "origin": self.0.name,
            "connected": state.lost.is_none(),
            "lost_s": state.lost.as_ref().map_or(0.0, |(since, _)| since.elapsed().as_secs_f64()),
            "lost": state.lost.as_ref().map(|(_, why)| why),
            "reconnects": client.as_ref().map(|client| client.reconnects),
            "transport": client.as_ref().map(|client| client.transport.name()),
            "topics_count": state.topics.len(),
            "problems_count": problems.clone().count(),
            "problems": problems
                .map(|(topic, why)| json!({ "topic": topic.as_str(), "problem": why }))
                .collect::<Vec<_>>(),
            "received_bytes": client.as_ref().map(|client| client.memory.snapshot_bytes),
        })
    }
}

/// A relay as the subject of an admin port: a server, its origins and its cache.
pub(super) struct RelaySubject {
    server: ServerSubject,
    origins: Vec<OriginStatus>,
    cache: Option<Arc<Cache>>,
    ready_within: Option<Duration>,
}

impl RelaySubject {
    pub(super) fn new(
        reader: server::StatusReader,
        topics: Vec<Topic>,
        origins: Vec<OriginStatus>,
        cache: Option<Arc<Cache>>,
        ready_within: Option<Duration>,
    ) -> Self {
        let server = ServerSubject { reader, topics, device: DeviceMemory::of(None) };
        Self { server, origins, cache, ready_within }
    }
}

impl Subject for RelaySubject {
    /// A relay is ready with versions, also while its origins are lost, unless it is told otherwise.
    fn readiness(&self) -> Result<(), String> {
        self.server.readiness()?;
        if self.server.topics.is_empty() && !self.server.reader.has_version() {
            return Err("no topic has a version yet".into());
        }
        let Some(within) = self.ready_within else { return Ok(()) };
        match self.origins.iter().find(|origin| origin.lost_for() > within) {
            Some(origin) => {
                let lost_s = origin.lost_for().as_secs();
                Err(format!("the origin {} has been lost for {lost_s} s", origin.name()))
            }
            None => Ok(()),
        }
    }

    fn status(&self) -> Value {
        let mut status = self.server.status();
        status["role"] = "relay".into();
        status["origins"] = self.origins.iter().map(OriginStatus::as_object).collect();
        if let Some(cache) = &self.cache {
            let (bytes, problem) = cache.status();
            status["cache"] = json!({ "bytes": bytes, "problem": problem });
        }
        status
    }

    fn metrics(&self) -> &'static [Part] {
        self.server.metrics()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_origin_is_told_with_its_reason_and_time() {
        let origin = OriginStatus::new(&["10.0.0.1:4747".into()]);
        let topic = Topic::new("t").unwrap();
        assert!(origin.lost_for() > Duration::ZERO);
        origin.handle_lost("later");
        assert_eq!(origin.as_object()["lost"], "it was not reached yet", "the first reason");
        origin.add_topic(&topic);
        origin.set_problem(&topic, Some("a ring"));
        let status = origin.as_object();
        assert_eq!(
            (&status["connected"], &status["problems"][0]["problem"]),
            (&json!(false), &json!("a ring"))
        );
        origin.remove_topic(&topic);
        assert_eq!(origin.as_object()["topics_count"], json!(0));
    }
}
