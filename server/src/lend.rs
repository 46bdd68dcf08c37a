//! Borrowed tensors in host memory: they stay in their producer's memory, and are released when nothing reads them.

use crate::{Borrowed, StageError, Staging};
use std::{ops::Range, sync::Arc};
use tensor_relay_device::{GatherSource, LentBytes, Loan, PartsError, Spread, SpreadParts};
use tensor_relay_protocol::{self as protocol, Manifest, Metadata, Tensor, TensorSpec};
use tensor_relay_transport::{Runs, egress::Payload};

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
    /// Lays out tensors and borrows their bytes. Copies only chunks with several tensors or padding, those of tensors
    /// in pieces, and memory that others may write ([`LentBytes::Foreign`]). Aliases have no bytes. Chunks are hashed
    /// when they are first sent.
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
        let (loan, returned) = Loan::new();
        let tensors = tensors.into_iter().map(|(spec, bytes)| (spec, bytes.into().on_loan(&loan)));
        let (specs, bytes): (Vec<_>, Vec<LentBytes>) = tensors.unzip();
        let manifest = staging.lay_out(specs, metadata).map_err(StageError::from)?;
        let TensorParts { whole, spread } =
            TensorParts::new(&manifest, &aliases, bytes, |bytes| bytes.len() as u64)?;
        let source = GatherSource::spread(manifest.payload_bytes(), whole, spread)?;
        let payload = Payload::new(manifest, Arc::new(source));
        Ok(Self { payload, returned: Some(returned) })
    }
}

/// The memory of tensors as parts of their payload.
pub(crate) struct TensorParts<M> {
    /// Tensors in one piece, with their ranges in the payload, in its order.
    pub(crate) whole: Vec<(Range<u64>, M)>,
    /// The pieces of the others.
    pub(crate) spread: SpreadParts<M>,
}

impl<M> TensorParts<M> {
    /// The parts of a payload in the memory of each tensor, in the order of the manifest.
    ///
    /// # Errors
    /// [`LendError`] names a tensor whose memory has the wrong size.
    pub(crate) fn new(
        manifest: &Manifest,
        aliases: &[bool],
        memory: Vec<M>,
        len_of: impl Fn(&M) -> u64,
    ) -> Result<Self, LendError> {
        let (mut whole, mut memories) = (Vec::with_capacity(memory.len()), vec![]);
        let mut pieces: Vec<(Range<u64>, usize, Arc<dyn Spread>)> = vec![];
        for ((tensor, is_alias), memory) in manifest.tensors().iter().zip(aliases).zip(memory) {
            check_size(tensor, *is_alias, len_of(&memory))?;
            match *is_alias || tensor.byte_len() == 0 {
                true => {}
                false => match tensor.range() {
                    Some(range) => whole.push((range, memory)),
                    None => {
                        pieces
                            .extend(spread_pieces(tensor).map(|(range, runs)| (range, memories.len(), runs)));
                        memories.push(memory);
                    }
                },
            }
        }
        whole.sort_by_key(|(range, _)| range.start);
        Ok(Self { whole, spread: SpreadParts::new(memories, pieces)? })
    }
}

/// Checks that a tensor's memory is as long as its bytes, or empty for an alias.
fn check_size(tensor: &Tensor, is_alias: bool, given_bytes: u64) -> Result<(), LendError> {
    let (expected_bytes, name) = (tensor.byte_len(), || tensor.name.as_str().into());
    match is_alias {
        true if given_bytes > 0 => Err(LendError::AliasWithBytes { name: name(), given_bytes }),
        false if given_bytes != expected_bytes => {
            Err(LendError::WrongSize { name: name(), expected_bytes, given_bytes })
        }
        _ => Ok(()),
    }
}

/// The range of each piece of a tensor in the payload, and how it is spread in the tensor.
fn spread_pieces(tensor: &Tensor) -> impl Iterator<Item = (Range<u64>, Arc<dyn Spread>)> {
    let pieces = (0..).zip(tensor.ranges());
    pieces.filter_map(|(number, range)| {
        let runs: Arc<dyn Spread> = Arc::new(Runs(protocol::Spread::of_piece(tensor, number)?));
        Some((range, runs))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Staged;
    use bytes::Bytes;
    use std::convert::Infallible;
    use tensor_relay_device::HostMemory;
    use tensor_relay_protocol::{CodecId, Cuts, Dtype, Limits, Shape, TensorName};
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
        let place = manifest.tensor("large").unwrap().range().unwrap();
        assert_eq!(manifest.tensor("tied").unwrap().range(), Some(place.clone()));
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

    /// Goal: borrowed tensors in pieces are the version that they are when they are staged. Method: compare the digests.
    #[tokio::test]
    async fn borrowed_pieces_are_the_staged_ones() {
        let specs = cut_specs();
        let content = |index: usize| -> Vec<u8> {
            let bytes = specs[index].shape.byte_len(specs[index].dtype).unwrap();
            (0..bytes).map(|at| (at * 31 + index as u64) as u8).collect()
        };
        let memory = Staging { memory: HostMemory::new(1 << 20), ..staging() };
        let staged = Staged::new::<Infallible>(&memory, specs.clone(), vec![], |index, out| {
            out.copy_from_slice(&content(index));
            Ok(())
        });
        let tensors = specs.iter().enumerate().map(|(index, spec)| {
            let bytes = if spec.alias_of.is_some() { vec![] } else { content(index) };
            (spec.clone(), Bytes::from(bytes))
        });
        let borrowed = Borrowed::from_tensors(&staging(), tensors.collect(), vec![]).unwrap();
        let encoder = Encoder::new(0, None, Workers::Inline);
        for (chunk, _) in borrowed.manifest().chunking().iter() {
            encoder.encode(&borrowed.payload, chunk, CodecId::Raw).await.unwrap();
        }
        assert!(borrowed.manifest().tensors().iter().any(Tensor::is_in_pieces));
        assert_eq!(borrowed.digest(), Some(staged.unwrap().hash()));
    }

    /// A matrix in columns, one that is tied to it, one that is whole, and one without bytes.
    fn cut_specs() -> Vec<TensorSpec> {
        let spec = |name: &str, dimensions: &[u64], parts| TensorSpec {
            cuts: Cuts::equal(1, dimensions[1], parts),
            ..TensorSpec::new(TensorName::new(name).unwrap(), Dtype::F32, Shape::new(dimensions).unwrap())
        };
        let tied = TensorSpec { alias_of: Some(0), ..spec("tied", &[30, 50], 4) };
        vec![spec("columns", &[30, 50], 4), tied, spec("whole", &[7, 9], 1), spec("none", &[0, 6], 3)]
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
