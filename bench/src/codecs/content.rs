//! The tensors of a file, laid out as a server does: one payload, in chunks of one dtype each.

use anyhow::{Context, Result, bail};
use std::{fs, ops::Range, path::Path};
use tensor_relay_protocol::{
    Dtype, Limits, Manifest, Shape, TensorName, TensorSpec,
    safetensors::{self, PREFIX_BYTES},
};

/// The tensors of one file, in memory.
pub(super) struct Content {
    manifest: Manifest,
    payload: Vec<u8>,
}

/// A tensor's specification, and its byte range in the file.
type TensorInFile = (TensorSpec, Range<u64>);

impl Content {
    /// Reads a file. `dtype` is the dtype of its elements, if the format does not record it.
    pub(super) fn read(path: &Path, dtype: Option<Dtype>, chunk_bytes: u32) -> Result<Self> {
        let about = || format!("cannot use {}", path.display());
        let file = fs::read(path).with_context(about)?;
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        let found = match (extension, dtype) {
            ("safetensors", _) => find_safetensors(&file),
            (_, Some(dtype)) => find_elements(&file, dtype),
            _ => bail!("{} does not record the dtype of its elements: give --dtype", path.display()),
        };
        let (specs, ranges): (Vec<TensorSpec>, Vec<Range<u64>>) =
            found.with_context(about)?.into_iter().unzip();
        let manifest =
            Manifest::layout(specs, vec![], chunk_bytes, &Limits::default()).with_context(about)?;
        let mut payload = vec![0; manifest.payload_bytes() as usize];
        for (tensor, range) in manifest.tensors().iter().zip(ranges) {
            payload[to_usize_range(tensor.range().expect("it is in one piece"))]
                .copy_from_slice(&file[to_usize_range(range)]);
        }
        Ok(Self { manifest, payload })
    }

    /// Whether both have the same tensors at the same offsets, so that one can be the base of the other.
    pub(super) fn has_same_layout(&self, other: &Self) -> bool {
        self.manifest.tensors() == other.manifest.tensors()
    }

    /// The dtypes of the chunks, each once, in the order of the payload.
    pub(super) fn dtypes(&self) -> Vec<Dtype> {
        let mut dtypes: Vec<Dtype> = Vec::new();
        for (chunk, _) in self.manifest.chunking().iter() {
            let (_, dtype) = self.manifest.chunk(chunk);
            if !dtypes.contains(&dtype) {
                dtypes.push(dtype);
            }
        }
        dtypes
    }

    /// The chunks of one dtype.
    pub(super) fn chunks(&self, dtype: Dtype) -> Vec<&[u8]> {
        let chunks = self.manifest.chunking().iter().map(|(chunk, _)| self.manifest.chunk(chunk));
        let matching = chunks.filter(|(_, chunk_dtype)| *chunk_dtype == dtype);
        matching.map(|(range, _)| &self.payload[to_usize_range(range)]).collect()
    }
}

fn find_safetensors(file: &[u8]) -> Result<Vec<TensorInFile>> {
    let (prefix, tail) = file.split_first_chunk::<PREFIX_BYTES>().context("it is too short")?;
    let header_bytes = safetensors::header_length(*prefix, file.len() as u64)?;
    let header = safetensors::parse_header(&tail[..header_bytes], file.len() as u64)?;
    Ok(header.tensors.into_iter().map(|tensor| (tensor.spec, tensor.range)).collect())
}

/// One tensor of all complete elements in the file.
fn find_elements(file: &[u8], dtype: Dtype) -> Result<Vec<TensorInFile>> {
    let elements = file.len() as u64 * 8 / u64::from(dtype.bits());
    let shape = Shape::new(&[elements])?;
    let bytes = shape.byte_len(dtype)?;
    Ok(vec![(TensorSpec::new(TensorName::new("elements")?, dtype, shape), 0..bytes)])
}

fn to_usize_range(range: Range<u64>) -> Range<usize> {
    range.start as usize..range.end as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_file(name: &str, bytes: &[u8]) -> std::path::PathBuf {
        let folder = std::env::temp_dir().join(format!("tensor-relay-codecs-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn every_chunk_has_one_dtype() {
        let header = br#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}}"#;
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(header);
        file.extend_from_slice(b"01234567abc");
        let content = Content::read(&write_file("a.safetensors", &file), None, 4 << 20).unwrap();
        assert_eq!(content.dtypes().len(), 2);
        assert!(content.chunks(Dtype::F32)[0].starts_with(b"01234567"));
        assert!(content.chunks(Dtype::U8)[0].starts_with(b"abc"));

        let path = write_file("a.bin", &[9; 7]);
        let content = Content::read(&path, Some(Dtype::Bf16), 256).unwrap();
        let padded: [u8; 256] = std::array::from_fn(|at| if at < 6 { 9 } else { 0 });
        assert_eq!(
            content.chunks(Dtype::Bf16),
            [padded],
            "complete elements only, and the payload's padding"
        );
        let error = Content::read(&path, None, 256).err().unwrap();
        assert!(error.to_string().contains("--dtype"));
    }

    #[test]
    fn a_base_has_the_same_tensors() {
        let read = |bytes, dtype| {
            let path = write_file(&format!("{bytes}.bin"), &vec![1; bytes]);
            Content::read(&path, Some(dtype), 256).unwrap()
        };
        assert!(read(10, Dtype::U8).has_same_layout(&read(10, Dtype::U8)));
        assert!(!read(10, Dtype::U8).has_same_layout(&read(12, Dtype::U8)));
        assert!(!read(12, Dtype::U8).has_same_layout(&read(12, Dtype::F16)));
    }
}
