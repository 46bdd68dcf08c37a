//! Borrowed tensors in host memory: they stay in their producer's memory, and are released when nothing reads them.

use crate::{Borrowed, StageError, Staging};
use std::{ops::Range, sync::Arc};
use tensor_relay_device::{GatherSource, LentBytes, Loan, PartsError};
use tensor_relay_protocol::{Manifest, Metadata, TensorSpec};
use tensor_relay_transport::egress::Payload;

/// Why tensors cannot be lent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LendError {
    /// They cannot be laid out together.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// A tensor's memory does not have the size of its dtype and shape.
    #[error(
        "tensor {name} takes {expected_bytes} bytes by its dtype and shape, but its memory has {given_bytes} bytes"
    )]
    WrongSize {
        /// The tensor.
        name: Box<str>,
        /// Its size by dtype and shape.
        expected_bytes: u64,
        /// The size of its memory.
        given_bytes: u64,
    },
    /// An alias was given bytes, which would never be read.
    #[error(
        "tensor {name} is an alias but was given {given_bytes} bytes: give the bytes to the tensor that it names, and none \
         to the alias"
    )]
    AliasWithBytes {
        /// The tensor.
        name: Box<str>,
        /// The size of its memory.
        given_bytes: u64,
    },
    /// A tensor is on another device than the first one.
    #[error(
        "tensor {name} is on {device}, and others of its version on {first}: publish the tensors of each device as a \
         separate topic"
    )]
    OtherDevice {
        /// The tensor.
        name: Box<str>,
        /// Its device.
        device: Box<str>,
        /// The device of the first tensor.
        first: Box<str>,
    },
    /// The parts do not form a payload.
    #[error(transparent)]
    Parts(#[from] PartsError),
}

impl Borrowed {
    /// Lays out tensors and borrows their bytes. Copies only chunks with several tensors or padding, and memory that
    /// others may write ([`LentBytes::Foreign`]). Aliases have no bytes. Chunks are hashed when they are first sent.
    ///
    /// The producer must not write to the bytes before [`Publication::released`](crate::Publication::released): when
    /// the version left retention (replaced, or [withdrawn](crate::Publication::withdraw)) and no transfer, cache or
    /// unacknowledged packet holds a byte of it. Costs a small allocation for each tensor.
    ///
    /// # Errors
    /// [`LendError`]; nothing is kept then.
    pub fn from_tensors(
        staging: &Staging,
        tensors: Vec<(TensorSpec, impl Into<LentBytes>)>,
        metadata: Metadata,
    ) -> Result<Self, LendError> {
        let aliases: Vec<bool> = tensors.iter().map(|(spec, _)| spec.alias_of.is_some()).collect();
        let tensors = tensors.into_iter().map(|(spec, bytes)| (spec, bytes.into()));
        let (specs, bytes): (Vec<_>, Vec<LentBytes>) = tensors.unzip();
        let manifest = staging.lay_out(specs, metadata).map_err(StageError::from)?;
        let (loan, returned) = Loan::new();
        let parts = tensor_parts(&manifest, &aliases, bytes, |bytes| bytes.len() as u64)?;
        let lent = parts.into_iter().map(|(range, bytes)| (range, bytes.on_loan(&loan)));
        let source = GatherSource::new(manifest.payload_bytes(), lent)?;
        let payload = Payload::new(manifest, Arc::new(source));
        Ok(Self { payload, returned: Some(returned) })
    }
}

