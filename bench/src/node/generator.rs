//! Generates the versions that a producer publishes.

use super::{
    load::OpenLoad,
    order::{Hold, Pace, Prepared, Work},
    snapshot_hash::{self, SnapshotHash, SnapshotHasher},
    stream_content::StreamContent,
};
use anyhow::Result;
use bytes::Bytes;
use std::io;
use tensor_relay_server::{Borrowed, Dtype, Publishable, Shape, Staged, Staging, TensorName, TensorSpec};

/// The name of the only tensor in the versions of a stream.
pub(super) const STREAM_TENSOR: &str = "stream.weight";

/// The versions of a round: one large version, or a stream of small ones.
pub(super) enum Generator {
    Version(OpenLoad),
    Stream { content: StreamContent, spec: TensorSpec, pace: Pace },
}

impl Generator {
    /// A generator for `work`.
    ///
    /// # Errors
    /// When the file of the work cannot be read, or a size is out of range.
    pub(super) fn open(work: &Work) -> Result<Self> {
        Ok(match work {
            Work::Version(load) => Self::Version(load.open()?),
            Work::Stream { bytes, pace } => Self::Stream {
                content: StreamContent::new(*bytes)?,
                spec: TensorSpec::new(TensorName::new(STREAM_TENSOR)?, Dtype::U8, Shape::new(&[*bytes])?),
                pace: *pace,
            },
        })
    }

    /// Generates the version of `round`, unless rounds are streams. Blocks while it fills memory, so it must not run on
    /// the executor.
    ///
    /// # Errors
    /// When memory is exhausted, or the file cannot be read.
    pub(super) fn generate(&self, staging: &Staging, hold: Hold, round: u32) -> Result<Generated> {
        match self {
            Self::Stream { spec, .. } => {
                let payload_bytes = spec.shape.byte_len(spec.dtype)?;
                Ok(Generated {
                    version: None,
                    prepared: Prepared { round, tensors: 1, payload_bytes, snapshot_hash: None },
                })
            }
            Self::Version(load) => {
                let (version, snapshot_hash) = match hold {
                    Hold::Stage => stage(load, staging, round)?,
                    Hold::Borrow => borrow(load, staging, round)?,
                };
                let payload_bytes = version.manifest().payload_bytes();
                let tensors = load.specs().len() as u64;
                Ok(Generated {
                    version: Some(version),
                    prepared: Prepared { round, tensors, payload_bytes, snapshot_hash: Some(snapshot_hash) },
                })
            }
        }
    }
}

/// The version of a round; `None` for a stream, whose versions are generated when they are published.
pub(super) struct Generated {
    pub(super) version: Option<Publishable>,
    pub(super) prepared: Prepared,
}

/// Generates the tensors in the server's memory.
fn stage(load: &OpenLoad, staging: &Staging, round: u32) -> Result<(Publishable, SnapshotHash)> {
    let mut hashes = vec![snapshot_hash::hash_bytes(&[]); load.specs().len()];
    let staged = Staged::new::<io::Error>(staging, load.specs().to_vec(), vec![], |index, out| {
        load.fill(round, index, out)?;
        hashes[index] = snapshot_hash::hash_bytes(out);
        Ok(())
    })?;
    Ok((staged.into(), snapshot_hash_of(load.specs(), &hashes)))
}

/// Generates each tensor in memory of its own, which the server borrows.
fn borrow(load: &OpenLoad, staging: &Staging, round: u32) -> Result<(Publishable, SnapshotHash)> {
    let mut tensors = Vec::with_capacity(load.specs().len());
    let mut hashes = Vec::with_capacity(load.specs().len());
    for (index, spec) in load.specs().iter().enumerate() {
        let mut bytes = vec![0; usize::try_from(spec.shape.byte_len(spec.dtype)?)?];
        load.fill(round, index, &mut bytes)?;
        hashes.push(snapshot_hash::hash_bytes(&bytes));
        tensors.push((spec.clone(), Bytes::from(bytes)));
    }
    let borrowed = Borrowed::from_tensors(staging, tensors, vec![])?;
    Ok((borrowed.into(), snapshot_hash_of(load.specs(), &hashes)))
}

fn snapshot_hash_of(specs: &[TensorSpec], hashes: &[snapshot_hash::TensorHash]) -> SnapshotHash {
    let mut hasher = SnapshotHasher::new();
    for (spec, hash) in specs.iter().zip(hashes) {
        hasher.add(&spec.name, spec.dtype, &spec.shape, hash);
    }
    hasher.finish()
}
