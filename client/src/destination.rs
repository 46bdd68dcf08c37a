//! The destination of a version's bytes: the session's own memory, a device, or buffers lent by the user.

mod arrangement;
mod device_sink;
mod on_device;

pub(crate) use on_device::{LentBuffer, OnDevice, SharedPayload};

use crate::{
    buffers::{Fit, Lent, LentMemory, Writing},
    error::TransferError,
};
use arrangement::Arrangement;
use bytes::Bytes;
use device_sink::DeviceSink;
use std::{collections::BTreeMap, ops::Range, sync::Arc};
use tensor_relay_device::{
    Device, DeviceBuffer, HostBytes, HostMemory, HostSink, HostSource, Lock, PartsError, Region, SharedRange,
    Sink, SinkError, SpreadParts, VolatileBytes,
};
use tensor_relay_protocol::{Selection, TensorName, VersionId};

/// The memory for versions without lent buffers.
#[derive(Debug)]
pub(crate) struct Allocators {
    /// Host memory, within the session's budget.
    pub(crate) memory: SnapshotMemory,
    /// The device for versions, if any.
    pub(crate) device: Option<Device>,
    /// Whether memory of that device that a server lends is used where it is.
    pub(crate) share_gpu: bool,
}

/// The host memory of snapshots, and who may write to it.
#[derive(Debug, Clone)]
pub(crate) struct SnapshotMemory {
    pub(crate) memory: HostMemory,
    /// Chunks on their way to boxes; as many as the credit allows.
    pub(crate) staging: HostMemory,
    /// Whether users may write to snapshots ([`Config::volatile_snapshots`](crate::Config::volatile_snapshots)).
    pub(crate) is_volatile: bool,
}

impl SnapshotMemory {
    /// A complete payload in `region`.
    pub(crate) fn payload(&self, region: Region) -> Payload {
        match (self.is_volatile, region.shared()) {
            (true, Ok(shared)) => self.payload_for_others(region, shared),
            // What users may write to is not for others.
            (true, Err(_)) => Payload::Region(self.complete(region), Backing::Private),
            (false, shared) => {
                let bytes = region.freeze();
                let source = HostSource::sharing(bytes.clone(), shared);
                Payload::Region(bytes.into(), Backing::Own(source))
            }
        }
    }

    /// A complete payload in `region`, which others may map: users write to a view of their own, which costs memory for the
    /// pages that they write. If the system refuses it, they get `region` itself, and others nothing.
    fn payload_for_others(&self, region: Region, shared: SharedRange) -> Payload {
        match shared.private_view() {
            Ok(view) => {
                let source = HostSource::sharing(region.freeze(), Ok(shared));
                Payload::Region(self.complete(view), Backing::Own(source))
            }
            Err(error) => {
                tracing::warn!(%error, "A version cannot be offered to others: users cannot have a view of their own.");
                Payload::Region(self.complete(region), Backing::Private)
            }
        }
    }

    /// A complete payload in `region`, a view of what the server lends.
    fn lent_payload(&self, region: Region, lent: SharedRange) -> Payload {
        let backing = match self.is_volatile {
            true => Backing::Private, // What users write is in the view alone.
            false => Backing::Lent(lent),
        };
        Payload::Region(self.complete(region), backing)
    }

    /// Complete bytes in `region`.
    fn complete(&self, region: Region) -> HostBytes {
        match self.is_volatile {
            true => VolatileBytes::from(region).into(),
            false => region.freeze().into(),
        }
    }
}

/// Receives the bytes of one version, and returns them once they are complete.
#[derive(Debug)]
pub(crate) enum Destination {
    /// One region for the entire selection.
    Memory { sink: Arc<HostSink>, memory: SnapshotMemory },
    /// Memory for each tensor: the user's buffers, where selected tensors without a buffer are discarded; or the session's
    /// memory, where boxes are selected.
    Tensors {
        sink: Arc<HostSink>,
        /// The starts of the sink's memories in the selection's memory, in order.
        starts: Vec<u64>,
        /// Records writes to the user's buffers; `None` for memory of the session.
        writing: Option<Arc<Writing>>,
        memory: SnapshotMemory,
    },
    /// Memory that the server lends, mapped for the user, with all bytes in place.
    Mapped {
        region: Lock<Option<(Region, SharedRange)>>,
        /// The places of the tensors in it, by their starts in the selection's memory; `None` if it is that memory.
        places: Option<Vec<(u64, Range<u64>)>>,
        memory: SnapshotMemory,
    },
    /// Device memory: one piece, or the user's buffers.
    Device { sink: Arc<DeviceSink>, payload: Arc<OnDevice> },
}

