//! [`Forwarding`]: offers what a subscription receives through a server of the same process: to other members of its swarms
//! (PROTOCOL.md §3.15), or to the clients of a relay (§3.20).

use crate::destination::{Backing, Destination, Payload};
use std::{
    ops::Range,
    sync::{Arc, Weak},
};
use tensor_relay_device::{HostBytes, HostSink, Lock, SinkError};
use tensor_relay_protocol::{
    Announce, EncodingEntry, EndReason, Epoch, RangeSet, Selection, Topic, Version, VersionId,
};
use tensor_relay_transport::forwarding::{Forward, Forwarded, ReceivedMemory, ReceivedVersion};

/// What a subscription offers: the version that arrives, and the last committed one, until the next one is committed or
/// needs its memory. Without a server it does nothing, and costs nothing.
#[derive(Debug, Default)]
pub(super) struct Forwarding {
    forward: Option<Arc<dyn Forward>>,
    /// Entries of the version that was announced last, until it begins.
    early: Vec<EncodingEntry>,
    arriving: Option<Arriving>,
    committed: Option<(VersionId, Arc<dyn Forwarded>)>,
}

/// A version on offer while it arrives.
#[derive(Debug)]
struct Arriving {
    id: VersionId,
    forwarded: Arc<dyn Forwarded>,
    memory: Option<Arc<VersionMemory>>,
}

impl Forwarding {
    /// Offers versions to `forward`.
    pub(super) fn new(forward: Arc<dyn Forward>) -> Self {
        Self { forward: Some(forward), ..Self::default() }
    }

    /// Handles `Encodings` of a version that was announced; `is_current` is whether it is the one under way, and has not been
    /// given up.
    pub(super) fn handle_encodings(
        &mut self,
        version: (Epoch, Version),
        entries: &[EncodingEntry],
        is_current: bool,
    ) {
        let is_of = |id: &VersionId| (id.epoch, id.version) == version;
        if self.forward.is_none() {
            return;
        }
        match (&self.arriving, &self.committed) {
            (Some(arriving), _) if is_of(&arriving.id) => arriving.forwarded.handle_encodings(entries),
            (_, Some((id, forwarded))) if is_of(id) => forwarded.handle_encodings(entries),
            _ if is_current => self.early.extend_from_slice(entries), // As many as the machine accepts before the manifest.
            _ => {}
        }
    }

    /// Begins to offer a version that is received into `destination`. One that resumes stays on offer.
    pub(super) fn begin(&mut self, announce: &Announce, selection: &Selection, destination: &Destination) {
        let early = std::mem::take(&mut self.early);
        let Some(forward) = &self.forward else { return };
        if self.arriving.as_ref().is_some_and(|arriving| arriving.id == announce.id) {
            return self.handle_encodings((announce.id.epoch, announce.id.version), &early, true);
        }
        self.arriving = None; // Before the next version begins.
        let memory = destination
            .whole_memory(selection)
            .map(|sink| Arc::new(VersionMemory(Lock::new(Place::Arriving(Arc::downgrade(sink))))));
        let version = ReceivedVersion {
            id: announce.id.clone(),
            manifest: Arc::clone(selection.manifest()),
            metadata: announce.metadata.clone(),
            shared: announce.shared,
            relays: announce.relays.clone(),
            memory: memory.clone().map(|memory| memory as Arc<dyn ReceivedMemory>),
        };
        self.arriving = forward.begin(version).map(|forwarded| {
            forwarded.handle_encodings(&early);
            Arriving { id: announce.id.clone(), forwarded, memory }
        });
    }

    /// The version that arrives, for the tasks that receive its chunks.
    pub(super) fn arriving(&self) -> Option<Weak<dyn Forwarded>> {
        self.arriving.as_ref().map(|arriving| Arc::downgrade(&arriving.forwarded))
    }

    /// Whether versions are offered.
    pub(super) fn is_active(&self) -> bool {
        self.forward.is_some()
    }

    /// The chunks of a version that are on offer.
    pub(super) fn offered(&self, (epoch, version): (Epoch, Version)) -> RangeSet {
        let is_it = |id: &VersionId| (id.epoch, id.version) == (epoch, version);
        let arriving = self.arriving.as_ref().filter(|arriving| is_it(&arriving.id));
        let committed = self.committed.as_ref().filter(|(id, _)| is_it(id));
        let forwarded = arriving.map(|arriving| &arriving.forwarded);
        let forwarded = forwarded.or_else(|| committed.map(|(_, forwarded)| forwarded));
        forwarded.map(|forwarded| forwarded.offered()).unwrap_or_default()
    }

    /// Runs the `commit` of the version that arrives. It stays on offer, in place of the one before, if it succeeds.
    pub(super) fn commit(
        &mut self,
        commit: impl FnOnce() -> Result<Payload, SinkError>,
    ) -> Result<Payload, SinkError> {
        let Some(Arriving { id, forwarded, memory }) = self.arriving.take() else {
            let payload = commit()?;
            self.committed = None; // It keeps the memory of an older version.
            return Ok(payload);
        };
        let payload = match memory {
            Some(memory) => memory.commit(commit)?,
            None => commit()?,
        };
        forwarded.handle_committed(payload.source());
        self.committed = Some((id, forwarded));
        Ok(payload)
    }

