//! Borrowed versions: tensors that stay in their producer's memory and are read while they are sent.

use crate::{StageError, Staging};
use std::sync::Arc;
use tensor_relay_device::{Returned, Source};
use tensor_relay_protocol::{ChunkHash, Manifest, Metadata, TensorSpec, VersionDigest};
use tensor_relay_transport::egress::Payload;

/// A borrowed version, read from its source whenever a subscriber needs it.
///
/// Costs no memory for the payload and no pass of copying, but the source is read again for each subscriber whose
/// chunks are not cached. The source must not change while the version is on offer or being sent. If chunks are hashed
/// at their first read, an earlier change goes undetected. Chunks of a source that [may
/// change](Source::may_change) are compared with that hash whenever bytes that were read again are sent: a later change ends the version
/// ([`Publication::failure`](crate::Publication::failure)).
#[derive(Debug)]
pub struct Borrowed {
    pub(crate) payload: Payload,
    pub(crate) returned: Option<Returned>,
}

impl Borrowed {
    /// Lays `specs` out and calls `source` for a source of the entire payload at the manifest's offsets, padding (as
    /// zeros) included. Chunks are hashed when they are first sent.
    ///
    /// # Errors
    /// [`StageError`] when the tensors cannot be laid out, or when the length of the source differs.
    pub fn from_source(
        staging: &Staging,
        specs: Vec<TensorSpec>,
        metadata: Metadata,
        source: impl FnOnce(&Manifest) -> Arc<dyn Source>,
    ) -> Result<Self, StageError> {
        let manifest = staging.lay_out(specs, metadata)?;
        let source = source(&manifest);
        check_length(&manifest, &*source)?;
        Ok(Self { payload: Payload::new(manifest, source), returned: None })
    }

    /// Like [`from_source`](Self::from_source), for a source with known hashes, one for each chunk of the manifest in
    /// order: the version has its [`digest`](Self::digest) from the beginning.
    ///
    /// # Errors
    /// [`StageError`] as for `from_source`, or with the error of `source`.
    ///
    /// # Panics
    /// When the numbers of hashes and chunks differ.
    pub fn from_hashed_source<E: std::error::Error>(
        staging: &Staging,
        specs: Vec<TensorSpec>,
        metadata: Metadata,
        source: impl FnOnce(&Manifest) -> Result<(Arc<dyn Source>, Vec<ChunkHash>), E>,
    ) -> Result<Self, StageError<E>> {
        let manifest = staging.lay_out(specs, metadata)?;
        let (source, hashes) = source(&manifest).map_err(StageError::Fill)?;
        check_length(&manifest, &*source)?;
        assert_eq!(hashes.len(), manifest.chunking().count() as usize, "one hash for each chunk");
        Ok(Self { payload: Payload::with_hashes(manifest, source, &hashes), returned: None })
    }

    /// Reads through another source of the same bytes, which `wrap` makes of the current one.
    #[must_use]
    pub fn through(self, wrap: impl FnOnce(Arc<dyn Source>) -> Arc<dyn Source>) -> Self {
        let payload = self.payload.through(wrap(Arc::clone(self.payload.source())));
        Self { payload, ..self }
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        self.payload.manifest()
    }

    /// The version's digest, once every chunk is hashed.
    pub fn digest(&self) -> Option<VersionDigest> {
        self.payload.digest()
    }
}

fn check_length<E: std::error::Error>(manifest: &Manifest, source: &dyn Source) -> Result<(), StageError<E>> {
    let (payload_bytes, source_bytes) = (manifest.payload_bytes(), source.len_bytes());
    match payload_bytes == source_bytes {
        true => Ok(()),
        false => Err(StageError::Source { payload_bytes, source_bytes }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Publishable;
    use std::convert::Infallible;
    use tensor_relay_device::{HostMemory, HostSource};
    use tensor_relay_protocol::{Dtype, Limits, Shape, TensorName};
    use tensor_relay_transport::Workers;

    fn staging() -> Staging {
        Staging {
            memory: HostMemory::new(0),
            bases: Arc::default(),
            layouts: Arc::default(),
            chunk_bytes: 1024,
            limits: Limits::default(),
            workers: Workers::Inline,
        }
    }

    fn specs() -> Vec<TensorSpec> {
        vec![TensorSpec::new(TensorName::new("t").unwrap(), Dtype::U8, Shape::new(&[3000]).unwrap())]
    }

    fn zeros(bytes: u64) -> Arc<dyn Source> {
        Arc::new(HostSource::new(vec![0; bytes as usize].into()))
    }

    /// The memory budget is zero: nothing is copied.
    #[test]
    fn a_borrowed_version_has_a_digest_once_hashed() {
        let borrow = |manifest: &Manifest| zeros(manifest.payload_bytes());
        let later = Borrowed::from_source(&staging(), specs(), vec![], borrow).unwrap();
        assert_eq!(later.digest(), None);
        let hashed = Borrowed::from_hashed_source::<Infallible>(&staging(), specs(), vec![], |manifest| {
            let chunks = manifest.chunking().iter();
            let hashes = chunks.map(|(_, range)| ChunkHash::of(&vec![0; (range.end - range.start) as usize]));
            Ok((zeros(manifest.payload_bytes()), hashes.collect()))
        });
        let held = Publishable::from(hashed.unwrap());
        assert!(held.digest().is_some());
        assert_eq!(held.manifest(), later.manifest());
    }

    #[test]
    fn a_source_of_another_length_is_refused() {
        let error = Borrowed::from_source(&staging(), specs(), vec![], |_| zeros(3000)).unwrap_err();
        assert!(matches!(error, StageError::Source { payload_bytes: 3072, source_bytes: 3000 }), "{error}");
    }
}
