//! Snapshots: the tensors of one complete, verified version.

use crate::{destination::Payload, load_report::LoadReport};
use bytes::Bytes;
use std::{sync::Arc, time::Duration};
use tensor_relay_device::{HostBytes, VolatileBytes};
use tensor_relay_protocol::{Manifest, Metadata, Selection, Tensor, VersionId, files::missed_generations};
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
    pub(crate) load_report: LoadReport,
}

/// Statistics of receiving a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receipt {
    /// The time from the announcement to the commit.
    pub duration: Duration,
    /// The encoded bytes received over the network, without headers and retransmissions.
    pub wire_bytes: u64,
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

    /// The descriptions of the selected tensors, in the order in which they were published.
    pub fn described(&self) -> impl Iterator<Item = &Tensor> {
        let all = self.manifest().tensors();
        self.selection.tensors().iter().filter_map(move |index| all.get(index as usize))
    }

    /// Every selected tensor with its bytes as from [`tensor`](Self::tensor), in the order in which they were published.
    /// Empty if the snapshot is [on a
    /// device](Self::is_on_device): use [`device_tensors`](Self::device_tensors), or copy it [to the
    /// host](Self::to_host) first.
    pub fn tensors(&self) -> impl Iterator<Item = (&Tensor, Bytes)> {
        let all = self.manifest().tensors();
        self.selection.tensors().iter().filter_map(move |index| {
            let index = index as usize;
            Some((all.get(index)?, self.bytes_at(index)?.into_stable()))
        })
    }

    /// The bytes of the tensor with this index in the manifest, if it was selected.
    pub(crate) fn bytes_at(&self, index: usize) -> Option<HostBytes> {
        self.payload.tensor(self.selection.tensor_range(index)?)
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
                chunks: 0,
                resumed: 0,
                transport: LaneKind::Quic,
                transport_reason: LaneKindReason::Forced,
                codecs: CodecStats::default(),
            },
            load_report: LoadReport::unsent(),
        }
    }
}
