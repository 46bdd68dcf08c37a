//! The word layout: the symbol, the low bits and the rest of each word. An element is one word, a complex one two.

use crate::Dtype;

/// The split of a dtype's words into symbol, low bits and rest (PROTOCOL.md §8.4, table).
///
/// A word with a sign is rotated left by one bit, so that the sign is its lowest bit. The upper bits of its uppermost
/// byte, which hold the exponent or the upper 8 of 11 exponent bits, are the *symbol*; the other bits of that byte, up
/// to four, are the *low bits*; the lower bytes are the *rest*.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::codec) struct Layout {
    /// The size and signedness of a word.
    pub(in crate::codec) words: Words,
    /// The number of bits of the uppermost byte that do not belong to the symbol.
    pub(in crate::codec) low_bits: LowBits,
}

/// The size of a dtype's words, and whether they have a sign. A complex number is two words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::codec) enum Words {
    /// One byte without a sign: the exponent alone.
    Unsigned8,
    /// One byte with a sign.
    Signed8,
    /// Two bytes, one of them rest.
    Signed16,
    /// Four bytes, three of them rest.
    Signed32,
    /// Eight bytes, seven of them rest.
    Signed64,
}

/// The number of bits of the uppermost byte that are stored uncoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::codec) enum LowBits {
    /// None: the symbol has the whole byte.
    None,
    /// Three, stored as masks.
    Three,
    /// Four, stored as those of two words in a byte.
    Four,
}

impl Layout {
    /// The layout of `dtype`, or `None` if its elements have no exponent.
    pub(in crate::codec) fn of(dtype: Dtype) -> Option<Self> {
        let (words, low_bits) = match dtype {
            Dtype::F8E8M0 => (Words::Unsigned8, LowBits::None),
            Dtype::F8E5M2 | Dtype::F8E5M2Fnuz => (Words::Signed8, LowBits::Three),
            Dtype::F8E3M4 | Dtype::F8E4M3 | Dtype::F8E4M3Fn | Dtype::F8E4M3Fnuz | Dtype::F8E4M3B11Fnuz => {
                (Words::Signed8, LowBits::Four)
            }
            Dtype::F16 | Dtype::C32 => (Words::Signed16, LowBits::Three),
            Dtype::Bf16 => (Words::Signed16, LowBits::None),
            Dtype::F32 | Dtype::C64 => (Words::Signed32, LowBits::None),
            Dtype::F64 | Dtype::C128 => (Words::Signed64, LowBits::None),
            _ => return None,
        };
        Some(Self { words, low_bits })
    }

    /// The size of a word in bytes.
    pub(in crate::codec) fn word_bytes(self) -> usize {
        match self.words {
            Words::Unsigned8 | Words::Signed8 => 1,
            Words::Signed16 => 2,
            Words::Signed32 => 4,
            Words::Signed64 => 8,
        }
    }

    /// The number of bytes of each word that hold neither symbol nor low bits.
    pub(in crate::codec) fn rest_bytes(self) -> usize {
        self.word_bytes() - 1
    }

    /// The size of a symbol in bits.
    pub(in crate::codec) fn symbol_bits(self) -> u32 {
        8 - self.low_bits.count()
    }

    /// The symbol of a word whose last byte is `last` and whose last but one is `before`, if it has two.
    pub(in crate::codec) fn symbol(self, last: u8, before: u8) -> u8 {
        let upper = match self.words {
            Words::Unsigned8 => last,
            Words::Signed8 => last.rotate_left(1),
            Words::Signed16 | Words::Signed32 | Words::Signed64 => last << 1 | before >> 7,
        };
        upper >> self.low_bits.count()
    }
}

impl LowBits {
    /// The number of low bits.
    pub(in crate::codec) fn count(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Three => 3,
            Self::Four => 4,
        }
    }

    /// The number of bytes that store the low bits of 64 words.
    pub(in crate::codec) fn group_bytes(self) -> usize {
        8 * self.count() as usize
    }
}