impl Destination {
    /// Uses the lent buffers, if there are any and they fit; otherwise memory of `allocators`. Buffers that do not fit
    /// are reported once the version is received.
    pub(crate) fn new(
        selection: &Selection,
        lent: Option<Lent>,
        allocators: &Allocators,
    ) -> Result<Self, TransferError> {
        if let Some(destination) = lent.and_then(|lent| Self::in_buffers(selection, lent, &allocators.memory))
        {
            return Ok(destination);
        }
        let len_bytes = selection.memory_bytes();
        match &allocators.device {
            Some(device) => {
                // This blocks the session's executor, and so all its subscriptions. On a GPU it costs a message to the
                // engine's thread and back if memory is reused, and milliseconds if it is new. It takes longer if
                // other memory must be freed first, which may wait for all work of the GPU, or while another driver
                // call occupies the engine's thread: locking pages takes a third of a second for each GiB. If the
                // driver hangs, the allocation fails after the engine's `answer_timeout`, 60 s by default.
                let payload = OnDevice::allocate(device, len_bytes, &allocators.memory);
                let payload = payload.map_err(|source| TransferError::device_memory(device, source))?;
                Ok(Self::on_device(payload, selection)?)
            }
            None => {
                let memory = allocators.memory.clone();
                let region = memory.memory.allocate(len_bytes as usize)?;
                match selection.has_parts() {
                    true => Ok(Self::tensors(selection, cut_up(region, selection), None, memory)?),
                    false => Ok(Self::Memory { sink: Arc::new(HostSink::new(region)), memory }),
                }
            }
        }
    }

    /// Uses memory that the server lends, with the whole payload. No tensor of `selection` is cut.
    pub(crate) fn mapped(
        (region, lent): (Region, SharedRange),
        selection: &Selection,
        memory: &SnapshotMemory,
    ) -> Self {
        let is_whole = selection.memory_bytes() == region.len() as u64;
        let place = |index: u32| {
            let start = selection.tensor_range(index as usize)?.start;
            let range = selection.manifest().tensors()[index as usize].range()?;
            (!range.is_empty()).then_some((start, range))
        };
        let places = (!is_whole).then(|| {
            let mut places: Vec<_> = selection.tensors().iter().filter_map(place).collect();
            places.sort_unstable_by_key(|(_, range)| range.start);
            places.dedup(); // Aliases.
            places
        });
        Self::Mapped { region: Lock::new(Some((region, lent))), places, memory: memory.clone() }
    }

    /// Uses memory of the device that the server lends, with the whole payload, all of which is selected.
    pub(crate) fn mapped_on_device(
        buffer: DeviceBuffer,
        selection: &Selection,
        memory: &SnapshotMemory,
    ) -> Result<Self, TransferError> {
        Ok(Self::on_device(OnDevice::of(buffer, memory), selection)?)
    }

    /// Uses the lent buffers, if they fit. Ranges that span several host buffers are staged in `memory`.
    pub(crate) fn in_buffers(selection: &Selection, mut lent: Lent, memory: &SnapshotMemory) -> Option<Self> {
        lent.retain_wanted(selection);
        let fits = lent.expected.fit(selection, lent.sizes().into_iter()).ok()?;
        match lent.memory {
            LentMemory::Host(tensors) => {
                let tensors = by_start(fits, tensors, |region| !region.is_empty());
                Self::tensors(selection, tensors, Some(lent.writing), memory.clone()).ok()
            }
            LentMemory::Device(tensors) => {
                let pieces = by_start(fits, tensors, |buffer| buffer.buffer().len_bytes() > 0);
                let payload = OnDevice::from_lent(pieces, lent.writing, memory)?;
                Self::on_device(payload, selection).ok()
            }
        }
    }

