//! [`ArrivingSource`]: the bytes of a version that is being received.

use bytes::Bytes;
use std::{ops::Range, sync::Arc};
use tensor_relay_device::{BoxFuture, HostSource, Lock, NotShared, SharedRange, Source, SourceError};
use tensor_relay_protocol::{Manifest, RangeSet};
use tensor_relay_transport::{Workers, egress::Arrival, forwarding::ReceivedMemory};

/// The bytes of a version in the memory of a client. Until it is whole, chunks that are here are copied out of that memory,
/// and reads of others wait; then they are read in place.
#[derive(Debug)]
pub(super) struct ArrivingSource {
    manifest: Arc<Manifest>,
    arrival: Arc<Arrival>,
    workers: Workers,
    place: Lock<Place>,
}

/// Where the bytes are.
#[derive(Debug, Clone)]
enum Place {
    /// In memory that is being filled; `None` if they cannot be read before they are whole.
    Arriving(Option<Arc<dyn ReceivedMemory>>),
    Whole(HostSource),
}

impl ArrivingSource {
    pub(super) fn new(
        manifest: Arc<Manifest>,
        memory: Option<Arc<dyn ReceivedMemory>>,
        arrival: Arc<Arrival>,
        workers: Workers,
    ) -> Self {
        Self { manifest, arrival, workers, place: Lock::new(Place::Arriving(memory)) }
    }

    /// Handles the commit. Returns false if the bytes are nowhere.
    pub(super) fn handle_committed(&self, whole: Option<HostSource>) -> bool {
        let mut place = self.place.lock();
        match whole {
            Some(whole) => *place = Place::Whole(whole),
            None => return matches!(&*place, Place::Arriving(Some(_)) | Place::Whole(_)),
        }
        true
    }

    /// The chunks that have a byte of `range`.
    fn chunks(&self, range: &Range<u64>) -> RangeSet {
        let chunks = self.manifest.chunking().iter();
        let overlaps = |chunk: &Range<u64>| chunk.start < range.end && range.start < chunk.end;
        let indices = chunks.filter(|(_, chunk)| overlaps(chunk)).map(|(index, _)| index.0);
        indices.map(|index| index..index + 1).collect()
    }

    /// Reads `range`, which is here: in place, or by a copy out of memory that is still being filled.
    async fn read_here(&self, range: Range<u64>) -> Result<Bytes, SourceError> {
        let place = self.place.lock().clone();
        match place {
            Place::Whole(whole) => whole.read(range).await,
            Place::Arriving(None) => Err(SourceError::GivenUp),
            Place::Arriving(Some(memory)) => {
                let len = (range.end - range.start) as usize;
                let copied = self.workers.run_over(len, move || {
                    let mut bytes = vec![0; len];
                    memory.copy(range, &mut bytes).then(|| Bytes::from(bytes))
                });
                copied.await.ok_or(SourceError::GivenUp)
            }
        }
    }
}

impl Source for ArrivingSource {
    fn len_bytes(&self) -> u64 {
        self.manifest.payload_bytes()
    }

    fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
        Box::pin(async move {
            if !self.arrival.is_whole() {
                let is_here = self.arrival.wait_for(&self.chunks(&range)).await;
                is_here.map_err(|_| SourceError::GivenUp)?;
            }
            self.read_here(range).await
        })
    }

    fn is_in_place(&self, range: &Range<u64>) -> bool {
        match &*self.place.lock() {
            Place::Arriving(_) => false,
            Place::Whole(whole) => whole.is_in_place(range),
        }
    }

    fn shared(&self) -> Result<SharedRange, NotShared> {
        match &*self.place.lock() {
            Place::Arriving(_) => Err(NotShared::Private),
            Place::Whole(whole) => whole.shared(),
        }
    }
}
