//! Results as a table in Markdown.

use super::document::FileResult;
use std::fmt::{self, Display, Formatter};

impl Display for FileResult {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { file, dtype, raw_bytes, chunks, codecs } = self;
        writeln!(f, "{file}, {dtype}: {raw_bytes} bytes in {chunks} chunks\n")?;
        writeln!(f, "| codec | ratio | raw chunks | encode GB/s | of memcpy | decode GB/s | of memcpy |")?;
        writeln!(f, "|---|---:|---:|---:|---:|---:|---:|")?;
        for codec in codecs {
            writeln!(
                f,
                "| {} | {:.4} | {} | {:.2} | {:.2} | {:.2} | {:.2} |",
                codec.codec,
                codec.ratio,
                codec.chunks_raw,
                codec.encode_gb_per_s,
                codec.encode_of_memcpy,
                codec.decode_gb_per_s,
                codec.decode_of_memcpy,
            )?;
        }
        writeln!(f)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::measure::CodecResult, *};

    #[test]
    fn a_table_as_people_read_it() {
        let codec = CodecResult {
            codec: "bitplanes".into(),
            encoded_bytes: 700,
            chunks_raw: 0,
            ratio: 1.4286,
            encode_gb_per_s: 9.876,
            decode_gb_per_s: 20.0,
            encode_of_memcpy: 0.4,
            decode_of_memcpy: 0.805,
        };
        let file = "a.safetensors".into();
        let result = FileResult { file, dtype: "bf16", raw_bytes: 1000, chunks: 1, codecs: vec![codec] };
        let text = result.to_string();
        assert!(text.starts_with("a.safetensors, bf16: 1000 bytes in 1 chunks\n\n| codec |"));
        assert!(text.contains("\n| bitplanes | 1.4286 | 0 | 9.88 | 0.40 | 20.00 | 0.81 |\n"), "{text}");
    }
}
