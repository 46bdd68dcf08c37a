//! [`Blocks`]: parts of versions that were received, in bounded memory, each received once for all who read it.

use super::{
    failure::Failure,
    origin::GotError,
    recent::Recent,
    version::{HubVersion, Piece},
};
use hyper::{
    StatusCode,
    body::{Buf, Bytes},
};
use std::{
    ops::Range,
    sync::{Arc, Weak},
    time::Duration,
};
use tensor_relay_client::{Snapshot, Tensor};
use tensor_relay_device::Lock;
use tokio::sync::{Semaphore, watch};

/// The number of blocks that are received at once, or fewer if they are large: at most half of the memory is for blocks
/// under way, or one block. Those that wait begin in the order in which they were asked for.
const IN_FLIGHT_MAX: usize = 8;

/// The least memory: twice what is received at once, in blocks of the usual size.
pub(super) const BUDGET_MIN_BYTES: u64 = 64 << 20;

/// The deadline for a block from when it is asked for, the wait for earlier ones included. Less than that of the server for
/// transfers, so that no request waits for more than a minute.
const BLOCK_TIMEOUT: Duration = Duration::from_secs(60);

/// The received blocks of all versions.
#[derive(Debug)]
pub(super) struct Blocks {
    budget_bytes: u64,
    in_flight: Semaphore,
    state: Lock<State>,
}

#[derive(Debug, Default)]
struct State {
    entries: Recent<Key, Entry>,
    /// The bytes of the blocks that are here or being received.
    bytes: u64,
}

/// The number of a version, and of a block of it.
type Key = (u64, usize);

#[derive(Debug)]
struct Entry {
    outcome: watch::Receiver<Option<Outcome>>,
    block: Option<Arc<Snapshot>>,
    /// The bytes that it takes: none while it waits for its turn.
    bytes: u64,
}

/// A received block. It may give way to others before it is read: clients that do not read hold no memory.
type Outcome = Result<Weak<Snapshot>, Failure>;

impl Blocks {
    /// Keeps up to `budget_bytes`, and at least [`BUDGET_MIN_BYTES`].
    pub(super) fn new(budget_bytes: u64) -> Self {
        Self {
            budget_bytes: budget_bytes.max(BUDGET_MIN_BYTES),
            in_flight: Semaphore::new(IN_FLIGHT_MAX),
            state: Lock::default(),
        }
    }

    /// How many blocks of `block_bytes` each of `readers` may have ahead of what it reads, so that they do not drive out
    /// each other's.
    pub(super) fn ahead(&self, block_bytes: u64, readers: usize) -> u64 {
        let blocks = self.budget_bytes / block_bytes.max(1) / (readers.max(1) as u64);
        blocks.saturating_sub(1).min(IN_FLIGHT_MAX as u64)
    }

    /// Begins to receive a block, unless it is here or on its way.
    pub(super) fn prefetch(self: &Arc<Self>, version: &Arc<HubVersion>, block: usize) {
        let _ = self.begin(version, block);
    }

    /// The bytes of a file in `range`, of which the reader asks for at most a few hundred KiB at once. They are verified.
    ///
    /// # Errors
    /// [`Failure`] when a part does not arrive.
    pub(super) async fn read_file(
        self: &Arc<Self>,
        version: &Arc<HubVersion>,
        file: usize,
        range: Range<u64>,
    ) -> Result<Bytes, Failure> {
        let mut content: Vec<u8> = vec![];
        let mut at = range.start;
        while at < range.end {
            let piece = version.files().get(file).and_then(|file| version.piece(file, at, range.end));
            let bytes = match piece {
                Some(Piece::Literal(bytes)) => bytes,
                Some(Piece::Tensor(tensor, range)) => self.read(version, tensor, range).await?,
                None => Bytes::new(),
            };
            if bytes.is_empty() {
                return Err(Failure::new(StatusCode::INTERNAL_SERVER_ERROR, "the file ends early"));
            }
            at += bytes.len() as u64;
            if at == range.end && content.is_empty() {
                return Ok(bytes);
            }
            content.extend_from_slice(bytes.chunk());
        }
        Ok(content.into())
    }

    /// A copy of the bytes of a tensor in `range`, so that no reader keeps a whole block in memory.
    ///
    /// # Errors
    /// [`Failure`] when a part does not arrive.
    pub(super) async fn read(
        self: &Arc<Self>,
        version: &Arc<HubVersion>,
        tensor: &Tensor,
        range: Range<u64>,
    ) -> Result<Bytes, Failure> {
        let mut content = Vec::with_capacity((range.end - range.start) as usize);
        let mut at = range.start;
        while at < range.end {
            // What lies in pieces is in one block.
            let number = match tensor.range() {
                Some(place) => version.block_at(place.start + at),
                None => version.block_at(tensor.offset()),
            };
            let snapshot = self.get(version, number).await?;
            let bytes = part_of(&snapshot, version, (tensor, number), at..range.end);
            let bytes = bytes.filter(|bytes| !bytes.is_empty()).ok_or_else(|| {
                Failure::new(StatusCode::INTERNAL_SERVER_ERROR, format!("{} has no such bytes", tensor.name))
            })?;
            at += bytes.len() as u64;
            content.extend_from_slice(&bytes);
        }
        Ok(content.into())
    }