    /// Uses buffers that were lent on a device for a copy of what was received: the sink takes ranges of the selection's
    /// memory, and not of its stream.
    pub(crate) fn for_copy(selection: &Selection, mut lent: Lent, memory: &SnapshotMemory) -> Option<Self> {
        lent.retain_wanted(selection);
        let fits = lent.expected.fit(selection, lent.sizes().into_iter()).ok()?;
        let LentMemory::Device(tensors) = lent.memory else { return None };
        let pieces = by_start(fits, tensors, |buffer| buffer.buffer().len_bytes() > 0);
        let payload = Arc::new(OnDevice::from_lent(pieces, lent.writing, memory)?);
        let sink = DeviceSink::of_memory(Arc::clone(&payload), selection.memory_bytes()).ok()?;
        Some(Self::Device { sink: Arc::new(sink), payload })
    }

    /// Receives into the memory of each tensor, by its start in the selection's memory. Ranges of the stream that have
    /// several places are staged; with boxes, in memory of its own, so that no version fails midway for want of it.
    fn tensors(
        selection: &Selection,
        mut tensors: BTreeMap<u64, Region>,
        writing: Option<Arc<Writing>>,
        memory: SnapshotMemory,
    ) -> Result<Self, PartsError> {
        if !selection.has_parts() {
            let starts = tensors.keys().copied().collect();
            let parts = tensors
                .into_iter()
                .map(|(start, region)| (start..start + region.len() as u64, region));
            let sink = HostSink::scatter(selection.payload_bytes(), parts, memory.memory.clone())?;
            return Ok(Self::Tensors { sink: Arc::new(sink), starts, writing, memory });
        }
        let arrangement = Arrangement::of(selection);
        let (mut starts, mut whole) = (vec![], vec![]);
        for (range, start) in arrangement.whole {
            if let Some(region) = tensors.remove(&start) {
                starts.push(start);
                whole.push((range, region));
            }
        }
        let (mut spread, mut numbers, mut memories) = (vec![], BTreeMap::new(), vec![]);
        for (range, start, runs) in arrangement.spread {
            if let Some(region) = tensors.remove(&start) {
                numbers.insert(start, memories.len());
                starts.push(start);
                memories.push(region);
            }
            spread.extend(numbers.get(&start).map(|number| (range, *number, runs)));
        }
        let spread = SpreadParts::new(memories, spread)?;
        let sink = HostSink::spread(selection.payload_bytes(), whole, spread, memory.staging.clone())?;
        Ok(Self::Tensors { sink: Arc::new(sink), starts, writing, memory })
    }

    fn on_device(payload: OnDevice, selection: &Selection) -> Result<Self, PartsError> {
        let payload = Arc::new(payload);
        let sink = DeviceSink::new(Arc::clone(&payload), selection)?;
        Ok(Self::Device { sink: Arc::new(sink), payload })
    }

    /// The sink for chunks of `id`, which may be written from now on.
    pub(crate) fn sink(&self, id: &VersionId) -> Arc<dyn Sink> {
        if let Some(writing) = self.writing() {
            writing.begin(id);
        }
        match self {
            Self::Memory { sink, .. } | Self::Tensors { sink, .. } => Arc::clone(sink) as Arc<dyn Sink>,
            Self::Device { sink, .. } => Arc::clone(sink) as Arc<dyn Sink>,
            Self::Mapped { .. } => Arc::new(HostSink::new(Region::default())), // It is complete.
        }
    }

    /// Returns the bytes. The caller guarantees that they are complete and verified.
    pub(crate) fn commit(&self) -> Result<Payload, SinkError> {
        match self {
            Self::Memory { sink, memory } => Ok(memory.payload(sink.commit()?.pop().unwrap_or_default())),
            Self::Tensors { sink, starts, writing, memory } => {
                let complete = |region: Region| match writing {
                    Some(_) => region.freeze().into(),
                    None => memory.complete(region),
                };
                let bytes = sink.commit()?.into_iter().map(complete);
                let by_start = starts.iter().copied().zip(bytes).collect();
                let (empty, writing) = (complete(Region::default()), writing.clone());
                Ok(Payload::Scattered(Arc::new(Scattered { by_start, empty, writing })))
            }
            Self::Mapped { region, places, memory } => {
                let (region, lent) = region.lock().take().ok_or(SinkError::Committed)?;
                let Some(places) = places else { return Ok(memory.lent_payload(region, lent)) };
                let by_start = cut_out(region, places)
                    .map(|(start, region)| (start, memory.complete(region)))
                    .collect();
                let empty = memory.complete(Region::default());
                Ok(Payload::Scattered(Arc::new(Scattered { by_start, empty, writing: None })))
            }
            Self::Device { sink, payload } => {
                sink.commit()?;
                Ok(Payload::Device(SharedPayload::new(Arc::clone(payload))))
            }
        }
    }

