//! The tensors of a large version: their names, dtypes and shapes, and their bytes.

mod file;
mod models;

pub use models::Model;

use crate::{noise, workload};
use anyhow::{Context, Result, ensure};
use file::TensorFile;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use tensor_relay_protocol::{Dtype, Shape, TensorName, TensorSpec};

/// The description of a large version, as sent in an order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Load {
    pub(crate) form: Form,
    pub(crate) content: Content,
}

/// The tensors of a version.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Form {
    /// One tensor.
    Bulk { bytes: u64 },
    /// `count` tensors of `bytes` each.
    Equal { count: u32, bytes: u64 },
    /// The tensors of a generated transformer of this size ([`workload::StateDict`]).
    Generated { bytes: u64 },
    /// The tensors of a published model.
    #[serde(rename = "known")]
    Model { model: Model, scale: f64 },
    /// The tensors of a safetensors file on the producer's machine, with the bytes of the file.
    File { path: PathBuf },
}

/// The kind of content of generated tensors. The bytes differ in each round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Content {
    /// Noise, which no codec makes smaller.
    Random,
    /// Values with the statistics of weights.
    Weights,
}

/// The maximum number of tensors: more than any model has. Each costs a few hundred bytes of memory.
const TENSORS_MAX: u32 = 1_000_000;

impl Load {
    /// Plans the tensors, and opens the file if there is one.
    ///
    /// # Errors
    /// When the file cannot be read, or a size is out of range.
    pub(crate) fn open(&self) -> Result<OpenLoad> {
        let generated = |specs| OpenLoad { specs, bytes: BytesSource::Generated(self.content) };
        Ok(match &self.form {
            Form::Bulk { bytes } => generated(vec![tensor("bulk.weight", *bytes)?]),
            Form::Equal { count, bytes } => {
                ensure!(*count <= TENSORS_MAX, "{count} tensors are more than the maximum of {TENSORS_MAX}");
                let specs = (0..*count).map(|index| tensor(&format!("layers.{index}.weight"), *bytes));
                generated(specs.collect::<Result<_>>()?)
            }
            Form::Generated { bytes } => generated(workload::StateDict::new(*bytes, 0).tensors().to_vec()),
            Form::Model { model, scale } => generated(model.tensors(*scale)?),
            Form::File { path } => {
                let file =
                    TensorFile::open(path).with_context(|| format!("cannot publish {}", path.display()))?;
                OpenLoad { specs: file.specs(), bytes: BytesSource::File(file) }
            }
        })
    }
}

/// A load with its planned tensors, ready to generate or read their bytes.
pub(crate) struct OpenLoad {
    specs: Vec<TensorSpec>,
    bytes: BytesSource,
}

enum BytesSource {
    Generated(Content),
    File(TensorFile),
}

impl OpenLoad {
    /// The tensors.
    pub(crate) fn specs(&self) -> &[TensorSpec] {
        &self.specs
    }

    /// Fills `out` with all bytes of the tensor at `index` in round `round`.
    ///
    /// # Errors
    /// When the file cannot be read, or has become too short.
    pub(crate) fn fill(&self, round: u32, index: usize, out: &mut [u8]) -> std::io::Result<()> {
        let key = noise::at(u64::from(round) ^ SEED, index as u64);
        match &self.bytes {
            BytesSource::Generated(Content::Weights) => {
                workload::fill_with_weights(self.specs[index].dtype, key, out);
                Ok(())
            }
            BytesSource::Generated(Content::Random) => {
                noise::fill(key, out);
                Ok(())
            }
            BytesSource::File(file) => file.read(index, out),
        }
    }
}

/// Makes these bytes differ from other uses of [`noise`].
const SEED: u64 = 0x7275_6e00_0000_0000;

/// A vector of `bytes` bytes: of bf16 elements, or of u8 if the number is odd.
fn tensor(name: &str, bytes: u64) -> Result<TensorSpec> {
    let (dtype, elements) =
        if bytes.is_multiple_of(2) { (Dtype::Bf16, bytes / 2) } else { (Dtype::U8, bytes) };
    Ok(TensorSpec::new(TensorName::new(name)?, dtype, Shape::new(&[elements])?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(form: Form, content: Content) -> OpenLoad {
        Load { form, content }.open().unwrap()
    }

    fn filled(load: &OpenLoad, round: u32, index: usize) -> Vec<u8> {
        let spec = &load.specs()[index];
        let mut out = vec![0; spec.shape.byte_len(spec.dtype).unwrap() as usize];
        load.fill(round, index, &mut out).unwrap();
        out
    }

    #[test]
    fn sizes_are_the_requested_ones() {
        for bytes in [0, 1, 4095, 4096] {
            assert_eq!(filled(&open(Form::Bulk { bytes }, Content::Random), 0, 0).len() as u64, bytes);
        }
        let many = open(Form::Equal { count: 10, bytes: 4096 }, Content::Weights);
        assert_eq!(many.specs().len(), 10);
        assert_eq!(filled(&many, 0, 9).len(), 4096);
        let refused = Load { form: Form::Equal { count: u32::MAX, bytes: 1 }, content: Content::Random };
        assert!(refused.open().is_err());
    }

    /// Bytes of an earlier round that were left in memory must not pass for those of the next.
    #[test]
    fn rounds_and_tensors_differ() {
        for content in [Content::Random, Content::Weights] {
            let many = open(Form::Equal { count: 2, bytes: 4096 }, content);
            assert_eq!(filled(&many, 1, 0), filled(&many, 1, 0));
            assert_ne!(filled(&many, 1, 0), filled(&many, 2, 0));
            assert_ne!(filled(&many, 1, 0), filled(&many, 1, 1));
        }
    }
}
