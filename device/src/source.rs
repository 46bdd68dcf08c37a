use std::{
    collections::TryReserveError,
    fmt,
    future::{Future, ready},
    io,
    ops::Range,
    path::PathBuf,
    pin::Pin,
    sync::Arc,
};

use bytes::Bytes;

use crate::{
    engine::{CopyEngine, CopyError},
    pool::SlotPool,
};

/// A boxed future: what makes [`Source`] and [`Sink`](crate::Sink) usable as trait objects. Costs one small
/// allocation per chunk, which is nothing beside its megabytes.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Where the bytes of one payload come from, wherever they lie.
///
/// Reads may run at the same time and end in any order. A source does not change while it is read.
pub trait Source: Send + Sync + fmt::Debug {
    /// The bytes of the whole payload.
    fn len_bytes(&self) -> u64;

    /// Gives the bytes of `range`, without a copy where they lie in host memory. May wait for a staging slot,
    /// which the bytes then hold until their last clone is dropped: a reader who keeps them keeps others
    /// waiting.
    fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>>;
}

/// Why a source gave no bytes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The reader asked for bytes that the source does not have.
    #[error(
        "The bytes {start}..{end} were to be read from a source of {len_bytes} bytes. The manifest that the reader \
         follows does not describe this source."
    )]
    OutOfBounds {
        /// The first byte asked for.
        start: u64,
        /// One past the last byte asked for.
        end: u64,
        /// The bytes that the source has.
        len_bytes: u64,
    },
    /// The reader asked for more than one staging slot holds.
    #[error(
        "A chunk of {asked_bytes} bytes does not fit into a staging slot of {slot_bytes} bytes. Make the pool's slots \
         as long as the longest chunk."
    )]
    LongerThanSlot {
        /// The length asked for.
        asked_bytes: u64,
        /// The bytes of each slot.
        slot_bytes: usize,
    },
    /// The bytes asked for lie in several places, and there is no memory to bring them together.
    #[error(
        "There is no memory for a copy of {asked_bytes} bytes, which lie in several places. Check the free memory of \
         this host, or make chunks smaller."
    )]
    NoMemory {
        /// The length asked for.
        asked_bytes: u64,
        /// What the allocator said.
        source: TryReserveError,
    },
    /// The engine could not copy the bytes off its device.
    #[error("The source could not be copied off its device.")]
    Copy(#[from] CopyError),
    /// The bytes are in a file that is not any more what it was when it was published.
    #[error(
        "{} changed while it was served. Write new content under another name and rename it into place.",
        path.display()
    )]
    Changed {
        /// Which file.
        path: PathBuf,
    },
    /// The bytes are in a file that the system does not let read.
    #[error("{} could not be read: {source}.", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl SourceError {
    /// Whether another try would fail as well: the bytes are not what they were, or never were there. What the system
    /// refuses now, it may give later.
    pub fn is_final(&self) -> bool {
        !matches!(self, Self::Io { .. } | Self::NoMemory { .. } | Self::Copy(_))
    }
}

/// A source in host memory. Reading it copies nothing and waits for nobody.
pub struct HostSource {
    bytes: Bytes,
}

impl HostSource {
    /// Serves `bytes`, and shares them with every reader.
    pub fn new(bytes: Bytes) -> Self {
        Self { bytes }
    }

    fn slice(&self, range: Range<u64>) -> Result<Bytes, SourceError> {
        check_range(&range, self.len_bytes())?;
        // In bounds of a `usize` length, so neither end is cut.
        Ok(self.bytes.slice(range.start as usize..range.end as usize))
    }
}

impl Source for HostSource {
    fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
        Box::pin(ready(self.slice(range)))
    }
}

impl fmt::Debug for HostSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostSource").field("len_bytes", &self.len_bytes()).finish()
    }
}

/// A source in the memory of a device. Each read waits for a slot, is copied into it, and holds it.
pub struct EngineSource<E: CopyEngine> {
    engine: Arc<E>,
    memory: Arc<E::Memory>,
    slots: SlotPool,
}

impl<E: CopyEngine> EngineSource<E> {
    /// Serves `memory` through `slots`, which `engine` must have made.
    pub fn new(engine: Arc<E>, memory: Arc<E::Memory>, slots: SlotPool) -> Self {
        Self { engine, memory, slots }
    }

    async fn copy(&self, range: Range<u64>) -> Result<Bytes, SourceError> {
        check_range(&range, self.len_bytes())?;
        let asked_bytes = range.end - range.start;
        let slot_bytes = self.slots.slot_bytes();
        if asked_bytes > slot_bytes as u64 {
            return Err(SourceError::LongerThanSlot { asked_bytes, slot_bytes });
        }
        let len = asked_bytes as usize;
        let slot = self.slots.acquire().await;
        let slot = self.engine.copy_out(&self.memory, range.start, len, slot).await?;
        Ok(slot.freeze(len))
    }
}

impl<E: CopyEngine> Source for EngineSource<E> {
    fn len_bytes(&self) -> u64 {
        self.engine.memory_len(&self.memory)
    }

    fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
        Box::pin(self.copy(range))
    }
}

impl<E: CopyEngine> fmt::Debug for EngineSource<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineSource")
            .field("engine", &self.engine.name())
            .field("len_bytes", &self.len_bytes())
            .field("slots", &self.slots)
            .finish()
    }
}

/// Judges a range before anything is read for it.
pub(crate) fn check_range(range: &Range<u64>, len_bytes: u64) -> Result<(), SourceError> {
    let Range { start, end } = *range;
    let inside = start <= end && end <= len_bytes;
    inside.then_some(()).ok_or(SourceError::OutOfBounds { start, end, len_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Capacity, HostEngine, HostMemory};

    #[tokio::test]
    async fn a_host_source_shares_its_bytes() {
        let bytes = Bytes::from(vec![1, 2, 3, 4]);
        let source = HostSource::new(bytes.clone());
        let part = source.read(1..3).await.unwrap();
        assert_eq!(part.as_ptr(), bytes[1..].as_ptr());
        assert_eq!(&part[..], [2, 3]);
        assert!(source.read(4..4).await.unwrap().is_empty());
    }

    #[tokio::test]
    #[expect(clippy::reversed_empty_ranges, reason = "a reader may ask for any two numbers")]
    async fn ranges_outside_are_refused() {
        let source = HostSource::new(Bytes::from_static(b"four"));
        for range in [0..5, 5..5, 3..2, u64::MAX..u64::MAX, 1..u64::MAX] {
            assert!(matches!(source.read(range).await, Err(SourceError::OutOfBounds { len_bytes: 4, .. })));
        }
    }

    #[tokio::test]
    async fn a_chunk_longer_than_a_slot_is_refused_before_it_waits() {
        let engine = Arc::new(HostEngine::new(HostMemory::new(1 << 20)).unwrap());
        let slots = engine.slots(Capacity { slots: 1, slot_bytes: 64 }).unwrap();
        let source = EngineSource::new(Arc::clone(&engine), engine.allocate(100).unwrap(), slots.clone());
        let held = source.read(0..64).await.unwrap();
        let refused = source.read(0..65).await;
        assert!(matches!(refused, Err(SourceError::LongerThanSlot { asked_bytes: 65, slot_bytes: 64 })));
        assert_eq!(slots.available(), 0);
        drop(held);
        assert_eq!(slots.available(), 1);
    }
}
