//! The code table: the symbols that each level names, chosen from a sample.

use super::layout::Layout;

/// The most levels of a table. The symbols that four levels do not name are too rare for a fifth level.
pub(super) const LEVELS_MAX: usize = 4;

/// The symbols that one level can name in two bits; the fourth code is the escape.
pub(super) const LEVEL_SYMBOLS: usize = 3;

/// The code table of a block: three symbols per level, the most frequent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Table {
    levels: usize,
    symbols: [[u8; LEVEL_SYMBOLS]; LEVELS_MAX],
}

/// The best form for some blocks, judged by a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Advice {
    /// Raw: coding gains too little.
    Raw,
    /// Constant if all symbols equal the table's first, the only one in the sample; otherwise coded with this table.
    Constant(Table),
    /// Coded with this table.
    Levels(Table),
}

/// The number of runs in a sample.
const RUNS: usize = 16;

/// The number of adjacent words in a run: neighbours share cache lines. A sample, 1,024 words, predicts the encoded
/// size of weights to 0.5 %.
const RUN_WORDS: usize = 64;

impl Table {
    /// The table with these symbols. `None` unless they are those of one to four levels.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (levels, remainder) = bytes.as_chunks::<LEVEL_SYMBOLS>();
        let mut symbols = [[0; LEVEL_SYMBOLS]; LEVELS_MAX];
        symbols.get_mut(..levels.len())?.copy_from_slice(levels);
        (!levels.is_empty() && remainder.is_empty()).then_some(Self { levels: levels.len(), symbols })
    }

    /// The symbols, level by level.
    pub(super) fn levels(&self) -> &[[u8; LEVEL_SYMBOLS]] {
        &self.symbols[..self.levels]
    }

    /// The most frequent symbol of the sample.
    pub(super) fn first(&self) -> u8 {
        self.symbols[0][0]
    }
}

/// The fixed cost of a level in bits, besides two bits for each symbol that reaches it: its symbols, its escape count,
/// and on average half a group of masks for padding.
const LEVEL_BITS: usize = 24 + 16 + 64;

/// Samples `raw`, which is cut into blocks of `block_words` words, and chooses the form of these blocks. Takes about
/// two microseconds at any length.
pub(super) fn advise(layout: Layout, raw: &[u8], block_words: usize) -> Advice {
    let counts = sample(layout, raw);
    let ranked = rank(&counts);
    let sampled: u32 = counts.iter().map(|count| u32::from(*count)).sum();
    // Costs are in bits of the sample, so a level's fixed cost per block is scaled down to it.
    let block_words = block_words.min(raw.len() / layout.word_bytes()).max(1);
    let level_bits = (LEVEL_BITS * sampled as usize).div_ceil(block_words) as u32;
    let (levels, bits) = cheapest(&counts, &ranked, sampled, level_bits);
    // A gain below 1 % of the raw bits is not worth the time.
    let gain_min = sampled * layout.word_bytes() as u32 * 8 / 100;
    let table = Table { levels, symbols: ranked };
    if sampled > 0 && u32::from(counts[usize::from(table.first())]) == sampled {
        return Advice::Constant(table);
    }
    match bits + gain_min < sampled * layout.symbol_bits() {
        true => Advice::Levels(table),
        false => Advice::Raw,
    }
}

/// The number of times that each symbol occurs in a sample.
fn sample(layout: Layout, raw: &[u8]) -> [u16; 256] {
    let bytes = layout.word_bytes();
    let mut counts = [0; 256];
    let mut count = |words: &[u8]| match bytes {
        1 => words.iter().for_each(|byte| counts[usize::from(layout.symbol(*byte, 0))] += 1),
        _ => words
            .chunks_exact(bytes)
            .for_each(|word| counts[usize::from(layout.symbol(word[bytes - 1], word[bytes - 2]))] += 1),
    };
    let run_bytes = RUN_WORDS * bytes;
    match raw.len() / bytes / RUNS {
        step if step <= RUN_WORDS => count(raw),
        step => (0..RUNS).for_each(|run| count(&raw[run * step * bytes..][..run_bytes])),
    }
    counts
}

/// The symbols by falling count, then unsampled symbols by rising value. All differ, so that no symbol has two codes.
fn rank(counts: &[u16; 256]) -> [[u8; LEVEL_SYMBOLS]; LEVELS_MAX] {
    // A key is the count, and in the low byte the complement of the symbol: one comparison sorts by both.
    let mut keys = [0u32; 256];
    let mut distinct = 0;
    for (symbol, count) in counts.iter().enumerate() {
        keys[distinct] = u32::from(*count) << 8 | (255 - symbol as u32);
        distinct += usize::from(*count != 0);
    }
    keys[..distinct].sort_unstable_by(|a, b| b.cmp(a));
    let frequent = keys[..distinct].iter().map(|key| 255 - *key as u8);
    let unsampled = (0..=255u8).filter(|symbol| counts[usize::from(*symbol)] == 0);
    let mut symbols = [[0; LEVEL_SYMBOLS]; LEVELS_MAX];
    for (slot, symbol) in symbols.as_flattened_mut().iter_mut().zip(frequent.chain(unsampled)) {
        *slot = symbol;
    }
    symbols
}

/// The number of levels that costs the fewest bits, and that cost: `level_bits` for each level, two bits for each
/// symbol that reaches it, and eight for each escape of the last level.
fn cheapest(
    counts: &[u16; 256],
    ranked: &[[u8; LEVEL_SYMBOLS]; LEVELS_MAX],
    sampled: u32,
    level_bits: u32,
) -> (usize, u32) {
    let (mut remaining, mut bits) = (sampled, 0);
    let costs = ranked.iter().enumerate().map(|(level, symbols)| {
        bits += level_bits + 2 * remaining;
        remaining -= symbols
            .iter()
            .map(|symbol| u32::from(counts[usize::from(*symbol)]))
            .sum::<u32>();
        (level + 1, bits + 8 * remaining)
    });
    costs.min_by_key(|(_, bits)| *bits).unwrap_or((1, u32::MAX))
}