    /// The device whose free slot or unfinished copy this destination waits for, if any.
    pub(crate) fn awaited_device(&self) -> Option<&Device> {
        match self {
            Self::Device { sink, payload } => sink.waits_for_device().then(|| payload.device()),
            Self::Memory { .. } | Self::Tensors { .. } | Self::Mapped { .. } => None,
        }
    }

    /// Its device, if it is on one.
    pub(crate) fn device(&self) -> Option<&Device> {
        match self {
            Self::Device { payload, .. } => Some(payload.device()),
            Self::Memory { .. } | Self::Tensors { .. } | Self::Mapped { .. } => None,
        }
    }

    /// The sink, if it is one region for the whole payload: `selection` lacks nothing of it.
    pub(crate) fn whole_memory(&self, selection: &Selection) -> Option<&Arc<HostSink>> {
        let tensors = selection.manifest().tensors().len();
        let is_whole = selection.tensors().len() as usize == tensors && !selection.has_parts();
        match self {
            Self::Memory { sink, .. } if is_whole => Some(sink),
            _ => None,
        }
    }

    /// Whether it is memory that the user lent.
    pub(crate) fn is_lent(&self) -> bool {
        self.writing().is_some()
    }

    fn writing(&self) -> Option<&Arc<Writing>> {
        match self {
            Self::Memory { .. } | Self::Mapped { .. } => None,
            Self::Tensors { writing, .. } => writing.as_ref(),
            Self::Device { payload, .. } => payload.writing(),
        }
    }
}

/// The memory for which `is_used` holds, by the start of its tensor in the selection's memory.
fn by_start<M>(
    fits: Vec<Fit>,
    tensors: Vec<(TensorName, M)>,
    is_used: impl Fn(&M) -> bool,
) -> BTreeMap<u64, M> {
    let memory = tensors.into_iter().map(|(_, memory)| memory);
    let placed = fits.into_iter().map(|fit| fit.range.start).zip(memory);
    placed.filter(|(_, memory)| is_used(memory)).collect()
}

/// Cuts memory for a selection with boxes up into the places of its tensors.
fn cut_up(region: Region, selection: &Selection) -> BTreeMap<u64, Region> {
    let places = selection
        .tensors()
        .iter()
        .filter_map(|index| selection.tensor_range(index as usize));
    let mut places: Vec<_> = places
        .filter(|place| !place.is_empty())
        .map(|place| (place.start, place))
        .collect();
    places.sort_unstable_by_key(|(start, place)| (*start, place.end));
    places.dedup();
    cut_out(region, &places).collect()
}

/// Cuts `region` up into these `places`, which are in order.
fn cut_out(mut region: Region, places: &[(u64, Range<u64>)]) -> impl Iterator<Item = (u64, Region)> {
    let cut = move |(key, place): &(u64, Range<u64>)| {
        // From the last place on, so that each place is split off with the padding behind it.
        let mut cut = region.split_off(place.start as usize)?;
        cut.split_off((place.end - place.start) as usize)?;
        Some((*key, cut))
    };
    places.iter().rev().map_while(cut)
}

/// The bytes of a version that was received.
#[derive(Debug, Clone)]
pub(crate) enum Payload {
    /// The entire selection in one region, which users may write to if it is volatile.
    Region(HostBytes, Backing),
    /// Tensors in memory of their own.
    Scattered(Arc<Scattered>),
    /// Device memory: all in one piece, or in the user's buffers.
    Device(SharedPayload),
}

/// What lies under a region that a version was received into.
#[derive(Debug, Clone)]
pub(crate) enum Backing {
    /// Memory in which nobody writes, to offer the same bytes to others; processes of the host can map it if the session's
    /// memory is shareable.
    Own(HostSource),
    /// Memory that users may write to.
    Private,
    /// Memory that the server lends: the same bytes as in the region, in which nobody writes.
    Lent(SharedRange),
}

/// Tensors in memory of their own, by their place in the selection, so that tied weights are found under each name. The
/// user's buffers are returned when the last clone is dropped.
#[derive(Debug)]
pub(crate) struct Scattered {
    by_start: BTreeMap<u64, HostBytes>,
    /// The bytes of empty tensors and boxes.
    empty: HostBytes,
    writing: Option<Arc<Writing>>,
}

