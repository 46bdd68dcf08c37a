//! The decoder, from blocks to words.

use super::{
    super::simd::Path,
    block::{BLOCK_WORDS, Form, Scratch, groups},
    layout::Layout,
    table::{LEVEL_SYMBOLS, LEVELS_MAX, Table},
};

/// A decoder of the words of one chunk.
pub(super) struct Decoder<'a> {
    layout: Layout,
    path: Path,
    scratch: &'a mut Scratch,
    /// The last table received.
    last_table: Option<Table>,
}

/// One level of a block, as read from its encoding.
#[derive(Debug, Clone, Copy, Default)]
struct Level<'a> {
    masks: &'a [[u8; 16]],
    symbols: [u8; LEVEL_SYMBOLS],
    /// The number of escapes.
    escapes: usize,
}

/// What is wrong with an encoding, as text for an error message.
pub(super) type DecodeFault = &'static str;

impl<'a> Decoder<'a> {
    /// A decoder for a chunk of words of this layout.
    pub(super) fn new(layout: Layout, path: Path, scratch: &'a mut Scratch) -> Self {
        Self { layout, path, scratch, last_table: None }
    }

    /// Decodes from the front of `encoded` until `words` is full, and removes the decoded bytes from `encoded`.
    pub(super) fn decode(&mut self, encoded: &mut &[u8], words: &mut [u8]) -> Result<(), DecodeFault> {
        for block in words.chunks_mut(BLOCK_WORDS * self.layout.word_bytes()) {
            let code = *encoded.split_off_first().ok_or(SHORT)?;
            match Form::from_code(code).ok_or("a block has an unknown form")? {
                Form::Raw => block.copy_from_slice(take(encoded, block.len())?),
                Form::Levels { levels, reuses_table } => {
                    self.coded_block(block, encoded, |this, word_count, encoded| {
                        let table = this.table(levels, reuses_table, encoded)?;
                        this.decode_symbols(table, word_count, encoded)
                    })?;
                }
                Form::Constant => self.coded_block(block, encoded, |this, word_count, encoded| {
                    let symbol = *encoded.split_off_first().ok_or(SHORT)?;
                    this.scratch.upper[..word_count].fill(symbol);
                    Ok(())
                })?,
            }
        }
        Ok(())
    }

    /// Reads the rest and the low bits, calls `decode_symbols` to fill `scratch.upper`, and merges the three.
    fn coded_block(
        &mut self,
        block: &mut [u8],
        encoded: &mut &[u8],
        decode_symbols: impl FnOnce(&mut Self, usize, &mut &[u8]) -> Result<(), DecodeFault>,
    ) -> Result<(), DecodeFault> {
        let word_count = block.len() / self.layout.word_bytes();
        let rest = take(encoded, word_count * self.layout.rest_bytes())?;
        let low = take(encoded, groups(word_count) * self.layout.low_bits.group_bytes())?;
        decode_symbols(self, word_count, encoded)?;
        let upper = &mut self.scratch.upper;
        let whole_groups = &mut upper.as_chunks_mut::<64>().0[..groups(word_count)];
        self.path.merge_low_bits(self.layout.low_bits, low, whole_groups);
        self.path.merge_words(self.layout.words, &upper[..word_count], rest, block);
        Ok(())
    }

    /// The table of a block: its own, or the last received one.
    fn table(
        &mut self,
        levels: usize,
        reuses_table: bool,
        encoded: &mut &[u8],
    ) -> Result<Table, DecodeFault> {
        if !reuses_table {
            self.last_table = Table::from_bytes(take(encoded, LEVEL_SYMBOLS * levels)?);
        }
        let table = self.last_table.filter(|table| table.levels().len() == levels);
        table.ok_or("a block refers to a table that was not sent")
    }

    /// Decodes the symbols of `word_count` words into `scratch.upper`, from the last level to the first.
    fn decode_symbols(
        &mut self,
        table: Table,
        word_count: usize,
        encoded: &mut &[u8],
    ) -> Result<(), DecodeFault> {
        let mut levels = [Level::default(); LEVELS_MAX];
        let levels = &mut levels[..table.levels().len()];
        let tail = read_levels(&table, word_count, encoded, levels)?;

        let Scratch { upper, escapes: [first, second] } = &mut *self.scratch;
        let (mut escapes, mut spare) = (first, second);
        escapes[..tail.len()].copy_from_slice(tail);
        for (above, level) in levels.iter().enumerate().rev() {
            let plain = if above == 0 { &mut *upper } else { &mut *spare };
            let groups = &mut plain.as_chunks_mut::<64>().0[..level.masks.len()];
            let found = self.path.decode_level(level.symbols, level.masks, escapes, groups);
            if found != level.escapes {
                return Err("the escapes in a block's masks differ from its escape count");
            }
            (escapes, spare) = (spare, escapes);
        }
        Ok(())
    }
}

/// Reads the masks of each level, and the symbols that no level names.
fn read_levels<'a>(
    table: &Table,
    word_count: usize,
    encoded: &mut &'a [u8],
    levels: &mut [Level<'a>],
) -> Result<&'a [u8], DecodeFault> {
    let escape_counts = take(encoded, 2 * levels.len())?.as_chunks::<2>().0;
    let mut remaining = word_count;
    for ((level, symbols), escapes) in levels.iter_mut().zip(table.levels()).zip(escape_counts) {
        let escapes = usize::from(u16::from_le_bytes(*escapes));
        if escapes > remaining {
            return Err("a level has more escapes than symbols");
        }
        let masks = take(encoded, 16 * groups(remaining))?.as_chunks().0;
        *level = Level { masks, symbols: *symbols, escapes };
        remaining = escapes;
    }
    take(encoded, remaining)
}

/// Splits `bytes` bytes off the front of `encoded`.
fn take<'a>(encoded: &mut &'a [u8], bytes: usize) -> Result<&'a [u8], DecodeFault> {
    encoded.split_off(..bytes).ok_or(SHORT)
}

/// The fault of a truncated encoding.
pub(super) const SHORT: DecodeFault = "it is truncated";
