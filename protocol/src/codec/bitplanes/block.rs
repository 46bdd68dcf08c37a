//! What both directions know of a block.

use super::table::LEVELS_MAX;

/// How many words a block has; the last one of a chunk may have fewer. Small enough that a block's bytes stay in the
/// processor's first caches while they are worked on, and that its counts fit two bytes.
pub(super) const BLOCK_WORDS: usize = 16 << 10;

/// What a block's first byte says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// The words as they are.
    Raw,
    /// So many levels; whether the table is that of the last block which brought one.
    Levels { levels: usize, known: bool },
    /// All words have the same symbol.
    Constant,
}

const CONSTANT: u8 = 5;
const KNOWN: u8 = 0x80;

impl Form {
    /// The byte that stands for it.
    pub(super) fn code(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Levels { levels, known } => levels as u8 | if known { KNOWN } else { 0 },
            Self::Constant => CONSTANT,
        }
    }

    /// What `code` stands for, if anything.
    pub(super) fn from_code(code: u8) -> Option<Self> {
        match (code & KNOWN != 0, code & !KNOWN) {
            (false, 0) => Some(Self::Raw),
            (false, CONSTANT) => Some(Self::Constant),
            (known, levels @ 1..) if usize::from(levels) <= LEVELS_MAX => {
                Some(Self::Levels { levels: levels.into(), known })
            }
            _ => None,
        }
    }
}

/// How many groups of 64 it takes to hold `symbols`.
pub(super) fn groups(symbols: usize) -> usize {
    symbols.div_ceil(64)
}

/// Symbols of a block, or escapes of one of its levels, with room for one group more: groups are read and written whole,
/// wherever the last one begins.
pub(super) type Symbols = [u8; BLOCK_WORDS + 64];

/// Memory of one thread, kept from block to block and from chunk to chunk.
pub(super) struct Scratch {
    /// The symbols of the block.
    pub(super) upper: Symbols,
    /// The escapes of the levels, turn and turn about.
    pub(super) escapes: [Symbols; 2],
}

impl Scratch {
    /// New memory, of 50 KiB.
    pub(super) fn new() -> Box<Self> {
        let empty = [0; BLOCK_WORDS + 64];
        Box::new(Self { upper: empty, escapes: [empty; 2] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_what_their_codes_say() {
        let known = (0..=255).filter_map(|code| Some((code, Form::from_code(code)?)));
        let codes: Vec<u8> = known
            .inspect(|(code, form)| assert_eq!(form.code(), *code))
            .map(|(code, _)| code)
            .collect();
        assert_eq!(codes, [0, 1, 2, 3, 4, 5, 0x81, 0x82, 0x83, 0x84]);
    }
}
