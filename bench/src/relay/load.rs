//! The tensors of a large version: their names, dtypes and shapes, and their bytes.

mod file;

use crate::{noise, workload};
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use file::TensorFile;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use tensor_relay_protocol::{Dtype, Shape, TensorName, TensorSpec};

/// The description of a large version.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Load {
    pub(crate) form: Form,
    pub(crate) content: Content,
}

/// The tensors of a version.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Form {
    /// `count` tensors, which share `bytes` evenly.
    Equal { bytes: u64, count: u32 },
    /// The tensors of a generated transformer of this size ([`workload::StateDict`]).
    Generated { bytes: u64 },
    /// The tensors of a safetensors file on the producer's machine, with the bytes of the file.
    File { path: PathBuf },
}

/// The kind of content of generated tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// Random bytes, which no codec makes smaller.
    #[default]
    #[value(alias = "random")]
    Noise,
    /// Normally distributed weights in bf16, with the exponents of real weights: codecs save a third.
    Weights,
    /// The same in f32: codecs save a sixth.
    WeightsF32,
}

/// The name of `value` on the command line.
pub(crate) fn name_of(value: &impl ValueEnum) -> String {
    value
        .to_possible_value()
        .map_or_else(String::new, |value| value.get_name().to_owned())
}

/// The maximum number of tensors: more than any model has. Each costs a few hundred bytes of memory.
const TENSORS_MAX: u32 = 1_000_000;

impl Content {
    fn dtype(self) -> Dtype {
        match self {
            Self::Noise => Dtype::U8,
            Self::Weights => Dtype::Bf16,
            Self::WeightsF32 => Dtype::F32,
        }
    }

    /// The specifications of `count` tensors, which share `bytes` evenly. The remainder goes to the first tensors, an
    /// element each.
    fn specs(self, bytes: u64, count: u32) -> Result<Vec<TensorSpec>> {
        let (dtype, count) = (self.dtype(), u64::from(count.max(1)));
        let element_bytes = u64::from(dtype.bits() / 8);
        ensure!(bytes.is_multiple_of(element_bytes), "{bytes} bytes are no whole number of {dtype} elements");
        let (each, remainder) = (bytes / element_bytes / count, bytes / element_bytes % count);
        let spec = |index| {
            let name = TensorName::new(&format!("model.layers.{index}.weight"))?;
            Ok(TensorSpec::new(name, dtype, Shape::new(&[each + u64::from(index < remainder)])?))
        };
        (0..count).map(spec).collect()
    }
}

impl Load {
    /// Plans the tensors, and opens the file if there is one.
    ///
    /// # Errors
    /// When the file cannot be read, or a size is out of range.
    pub(crate) fn open(&self) -> Result<OpenLoad> {
        let generated = |specs| OpenLoad { specs, bytes: BytesSource::Generated(self.content) };
        Ok(match &self.form {
            Form::Equal { bytes, count } => {
                ensure!(*count <= TENSORS_MAX, "{count} tensors are more than the maximum of {TENSORS_MAX}");
                generated(self.content.specs(*bytes, *count)?)
            }
            Form::Generated { bytes } => generated(workload::StateDict::new(*bytes, 0).tensors().to_vec()),
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

    /// Fills `out` with all bytes of the tensor at `index` in round `round`: other bytes in each round, except those of
    /// a file.
    ///
    /// # Errors
    /// When the file cannot be read, or has become too short.
    pub(crate) fn fill(&self, round: u32, index: usize, out: &mut [u8]) -> std::io::Result<()> {
        let key = noise::at(u64::from(round) ^ SEED, index as u64);
        match &self.bytes {
            BytesSource::Generated(Content::Noise) => noise::fill(key, out),
            BytesSource::Generated(_) => workload::fill_with_weights(self.specs[index].dtype, key, out),
            BytesSource::File(file) => file.read(index, out)?,
        }
        Ok(())
    }
}

/// Makes these bytes differ from other uses of [`noise`].
const SEED: u64 = 0x7275_6e00_0000_0000;

#[cfg(test)]
mod tests {
    use super::*;

    fn open(bytes: u64, count: u32, content: Content) -> Result<OpenLoad> {
        Load { form: Form::Equal { bytes, count }, content }.open()
    }

    fn filled(load: &OpenLoad, round: u32, index: usize) -> Vec<u8> {
        let spec = &load.specs()[index];
        let mut out = vec![0; spec.shape.byte_len(spec.dtype).unwrap() as usize];
        load.fill(round, index, &mut out).unwrap();
        out
    }

    #[test]
    fn elements_are_divided_evenly() {
        let divided = |bytes, count| -> Vec<usize> {
            let load = open(bytes, count, Content::Noise).unwrap();
            (0..load.specs().len()).map(|index| filled(&load, 0, index).len()).collect()
        };
        assert_eq!(divided(10, 4), [3, 3, 2, 2]);
        assert_eq!(divided(2, 3), [1, 1, 0]);
        assert_eq!(divided(0, 1), [0]);
        assert_eq!(divided(1 << 20, 10_000).iter().sum::<usize>(), 1 << 20);
    }

    #[test]
    fn impossible_loads_are_refused() {
        assert_eq!(open(1000, 3, Content::Weights).unwrap().specs().len(), 3);
        assert!(open(1001, 3, Content::Weights).is_err(), "a part of an element");
        assert!(open(1001, 3, Content::Noise).is_ok());
        assert!(open(1, u32::MAX, Content::Noise).is_err());
    }

    /// Bytes of an earlier round that were left in memory must not pass for those of the next.
    #[test]
    fn rounds_and_tensors_differ() {
        for content in [Content::Noise, Content::Weights, Content::WeightsF32] {
            let many = open(8192, 2, content).unwrap();
            assert_eq!(filled(&many, 1, 0), filled(&many, 1, 0));
            assert_ne!(filled(&many, 1, 0), filled(&many, 2, 0));
            assert_ne!(filled(&many, 1, 0), filled(&many, 1, 1));
        }
    }
}
