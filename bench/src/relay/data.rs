//! The content of a comparison: incompressible bytes, or values with the statistics of models.

use crate::{noise, workload};
use anyhow::{Result, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tensor_relay_server::{Dtype, Shape, TensorName, TensorSpec};

/// The kinds of content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Data {
    /// Random bytes, which travel raw: what is compared is the way of a byte.
    #[default]
    Noise,
    /// Normal weights in bf16, with the exponents of real ones: codecs find a third to save.
    Weights,
    /// The same in f32: codecs find a sixth to save.
    WeightsF32,
}

impl Data {
    /// The word that stands for it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Noise => "noise",
            Self::Weights => "weights",
            Self::WeightsF32 => "weights-f32",
        }
    }

    /// So many `tensors` that together have so many `bytes`.
    ///
    /// # Errors
    /// When the bytes are no whole number of elements.
    pub(super) fn specs(self, bytes: u64, tensors: u32) -> Result<Vec<TensorSpec>> {
        let dtype = self.dtype();
        let element_bytes = u64::from(dtype.bits() / 8);
        ensure!(bytes.is_multiple_of(element_bytes), "{bytes} bytes are no whole number of {dtype} elements");
        let spec = |(number, elements)| {
            let name = TensorName::new(&format!("model.layers.{number}.{}", self.word()))?;
            Ok(TensorSpec::new(name, dtype, Shape::new(&[elements])?))
        };
        (0u32..).zip(cut(bytes / element_bytes, tensors)).map(spec).collect()
    }

    /// Fills `out` with the bytes of the tensor with this number.
    pub(super) fn fill(self, tensor: usize, out: &mut [u8]) {
        match self {
            Self::Noise => {
                for (index, word) in (0..).zip(out.chunks_mut(8)) {
                    word.copy_from_slice(&noise::at(tensor as u64, index).to_le_bytes()[..word.len()]);
                }
            }
            Self::Weights | Self::WeightsF32 => workload::fill_with_weights(self.dtype(), tensor as u64, out),
        }
    }

    fn dtype(self) -> Dtype {
        match self {
            Self::Noise => Dtype::U8,
            Self::Weights => Dtype::Bf16,
            Self::WeightsF32 => Dtype::F32,
        }
    }
}

/// The sizes of so many `tensors` that together have so many `elements`: the first ones take what does not divide.
fn cut(elements: u64, tensors: u32) -> impl Iterator<Item = u64> {
    let tensors = u64::from(tensors);
    let (each, rest) = (elements / tensors, elements % tensors);
    (0..tensors).map(move |number| each + u64::from(number < rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_size_can_be_cut() {
        assert_eq!(cut(10, 4).collect::<Vec<_>>(), [3, 3, 2, 2]);
        assert_eq!(cut(2, 3).collect::<Vec<_>>(), [1, 1, 0]);
        assert_eq!(cut(1 << 30, 10_000).sum::<u64>(), 1 << 30);
    }

    #[test]
    fn elements_are_whole() {
        let bytes = |specs: Vec<TensorSpec>| specs.len() as u64;
        assert_eq!(bytes(Data::Weights.specs(1000, 3).unwrap()), 3);
        assert!(Data::Weights.specs(1001, 3).is_err());
        assert!(Data::Noise.specs(1001, 3).is_ok());
    }
}
