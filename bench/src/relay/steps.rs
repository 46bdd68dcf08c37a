//! The versions of a delta benchmark: files, or generated weights, of which a share changes in each version.

use crate::{noise, size, workload};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::{
    convert::Infallible,
    path::{Path, PathBuf},
};
use tensor_relay_server::{Dtype, Shape, Staged, Staging, TensorFiles, TensorName, TensorSpec};

/// The versions to publish, one after the other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, clap::Args)]
pub struct StepsArgs {
    /// The size of a version: bf16 weights in tensors of 16 MiB.
    #[arg(long, default_value = "256MiB", value_parser = size::parse)]
    pub size: u64,
    /// The percentage of elements that change from one version to the next, each by one unit in the last place.
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0)]
    pub changed: f64,
    /// The number of versions, including the first two, which are sent whole.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(3..))]
    pub versions: u32,
    /// Publishes the safetensors files of this folder instead, in order of their names.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["size", "changed", "versions"])]
    pub steps: Option<PathBuf>,
}

/// The versions that are yet to be published.
pub(super) enum Steps {
    Files(std::vec::IntoIter<PathBuf>),
    Generated(Generated),
}

/// Generated weights, which change with each step.
pub(super) struct Generated {
    weights: Vec<u8>,
    /// The share of elements that change in a step.
    share: f64,
    step: u64,
    /// The number of versions that are yet to be published.
    remaining: u32,
}

/// The size of a generated tensor; the last one may be shorter.
const TENSOR_BYTES: usize = 16 << 20;

impl StepsArgs {
    /// Opens the folder, or generates the first version.
    ///
    /// # Errors
    /// When the folder cannot be read or has fewer than three files, or a number is out of range.
    pub(super) fn open(&self) -> Result<Steps> {
        let Some(folder) = &self.steps else {
            ensure!((0.0..=100.0).contains(&self.changed), "--changed must be between 0 and 100");
            ensure!(
                self.size >= 2 && self.size.is_multiple_of(2),
                "--size must be a positive multiple of 2: bf16 weights have two bytes each"
            );
            let mut weights = vec![0; usize::try_from(self.size)?];
            workload::fill_with_weights(Dtype::Bf16, 0, &mut weights);
            let share = self.changed / 100.0;
            return Ok(Steps::Generated(Generated { weights, share, step: 0, remaining: self.versions }));
        };
        Ok(Steps::Files(files(folder)?.into_iter()))
    }

    /// The number of versions.
    ///
    /// # Errors
    /// When the folder cannot be read or has fewer than three files.
    pub(crate) fn count(&self) -> Result<u32> {
        Ok(match &self.steps {
            Some(folder) => files(folder)?.len() as u32,
            None => self.versions,
        })
    }
}

/// The files in `folder`, in order of their names.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let listed = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let paths = listed.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>>>()?;
    let is_step = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "safetensors");
    let mut paths: Vec<PathBuf> = paths.into_iter().filter(is_step).collect();
    ensure!(paths.len() > 2, "{} has fewer than three .safetensors files", folder.display());
    paths.sort();
    Ok(paths)
}

impl Steps {
    /// Prepares the version after the first: changes the generated weights.
    pub(super) fn advance(&mut self) {
        if let Self::Generated(generated) = self {
            generated.change();
        }
    }

    /// Stages the next version; `None` if there is none.
    ///
    /// # Errors
    /// When a file cannot be read, or memory is exhausted.
    pub(super) fn next(&mut self, staging: &Staging) -> Result<Option<Staged>> {
        match self {
            Self::Files(paths) => {
                let Some(path) = paths.next() else { return Ok(None) };
                Ok(Some(TensorFiles::open(&path)?.stage(staging)?))
            }
            Self::Generated(generated) if generated.remaining == 0 => Ok(None),
            Self::Generated(generated) => {
                generated.remaining -= 1;
                Ok(Some(generated.stage(staging)?))
            }
        }
    }
}

impl Generated {
    fn stage(&self, staging: &Staging) -> Result<Staged> {
        let tensors: Vec<&[u8]> = self.weights.chunks(TENSOR_BYTES).collect();
        let spec = |(index, bytes): (usize, &&[u8])| -> Result<TensorSpec> {
            let name = TensorName::new(&format!("layers.{index}.weight"))?;
            Ok(TensorSpec::new(name, Dtype::Bf16, Shape::new(&[bytes.len() as u64 / 2])?))
        };
        let specs = tensors.iter().enumerate().map(spec).collect::<Result<_>>()?;
        Ok(Staged::copied::<Infallible>(staging, specs, vec![], |index, at, out| {
            out.copy_from_slice(&tensors[index][at..at + out.len()]);
            Ok(())
        })?)
    }

    /// Changes random elements, up or down, by one unit in the last place.
    fn change(&mut self) {
        self.step += 1;
        let threshold = (self.share * u64::MAX as f64) as u64;
        let (elements, _) = self.weights.as_chunks_mut::<2>();
        for (index, element) in (0..).zip(elements) {
            let drawn = noise::at(self.step, index);
            if drawn < threshold {
                let bits = u16::from_le_bytes(*element);
                let changed = if index % 2 == 0 { bits.wrapping_add(1) } else { bits.wrapping_sub(1) };
                *element = changed.to_le_bytes();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requested_share_of_elements_changes() {
        let args = StepsArgs { size: 200_000, changed: 1.0, versions: 3, steps: None };
        let Steps::Generated(mut generated) = args.open().unwrap() else { panic!("they are generated") };
        let before = generated.weights.clone();
        generated.change();
        let changed = before.chunks(2).zip(generated.weights.chunks(2)).filter(|(a, b)| a != b);
        assert!((800..1200).contains(&changed.count()));
    }

    #[test]
    fn a_missing_folder_is_refused() {
        let folder = std::env::temp_dir();
        let steps = Some(folder.join("no such folder"));
        assert!(StepsArgs { size: 2, changed: 1.0, versions: 2, steps }.open().is_err());
    }
}
