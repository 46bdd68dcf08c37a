//! What changed between two strings of elements: where, and by how much.

use std::slice;

/// The changed elements of a string against its base, as the three strings that travel (PROTOCOL.md §8.7).
#[derive(Default)]
pub(super) struct Changes {
    /// For each change the unchanged elements in front of it. 255 is "255, and more follow".
    pub(super) gaps: Vec<u8>,
    /// For each change its zigzag difference, 1 to 255, or [`REPLACED`].
    pub(super) differences: Vec<u8>,
    /// The new elements of those that are replaced.
    pub(super) values: Vec<u8>,
    /// The element behind the last change.
    next: usize,
}

/// The largest gap that fits one byte, and one more.
const GAP_MAX: usize = 255;

/// Stands for a difference that does not fit a byte. No change has a difference of 0.
const REPLACED: u8 = 0;

/// What is compared at once. Blocks that are equal, nearly all, cost a vector comparison and no branch.
const BLOCK_BYTES: usize = 64;

/// Blocks that are compared before the differing ones are looked at.
const TILE_BLOCKS: usize = 256;

pub(super) const TILE_BYTES: usize = TILE_BLOCKS * BLOCK_BYTES;

/// The bytes of a word, in which elements are told apart.
const WORD_BYTES: usize = 8;

impl Changes {
    /// Forgets all changes, and keeps the memory.
    pub(super) fn clear(&mut self) {
        self.gaps.clear();
        self.differences.clear();
        self.values.clear();
        self.next = 0;
    }

    /// The bytes of all three strings.
    pub(super) fn len(&self) -> usize {
        self.gaps.len() + self.differences.len() + self.values.len()
    }

    /// Appends the changes from `base` to `raw`, two strings of whole elements of `W` bytes and of equal length. `None`
    /// once there are more than `room` bytes of them; then what is noted is of no use.
    pub(super) fn find<const W: usize>(&mut self, base: &[u8], raw: &[u8], room: usize) -> Option<()> {
        let begin = self.next;
        let mut differing = Differing::new();
        let whole = raw.len() / BLOCK_BYTES * BLOCK_BYTES;
        let tiles = base[..whole].chunks(TILE_BYTES).zip(raw[..whole].chunks(TILE_BYTES));
        for (tile, (base, raw)) in tiles.enumerate() {
            self.find_in_tile::<W>(begin + tile * (TILE_BYTES / W), base, raw, &mut differing);
            (self.len() <= room).then_some(())?;
        }
        let (base, raw) = (padded(&base[whole..]), padded(&raw[whole..]));
        self.find_in_tile::<W>(begin + whole / W, &base, &raw, &mut differing);
        (self.len() <= room).then_some(())
    }

    /// Appends the changes of at most a tile, of whole blocks, that begins with the element `first`.
    fn find_in_tile<const W: usize>(
        &mut self,
        first: usize,
        base: &[u8],
        raw: &[u8],
        differing: &mut Differing,
    ) {
        let (base_words, raw_words) = (base.as_chunks().0, raw.as_chunks().0);
        for word in differing.words(base, raw) {
            let word = usize::from(*word);
            self.note_word::<W>(first + word * (WORD_BYTES / W), base_words[word], raw_words[word]);
        }
    }

    fn note_word<const W: usize>(&mut self, first: usize, base: [u8; WORD_BYTES], raw: [u8; WORD_BYTES]) {
        let (base, raw) = (u64::from_le_bytes(base), u64::from_le_bytes(raw));
        let mut differing = base ^ raw;
        while differing != 0 {
            let lane = differing.trailing_zeros() as usize / (8 * W);
            let shift = lane * 8 * W;
            differing &= !(lane_mask::<W>() << shift);
            self.note::<W>(first + lane, base >> shift, raw >> shift);
        }
    }

    /// Notes that `element` changed. What lies above the low `W` bytes of `base` and `raw` is of no meaning.
    fn note<const W: usize>(&mut self, element: usize, base: u64, raw: u64) {
        let mut gap = element - self.next;
        self.next = element + 1;
        while gap >= GAP_MAX {
            self.gaps.push(GAP_MAX as u8);
            gap -= GAP_MAX;
        }
        self.gaps.push(gap as u8);
        match u8::try_from(zigzag::<W>(raw.wrapping_sub(base))) {
            Ok(difference) => self.differences.push(difference),
            Err(_) => {
                self.differences.push(REPLACED);
                self.values.extend_from_slice(&raw.to_le_bytes()[..W]);
            }
        }
    }
}

/// Finds the words of a tile that differ: blocks first, then words of those that do. Each is written down whether it
/// differs or not, and counts if it does, since a branch that cannot be foretold costs more than all the rest.
struct Differing {
    blocks: [u8; TILE_BLOCKS],
    words: [u16; TILE_BYTES / WORD_BYTES],
}

impl Differing {
    fn new() -> Self {
        Self { blocks: [0; TILE_BLOCKS], words: [0; TILE_BYTES / WORD_BYTES] }
    }

    /// The numbers of the words that differ, in order, of at most a tile of whole blocks.
    fn words(&mut self, base: &[u8], raw: &[u8]) -> &[u16] {
        let (base, raw) = (base.as_chunks().0, raw.as_chunks().0);
        let blocks = self.note_blocks(base, raw);
        let words = self.note_words(blocks, base, raw);
        &self.words[..words]
    }

