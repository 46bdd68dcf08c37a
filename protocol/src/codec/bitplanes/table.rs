//! The code table: which symbols get the short codes.

use super::layout::Layout;

/// The most levels a table has. After four, what is left is too rare to be worth a mask.
pub(super) const LEVELS_MAX: usize = 4;

/// The symbols that one level can name in two bits; the fourth code is the escape.
pub(super) const LEVEL_SYMBOLS: usize = 3;

/// The code table of a block: three symbols per level, the most frequent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Table {
    levels: usize,
    symbols: [[u8; LEVEL_SYMBOLS]; LEVELS_MAX],
}

/// The best form for a block, judged by a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Advice {
    /// Raw: coding gains too little.
    Raw,
    /// Constant: only this symbol was sampled, perhaps there is no other.
    Constant(Table),
    /// Coded with this table.
    Levels(Table),
}

/// The sampled places of a span, and the words in a row at each: neighbours share cache lines. 1,024 words predict the
/// size to 0.5 % on weights.
const PLACES: usize = 16;
const IN_A_ROW: usize = 64;

impl Table {
    /// Reads a table, as many levels as there are symbols for. `None` if there are none or too many.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (given, odd) = bytes.as_chunks::<LEVEL_SYMBOLS>();
        let mut symbols = [[0; LEVEL_SYMBOLS]; LEVELS_MAX];
        symbols.get_mut(..given.len())?.copy_from_slice(given);
        (!given.is_empty() && odd.is_empty()).then_some(Self { levels: given.len(), symbols })
    }

    /// The symbols, level by level.
    pub(super) fn levels(&self) -> &[[u8; LEVEL_SYMBOLS]] {
        &self.symbols[..self.levels]
    }

    /// The presumably most frequent symbol.
    pub(super) fn first(&self) -> u8 {
        self.symbols[0][0]
    }
}

/// The cost of a level beyond two bits for each symbol that reaches it: its symbols, its count, and on average half a
/// group of masks for the last symbols.
const LEVEL_BITS: usize = 24 + 16 + 64;

/// Samples a few places of `raw`, which is cut into blocks of `block_words`, and chooses how to code them. Costs about
/// two microseconds, whatever the length.
pub(super) fn advise(layout: Layout, raw: &[u8], block_words: usize) -> Advice {
    let counts = sample(layout, raw);
    let ranked = rank(&counts);
    let seen: u32 = counts.iter().map(|count| u32::from(*count)).sum();
    // Costs are in bits of the sample, so a level's cost per block is scaled down.
    let block_words = block_words.min(raw.len() / layout.word_bytes()).max(1);
    let level_bits = (LEVEL_BITS * seen as usize).div_ceil(block_words) as u32;
    let (levels, bits) = cheapest(&counts, &ranked, seen, level_bits);
    // A gain below 1 % of the raw bits is not worth the time.
    let worth = seen * layout.word_bytes() as u32 * 8 / 100;
    let table = Table { levels, symbols: ranked };
    if seen > 0 && u32::from(counts[usize::from(table.first())]) == seen {
        return Advice::Constant(table);
    }
    match bits + worth < seen * layout.symbol_bits() {
        true => Advice::Levels(table),
        false => Advice::Raw,
    }
}

/// Counts the symbols at a few places.
fn sample(layout: Layout, raw: &[u8]) -> [u16; 256] {
    let bytes = layout.word_bytes();
    let mut counts = [0; 256];
    let mut count = |words: &[u8]| match bytes {
        1 => words.iter().for_each(|byte| counts[usize::from(layout.symbol(*byte, 0))] += 1),
        _ => words
            .chunks_exact(bytes)
            .for_each(|word| counts[usize::from(layout.symbol(word[bytes - 1], word[bytes - 2]))] += 1),
    };
    let run_bytes = IN_A_ROW * bytes;
    match raw.len() / bytes / PLACES {
        step if step <= IN_A_ROW => count(raw),
        step => (0..PLACES).for_each(|place| count(&raw[place * step * bytes..][..run_bytes])),
    }
    counts
}

/// The symbols by falling count; unseen ones follow by rising value. All differ, so that no symbol has two codes.
fn rank(counts: &[u16; 256]) -> [[u8; LEVEL_SYMBOLS]; LEVELS_MAX] {
    // Count above, complement of the symbol below: one comparison sorts by both.
    let mut keys = [0u32; 256];
    let mut seen = 0;
    for (symbol, count) in counts.iter().enumerate() {
        keys[seen] = u32::from(*count) << 8 | (255 - symbol as u32);
        seen += usize::from(*count != 0);
    }
    keys[..seen].sort_unstable_by(|a, b| b.cmp(a));
    let frequent = keys[..seen].iter().map(|key| 255 - *key as u8);
    let unseen = (0..=255u8).filter(|symbol| counts[usize::from(*symbol)] == 0);
    let mut symbols = [[0; LEVEL_SYMBOLS]; LEVELS_MAX];
    for (place, symbol) in symbols.as_flattened_mut().iter_mut().zip(frequent.chain(unseen)) {
        *place = symbol;
    }
    symbols
}

/// The number of levels that costs the fewest bits, and that cost: two bits for each symbol that reaches a level, and
/// eight for each remaining one.
fn cheapest(
    counts: &[u16; 256],
    ranked: &[[u8; LEVEL_SYMBOLS]; LEVELS_MAX],
    seen: u32,
    level_bits: u32,
) -> (usize, u32) {
    let (mut left, mut bits) = (seen, 0);
    let costs = ranked.iter().enumerate().map(|(level, symbols)| {
        bits += level_bits + 2 * left;
        left -= symbols
            .iter()
            .map(|symbol| u32::from(counts[usize::from(*symbol)]))
            .sum::<u32>();
        (level + 1, bits + 8 * left)
    });
    costs.min_by_key(|(_, bits)| *bits).unwrap_or((1, u32::MAX))
}