    /// Withdraws the version that arrives: it is given up.
    pub(super) fn give_up(&mut self) {
        self.early.clear();
        self.arriving = None;
    }

    /// Withdraws the last committed version, whose memory is needed. Returns whether there was one.
    pub(super) fn give_way(&mut self) -> bool {
        self.committed.take().is_some()
    }

    /// Handles the end of the subscription at its origin.
    pub(super) fn end(&mut self, topic: &Topic, reason: EndReason) {
        if let Some(forward) = &self.forward {
            forward.end(topic, reason);
        }
        self.give_up();
        self.committed = None;
    }
}

/// The memory of a version that is received into one region, from its first chunk on.
#[derive(Debug)]
struct VersionMemory(Lock<Place>);

/// Where the bytes are.
#[derive(Debug, Clone)]
enum Place {
    /// In the sink, until it is dropped.
    Arriving(Weak<HostSink>),
    /// Where no user writes, or else in the user's snapshot: there a chunk may be overwritten, and is withdrawn then.
    Committed(HostBytes),
}

impl VersionMemory {
    /// Runs `commit`, which moves the bytes. Nobody looks for them meanwhile.
    fn commit(&self, commit: impl FnOnce() -> Result<Payload, SinkError>) -> Result<Payload, SinkError> {
        let mut place = self.0.lock();
        let payload = commit()?;
        if let Payload::Region(bytes, backing) = &payload {
            *place = Place::Committed(match backing {
                Backing::Own(source) => source.bytes().clone().into(),
                Backing::Private | Backing::Lent(_) => bytes.clone(),
            });
        }
        Ok(payload)
    }
}

impl ReceivedMemory for VersionMemory {
    fn copy(&self, range: Range<u64>, out: &mut [u8]) -> bool {
        let place = self.0.lock().clone();
        if let Place::Arriving(sink) = place
            && sink.upgrade().is_some_and(|sink| sink.copy(range.clone(), out))
        {
            return true;
        }
        let place = self.0.lock().clone(); // It may have been committed meanwhile.
        match place {
            Place::Arriving(_) => false,
            Place::Committed(bytes) => copy_of(&bytes, range, out),
        }
    }
}

/// Copies `range` of `bytes` to `out`, unless it is out of bounds or of another length.
fn copy_of(bytes: &HostBytes, range: Range<u64>, out: &mut [u8]) -> bool {
    let is_within = range.start <= range.end && range.end <= bytes.len() as u64;
    if !is_within || range.end - range.start != out.len() as u64 {
        return false;
    }
    bytes.slice(range.start as usize..range.end as usize).copy_to(out);
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use futures_util::FutureExt;
    use tensor_relay_device::{HostMemory, Sink};

    /// Goal: what was verified can be copied before the commit, during it and after it, and not once the version is given
    /// up.
    #[test]
    fn memory_can_be_read_from_the_first_chunk_on() {
        let sink = Arc::new(HostSink::new(HostMemory::new(u64::MAX).allocate(100).unwrap()));
        let memory = VersionMemory(Lock::new(Place::Arriving(Arc::downgrade(&sink))));
        let copy = |range: Range<u64>| {
            let mut out = vec![0; (range.end - range.start) as usize];
            memory.copy(range, &mut out).then_some(out)
        };
        let mut target = sink.open(10..20).now_or_never().unwrap().unwrap();
        target.fill(7);
        assert_eq!(copy(10..20), None, "it is being written");
        sink.write(target).now_or_never().unwrap().unwrap();
        assert_eq!(copy(10..20), Some(vec![7; 10]));
        assert_eq!(copy(95..101), None);
        let failed = memory.commit(|| Err(SinkError::Committed));
        assert!(failed.is_err() && copy(10..20).is_some(), "nothing has moved");
        let committed = memory.commit(|| {
            let region = sink.commit()?.pop().unwrap_or_default();
            Ok(Payload::Region(region.freeze().into(), Backing::Private))
        });
        assert_eq!(copy(10..20), Some(vec![7; 10]));
        assert_eq!((copy(95..101), copy(101..101)), (None, None));
        drop((committed, sink));
        assert_eq!(copy(10..20), Some(vec![7; 10]), "as long as it is on offer");

        let sink = Arc::new(HostSink::new(HostMemory::new(u64::MAX).allocate(100).unwrap()));
        let memory = VersionMemory(Lock::new(Place::Arriving(Arc::downgrade(&sink))));
        drop(sink);
        assert!(!memory.copy(0..1, &mut [0]), "it was given up");
        assert!(!copy_of(&Bytes::from_static(b"four").into(), 0..3, &mut [0; 2]), "another length");
    }
}