    fn note_blocks(&mut self, base: &[[u8; BLOCK_BYTES]], raw: &[[u8; BLOCK_BYTES]]) -> usize {
        let mut count = 0;
        for (block, (base, raw)) in (0..=u8::MAX).zip(base.iter().zip(raw)) {
            self.blocks[count] = block;
            count += usize::from(differ(base, raw));
        }
        count
    }

    fn note_words(&mut self, blocks: usize, base: &[[u8; BLOCK_BYTES]], raw: &[[u8; BLOCK_BYTES]]) -> usize {
        let mut count = 0;
        for block in &self.blocks[..blocks] {
            let (base, raw) = (&base[usize::from(*block)], &raw[usize::from(*block)]);
            let pairs = base.as_chunks::<WORD_BYTES>().0.iter().zip(raw.as_chunks().0);
            let first = u16::from(*block) * (BLOCK_BYTES / WORD_BYTES) as u16;
            for (word, (base, raw)) in (first..).zip(pairs) {
                self.words[count] = word;
                count += usize::from(base != raw);
            }
        }
        count
    }
}

/// Written as an OR of differences because compilers make vector instructions of it.
fn differ(base: &[u8; BLOCK_BYTES], raw: &[u8; BLOCK_BYTES]) -> bool {
    let words = base.as_chunks::<WORD_BYTES>().0.iter().zip(raw.as_chunks().0);
    words.fold(0, |any, (base, raw)| any | (u64::from_le_bytes(*base) ^ u64::from_le_bytes(*raw))) != 0
}

/// The end of a string, as a block whose rest does not differ.
fn padded(rest: &[u8]) -> [u8; BLOCK_BYTES] {
    let mut block = [0; BLOCK_BYTES];
    block[..rest.len()].copy_from_slice(rest);
    block
}

const fn lane_mask<const W: usize>() -> u64 {
    u64::MAX >> (64 - 8 * W)
}

/// Small differences of either sign as small numbers: 1, -1, 2, -2 become 2, 1, 4, 3. The difference is a two's
/// complement number in the low `W` bytes.
fn zigzag<const W: usize>(difference: u64) -> u64 {
    let unused = 64 - 8 * W as u32;
    let difference = ((difference << unused) as i64) >> unused;
    ((difference << 1) ^ (difference >> 63)) as u64
}

fn unzigzag(zigzag: u8) -> u64 {
    let zigzag = u64::from(zigzag);
    (zigzag >> 1) ^ (zigzag & 1).wrapping_neg()
}

/// Changes on their way to the elements that they are of, from the first to the last.
///
/// They are applied to one tile after the other, so that the caller can do with each what it wants before and after, while
/// its bytes are in the first cache.
pub(super) struct Pending<'a, const W: usize> {
    gaps: slice::Iter<'a, u8>,
    differences: slice::Iter<'a, u8>,
    values: slice::Iter<'a, [u8; W]>,
    /// The element that changes next, and its difference.
    next: Option<(usize, u8)>,
}

impl<'a, const W: usize> Pending<'a, W> {
    /// The changes that these three strings say. `None` when they do not fit each other, as far as that is known yet.
    pub(super) fn new(gaps: &'a [u8], differences: &'a [u8], values: &'a [u8]) -> Option<Self> {
        let (values, cut) = values.as_chunks();
        let (gaps, differences) = (gaps.iter(), differences.iter());
        let mut pending = Self { gaps, differences, values: values.iter(), next: None };
        pending.advance(0)?;
        cut.is_empty().then_some(pending)
    }

    /// Applies to `tile`, whose first element is number `first`, what changes there. Tiles come in order and leave nothing
    /// out. `None`, with the tile half done, when the strings do not fit each other.
    pub(super) fn apply_to(&mut self, first: usize, tile: &mut [[u8; W]]) -> Option<()> {
        while let Some((at, difference)) = self.next
            && let Some(element) = tile.get_mut(at - first)
        {
            match difference {
                REPLACED => *element = *self.values.next()?,
                difference => add(element, unzigzag(difference)),
            }
            self.advance(at + 1)?;
        }
        Some(())
    }

    /// Whether nothing is left: no change behind the last tile, and no byte that no change took.
    pub(super) fn is_empty(&self) -> bool {
        self.next.is_none() && self.gaps.len() == 0 && self.values.len() == 0
    }

    /// Finds the next change, `from` being the element behind the one before.
    fn advance(&mut self, from: usize) -> Option<()> {
        self.next = match self.differences.next() {
            Some(difference) => Some((from + take_gap(&mut self.gaps)?, *difference)),
            None => None,
        };
        Some(())
    }
}

fn take_gap(gaps: &mut slice::Iter<'_, u8>) -> Option<usize> {
    let mut gap = 0;
    loop {
        let byte = usize::from(*gaps.next()?);
        gap += byte;
        if byte < GAP_MAX {
            return Some(gap);
        }
    }
}

fn add<const W: usize>(element: &mut [u8; W], difference: u64) {
    let mut wide = [0; 8];
    wide[..W].copy_from_slice(element);
    let sum = u64::from_le_bytes(wide).wrapping_add(difference);
    element.copy_from_slice(&sum.to_le_bytes()[..W]);
}