    async fn get(
        self: &Arc<Self>,
        version: &Arc<HubVersion>,
        block: usize,
    ) -> Result<Arc<Snapshot>, Failure> {
        let getting = async {
            loop {
                let mut outcome = self.begin(version, block);
                let received = outcome.wait_for(Option::is_some).await.map(|outcome| outcome.clone());
                match received {
                    Ok(Some(received)) => {
                        // Otherwise it has given way to others, and is received again.
                        if let Some(block) = received?.upgrade() {
                            return Ok(block);
                        }
                    }
                    // The task ended without an outcome: it panicked, or the hub is stopping.
                    Ok(None) | Err(_) => {
                        return Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, "the hub is stopping"));
                    }
                }
            }
        };
        tokio::time::timeout(BLOCK_TIMEOUT, getting)
            .await
            .unwrap_or_else(|_| Err(late()))
    }

    fn begin(self: &Arc<Self>, version: &Arc<HubVersion>, block: usize) -> watch::Receiver<Option<Outcome>> {
        let key = (version.number, block);
        let mut state = self.state.lock();
        if let Some(entry) = state.entries.get(&key)
            && entry.is_of_use()
        {
            return entry.outcome.clone();
        }
        let (sender, outcome) = watch::channel(None);
        let entry = Entry { outcome: outcome.clone(), block: None, bytes: 0 };
        if let Some(replaced) = state.entries.insert(key, entry) {
            state.bytes -= replaced.bytes;
        }
        drop(state);
        let (blocks, version) = (Arc::clone(self), Arc::clone(version));
        tokio::spawn(async move {
            let received = tokio::time::timeout(BLOCK_TIMEOUT, blocks.receive(&version, block)).await;
            let received = received.unwrap_or_else(|_| Err(late()));
            let outcome = blocks.state.lock().handle_received(&key, received);
            let _ = sender.send(Some(outcome)); // Nobody may be waiting any more.
        });
        outcome
    }

    /// The number of turns that a block takes.
    fn turns(&self, bytes: u64) -> u32 {
        let bytes_of_turn = self.budget_bytes / 2 / IN_FLIGHT_MAX as u64;
        bytes.div_ceil(bytes_of_turn).clamp(1, IN_FLIGHT_MAX as u64) as u32
    }

    async fn receive(&self, version: &HubVersion, number: usize) -> Result<Snapshot, Failure> {
        let Some(block) = version.block(number) else {
            return Err(Failure::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "there is no such part of the version",
            ));
        };
        let bytes = block.payload.end - block.payload.start;
        let _turn = self.in_flight.acquire_many(self.turns(bytes)).await;
        self.state.lock().make_room((version.number, number), bytes, self.budget_bytes);
        let received = version
            .origin
            .get(version.request(block), "a part of the file", BLOCK_TIMEOUT)
            .await;
        let (snapshot, instance) = received.map_err(|error| match error {
            GotError::Get(error) if Failure::is_not_kept(&error) => {
                Failure::gone(&version.id.topic, version.id.version)
            }
            error => error.into(),
        })?;
        match *snapshot.id() == version.id && snapshot.manifest() == version.manifest() {
            _ if instance != version.instance => Err(Failure::restarted()),
            true => Ok(snapshot),
            false => Err(Failure::gone(&version.id.topic, version.id.version)),
        }
    }
}

impl Entry {
    /// Whether it was received or is on its way; otherwise its task panicked.
    fn is_of_use(&self) -> bool {
        self.outcome.borrow().is_some() || self.outcome.has_changed().is_ok()
    }
}

impl State {
    /// Makes room for a block that is received from now on: those that were not used for the longest time are
    /// forgotten.
    fn make_room(&mut self, key: Key, bytes: u64, budget_bytes: u64) {
        let Some(entry) = self.entries.get(&key) else { return };
        entry.bytes = bytes;
        self.bytes += bytes;
        while self.bytes > budget_bytes
            && let Some(oldest) = self.entries.remove_oldest(|entry| entry.block.is_some())
        {
            self.bytes -= oldest.bytes;
        }
    }

    /// Keeps a received block. If it failed, whoever asks next tries again.
    fn handle_received(&mut self, key: &Key, received: Result<Snapshot, Failure>) -> Outcome {
        let block = received.map(Arc::new);
        let outcome = block.as_ref().map(Arc::downgrade).map_err(Clone::clone);
        match block {
            Ok(block) => {
                if let Some(entry) = self.entries.get(key) {
                    entry.block = Some(block);
                }
            }
            Err(_) => self.bytes -= self.entries.remove(key).map_or(0, |entry| entry.bytes),
        }
        outcome
    }
}

/// A block did not arrive in time.
fn late() -> Failure {
    Failure::late("a part of the file", BLOCK_TIMEOUT.as_secs())
}

/// The bytes of a tensor from the start of `range` on that a block has.
fn part_of(
    snapshot: &Snapshot,
    version: &HubVersion,
    (tensor, number): (&Tensor, usize),
    range: Range<u64>,
) -> Option<Bytes> {
    if let Some(place) = tensor.range() {
        let block = version.block(number)?;
        let end = (place.start + range.end).min(block.payload.end);
        if let Some(bytes) = snapshot.payload(place.start + range.start..end) {
            return Some(bytes);
        }
    }
    // The block has tensors in pieces, so it has this one whole.
    Some(
        snapshot
            .tensor(tensor.name.as_str())?
            .slice(range.start as usize..range.end as usize),
    )
}
