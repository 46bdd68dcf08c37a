//! [`Laid`]: the place of a tensor in the payload.

use super::Cuts;

/// The place of a tensor in the payload: the offset of each piece. With several owners, i.e. writers of a version, also
/// the owner of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Laid {
    /// The offset of the first piece; that of the only one takes no allocation.
    offset: u64,
    owner: u32,
    pieces: Option<Box<Pieces>>,
}

/// The pieces of a tensor that is cut.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Pieces {
    cuts: Cuts,
    offsets: Box<[u64]>,
    owners: Box<[u32]>,
}

/// The cuts of a tensor without any.
static NO_CUTS: Cuts = Cuts::NONE;

impl Laid {
    /// The place of a tensor of one owner, with the offset of each piece.
    pub(super) fn new(cuts: Cuts, offsets: &[u64]) -> Self {
        Self::of_owners(cuts, offsets, &[])
    }

    /// The place of a tensor, with the offset and the owner of each piece; without `owners`, all are of owner 0.
    pub(super) fn of_owners(cuts: Cuts, offsets: &[u64], owners: &[u32]) -> Self {
        let (offset, owner) = (offsets[0], owners.first().copied().unwrap_or(0));
        let is_cut = !cuts.is_empty();
        let pieces =
            is_cut.then(|| Box::new(Pieces { cuts, offsets: offsets.into(), owners: owners.into() }));
        Self { offset, owner, pieces }
    }

    pub(super) fn cuts(&self) -> &Cuts {
        self.pieces.as_ref().map_or(&NO_CUTS, |pieces| &pieces.cuts)
    }

    /// The offset of the piece with this number, which exists.
    pub(super) fn offset(&self, number: u64) -> u64 {
        self.pieces
            .as_ref()
            .map_or(self.offset, |pieces| pieces.offsets[number as usize])
    }

    /// The owner of the piece with this number.
    pub(super) fn owner(&self, number: u64) -> u32 {
        let owners = self.pieces.as_ref().map(|pieces| &pieces.owners);
        owners.map_or(self.owner, |owners| owners.get(number as usize).copied().unwrap_or(0))
    }
}
