//! Results as a table in Markdown.

use super::{document::DtypeResult, measure::CodecResult};
use std::fmt::{self, Display, Formatter};

impl Display for DtypeResult {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { file, dtype, raw_bytes, chunks, codecs, auto } = self;
        writeln!(f, "{file}, {dtype}: {raw_bytes} bytes in {chunks} chunks\n")?;
        writeln!(f, "| codec | ratio | raw chunks | encode GB/s | of memcpy | decode GB/s | of memcpy |")?;
        writeln!(f, "|---|---:|---:|---:|---:|---:|---:|")?;
        for codec in codecs {
            let (ratio, raw) = (format_number(codec.ratio, 4), chunks_raw(codec));
            let (encode, decode) =
                (format_number(codec.encode_gb_per_s, 2), format_number(codec.decode_gb_per_s, 2));
            let (of_encode, of_decode) =
                (format_number(codec.encode_of_memcpy, 2), format_number(codec.decode_of_memcpy, 2));
            let name = &codec.codec;
            writeln!(f, "| {name} | {ratio} | {raw} | {encode} | {of_encode} | {decode} | {of_decode} |")?;
        }
        write!(f, "\n{auto}")?;
        writeln!(f)
    }
}

fn format_number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| MISSING.into(), |value| format!("{value:.digits$}"))
}

/// The cell for the number of raw chunks; a dash for a codec that does not apply.
fn chunks_raw(codec: &CodecResult) -> String {
    codec.ratio.map_or_else(|| MISSING.into(), |_| codec.chunks_raw.to_string())
}

/// The cell of a missing number.
const MISSING: &str = "–";

#[cfg(test)]
mod tests {
    use super::{super::choice::Choice, *};

    #[test]
    fn results_are_formatted() {
        let codec = CodecResult {
            codec: "bitplanes".into(),
            encoded_bytes: 700,
            chunks_raw: 0,
            ratio: Some(1.4286),
            encode_gb_per_s: Some(9.876),
            decode_gb_per_s: Some(20.0),
            encode_of_memcpy: Some(0.4),
            decode_of_memcpy: Some(0.805),
        };
        let sparse = CodecResult {
            codec: "sparse".into(),
            encoded_bytes: 1000,
            chunks_raw: 1,
            ratio: None,
            encode_gb_per_s: None,
            decode_gb_per_s: None,
            encode_of_memcpy: None,
            decode_of_memcpy: None,
        };
        let (file, codecs) = ("a.safetensors".into(), vec![codec, sparse]);
        let auto = Choice { estimate_us: Some(40.4), efforts: vec![] };
        let result = DtypeResult { file, dtype: "bf16", raw_bytes: 1000, chunks: 1, codecs, auto };
        let text = result.to_string();
        assert!(text.starts_with("a.safetensors, bf16: 1000 bytes in 1 chunks\n\n| codec |"));
        assert!(text.contains("\n| bitplanes | 1.4286 | 0 | 9.88 | 0.40 | 20.00 | 0.81 |\n"), "{text}");
        assert!(
            text.ends_with(
                "\n| sparse | – | – | – | – | – | – |\n\nauto chooses; the estimate of a chunk takes 40 µs.\n\n"
            ),
            "{text}"
        );
    }
}
