//! The content of the payload in a comparison: incompressible bytes, or values with the statistics of model weights.

use crate::{noise, workload};
use anyhow::{Result, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tensor_relay_server::{Dtype, Shape, TensorName, TensorSpec};

/// The kind of content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Data {
    /// Random bytes, which no codec makes smaller.
    #[default]
    Noise,
    /// Normally distributed weights in bf16, with the exponents of real weights: codecs save a third.
    Weights,
    /// The same in f32: codecs save a sixth.
    WeightsF32,
}

impl Data {
    /// The name of this kind on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Noise => "noise",
            Self::Weights => "weights",
            Self::WeightsF32 => "weights-f32",
        }
    }

    /// The specifications of `tensor_count` tensors, which share `bytes` evenly.
    ///
    /// # Errors
    /// When `bytes` is no multiple of the element size.
    pub(super) fn specs(self, bytes: u64, tensor_count: u32) -> Result<Vec<TensorSpec>> {
        let dtype = self.dtype();
        let element_bytes = u64::from(dtype.bits() / 8);
        ensure!(bytes.is_multiple_of(element_bytes), "{bytes} bytes are no whole number of {dtype} elements");
        let spec = |(index, elements)| {
            let name = TensorName::new(&format!("model.layers.{index}.{}", self.name()))?;
            Ok(TensorSpec::new(name, dtype, Shape::new(&[elements])?))
        };
        (0u32..).zip(divide(bytes / element_bytes, tensor_count)).map(spec).collect()
    }

    /// Fills `out` with the bytes of tensor number `tensor`.
    pub(super) fn fill(self, tensor: usize, out: &mut [u8]) {
        match self {
            Self::Noise => noise::fill(tensor as u64, out),
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

/// The number of elements of each of `tensor_count` tensors, `elements` in all. The remainder goes to the first
/// tensors, an element each.
fn divide(elements: u64, tensor_count: u32) -> impl Iterator<Item = u64> {
    let tensor_count = u64::from(tensor_count);
    let (each, remainder) = (elements / tensor_count, elements % tensor_count);
    (0..tensor_count).map(move |index| each + u64::from(index < remainder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_divided_evenly() {
        assert_eq!(divide(10, 4).collect::<Vec<_>>(), [3, 3, 2, 2]);
        assert_eq!(divide(2, 3).collect::<Vec<_>>(), [1, 1, 0]);
        assert_eq!(divide(1 << 30, 10_000).sum::<u64>(), 1 << 30);
    }

    #[test]
    fn a_part_of_an_element_is_refused() {
        assert_eq!(Data::Weights.specs(1000, 3).unwrap().len(), 3);
        assert!(Data::Weights.specs(1001, 3).is_err());
        assert!(Data::Noise.specs(1001, 3).is_ok());
    }
}
