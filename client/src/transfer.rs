//! One version on its way in.

use crate::{
    Receipt, Snapshot,
    buffers::Lent,
    error::TransferError,
    landing::{Ground, Landing},
    progress::Counters,
};
use std::{ops::Range, sync::Arc};
use tensor_relay_device::Sink;
use tensor_relay_protocol::{
    Announce, Arrival, Assembly, ChunkHeader, ChunkIndex, Dtype, Manifest, Misbehaved, Outcome,
    PARTIAL_RANGES_MAX, RangeSet, Selection, Verified, Version, VersionDigest,
};
use tensor_relay_transport::Tally;
use tokio::time::Instant;

/// What is known of a version that was announced, and where its bytes go.
#[derive(Debug)]
pub(crate) struct Transfer {
    announce: Announce,
    assembly: Assembly,
    landing: Landing,
    counters: Arc<Counters>,
    /// What came in which codec.
    tally: Arc<Tally>,
    began: Instant,
    resumed: u32,
}

/// Where one chunk goes.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) sink: Arc<dyn Sink>,
    pub(crate) range: Range<u64>,
    pub(crate) dtype: Dtype,
    /// Where the chunk is counted.
    pub(crate) tally: Arc<Tally>,
}

impl Transfer {
    /// Finds a place for what is selected: the buffers that were lent, or memory.
    pub(crate) fn begin(
        announce: Announce,
        selection: Arc<Selection>,
        lent: Option<Lent>,
        ground: &Ground,
        counters: Arc<Counters>,
        began: Instant,
    ) -> Result<Self, TransferError> {
        counters.expect(selection.payload_bytes());
        let landing = Landing::new(&selection, lent, ground)?;
        let (assembly, tally) = (Assembly::new(selection), Arc::default());
        Ok(Self { announce, assembly, landing, counters, tally, began, resumed: 0 })
    }

    pub(crate) fn announce(&self) -> &Announce {
        &self.announce
    }

    pub(crate) fn manifest(&self) -> &Manifest {
        self.assembly.manifest()
    }

    pub(crate) fn selection(&self) -> &Selection {
        self.assembly.selection()
    }

    pub(crate) fn landing(&self) -> &Landing {
        &self.landing
    }

    /// Lets chunks be coded against this version from now on.
    pub(crate) fn set_base(&mut self, base: Option<Version>) {
        self.assembly.set_base(base);
    }

    /// Says what to do with the chunk that begins to arrive, and where it belongs.
    pub(crate) fn handle_header(&mut self, header: &ChunkHeader) -> Result<Arrival, Misbehaved> {
        self.assembly.handle_header(header)
    }

    /// The place of `chunk`, which is `range` of what is received.
    pub(crate) fn place(&self, chunk: ChunkIndex, range: Range<u64>) -> Place {
        let (_, dtype) = self.assembly.manifest().chunk(chunk);
        let sink = self.landing.sink(&self.announce.id);
        Place { sink, range, dtype, tally: Arc::clone(&self.tally) }
    }

    /// The place of a chunk that is wanted.
    pub(crate) fn place_of(&self, chunk: ChunkIndex) -> Option<Place> {
        Some(self.place(chunk, self.assembly.selection().place(chunk)?))
    }

    /// Takes the news that a chunk's lane was lost under it: it is missing again.
    pub(crate) fn handle_lost(&mut self, chunk: ChunkIndex) {
        self.assembly.handle_lost(chunk);
    }

    /// Takes a chunk that is verified and in its place.
    pub(crate) fn handle_verified(&mut self, verified: Verified) {
        let (range, _) = self.assembly.manifest().chunk(verified.chunk());
        self.counters.add_verified(range.end - range.start);
        self.assembly.handle_verified(verified);
    }

    pub(crate) fn handle_complete(&mut self, digest: VersionDigest) {
        self.assembly.handle_complete(digest);
    }

    /// The connection is gone: what was arriving is missing again. What is verified stays.
    pub(crate) fn handle_detached(&mut self) {
        self.assembly.handle_detached();
        for chunk in self.assembly.forget_beyond(PARTIAL_RANGES_MAX).iter() {
            let (range, _) = self.assembly.manifest().chunk(ChunkIndex(chunk));
            self.counters.sub_verified(range.end - range.start);
        }
    }

    /// The same version is announced on another connection.
    pub(crate) fn handle_resumed(&mut self) {
        self.resumed += 1;
    }

    /// The chunks that need not come again.
    pub(crate) fn held(&self) -> RangeSet {
        self.assembly.held()
    }

    /// The snapshot, once the version is whole; the reason, once it cannot become whole.
    pub(crate) fn poll(&self) -> Option<Result<Snapshot, TransferError>> {
        Some(match self.assembly.poll()? {
            Outcome::Commit => self.commit(),
            Outcome::Mismatch { expected, found } => Err(TransferError::Mismatch { expected, found }),
        })
    }

    fn commit(&self) -> Result<Snapshot, TransferError> {
        let payload = self.landing.commit()?;
        let counted = self.counters.get();
        Ok(Snapshot {
            id: self.announce.id.clone(),
            selection: payload.narrow(self.assembly.selection()),
            payload,
            metadata: self.announce.metadata.clone(),
            skipped: self.announce.skipped,
            new_epoch: false,
            receipt: Receipt {
                duration: self.began.elapsed(),
                wire_bytes: counted.wire_bytes,
                chunks: self.assembly.verified_chunks(),
                resumed: self.resumed,
                codecs: self.tally.stats(),
            },
        })
    }
}
