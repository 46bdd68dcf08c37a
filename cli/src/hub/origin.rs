//! [`Origin`]: a server whose topics the hub offers.

use super::failure::Failure;
use hyper::StatusCode;
use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};
use tensor_relay_client::{
    Client, ClientError, Config, GetError, InstanceId, Request, Snapshot, Ticket, Topic, VersionId,
};
use tokio::{sync::Mutex, time::timeout};

/// How old the list of topics, and with it the newest versions, may be.
const LIST_AGE_MAX: Duration = Duration::from_millis(250);

/// The deadline for a list: Hugging Face's client waits 10 s for the size of a file.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

/// The deadline for a list where an earlier one is known, which answers in its place.
const LIST_TIMEOUT_OF_KNOWN: Duration = Duration::from_secs(1);

/// The time without a connection after which requests are told so: less than the 10 s for which Hugging Face's client waits
/// for a byte.
const LOST_TIMEOUT: Duration = Duration::from_secs(6);

/// The interval at which a request looks whether the connection is lost.
const LOST_INTERVAL: Duration = Duration::from_millis(500);

/// The pause between attempts to replace a session that has ended.
const RECONNECT_INTERVAL: Duration = Duration::from_secs(1);

/// The time for which a session tries to restore its connection. Requests have deadlines of their own.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(3_600);

/// A session with one server, replaced when it has ended.
#[derive(Debug)]
pub(super) struct Origin {
    ticket: Ticket,
    config: Config,
    connect_timeout: Duration,
    session: Mutex<Session>,
    listed: Mutex<Option<Listed>>,
}

#[derive(Debug)]
struct Session {
    client: Arc<Client>,
    /// When its replacement may be tried, after a failure, which is this.
    failed: Option<(Instant, Failure)>,
}

#[derive(Debug)]
struct Listed {
    at: Instant,
    newest: Arc<Newest>,
}

/// The newest version of each topic.
#[derive(Debug)]
pub(super) struct Newest {
    /// The server process that has them.
    pub(super) instance: InstanceId,
    /// The number of lists in which a topic was at an earlier version of its epoch than before. A relay, whose origin was
    /// restored from a backup, relays other versions under the same numbers from then on.
    pub(super) reversals: u64,
    pub(super) topics: BTreeMap<Topic, VersionId>,
}

impl Newest {
    /// Counts whether a topic is at an earlier version than in the list `before` this one.
    fn after(mut self, before: Option<&Self>) -> Self {
        let is_earlier = |id: &VersionId| {
            let known = before.and_then(|before| before.topics.get(&id.topic));
            known.is_some_and(|known| known.epoch == id.epoch && id.version < known.version)
        };
        let reversals = u64::from(self.topics.values().any(is_earlier));
        self.reversals = reversals + before.map_or(0, |before| before.reversals);
        self
    }
}

impl Origin {
    /// Connects to the server that `ticket` names.
    ///
    /// # Errors
    /// Those of [`Client::connect`].
    pub(super) async fn open(
        ticket: Ticket,
        config: Config,
        connect_timeout: Duration,
    ) -> Result<Self, ClientError> {
        // Whole files pass through, and no version follows another in one subscription: there are no deltas.
        let config = Config { base_bytes: 0, reconnect_timeout: RECONNECT_TIMEOUT, ..config };
        let client = Client::connect_within(connect_timeout, &ticket, config.clone()).await?;
        let session = Session { client: Arc::new(client), failed: None };
        Ok(Self { ticket, config, connect_timeout, session: Mutex::new(session), listed: Mutex::default() })
    }

    /// The topics with their newest versions, as far as they are known while the server does not answer.
    ///
    /// # Errors
    /// [`Failure`] when the server refuses to tell, or is not reached and nothing is known.
    pub(super) async fn newest(self: &Arc<Self>) -> Result<Arc<Newest>, Failure> {
        let mut listed = self.listed.lock().await;
        if let Some(Listed { at, newest }) = &*listed
            && at.elapsed() <= LIST_AGE_MAX
        {
            return Ok(Arc::clone(newest));
        }
        let known = listed.as_ref().map(|listed| Arc::clone(&listed.newest));
        let within = if known.is_some() { LIST_TIMEOUT_OF_KNOWN } else { LIST_TIMEOUT };
        let asked = timeout(within, self.list()).await;
        let asked = asked.unwrap_or_else(|_| Err(Failure::late("the list of topics", within.as_secs())));
        let newest = match (asked, known) {
            (Ok(newest), known) => Arc::new(newest.after(known.as_deref())),
            // What is in memory can be read meanwhile.
            (Err(failure), Some(known)) if !failure.is_refusal() => known,
            (Err(failure), _) => return Err(failure),
        };
        *listed = Some(Listed { at: Instant::now(), newest: Arc::clone(&newest) });
        Ok(newest)
    }

