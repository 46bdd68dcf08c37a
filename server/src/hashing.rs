//! Hashes published versions in the background.
//!
//! For versions in the server's own memory that nobody follows when they are published: what is followed is hashed by its
//! senders, together with all that they need the bytes for. One thread of the lowest priority hashes for all servers of
//! the process. A version that is dropped or replaced meanwhile is not hashed further; its memory is held until the chunk
//! is hashed, which takes long if all processors are busy ([`wait_until_released`]).

use crate::{retained::Retained, topic::TopicState};
use std::{
    sync::{
        Weak,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};
use tensor_relay_device::{Lock, SourceError};
use tensor_relay_protocol::{ChunkHash, ChunkIndex};
use tensor_relay_transport::Workers;

/// A published version that is not hashed yet.
#[derive(Debug)]
pub(crate) struct Unhashed {
    pub(crate) version: Weak<Retained>,
    pub(crate) topic: Weak<TopicState>,
}

/// The versions that wait for the thread, oldest first, and whether it runs.
struct Queue {
    versions: Vec<Unhashed>,
    has_thread: bool,
}

static QUEUE: Lock<Queue> = Lock::new(Queue { versions: vec![], has_thread: false });

/// Counts when the thread takes the bytes of a chunk and when it releases them: odd while it holds some.
static HELD: AtomicU64 = AtomicU64::new(0);

/// The time to wait for bytes that the thread holds, and the interval of looking.
const RELEASED_TIMEOUT: Duration = Duration::from_secs(1);
const RELEASED_INTERVAL: Duration = Duration::from_millis(1);

/// Waits until the thread releases the bytes that it holds, whose version may have been replaced. Returns whether it held
/// some. Blocks, for a second at most.
pub(crate) fn wait_until_released() -> bool {
    let held = HELD.load(Ordering::Acquire);
    let holds = held % 2 == 1;
    let is_over = |_: &u32| HELD.load(Ordering::Acquire) != held;
    let looks = (RELEASED_TIMEOUT.as_millis() / RELEASED_INTERVAL.as_millis()) as u32;
    if holds {
        (0..looks)
            .take_while(|look| !is_over(look))
            .for_each(|_| thread::sleep(RELEASED_INTERVAL));
    }
    holds
}

/// The most versions that wait. The oldest of more is hashed when it is sent, like all that are sent before their turn.
const WAITING_MAX: usize = 64;

/// Hashes a version in the background: of several, the one that was published last goes first.
pub(crate) fn begin(version: Unhashed, workers: Workers) {
    if workers == Workers::Inline {
        return version.hash();
    }
    let mut queue = QUEUE.lock();
    queue.push(version);
    if !queue.has_thread {
        queue.has_thread =
            Workers::spawn_idle("relay-hash", || std::iter::from_fn(next).for_each(|v| v.hash())).is_ok();
    }
}

/// The next version. `None` ends the calling thread.
fn next() -> Option<Unhashed> {
    let mut queue = QUEUE.lock();
    let next = queue.versions.pop();
    queue.has_thread = next.is_some(); // Under the lock, so that `begin` never counts on a thread that ends.
    next
}

impl Queue {
    fn push(&mut self, version: Unhashed) {
        if self.versions.len() == WAITING_MAX {
            self.versions.remove(0);
        }
        self.versions.push(version);
    }
}

impl Unhashed {
    /// Hashes the chunks from the last one on, since senders begin with the first one. A version that cannot be read is
    /// withdrawn.
    fn hash(&self) {
        let Some(version) = self.version.upgrade() else { return };
        let chunks = 0..version.payload.manifest().chunking().count();
        drop(version);
        for chunk in chunks.rev().map(ChunkIndex) {
            match self.hash_chunk(chunk) {
                Some(Ok(())) => {}
                Some(Err(error)) => return self.handle_unreadable(&error),
                None => return,
            }
        }
    }

    /// Hashes a chunk, if that is still to be done. Holds only its bytes meanwhile, and with them the version's memory.
    /// `None` if the version was dropped or replaced.
    fn hash_chunk(&self, chunk: ChunkIndex) -> Option<Result<(), SourceError>> {
        let wanted = || self.version.upgrade().filter(|version| !version.has_left_retention());
        HELD.fetch_add(1, Ordering::AcqRel);
        let hash = wanted().map(|version| {
            let bytes = version.payload.unhashed_bytes(chunk);
            drop(version);
            bytes.map(|bytes| bytes.map(|bytes| ChunkHash::of(&bytes)))
        });
        HELD.fetch_add(1, Ordering::AcqRel);
        let Some(hash) = hash? else { return Some(Ok(())) };
        match hash {
            Ok(hash) => Some(wanted()?.payload.handle_read(chunk, hash)),
            Err(error) => Some(Err(error)),
        }
    }

    fn handle_unreadable(&self, error: &SourceError) {
        if let (Some(topic), Some(version)) = (self.topic.upgrade(), self.version.upgrade()) {
            topic.handle_unreadable(&version, error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Publication, Publishable, Publisher, Staged, Staging, TopicOptions, bases::Bases,
        catalogue::Catalogue,
    };
    use bytes::Bytes;
    use std::{
        convert::Infallible,
        ops::Range,
        sync::{Arc, mpsc},
        time::Duration,
    };
    use tensor_relay_device::{BoxFuture, HostMemory, Source};
    use tensor_relay_protocol::{Dtype, Epoch, Limits, Shape, TensorName, TensorSpec, Topic};

    const CHUNK_BYTES: u32 = 64 << 10;
    const CHUNKS: u32 = 8;

    /// A source that records where it was read, and what follows.
    #[derive(Debug)]
    struct Recorded {
        source: Arc<dyn Source>,
        reads: Lock<Vec<u64>>,
        /// Blocks each read until it can receive.
        gate: Option<Lock<mpsc::Receiver<()>>>,
        /// The chunk that cannot be read.
        failing: Option<u64>,
    }

    impl Source for Recorded {
        fn len_bytes(&self) -> u64 {
            self.source.len_bytes()
        }

        fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
            let chunk = range.start / u64::from(CHUNK_BYTES);
            self.reads.lock().push(chunk);
            if let Some(gate) = &self.gate {
                gate.lock().recv_timeout(Duration::from_secs(60)).unwrap();
            }
            match self.failing == Some(chunk) {
                true => Box::pin(async { Err(SourceError::Changed { path: "model".into() }) }),
                false => self.source.read(range),
            }
        }

        fn is_in_place(&self, range: &Range<u64>) -> bool {
            self.source.is_in_place(range)
        }
    }

    struct Case {
        memory: HostMemory,
        catalogue: Arc<Catalogue>,
        topic: Arc<TopicState>,
        publisher: Publisher,
        workers: Workers,
    }

    impl Case {
        fn new(workers: Workers) -> Self {
            let catalogue = Arc::new(Catalogue::new(Duration::ZERO, Arc::new(Bases::new(0))));
            let topic = catalogue.open(&topic()).unwrap();
            let (topics, options) = (Arc::clone(&catalogue), TopicOptions::default());
            let publisher =
                Publisher::new(Arc::clone(&topic), topics, Arc::default(), workers, options, Epoch(1));
            Self { memory: HostMemory::new(1 << 30), catalogue, topic, publisher, workers }
        }

        fn stage(&self, value: u8) -> Staged {
            let staging = Staging {
                memory: self.memory.clone(),
                bases: Arc::default(),
                layouts: Arc::default(),
                chunk_bytes: CHUNK_BYTES,
                limits: Limits::default(),
                workers: self.workers,
            };
            let shape = Shape::new(&[u64::from(CHUNKS * CHUNK_BYTES)]).unwrap();
            let spec = TensorSpec::new(TensorName::new("t").unwrap(), Dtype::U8, shape);
            let fill = |_: usize, out: &mut [u8]| {
                out.fill(value);
                Ok::<(), Infallible>(())
            };
            Staged::new(&staging, vec![spec], vec![], fill).unwrap()
        }

        /// Publishes a version through a recorded source.
        async fn publish(
            &mut self,
            gate: Option<mpsc::Receiver<()>>,
            failing: Option<u64>,
        ) -> (Publication, Arc<Recorded>) {
            let staged = self.stage(7);
            let source = Arc::clone(staged.payload.source());
            let recorded = Recorded { source, reads: Lock::default(), gate: gate.map(Lock::new), failing };
            let recorded = Arc::new(recorded);
            let payload = staged.payload.through(recorded.clone());
            drop(staged);
            let version =
                Publishable { payload: payload.into(), returned: None, charge: None, relayed: None };
            (self.publisher.publish(version, vec![]).await.unwrap(), recorded)
        }

        fn newest(&self) -> Option<Arc<Retained>> {
            self.topic.current(|_| true).map(|(_, version)| version)
        }

        fn is_hashed(&self) -> bool {
            self.newest().is_some_and(|version| version.payload.digest().is_some())
        }
    }

    #[tokio::test]
    async fn what_nobody_follows_is_hashed_from_its_end() {
        let mut case = Case::new(Workers::Threads);
        let (_, recorded) = case.publish(None, None).await;
        wait_until("the version is hashed", || case.is_hashed());
        assert_eq!(*recorded.reads.lock(), (0..u64::from(CHUNKS)).rev().collect::<Vec<_>>());
        let expected = case.stage(7).hash();
        assert_eq!(case.newest().unwrap().payload.digest(), Some(expected));
    }

    #[tokio::test]
    async fn what_is_followed_is_left_to_its_senders() {
        let mut case = Case::new(Workers::Inline);
        let follower = case.catalogue.follow(&topic());
        let (_, recorded) = case.publish(None, None).await;
        assert!(recorded.reads.lock().is_empty() && !case.is_hashed());
        drop(follower);
        case.publish(None, None).await;
        assert!(case.is_hashed());
    }

    #[tokio::test]
    async fn a_version_that_cannot_be_read_is_withdrawn() {
        for workers in [Workers::Inline, Workers::Threads] {
            let mut case = Case::new(workers);
            let (publication, recorded) = case.publish(None, Some(5)).await;
            wait_until("its failure is told", || publication.failure().is_some());
            assert!(publication.failure().unwrap().starts_with("model changed"), "{publication:?}");
            wait_until("it is withdrawn", || case.newest().is_none() && case.publisher.is_lost());
            assert_eq!(*recorded.reads.lock(), [7, 6, 5]);
            drop(recorded);
            wait_until("its memory is given back", || case.memory.stats().in_use_bytes == 0);
            let (next, _) = case.publish(None, None).await;
            wait_until("the next version is hashed", || case.is_hashed());
            assert_eq!(next.failure(), None);
        }
    }

    /// Goal: a version that is withdrawn or replaced while it is hashed ends the hashing, and its memory comes back.
    /// Method: the hashing waits in its first read meanwhile.
    #[tokio::test]
    async fn a_version_that_leaves_is_not_hashed_further() {
        for is_replaced in [false, true] {
            let mut case = Case::new(Workers::Threads);
            let (open, gate) = mpsc::channel();
            let (publication, recorded) = case.publish(Some(gate), None).await;
            wait_until("the hashing has begun", || recorded.reads.lock().len() == 1);
            match is_replaced {
                true => drop(case.publish(None, None).await),
                false => publication.withdraw(),
            }
            for _ in 0..CHUNKS {
                open.send(()).unwrap();
            }
            let left = if is_replaced { u64::from(CHUNKS * CHUNK_BYTES) } else { 0 };
            let weak = Arc::downgrade(&recorded);
            drop(recorded);
            wait_until("it is dropped", || weak.strong_count() == 0);
            wait_until("its memory is given back", || case.memory.stats().in_use_bytes == left);
            assert!(!is_replaced || publication.failure().is_none());
        }
    }

    #[tokio::test]
    async fn a_withdrawn_version_in_transfer_is_not_hashed() {
        let mut case = Case::new(Workers::Inline);
        let _follower = case.catalogue.follow(&topic());
        let (publication, recorded) = case.publish(None, None).await;
        let in_transfer = case.newest().unwrap();
        publication.withdraw();
        Unhashed { version: Arc::downgrade(&in_transfer), topic: Arc::downgrade(&case.topic) }.hash();
        assert!(recorded.reads.lock().is_empty());
    }

    #[test]
    fn the_oldest_of_too_many_is_not_hashed() {
        let mut queue = Queue { versions: vec![], has_thread: true };
        let oldest = Case::new(Workers::Inline).topic;
        queue.push(Unhashed { version: Weak::new(), topic: Arc::downgrade(&oldest) });
        for _ in 0..WAITING_MAX {
            queue.push(Unhashed { version: Weak::new(), topic: Weak::new() });
        }
        assert_eq!(queue.versions.len(), WAITING_MAX);
        assert!(queue.versions.iter().all(|version| version.topic.upgrade().is_none()));
    }

    fn topic() -> Topic {
        Topic::new("t").unwrap()
    }

    fn wait_until(what: &str, reached: impl Fn() -> bool) {
        for _ in 0..60_000 {
            if reached() {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        panic!("not within a minute: {what}");
    }
}
