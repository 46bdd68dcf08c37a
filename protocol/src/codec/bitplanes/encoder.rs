//! The encoder, from words to blocks.

use super::{
    super::simd::Path,
    block::{BLOCK_WORDS, Form, Scratch, groups},
    layout::Layout,
    table::{Advice, LEVEL_SYMBOLS, Table, advise},
};

/// The number of blocks that share one sample. A sample takes two microseconds, encoding these blocks tens of
/// microseconds; a sample for each block would make weights only 0.1 % smaller.
const BLOCKS_PER_SAMPLE: usize = 8;

/// An encoder of the words of one chunk.
pub(super) struct Encoder<'a> {
    layout: Layout,
    path: Path,
    scratch: &'a mut Scratch,
    /// The last table sent.
    last_table: Option<Table>,
}

impl<'a> Encoder<'a> {
    /// An encoder for a chunk of words of this layout.
    pub(super) fn new(layout: Layout, path: Path, scratch: &'a mut Scratch) -> Self {
        Self { layout, path, scratch, last_table: None }
    }

    /// Encodes whole words to the front of `room`, and removes the written bytes from it. `None` if they do not fit.
    pub(super) fn encode(&mut self, words: &[u8], room: &mut &mut [u8]) -> Option<()> {
        let block_bytes = BLOCK_WORDS * self.layout.word_bytes();
        for blocks in words.chunks(BLOCKS_PER_SAMPLE * block_bytes) {
            let advice = advise(self.layout, blocks, BLOCK_WORDS);
            for block in blocks.chunks(block_bytes) {
                self.encode_block(advice, block, room)?;
            }
        }
        Some(())
    }

    /// Encodes one block as advised, or raw if that would not make it smaller.
    fn encode_block(&mut self, advice: Advice, block: &[u8], room: &mut &mut [u8]) -> Option<()> {
        let (table, is_constant) = match advice {
            Advice::Raw => return raw_block(block, room),
            Advice::Constant(table) => (table, true),
            Advice::Levels(table) => (table, false),
        };
        let last_table = self.last_table;
        let out = std::mem::take(room);
        let limit = out.len().min(block.len());
        let mut unused = &mut out[..limit];
        match self.coded_block(table, is_constant, block, &mut unused) {
            Some(()) => {
                let written = limit - unused.len();
                *room = &mut out[written..];
                Some(())
            }
            None => {
                self.last_table = last_table;
                *room = out;
                raw_block(block, room)
            }
        }
    }

    /// Writes the form, the rest, the low bits and the symbols. `is_constant` says that the sample had a single symbol.
    fn coded_block(
        &mut self,
        table: Table,
        is_constant: bool,
        block: &[u8],
        room: &mut &mut [u8],
    ) -> Option<()> {
        let word_count = block.len() / self.layout.word_bytes();
        let form = room.split_off_first_mut()?;
        let rest = room.split_off_mut(..word_count * self.layout.rest_bytes())?;
        let low = room.split_off_mut(..groups(word_count) * self.layout.low_bits.group_bytes())?;

        let Scratch { upper, .. } = &mut *self.scratch;
        self.path.split_words(self.layout.words, block, &mut upper[..word_count], rest);
        upper[word_count..][..64].fill(0);
        let whole_groups = &mut upper.as_chunks_mut::<64>().0[..groups(word_count)];
        self.path.split_low_bits(self.layout.low_bits, whole_groups, low);

        if is_constant && upper[..word_count].iter().all(|symbol| *symbol == table.first()) {
            *form = Form::Constant.code();
            *room.split_off_first_mut()? = table.first();
            return Some(());
        }
        let reuses_table = self.last_table == Some(table);
        *form = Form::Levels { levels: table.levels().len(), reuses_table }.code();
        if !reuses_table {
            let symbols = table.levels().as_flattened();
            room.split_off_mut(..symbols.len())?.copy_from_slice(symbols);
            self.last_table = Some(table);
        }
        self.code_symbols(table, word_count, room)
    }

    /// Writes the escape count and the masks of each level, and the escapes of the last level.
    fn code_symbols(&mut self, table: Table, word_count: usize, room: &mut &mut [u8]) -> Option<()> {
        let levels = table.levels();
        let escape_counts = room.split_off_mut(..2 * levels.len())?;
        let Scratch { upper, escapes: [first, second] } = &mut *self.scratch;
        let (mut plain, mut escapes, mut spare) = (upper, first, second);
        let mut remaining = word_count;
        for (symbols, escape_count) in levels.iter().zip(escape_counts.as_chunks_mut::<2>().0) {
            let group_count = groups(remaining);
            let masks = room.split_off_mut(..16 * group_count)?.as_chunks_mut::<16>().0;
            // Pads the last group with a symbol of code 0, which adds no escapes.
            plain[remaining..][..64].fill(symbols[0]);
            remaining =
                self.path
                    .encode_level(*symbols, &plain.as_chunks::<64>().0[..group_count], masks, escapes);
            *escape_count = (remaining as u16).to_le_bytes();
            (plain, escapes, spare) = (escapes, spare, plain);
        }
        room.split_off_mut(..remaining)?.copy_from_slice(&plain[..remaining]);
        Some(())
    }
}

fn raw_block(block: &[u8], room: &mut &mut [u8]) -> Option<()> {
    *room.split_off_first_mut()? = Form::Raw.code();
    room.split_off_mut(..block.len())?.copy_from_slice(block);
    Some(())
}

// A level codes three symbols and the escape in two bits.
const _: () = assert!(LEVEL_SYMBOLS == 3);
// Escape counts are two bytes.
const _: () = assert!(BLOCK_WORDS <= u16::MAX as usize);
