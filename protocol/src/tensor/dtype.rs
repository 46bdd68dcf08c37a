//! Element types.

use std::fmt;

/// Defines the enum of dtypes, each with its wire code, bits per element and name. Codes are never reused (PROTOCOL.md
/// §4.2).
macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $bits:literal, $name:literal;)*) => {
        /// The type of a tensor's elements: every type of safetensors and DLPack, sub-byte types included.
        ///
        /// Elements are little-endian. Sub-byte elements are packed into bytes, the first element in the lowest bits.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Dtype { $($(#[$doc])* $variant,)* }

        impl Dtype {
            /// Every dtype, in the order of their wire codes.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The wire code.
            pub fn code(self) -> u32 {
                match self { $(Self::$variant => $code,)* }
            }

            /// The dtype with this wire code, if this build knows it.
            pub fn from_code(code: u32) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)* _ => None }
            }

            /// The size of one element, in bits.
            pub fn bits(self) -> u32 {
                match self { $(Self::$variant => $bits,)* }
            }

            /// The name in errors, reports, JSON and on the command line.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

dtypes! {
    /// Boolean in one byte, 0 or 1.
    Bool = 1, 8, "bool";
    /// Signed integer of 2 bits.
    I2 = 2, 2, "i2";
    /// Unsigned integer of 2 bits.
    U2 = 3, 2, "u2";
    /// Signed integer of 4 bits.
    I4 = 4, 4, "i4";
    /// Unsigned integer of 4 bits.
    U4 = 5, 4, "u4";
    /// Signed integer of 8 bits.
    I8 = 6, 8, "i8";
    /// Unsigned integer of 8 bits.
    U8 = 7, 8, "u8";
    /// Signed integer of 16 bits.
    I16 = 8, 16, "i16";
    /// Unsigned integer of 16 bits.
    U16 = 9, 16, "u16";
    /// Signed integer of 32 bits.
    I32 = 10, 32, "i32";
    /// Unsigned integer of 32 bits.
    U32 = 11, 32, "u32";
    /// Signed integer of 64 bits.
    I64 = 12, 64, "i64";
    /// Unsigned integer of 64 bits.
    U64 = 13, 64, "u64";
    /// Float of 4 bits: 2 exponent, 1 mantissa (OCP MXFP4; safetensors `F4`).
    F4E2M1 = 14, 4, "f4_e2m1fn";
    /// Float of 6 bits: 2 exponent, 3 mantissa (OCP MXFP6).
    F6E2M3 = 15, 6, "f6_e2m3fn";
    /// Float of 6 bits: 3 exponent, 2 mantissa (OCP MXFP6).
    F6E3M2 = 16, 6, "f6_e3m2fn";
    /// Float of 8 bits: 3 exponent, 4 mantissa.
    F8E3M4 = 17, 8, "f8_e3m4";
    /// Float of 8 bits: 4 exponent, 3 mantissa, with infinities (IEEE-like).
    F8E4M3 = 18, 8, "f8_e4m3";
    /// Float of 8 bits: 4 exponent, 3 mantissa, finite only (safetensors `F8_E4M3`).
    F8E4M3Fn = 19, 8, "f8_e4m3fn";
    /// Float of 8 bits: 4 exponent, 3 mantissa, finite, one zero, bias 8.
    F8E4M3Fnuz = 20, 8, "f8_e4m3fnuz";
    /// Float of 8 bits: 4 exponent, 3 mantissa, finite, one zero, bias 11.
    F8E4M3B11Fnuz = 21, 8, "f8_e4m3b11fnuz";
    /// Float of 8 bits: 5 exponent, 2 mantissa.
    F8E5M2 = 22, 8, "f8_e5m2";
    /// Float of 8 bits: 5 exponent, 2 mantissa, finite, one zero.
    F8E5M2Fnuz = 23, 8, "f8_e5m2fnuz";
    /// A power of two in 8 bits, the scale of a microscaling block.
    F8E8M0 = 24, 8, "f8_e8m0fnu";
    /// IEEE half precision.
    F16 = 25, 16, "f16";
    /// Brain float: the upper half of an `f32`.
    Bf16 = 26, 16, "bf16";
    /// IEEE single precision.
    F32 = 27, 32, "f32";
    /// IEEE double precision.
    F64 = 28, 64, "f64";
    /// Complex of two `f16`.
    C32 = 29, 32, "c32";
    /// Complex of two `f32`.
    C64 = 30, 64, "c64";
    /// Complex of two `f64`.
    C128 = 31, 128, "c128";
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// PROTOCOL.md §4.2: the codes are part of the wire format, frozen in version 1.
    #[test]
    fn codes_are_frozen() {
        let frozen: Vec<(u32, &str, u32)> =
            Dtype::ALL.iter().map(|d| (d.code(), d.name(), d.bits())).collect();
        assert_eq!(frozen.len(), 31);
        assert_eq!(frozen[0], (1, "bool", 8));
        assert_eq!(frozen[25], (26, "bf16", 16));
        assert_eq!(frozen[30], (31, "c128", 128));
        for (i, (code, ..)) in frozen.iter().enumerate() {
            assert_eq!(*code, i as u32 + 1, "codes are dense and in order");
            assert_eq!(Dtype::from_code(*code), Some(Dtype::ALL[i]));
        }
        assert_eq!(Dtype::from_code(0), None);
        assert_eq!(Dtype::from_code(32), None);
    }
}
