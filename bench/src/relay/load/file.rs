//! A safetensors file as the source of a version's tensors.

use anyhow::{Context, Result, bail};
use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt,
    path::Path,
};
use tensor_relay_protocol::{
    TensorSpec,
    safetensors::{Header, PREFIX_BYTES, header_length, parse_header},
};

/// An open safetensors file with its parsed header. Tensors are read by position, when they are requested.
pub(super) struct TensorFile {
    file: File,
    header: Header,
}

impl TensorFile {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// When it cannot be read or is no safetensors file.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let mut file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            bail!("it is no regular file: give a safetensors file");
        }
        let mut prefix = [0; PREFIX_BYTES];
        file.read_exact(&mut prefix).context("it is too short for a safetensors file")?;
        let mut json = vec![0; header_length(prefix, metadata.len())?];
        file.read_exact(&mut json)?;
        Ok(Self { file, header: parse_header(&json, metadata.len())? })
    }

    /// The tensors of the file, in the order of their bytes.
    pub(super) fn specs(&self) -> Vec<TensorSpec> {
        self.header.tensors.iter().map(|tensor| tensor.spec.clone()).collect()
    }

    /// Reads the tensor at `index` into `out`, which has its size.
    pub(super) fn read(&self, index: usize, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, self.header.tensors[index].range.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(name: &str, bytes: &[u8]) -> Result<TensorFile> {
        let path = std::env::temp_dir().join(format!("tensor-relay-bench-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes)?;
        let opened = TensorFile::open(&path);
        std::fs::remove_file(path)?;
        opened
    }

    #[test]
    fn tensors_are_read_by_position() {
        let header = br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[3],"data_offsets":[2,5]}}"#;
        let whole = [&(header.len() as u64).to_le_bytes(), &header[..], b"12345"].concat();
        let file = open("good", &whole).unwrap();
        assert_eq!(file.specs()[1].name.as_str(), "b");
        let mut out = [0; 3];
        file.read(1, &mut out).unwrap();
        assert_eq!(&out, b"345");
        let cut = open("cut", &whole[..whole.len() - 1]).map(|_| ()).unwrap_err();
        assert!(cut.to_string().contains("cut off"), "{cut}");
    }

    #[test]
    fn files_that_are_no_safetensors_are_refused() {
        assert!(open("empty", b"").is_err());
        assert!(open("garbage", &[0xff; 100]).is_err());
        assert!(TensorFile::open(Path::new("/")).is_err());
        assert!(TensorFile::open(Path::new("/no/such/file")).is_err());
    }
}