/// The memory of each tensor that has bytes, with its range, in payload order.
pub(crate) fn tensor_parts<M>(
    manifest: &Manifest,
    aliases: &[bool],
    memory: Vec<M>,
    len_of: impl Fn(&M) -> u64,
) -> Result<Vec<(Range<u64>, M)>, LendError> {
    let mut parts = Vec::with_capacity(memory.len());
    for ((tensor, is_alias), memory) in manifest.tensors().iter().zip(aliases).zip(memory) {
        let (expected_bytes, given_bytes) = (tensor.byte_len(), len_of(&memory));
        match is_alias {
            true if given_bytes == 0 => {}
            true => return Err(LendError::AliasWithBytes { name: tensor.name.as_str().into(), given_bytes }),
            false if expected_bytes == given_bytes => parts.push((tensor.range(), memory)),
            false => {
                let name = tensor.name.as_str().into();
                return Err(LendError::WrongSize { name, expected_bytes, given_bytes });
            }
        }
    }
    parts.retain(|(range, _)| !range.is_empty());
    parts.sort_by_key(|(range, _)| range.start);
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use tensor_relay_device::HostMemory;
    use tensor_relay_protocol::{CodecId, Dtype, Limits, Shape, TensorName};
    use tensor_relay_transport::{Workers, egress::Encoder};

    const CHUNK_BYTES: u32 = 1024;

    /// Without memory for staging.
    fn staging() -> Staging {
        Staging {
            memory: HostMemory::new(0),
            bases: Arc::default(),
            layouts: Arc::default(),
            chunk_bytes: CHUNK_BYTES,
            limits: Limits::default(),
            workers: Workers::Inline,
        }
    }

    fn tensor(name: &str, bytes: Bytes) -> (TensorSpec, Bytes) {
        let shape = Shape::new(&[bytes.len() as u64]).unwrap();
        (TensorSpec::new(TensorName::new(name).unwrap(), Dtype::U8, shape), bytes)
    }

    fn alias(name: &str, of: usize, len: u64, bytes: Bytes) -> (TensorSpec, Bytes) {
        let spec = TensorSpec::new(TensorName::new(name).unwrap(), Dtype::U8, Shape::new(&[len]).unwrap());
        (TensorSpec { alias_of: Some(of), ..spec }, bytes)
    }

    /// Goal: chunks within a large tensor are sent from the producer's memory. Method: compare the address of each.
    #[tokio::test]
    async fn chunks_within_a_large_tensor_are_not_copied() {
        let large = Bytes::from((0..5000u32).map(|i| i as u8).collect::<Vec<_>>());
        let tensors = vec![
            tensor("small", Bytes::from_static(b"abc")),
            tensor("large", large.clone()),
            tensor("none", Bytes::new()),
            alias("tied", 1, 5000, Bytes::new()),
        ];
        let borrowed = Borrowed::from_tensors(&staging(), tensors, vec![]).unwrap();
        let (manifest, encoder) = (borrowed.manifest(), Encoder::new(0, None, Workers::Inline));
        let place = manifest.tensor("large").unwrap().range();
        assert_eq!(manifest.tensor("tied").unwrap().range(), place);
        let mut shared = 0;
        for (chunk, range) in manifest.chunking().iter() {
            let sent = encoder.encode(&borrowed.payload, chunk, CodecId::Raw).await.unwrap().bytes;
            if range.start >= place.start && range.end <= place.end {
                assert_eq!(sent.as_ptr(), large[(range.start - place.start) as usize..].as_ptr());
                shared += sent.len();
            }
        }
        assert_eq!(shared, 4096, "all but the last chunk, which has padding");
        let stats = encoder.stats();
        assert_eq!(stats.host_read_bytes, manifest.payload_bytes());
        assert_eq!(stats.host_copied_bytes, stats.host_read_bytes - 4096, "the counters agree");
    }

    #[test]
    fn a_loan_ends_when_the_version_is_dropped() {
        let tensors = vec![tensor("t", Bytes::from(vec![7; 100]))];
        let borrowed = Borrowed::from_tensors(&staging(), tensors, vec![]).unwrap();
        let returned = borrowed.returned.clone().unwrap();
        assert!(!returned.is_returned());
        drop(borrowed);
        assert!(returned.is_returned());
    }

    #[test]
    fn the_error_for_bytes_of_wrong_size_names_the_tensor() {
        let (spec, _) = tensor("t", Bytes::from_static(b"1234"));
        let refused = Borrowed::from_tensors(&staging(), vec![(spec, Bytes::from_static(b"123"))], vec![]);
        let error = refused.unwrap_err();
        let LendError::WrongSize { name, expected_bytes: 4, given_bytes: 3 } = &error else {
            panic!("{error}")
        };
        assert_eq!(&**name, "t");
        let twice =
            vec![tensor("t", Bytes::from_static(b"1234")), alias("u", 0, 4, Bytes::from_static(b"1234"))];
        let error = Borrowed::from_tensors(&staging(), twice, vec![]).unwrap_err();
        assert!(matches!(error, LendError::AliasWithBytes { given_bytes: 4, .. }), "{error}");
        let same = vec![tensor("t", Bytes::new()), tensor("t", Bytes::new())];
        let error = Borrowed::from_tensors(&staging(), same, vec![]).unwrap_err();
        assert!(matches!(error, LendError::Stage(StageError::Layout(_))), "{error}");
    }
}
