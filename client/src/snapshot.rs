//! Snapshots: the tensors of one complete, verified version.

use crate::{
    destination::{Backing, Payload},
    load_report::LoadReport,
    server_memory::Sharing,
};
use bytes::Bytes;
use std::{ops::Range, sync::Arc, time::Duration};
use tensor_relay_device::{HostBytes, HostSource, SharedRange, Source, VolatileBytes};
use tensor_relay_protocol::{
    Manifest, Metadata, RelayPath, Selection, Tensor, VersionId, files::missed_generations,
};
use tensor_relay_transport::{CodecStats, LaneKind, LaneKindReason};

/// The tensors of one committed version.
///
/// The payload is one piece of memory, each tensor aligned to 256 bytes, and is shared by clones. When the last clone,
/// and every `Bytes` or `DeviceTensor` taken from it, is dropped, the memory is reused for a later version.
///
/// It is host memory, or memory of the [configured device](crate::Config::device).
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub(crate) id: VersionId,
    pub(crate) selection: Arc<Selection>,
    pub(crate) payload: Payload,
    pub(crate) metadata: Metadata,
    pub(crate) skipped: u64,
    pub(crate) new_epoch: bool,
    pub(crate) receipt: Receipt,
    pub(crate) relays: RelayPath,
    pub(crate) load_report: LoadReport,
}

/// Statistics of receiving a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receipt {
    /// The time from the announcement to the commit.
    pub duration: Duration,
    /// The encoded bytes received over the network, without headers and retransmissions.
    pub wire_bytes: u64,
    /// The bytes of the selected tensors, or boxes.
    pub wanted_bytes: u64,
    /// The decoded bytes of the received chunks, which also contain padding, and what lies between boxes.
    pub received_bytes: u64,
    /// The number of verified chunks.
    pub chunks: u32,
    /// The number of times that the transfer resumed on another connection.
    pub resumed: u32,
    /// Its transport; after a lost connection, that of its last chunks.
    pub transport: LaneKind,
    /// The reason for that transport.
    pub transport_reason: LaneKindReason,
    /// The chunks received in each codec, and the time for decoding; [`deltas`](CodecStats::deltas) counts those that
    /// were coded against an earlier version. Chunks sent again after a lost connection count again.
    pub codecs: CodecStats,
    /// Whether its bytes came in memory of a server of this host, and why not.
    pub sharing: Sharing,
    /// From whom its encoded bytes came.
    pub sources: ReceiptSources,
}

/// From whom the encoded bytes of a version came: together [`Receipt::wire_bytes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReceiptSources {
    /// From the server that announced it.
    pub origin_bytes: u64,
    /// From [other servers](crate::Config::sources) with the same content.
    pub server_bytes: u64,
    /// From other clients of the server, with [sharing](crate::Config::sharing).
    pub peer_bytes: u64,
    /// The number of these clients.
    pub peers: u32,
}

impl Snapshot {
    /// The version.
    pub fn id(&self) -> &VersionId {
        &self.id
    }

    /// The content of the version, selected or not, and the metadata that all versions of this manifest share.
    pub fn manifest(&self) -> &Arc<Manifest> {
        self.selection.manifest()
    }

    /// The publisher's metadata of this version.
    pub fn metadata(&self) -> &[(String, String)] {
        &self.metadata
    }

    /// The relays that it came through, from its publisher on.
    pub fn relays(&self) -> &RelayPath {
        &self.relays
    }

    /// The number of published versions between the previously delivered snapshot and this one.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// For a topic that follows files (`serve --watch`): the number of file generations that the server saw before this
    /// version and never published, because later ones replaced them first. They have no version numbers, so they do
    /// not form a gap.
    pub fn missed_generations(&self) -> u64 {
        missed_generations(&self.metadata)
    }

    /// Whether it does not continue the previous snapshot: its epoch differs, because the publisher restarted and
    /// version numbers may have restarted too; or it has other content under the same epoch and number.
    pub fn is_new_epoch(&self) -> bool {
        self.new_epoch
    }

    /// The size of the received payload.
    pub fn payload_bytes(&self) -> u64 {
        self.selection.payload_bytes()
    }

    /// Whether boxes of tensors were requested, and cut some of them.
    pub fn has_boxes(&self) -> bool {
        self.selection.has_boxes()
    }

    /// The same version without its tensors, whose memory it does not keep.
    #[must_use]
    pub fn without_tensors(&self) -> Self {
        Self { payload: Payload::EMPTY, ..self.clone() }
    }

    /// The statistics of its transfer.
    pub fn receipt(&self) -> Receipt {
        self.receipt
    }

    /// Reports to the server that the application has loaded it ([`LoadReport`]).
    pub fn loaded(&self) {
        self.load_report.send();
    }

    /// The report that the application has loaded it, to be sent later or with another digest.
    pub fn load_report(&self) -> &LoadReport {
        &self.load_report
    }

    /// The bytes of the tensor called `name`, without a copy unless [users may write to
    /// snapshots](crate::Config::volatile_snapshots); `None` when there is none, it was not selected, or the snapshot is
    /// [on a device](Self::is_on_device).
    pub fn tensor(&self, name: &str) -> Option<Bytes> {
        Some(self.bytes_at(self.manifest().tensor_index(name)?)?.into_stable())
    }