impl Payload {
    /// The empty payload.
    pub(crate) const EMPTY: Self = Self::Region(HostBytes::Stable(Bytes::new()), Backing::Private);

    /// The bytes of a region in which nobody writes, to offer them to others.
    pub(crate) fn source(&self) -> Option<HostSource> {
        match self {
            Self::Region(_, Backing::Own(source)) => Some(source.clone()),
            // In chunks: the server whose memory it is decides who may map it.
            Self::Region(HostBytes::Stable(bytes), Backing::Lent(_) | Backing::Private) => {
                Some(HostSource::new(bytes.clone()))
            }
            _ => None,
        }
    }

    /// The tensors of `selection` that it contains.
    pub(crate) fn narrow_selection(&self, selection: &Arc<Selection>) -> Arc<Selection> {
        match self {
            Self::Region(..) => Arc::clone(selection),
            Self::Scattered(_) | Self::Device(_) => Arc::new(
                selection.retain(|index| selection.tensor_range(index).is_some_and(|range| self.has(range))),
            ),
        }
    }

    /// The bytes of the tensor at `range` of the selection; `None` if it had no buffer, or is on a device.
    pub(crate) fn tensor(&self, range: Range<u64>) -> Option<HostBytes> {
        match self {
            Self::Device(_) => None,
            Self::Region(bytes, _) if range.is_empty() => Some(bytes.slice(0..0)),
            Self::Region(bytes, _) => Some(bytes.slice(range.start as usize..range.end as usize)),
            Self::Scattered(scattered) if range.is_empty() => Some(scattered.empty.clone()),
            Self::Scattered(scattered) => scattered.by_start.get(&range.start).cloned(),
        }
    }

    /// Its device memory, if it is on a device.
    pub(crate) fn on_device(&self) -> Option<&SharedPayload> {
        match self {
            Self::Region(..) | Self::Scattered(_) => None,
            Self::Device(shared) => Some(shared),
        }
    }

    /// Whether it is in the buffers that `writing` tracks.
    pub(crate) fn is_in(&self, writing: &Arc<Writing>) -> bool {
        let tracked = match self {
            Self::Region(..) => None,
            Self::Scattered(scattered) => scattered.writing.as_ref(),
            Self::Device(shared) => shared.payload().writing(),
        };
        tracked.is_some_and(|tracked| Arc::ptr_eq(tracked, writing))
    }

    fn has(&self, range: Range<u64>) -> bool {
        match self {
            Self::Device(shared) => shared.payload().find(range).is_some(),
            Self::Region(..) | Self::Scattered(_) => self.tensor(range).is_some(),
        }
    }
}

#[cfg(test)]
impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Region(Bytes::from(bytes).into(), Backing::Private)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use tensor_relay_device::Source;

    #[test]
    fn what_users_write_is_not_what_others_read() {
        const LEN: usize = 1 << 20;
        for is_shareable in [true, false] {
            let memory = HostMemory::new(4 * LEN as u64);
            let memory = if is_shareable { memory.shareable() } else { memory };
            let memory = SnapshotMemory { memory, staging: HostMemory::new(0), is_volatile: true };
            let mut region = memory.memory.allocate(LEN).unwrap();
            region.fill(1);
            let Payload::Region(HostBytes::Volatile(bytes), backing) = memory.payload(region) else {
                panic!("users may write to it");
            };
            assert_eq!((bytes.len(), matches!(backing, Backing::Own(_))), (LEN, is_shareable));
            let Backing::Own(source) = backing else { continue };
            let shared = source.shared().expect("others can map it");
            let taken = source.read(0..LEN as u64).now_or_never().unwrap().unwrap();
            assert_ne!(
                bytes.as_ptr().as_ptr().cast_const(),
                taken.as_ptr(),
                "users have a view of their own"
            );
            let mut seen = vec![0; LEN];
            bytes.copy_to(&mut seen);
            assert!(seen == taken && seen == vec![1; LEN]);
            assert_eq!(memory.memory.stats().in_use_bytes, LEN as u64, "one copy of what was received");
            drop((bytes, source, taken, shared));
            assert_eq!(memory.memory.stats().in_use_bytes, 0);
        }
    }
}