    /// Asks for the list. If that is cancelled, an ended session is replaced nevertheless.
    async fn list(self: &Arc<Self>) -> Result<Newest, Failure> {
        let origin = Arc::clone(self);
        let connecting = tokio::spawn(async move { origin.client().await }).await;
        let client = connecting
            .map_err(|error| Failure::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))??;
        if let Some(lost) = client.connection_lost() {
            return Err(Failure::of_client(&lost));
        }
        let instance = client.instance();
        let topics = client.list().await.map_err(|error| Failure::of_client(&error))?;
        let topics = topics.into_iter().map(|entry| (entry.id.topic.clone(), entry.id)).collect();
        Ok(Newest { instance, reversals: 0, topics })
    }

    /// Receives one version, or a part or description of one, `within` this time. Returns also the server process from
    /// which it came.
    ///
    /// # Errors
    /// [`GotError`].
    pub(super) async fn get(
        &self,
        request: Request,
        what: &str,
        within: Duration,
    ) -> Result<(Snapshot, InstanceId), GotError> {
        let client = self.client().await?;
        let instance = client.instance();
        let received = tokio::select! {
            received = timeout(within, client.get(request)) => match received {
                Ok(received) => received?,
                Err(_) => return Err(not_connected(&client, what, within).into()),
            },
            lost = lost(&client) => return Err(Failure::of_client(&lost).into()),
        };
        match client.instance() == instance {
            true => Ok((received, instance)),
            false => Err(Failure::restarted().into()),
        }
    }

    /// The session, or a new one if it has ended.
    async fn client(&self) -> Result<Arc<Client>, Failure> {
        let mut session = self.session.lock().await;
        if !session.client.has_ended() {
            return Ok(Arc::clone(&session.client));
        }
        if let Some((next_at, failure)) = &session.failed
            && Instant::now() < *next_at
        {
            return Err(failure.clone());
        }
        match Client::connect_within(self.connect_timeout, &self.ticket, self.config.clone()).await {
            Ok(client) => {
                *session = Session { client: Arc::new(client), failed: None };
                Ok(Arc::clone(&session.client))
            }
            Err(error) => {
                tracing::warn!(%error, "The hub cannot connect to the server again.");
                let failure = Failure::of_client(&error);
                session.failed = Some((Instant::now() + RECONNECT_INTERVAL, failure.clone()));
                Err(failure)
            }
        }
    }
}

/// Waits until the connection was lost for [`LOST_TIMEOUT`]; returns why.
async fn lost(client: &Client) -> Arc<ClientError> {
    let mut since: Option<Instant> = None;
    loop {
        tokio::time::sleep(LOST_INTERVAL).await;
        match client.connection_lost() {
            Some(lost) if since.is_some_and(|since| since.elapsed() >= LOST_TIMEOUT) => return lost,
            Some(_) => since = Some(since.unwrap_or_else(Instant::now)),
            None => since = None,
        }
    }
}

/// Why something did not come `within` a time: the connection is lost, or it is slow.
fn not_connected(client: &Client, what: &str, within: Duration) -> Failure {
    match client.connection_lost() {
        Some(lost) => Failure::of_client(&lost),
        None => Failure::late(what, within.as_secs()),
    }
}

/// Why [`Origin::get`] failed.
#[derive(Debug)]
pub(super) enum GotError {
    Hub(Failure),
    Get(GetError),
}

impl From<Failure> for GotError {
    fn from(failure: Failure) -> Self {
        Self::Hub(failure)
    }
}

impl From<GetError> for GotError {
    fn from(error: GetError) -> Self {
        Self::Get(error)
    }
}

impl From<GotError> for Failure {
    fn from(error: GotError) -> Self {
        match error {
            GotError::Hub(failure) => failure,
            GotError::Get(error) => error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_client::{Epoch, Version};

    #[test]
    fn a_topic_that_went_back_is_counted() {
        let list = |topics: &[(&str, u64, u64)]| {
            let id = |&(topic, epoch, version): &(&str, u64, u64)| {
                let topic = Topic::new(topic).unwrap();
                (topic.clone(), VersionId { topic, epoch: Epoch(epoch), version: Version(version) })
            };
            Newest { instance: InstanceId([1; 16]), reversals: 0, topics: topics.iter().map(id).collect() }
        };
        let mut known = None;
        for (topics, reversals) in [
            (&[("a", 1, 5), ("b", 1, 5)][..], 0),
            (&[("a", 1, 5), ("b", 1, 7)], 0),
            (&[("a", 1, 4), ("b", 1, 7)], 1),
            (&[("a", 1, 6), ("b", 1, 7)], 1),
            (&[("a", 2, 1), ("c", 1, 1)], 1),
            (&[("a", 2, 1), ("c", 1, 0)], 2),
        ] {
            let newest = list(topics).after(known.as_ref());
            assert_eq!(newest.reversals, reversals, "{topics:?}");
            known = Some(newest);
        }
    }
}
