//! Instruction paths: the same codec steps with different instructions. All `unsafe` of this crate is here.
//!
//! A [`Path`] value proves that the processor has the path's instructions: only [`Path::all`] and [`Path::fastest`]
//! make one, after CPU feature detection. Other modules call functions compiled for these instructions only through a
//! `Path`. Within these functions, only loads and stores need `unsafe`: their operands are references to arrays, whose
//! lengths the compiler checks.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use super::{
    bitplanes::layout::{LowBits, Words},
    sparse::differing::Differing,
};

/// The steps in portable Rust, defined beside their codecs.
mod portable {
    pub(super) use super::super::{
        bitplanes::portable::{
            decode_level, encode_level, merge_low_bits, merge_words, split_low_bits, split_words,
        },
        sparse::differing::find_differing,
    };
}

/// An instruction path that this processor supports. All paths write the same bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path(Kind);

/// The instructions of a path. Private, so that no other module can make a [`Path`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Path {
    /// Every path that this processor supports, the fastest first.
    pub fn all() -> impl Iterator<Item = Self> {
        let paths = [
            #[cfg(target_arch = "x86_64")]
            has_avx512().then_some(Self(Kind::Avx512)),
            #[cfg(target_arch = "x86_64")]
            has_avx2().then_some(Self(Kind::Avx2)),
            Some(Self(Kind::Portable)),
        ];
        paths.into_iter().flatten()
    }

    /// The first of [`all`](Self::all). Features are detected once; later calls take a nanosecond.
    pub fn fastest() -> Self {
        Self::all().next().unwrap_or(Self(Kind::Portable))
    }

    /// The path's name in reports.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("popcnt")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("avx512vbmi2")
}

/// The vectors of `base`, each with the vector of `raw` at the same place.
#[cfg(target_arch = "x86_64")]
fn vectors<'a, const VECTOR_BYTES: usize>(
    base: &'a [u8],
    raw: &'a [u8],
) -> impl DoubleEndedIterator<Item = (&'a [u8; VECTOR_BYTES], &'a [u8; VECTOR_BYTES])> {
    base.as_chunks().0.iter().zip(raw.as_chunks().0)
}

/// Defines each step as a method of [`Path`] that calls the path's function of the same name.
macro_rules! steps {
    ($($(#[$doc:meta])* fn $step:ident($($name:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        impl Path {
            $($(#[$doc])*
            pub(super) fn $step(self, $($name: $type),*) $(-> $result)? {
                match self.0 {
                    Kind::Portable => portable::$step($($name),*),
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: `Path::all` made this value after `has_avx2` detected the features that the function
                    // needs.
                    Kind::Avx2 => unsafe { avx2::$step($($name),*) },
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: `Path::all` made this value after `has_avx512` detected the features that the function
                    // needs.
                    Kind::Avx512 => unsafe { avx512::$step($($name),*) },
                }
            })*
        }
    };
}

steps! {
    /// See [`portable::encode_level`].
    fn encode_level(level_symbols: [u8; 3], plain: &[[u8; 64]], masks: &mut [[u8; 16]], escapes: &mut [u8]) -> usize;
    /// See [`portable::decode_level`].
    fn decode_level(level_symbols: [u8; 3], masks: &[[u8; 16]], escapes: &[u8], plain: &mut [[u8; 64]]) -> usize;
    /// See [`portable::split_low_bits`].
    fn split_low_bits(bits: LowBits, upper: &mut [[u8; 64]], low: &mut [u8]);
    /// See [`portable::merge_low_bits`].
    fn merge_low_bits(bits: LowBits, low: &[u8], upper: &mut [[u8; 64]]);
    /// See [`portable::split_words`].
    fn split_words(words: Words, raw: &[u8], upper: &mut [u8], rest: &mut [u8]);
    /// See [`portable::merge_words`].
    fn merge_words(words: Words, upper: &[u8], rest: &[u8], raw: &mut [u8]);
    /// See [`find_differing`](super::sparse::differing::find_differing).
    fn find_differing(width: usize, base: &[u8], raw: &[u8], differing: &mut Differing) -> usize;
}
