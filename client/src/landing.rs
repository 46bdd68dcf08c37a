//! Where the bytes of a version land: in memory of the session's own, or in buffers that the user lent.

use crate::buffers::{Lent, Writing, check_shared, fit};
use bytes::Bytes;
use std::{collections::BTreeMap, ops::Range, sync::Arc};
use tensor_relay_device::{AllocError, HostMemory, HostSink, Region, ScatterSink, Sink, SinkError};
use tensor_relay_protocol::{Selection, VersionId};

/// Takes the bytes of one version while they come, and gives them when they are whole.
#[derive(Debug)]
pub(crate) enum Landing {
    /// One piece of memory for all that is selected.
    Memory(Arc<HostSink>),
    /// The user's buffers. What is selected and has none goes nowhere.
    Buffers {
        sink: Arc<ScatterSink>,
        /// Where each part of the sink begins.
        starts: Vec<u64>,
        writing: Arc<Writing>,
    },
}

impl Landing {
    /// In the buffers that were lent, if there are some and they fit; in `memory` otherwise. Who lent buffers that do not
    /// fit is told when the version is there.
    pub(crate) fn new(
        selection: &Selection,
        lent: Option<Lent>,
        memory: &HostMemory,
    ) -> Result<Self, AllocError> {
        if let Some(landing) = lent.and_then(|lent| Self::in_buffers(selection, lent, memory)) {
            return Ok(landing);
        }
        let region = memory.allocate(selection.payload_bytes() as usize)?;
        Ok(Self::Memory(Arc::new(HostSink::new(region))))
    }

    fn in_buffers(selection: &Selection, lent: Lent, memory: &HostMemory) -> Option<Self> {
        let asked = lent.tensors.iter().map(|(name, region)| (name.as_str(), region.len() as u64));
        let fits = fit(selection, asked).ok()?;
        check_shared(selection, &fits).ok()?;
        let regions = lent.tensors.into_iter().map(|(_, region)| region);
        let mut parts: Vec<_> =
            fits.into_iter().zip(regions).filter(|(_, region)| !region.is_empty()).collect();
        parts.sort_by_key(|(fit, _)| fit.range.start);
        let starts = parts.iter().map(|(fit, _)| fit.range.start).collect();
        let parts = parts.into_iter().map(|(fit, region)| (fit.range, region));
        let sink = ScatterSink::new(selection.payload_bytes(), parts, memory.clone()).ok()?;
        Some(Self::Buffers { sink: Arc::new(sink), starts, writing: lent.writing })
    }

    /// Where a chunk of `id` may be written from now on.
    pub(crate) fn sink(&self, id: &VersionId) -> Arc<dyn Sink> {
        match self {
            Self::Memory(sink) => Arc::clone(sink) as Arc<dyn Sink>,
            Self::Buffers { sink, writing, .. } => {
                writing.begin(id);
                Arc::clone(sink) as Arc<dyn Sink>
            }
        }
    }

    /// Gives the bytes, which the caller vouches for being whole and verified.
    pub(crate) fn commit(&self) -> Result<Payload, SinkError> {
        match self {
            Self::Memory(sink) => sink.commit().map(Payload::Whole),
            Self::Buffers { sink, starts, writing } => {
                let bytes = sink.commit()?.into_iter().map(Region::freeze);
                let by_start = starts.iter().copied().zip(bytes).collect();
                Ok(Payload::Scattered(Arc::new(Scattered { by_start, writing: Arc::clone(writing) })))
            }
        }
    }
}

/// The bytes of a version that was received.
#[derive(Debug, Clone)]
pub(crate) enum Payload {
    /// All that was selected, in one piece.
    Whole(Bytes),
    /// The tensors that had a buffer of the user's, in those buffers.
    Scattered(Arc<Scattered>),
}

/// Tensors in the user's buffers, by where they would lie in one piece: tied weights are found under all their names.
/// The buffers go back when the last clone is dropped.
#[derive(Debug)]
pub(crate) struct Scattered {
    by_start: BTreeMap<u64, Bytes>,
    writing: Arc<Writing>,
}

impl Payload {
    /// Nothing.
    pub(crate) const EMPTY: Self = Self::Whole(Bytes::new());

    pub(crate) fn len_bytes(&self) -> u64 {
        match self {
            Self::Whole(bytes) => bytes.len() as u64,
            Self::Scattered(scattered) => scattered.by_start.values().map(|bytes| bytes.len() as u64).sum(),
        }
    }

    /// The tensors of `selection` that it has.
    pub(crate) fn narrow(&self, selection: &Arc<Selection>) -> Arc<Selection> {
        match self {
            Self::Whole(_) => Arc::clone(selection),
            Self::Scattered(_) => Arc::new(selection.retain(|index| {
                selection.tensor_range(index).is_some_and(|range| self.tensor(range).is_some())
            })),
        }
    }

    /// The bytes of the tensor at `range` of what is selected; `None` where it had no buffer.
    pub(crate) fn tensor(&self, range: Range<u64>) -> Option<Bytes> {
        match self {
            _ if range.is_empty() => Some(Bytes::new()),
            Self::Whole(bytes) => Some(bytes.slice(range.start as usize..range.end as usize)),
            Self::Scattered(scattered) => scattered.by_start.get(&range.start).cloned(),
        }
    }

    /// Whether it lies in the buffers that `writing` watches.
    pub(crate) fn is_in(&self, writing: &Arc<Writing>) -> bool {
        matches!(self, Self::Scattered(scattered) if Arc::ptr_eq(&scattered.writing, writing))
    }
}

#[cfg(test)]
impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Whole(bytes.into())
    }
}