    /// The memory of the tensor called `name`, for bindings whose users may write to it; `None` where
    /// [`tensor`](Self::tensor) returns `None`, and without
    /// [`Config::volatile_snapshots`](crate::Config::volatile_snapshots).
    pub fn volatile_tensor(&self, name: &str) -> Option<VolatileBytes> {
        match self.bytes_at(self.manifest().tensor_index(name)?)? {
            HostBytes::Volatile(bytes) => Some(bytes),
            HostBytes::Stable(_) => None,
        }
    }

    /// The whole payload, to offer it to others without a copy: to processes of this host in the same memory, if that is
    /// [shareable](crate::Config::shareable). `None` if some tensors were not selected, are cut or in pieces, if they are on
    /// a device, or if users may write to snapshots and the memory is not shareable: otherwise they write to a view of
    /// their own.
    pub fn source(&self) -> Option<HostSource> {
        let (manifest, selection) = (self.manifest(), &self.selection);
        let is_whole =
            selection.tensors().len() as usize == manifest.tensors().len() && !selection.has_parts();
        match &self.payload {
            _ if !is_whole => None,
            // With the bytes as they were delivered, which count as held.
            Payload::Region(HostBytes::Stable(bytes), Backing::Own(source)) => {
                Some(HostSource::sharing(bytes.clone(), source.shared()))
            }
            payload => payload.source(),
        }
    }

    /// The descriptions of the selected tensors, in the order in which they were published. If a box of one is selected,
    /// it is that box, whose [shard](Tensor::shard) says where it lies.
    pub fn described(&self) -> impl Iterator<Item = &Tensor> {
        self.selection
            .tensors()
            .iter()
            .map(move |index| self.selection.tensor(index as usize))
    }

    /// The description of the tensor called `name`, or of the box of it that is selected; `None` if it is not selected.
    pub fn selected(&self, name: &str) -> Option<&Tensor> {
        let index = self.manifest().tensor_index(name)?;
        self.selection
            .tensors()
            .contains(index as u32)
            .then(|| self.selection.tensor(index))
    }

    /// Every selected tensor with its bytes as from [`tensor`](Self::tensor), in the order in which they were published.
    /// Empty if the snapshot is [on a
    /// device](Self::is_on_device): use [`device_tensors`](Self::device_tensors), or copy it [to the
    /// host](Self::to_host) first.
    pub fn tensors(&self) -> impl Iterator<Item = (&Tensor, Bytes)> {
        self.selection.tensors().iter().filter_map(move |index| {
            let index = index as usize;
            Some((self.selection.tensor(index), self.bytes_at(index)?.into_stable()))
        })
    }

    /// A range of the version's payload, without a copy unless [users may write to
    /// snapshots](crate::Config::volatile_snapshots); `None` if a chunk of it was not received, boxes or tensors in pieces
    /// are selected, or the snapshot is [on a device](Self::is_on_device). So a [part](crate::Request::part) can be read
    /// whose ends lie within tensors.
    pub fn payload(&self, range: Range<u64>) -> Option<Bytes> {
        let Payload::Region(bytes, _) = &self.payload else { return None };
        let range = self.selection.memory_range(range)?;
        Some(bytes.slice(range.start as usize..range.end as usize).into_stable())
    }

    /// The bytes of the tensor with this index in the manifest, if it was selected.
    pub(crate) fn bytes_at(&self, index: usize) -> Option<HostBytes> {
        self.payload.tensor(self.selection.tensor_range(index)?)
    }

    /// The bytes of a selected tensor of this manifest in the memory that the server lends, if they are there.
    pub(crate) fn lent(&self, tensor: &Tensor) -> Option<(&SharedRange, Range<u64>)> {
        let Payload::Region(_, Backing::Lent(lent)) = &self.payload else { return None };
        let index = self.manifest().tensor_index(tensor.name.as_str())?;
        Some((lent, self.selection.tensor_range(index)?))
    }

    /// The bytes of a selected tensor of this manifest; empty for any other tensor.
    pub(crate) fn bytes(&self, tensor: &Tensor) -> HostBytes {
        let index = self.manifest().tensor_index(tensor.name.as_str());
        let bytes = index.and_then(|index| self.bytes_at(index));
        bytes.unwrap_or_else(|| Bytes::new().into())
    }

    /// An empty snapshot, for tests to fill.
    #[cfg(test)]
    pub(crate) fn empty() -> Self {
        use tensor_relay_protocol::{Epoch, Limits, Topic, Version};
        let manifest = Manifest::layout(vec![], vec![], 256, &Limits::default()).unwrap();
        let id = VersionId { topic: Topic::new("t").unwrap(), epoch: Epoch(1), version: Version(1) };
        Self {
            id,
            selection: Arc::new(Selection::all(Arc::new(manifest))),
            payload: Payload::EMPTY,
            metadata: vec![],
            skipped: 0,
            new_epoch: false,
            receipt: Receipt {
                duration: Duration::ZERO,
                wire_bytes: 0,
                wanted_bytes: 0,
                received_bytes: 0,
                chunks: 0,
                resumed: 0,
                transport: LaneKind::Quic,
                transport_reason: LaneKindReason::Forced,
                codecs: CodecStats::default(),
                sharing: Sharing::Network,
                sources: ReceiptSources::default(),
            },
            relays: RelayPath::default(),
            load_report: LoadReport::unsent(),
        }
    }
}
