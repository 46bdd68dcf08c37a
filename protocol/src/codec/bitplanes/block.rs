//! The block format, shared by encoder and decoder.

use super::table::LEVELS_MAX;

/// The words per block; the last block of a chunk may have fewer. Small enough that a block stays in the processor's
/// first caches while it is coded, and that its counts fit two bytes.
pub(super) const BLOCK_WORDS: usize = 16 << 10;

/// The form of a block, in its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// The words are stored unchanged.
    Raw,
    /// The symbols are coded in `levels` levels, with the last transmitted table if `reuses_table`.
    Levels { levels: usize, reuses_table: bool },
    /// All words have the same symbol.
    Constant,
}

const CONSTANT: u8 = 5;
const REUSES_TABLE: u8 = 0x80;

impl Form {
    /// The byte of this form.
    pub(super) fn code(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Levels { levels, reuses_table } => {
                levels as u8 | if reuses_table { REUSES_TABLE } else { 0 }
            }
            Self::Constant => CONSTANT,
        }
    }

    /// The form with this byte, if any.
    pub(super) fn from_code(code: u8) -> Option<Self> {
        match (code & REUSES_TABLE != 0, code & !REUSES_TABLE) {
            (false, 0) => Some(Self::Raw),
            (false, CONSTANT) => Some(Self::Constant),
            (reuses_table, levels @ 1..) if usize::from(levels) <= LEVELS_MAX => {
                Some(Self::Levels { levels: levels.into(), reuses_table })
            }
            _ => None,
        }
    }
}

/// The number of groups of 64 that `symbols` symbols need.
pub(super) fn groups(symbols: usize) -> usize {
    symbols.div_ceil(64)
}

/// Symbols of a block, or escapes of one of its levels. The array has room for two more groups, since groups are read
/// and written whole at any offset.
pub(super) type Symbols = [u8; BLOCK_WORDS + 128];

/// Scratch memory of one thread, reused from block to block and from chunk to chunk.
pub(super) struct Scratch {
    /// The symbols of the block.
    pub(super) upper: Symbols,
    /// The escapes of two successive levels, used alternately.
    pub(super) escapes: [Symbols; 2],
}

impl Scratch {
    /// Scratch memory of about 48 KiB, on the heap.
    pub(super) fn new() -> Box<Self> {
        let empty = [0; BLOCK_WORDS + 128];
        Box::new(Self { upper: empty, escapes: [empty; 2] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_has_one_code() {
        let forms = (0..=255).filter_map(|code| Some((code, Form::from_code(code)?)));
        let codes: Vec<u8> = forms
            .inspect(|(code, form)| assert_eq!(form.code(), *code))
            .map(|(code, _)| code)
            .collect();
        assert_eq!(codes, [0, 1, 2, 3, 4, 5, 0x81, 0x82, 0x83, 0x84]);
    }
}
