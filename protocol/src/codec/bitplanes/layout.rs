//! The word layout: which bits of an element are its symbol, and where the others go.

use crate::Dtype;

/// The split of a dtype's elements into symbol, low bits and rest (PROTOCOL.md §8.4, table).
///
/// Each element, rotated left by one bit so that the sign is at the bottom, is its *symbol*, the topmost bits, which
/// hold the exponent; below it up to four *low bits* in the same byte; and the bytes below that, the *rest*.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::codec) struct Layout {
    /// The size and signedness of a word.
    pub(in crate::codec) words: Words,
    /// The bits of the upper byte that do not belong to the symbol: 0, 3 or 4.
    pub(in crate::codec) low_bits: LowBits,
}

/// The words of a dtype. A complex number is two of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::codec) enum Words {
    /// Bytes without a sign: the exponent alone.
    Unsigned8,
    /// Bytes with a sign.
    Signed8,
    /// Two bytes: the rest is one.
    Signed16,
    /// Four bytes: the rest is three.
    Signed32,
    /// Eight bytes: the rest is seven.
    Signed64,
}

/// The number of bits of the upper byte that are stored uncoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::codec) enum LowBits {
    /// None: the byte is the symbol.
    None,
    /// Three, as masks.
    Three,
    /// Four, two elements in a byte.
    Four,
}

impl Layout {
    /// The layout of `dtype`, or `None` where there is no exponent to find.
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

    /// The size of a word.
    pub(in crate::codec) fn word_bytes(self) -> usize {
        match self.words {
            Words::Unsigned8 | Words::Signed8 => 1,
            Words::Signed16 => 2,
            Words::Signed32 => 4,
            Words::Signed64 => 8,
        }
    }

    /// The bytes of each word that hold neither symbol nor low bits.
    pub(in crate::codec) fn rest_bytes(self) -> usize {
        self.word_bytes() - 1
    }

    /// The size of a symbol.
    pub(in crate::codec) fn symbol_bits(self) -> u32 {
        8 - self.low_bits.count()
    }

    /// The symbol of the word whose last byte is `last`, and the one before it `before`.
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
    /// The number of bits.
    pub(in crate::codec) fn count(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Three => 3,
            Self::Four => 4,
        }
    }

    /// The bytes that they take for 64 words.
    pub(in crate::codec) fn group_bytes(self) -> usize {
        8 * self.count() as usize
    }
}
