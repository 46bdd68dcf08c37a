//! The versions of a job, generated or read by the publishing side.

use super::{
    job::{Hold, Pace, Work},
    load::OpenLoad,
    snapshot_hash::SnapshotHasher,
    steps::Steps,
    stream_content::{Stamp, StreamContent},
};
use anyhow::Result;
use bytes::Bytes;
use std::{convert::Infallible, io};
use tensor_relay_server::{Borrowed, Dtype, Publishable, Shape, Staged, Staging, TensorName, TensorSpec};

/// The name of the only tensor in the versions of a stream.
pub(super) const STREAM_TENSOR: &str = "stream.weight";

/// The source of the versions.
pub(super) enum Versions {
    Version(OpenLoad),
    Stream(Stream),
    Steps(Steps),
}

/// What is published in a round.
pub(super) struct Prepared {
    /// `None` for a stream, whose versions are generated when they are published.
    pub(super) version: Option<Publishable>,
    pub(super) tensors: u64,
    /// The payload of one version, with the padding between its tensors; of a stream's version, without padding.
    pub(super) bytes: u64,
    pub(super) hash: Option<String>,
}

impl Versions {
    /// Opens the source for `work`.
    ///
    /// # Errors
    /// When a file cannot be read, or a size is out of range.
    pub(super) fn open(work: &Work) -> Result<Self> {
        Ok(match work {
            Work::Version(load) => Self::Version(load.open()?),
            Work::Stream { bytes, pace, .. } => Self::Stream(Stream {
                content: StreamContent::new(*bytes)?,
                spec: TensorSpec::new(TensorName::new(STREAM_TENSOR)?, Dtype::U8, Shape::new(&[*bytes])?),
                pace: *pace,
            }),
            Work::Steps(steps) => Self::Steps(steps.open()?),
        })
    }

    /// Generates or reads the version of `round`; `None` if there are no more. It blocks while it fills memory.
    ///
    /// # Errors
    /// When memory is exhausted, or a file cannot be read.
    pub(super) fn prepare(&mut self, staging: &Staging, hold: Hold, round: u32) -> Result<Option<Prepared>> {
        let (version, hash) = match self {
            Self::Stream(stream) => {
                let bytes = stream.content.bytes();
                return Ok(Some(Prepared { version: None, tensors: 1, bytes, hash: None }));
            }
            Self::Version(load) => {
                let (version, hash) = match hold {
                    Hold::Stage => stage(load, staging, round)?,
                    Hold::Borrow => borrow(load, staging, round)?,
                };
                (version, Some(hash))
            }
            Self::Steps(steps) => match steps.next(staging)? {
                Some(staged) => (staged.into(), None),
                None => return Ok(None),
            },
        };
        let manifest = version.manifest();
        let (tensors, bytes) = (manifest.tensors().len() as u64, manifest.payload_bytes());
        Ok(Some(Prepared { version: Some(version), tensors, bytes, hash }))
    }
}

/// The versions of a stream, each generated when it is published.
pub(super) struct Stream {
    content: StreamContent,
    spec: TensorSpec,
    pub(super) pace: Pace,
}

impl Stream {
    /// Stages the version with `stamp`.
    ///
    /// # Errors
    /// When memory is exhausted.
    pub(super) fn stage(&self, staging: &Staging, stamp: Stamp) -> Result<Staged> {
        Ok(Staged::new::<Infallible>(staging, vec![self.spec.clone()], vec![], |_, out| {
            self.content.write(stamp, out);
            Ok(())
        })?)
    }
}

/// Generates the tensors in the server's memory, and hashes them, so that a round measures the transfer alone.
fn stage(load: &OpenLoad, staging: &Staging, round: u32) -> Result<(Publishable, String)> {
    let mut hasher = SnapshotHasher::default();
    let staged = Staged::new::<io::Error>(staging, load.specs().to_vec(), vec![], |index, out| {
        load.fill(round, index, out)?;
        let spec = &load.specs()[index];
        hasher.add(&spec.name, spec.dtype, &spec.shape, out);
        Ok(())
    })?;
    staged.hash();
    Ok((staged.into(), hasher.finish()))
}

/// Generates each tensor in memory of its own, which the server borrows.
fn borrow(load: &OpenLoad, staging: &Staging, round: u32) -> Result<(Publishable, String)> {
    let mut hasher = SnapshotHasher::default();
    let mut tensors = Vec::with_capacity(load.specs().len());
    for (index, spec) in load.specs().iter().enumerate() {
        let mut bytes = vec![0; usize::try_from(spec.shape.byte_len(spec.dtype)?)?];
        load.fill(round, index, &mut bytes)?;
        hasher.add(&spec.name, spec.dtype, &spec.shape, &bytes);
        tensors.push((spec.clone(), Bytes::from(bytes)));
    }
    Ok((Borrowed::from_tensors(staging, tensors, vec![])?.into(), hasher.finish()))
}
