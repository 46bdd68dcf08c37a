//! The safetensors file format (<https://github.com/huggingface/safetensors#format>), without I/O.
//!
//! A file consists of eight bytes of header length, a JSON header, and the tensors without gaps. Callers read and write
//! files; this module parses and makes headers, with the `safetensors` crate, the reference implementation.

mod index;
mod order;

use crate::{Dtype, Limits, NameError, Shape, ShapeError, Tensor, TensorName, TensorSpec};
use ::safetensors::{Dtype as FileDtype, tensor::Metadata, tensor::TensorInfo};
use order::Order;
use serde::ser::{Serialize, SerializeMap, Serializer};
use std::ops::Range;

pub use index::{INDEX_MAX_BYTES, IndexError, WeightIndex};

/// The size in bytes of the header's length field, a little-endian `u64` at the beginning of the file.
pub const PREFIX_BYTES: usize = 8;

/// The largest header accepted, in bytes, as in the reference implementation.
pub const HEADER_MAX_BYTES: u64 = 100_000_000;

/// The header key of the file's metadata.
const METADATA_KEY: &str = "__metadata__";

/// The parsed header of a safetensors file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The tensors, in the order of their bytes in the file; empty tensors at the same offset are in the header's
    /// order.
    pub tensors: Vec<FileTensor>,
    /// The file's metadata, in the header's order.
    pub metadata: Vec<(String, String)>,
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileTensor {
    /// The tensor's name, dtype and shape.
    pub spec: TensorSpec,
    /// The range of the tensor's bytes in the file.
    pub range: Range<u64>,
}

/// Why a file is not a safetensors file, or a manifest cannot become one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SafetensorsError {
    /// A file that is shorter than its prefix and header.
    #[error(
        "its first 8 bytes claim a header of {header_bytes} bytes, which a file of {file_bytes} bytes cannot have: it has \
         another format, or was cut off"
    )]
    HeaderLength {
        /// The length in the prefix.
        header_bytes: u64,
        /// The size of the file.
        file_bytes: u64,
    },
    /// A header that exceeds the limit.
    #[error("it claims a header of {header_bytes} bytes, and at most {HEADER_MAX_BYTES} bytes are accepted")]
    HeaderTooLong {
        /// The length in the prefix.
        header_bytes: u64,
    },
    /// An invalid header.
    #[error("its header is not valid: {0}")]
    Header(#[from] serde_json::Error),
    /// More tensors than a version may have.
    #[error("it has {tensors} tensors, and at most {} are accepted", Limits::default().tensors)]
    TooManyTensors {
        /// The tensors that the header names.
        tensors: usize,
    },
    /// The data after the header is not as long as the header says.
    #[error(
        "its header describes {described_bytes} bytes of tensors, but {found_bytes} follow it{}",
        cut_off_hint(.described_bytes, .found_bytes)
    )]
    DataLength {
        /// The size by the header.
        described_bytes: u64,
        /// The actual size.
        found_bytes: u64,
    },
    /// A tensor name that tensor-relay does not support.
    #[error("it contains an invalid tensor name: {0}")]
    Name(#[from] NameError),
    /// A shape that tensor-relay does not support.
    #[error("tensor {name:?} has no usable shape: {source}")]
    Shape {
        /// The tensor.
        name: TensorName,
        /// The reason.
        source: ShapeError,
    },
    /// A dtype that tensor-relay or safetensors lacks.
    #[error("tensor {name:?} has dtype {dtype}, which tensor-relay and safetensors do not both support")]
    Dtype {
        /// The tensor.
        name: TensorName,
        /// The tensor's dtype.
        dtype: String,
    },
    /// A tensor name with another meaning in this format.
    #[error(
        "a tensor named `{METADATA_KEY}` cannot be written: safetensors files keep their metadata under that name"
    )]
    ReservedName,
    /// Tensors that the format does not support.
    #[error("the safetensors format does not support these tensors: {0}")]
    Unwritable(String),
}

fn cut_off_hint(described_bytes: &u64, found_bytes: &u64) -> &'static str {
    if found_bytes < described_bytes { ": was the file cut off?" } else { "" }
}

/// The length of the header, from the first bytes of a file of `file_bytes`.
///
/// # Errors
/// [`SafetensorsError::HeaderLength`] when the file is too short for the header, and
/// [`SafetensorsError::HeaderTooLong`] when the header exceeds [`HEADER_MAX_BYTES`].
pub fn header_length(prefix: [u8; PREFIX_BYTES], file_bytes: u64) -> Result<usize, SafetensorsError> {
    let header_bytes = u64::from_le_bytes(prefix);
    let room = file_bytes.saturating_sub(PREFIX_BYTES as u64);
    match () {
        () if header_bytes > room => Err(SafetensorsError::HeaderLength { header_bytes, file_bytes }),
        () if header_bytes > HEADER_MAX_BYTES => Err(SafetensorsError::HeaderTooLong { header_bytes }),
        () => Ok(header_bytes as usize),
    }
}

/// Parses `json`, the header of a file of `file_bytes`.
///
/// # Errors
/// [`SafetensorsError`] when the header breaks a rule of the format (offsets that leave gaps or overlap, sizes that do
/// not match shapes), the file has another size than the header describes, or it has more tensors than
/// [`Limits::tensors`] by default. The last is found first, because it needs the names alone.
pub fn parse_header(json: &[u8], file_bytes: u64) -> Result<Header, SafetensorsError> {
    let order: Order = serde_json::from_slice(json)?;
    let tensors = order.tensors.len();
    if tensors > Limits::default().tensors {
        return Err(SafetensorsError::TooManyTensors { tensors });
    }
    let header: Metadata = serde_json::from_slice(json)?;
    let data_start = (PREFIX_BYTES + json.len()) as u64;
    let described_bytes = header.data_len() as u64;
    let found_bytes = file_bytes.saturating_sub(data_start);
    if described_bytes != found_bytes {
        return Err(SafetensorsError::DataLength { described_bytes, found_bytes });
    }
    let mut tensors = Vec::with_capacity(header.tensors().len());
    for (name, info) in header.tensors() {
        tensors.push(file_tensor(&name, info, data_start)?);
    }
    tensors.sort_by_key(|t| (t.range.start, t.range.end, order.tensors.position(t.spec.name.as_str())));
    let mut metadata: Vec<_> = header.metadata().clone().unwrap_or_default().into_iter().collect();
    metadata.sort_by_key(|(key, _)| order.metadata.position(key));
    Ok(Header { tensors, metadata })
}

fn file_tensor(name: &str, info: &TensorInfo, data_start: u64) -> Result<FileTensor, SafetensorsError> {
    let name = TensorName::new(name)?;
    let dtype = from_file(info.dtype)
        .ok_or_else(|| SafetensorsError::Dtype { name: name.clone(), dtype: info.dtype.to_string() })?;
    let dimensions: Vec<u64> = info.shape.iter().map(|d| *d as u64).collect();
    let shape =
        Shape::new(&dimensions).map_err(|source| SafetensorsError::Shape { name: name.clone(), source })?;
    let (start, end) = info.data_offsets;
    let range = data_start + start as u64..data_start + end as u64;
    Ok(FileTensor { spec: TensorSpec::new(name, dtype, shape), range })
}

/// The plan of a file: its head, and the order of the tensors' bytes behind the head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileLayout {
    /// The prefix and the header, padded to eight bytes.
    pub head: Vec<u8>,
    /// The indexes of the tensors in the argument of [`plan_tensors`], in the order of their bytes in the file.
    pub order: Vec<usize>,
}

/// Plans a file with `tensors` and `metadata` in the given order: a file made by the reference writer is byte-identical
/// after it was parsed and written again. If a tensor would not be aligned to its element size in that order, the
/// tensors are sorted as by the reference writer: wider elements first, then by name. Tied weights are written once for
/// each name.
///
/// # Errors
/// [`SafetensorsError`] for tensors that the format does not support: an unknown dtype, sub-byte tensors that end
/// within a byte, or a tensor called `__metadata__`.
pub fn plan_tensors(
    tensors: &[&Tensor],
    metadata: Vec<(String, String)>,
) -> Result<FileLayout, SafetensorsError> {
    let dtypes = tensors.iter().map(|tensor| file_dtype(tensor)).collect::<Result<Vec<_>, _>>()?;
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    if !are_aligned(tensors) {
        order.sort_by(|a, b| {
            dtypes[*b]
                .cmp(&dtypes[*a])
                .then_with(|| tensors[*a].name.cmp(&tensors[*b].name))
        });
    }
    let mut end = 0usize;
    let mut infos = Vec::with_capacity(tensors.len());
    for index in &order {
        let tensor = tensors[*index];
        let shape = tensor.shape.dimensions().iter().map(|d| *d as usize).collect();
        let start = end;
        end += tensor.byte_len() as usize;
        let info = TensorInfo { dtype: dtypes[*index], shape, data_offsets: (start, end) };
        infos.push((tensor.name.as_str().to_owned(), info));
    }
    let header = OrderedHeader { metadata, infos };
    // This only validates: `Metadata` would serialise the file's metadata in random order.
    Metadata::new(None, header.infos.clone()).map_err(|e| SafetensorsError::Unwritable(e.to_string()))?;
    Ok(FileLayout { head: head(&header)?, order })
}

fn file_dtype(tensor: &Tensor) -> Result<FileDtype, SafetensorsError> {
    let refuse = || SafetensorsError::Dtype { name: tensor.name.clone(), dtype: tensor.dtype.name().into() };
    match tensor.name.as_str() {
        METADATA_KEY => Err(SafetensorsError::ReservedName),
        _ => to_file(tensor.dtype).ok_or_else(refuse),
    }
}

/// Whether each tensor begins at a multiple of its element size if the tensors lie end to end in this order.
fn are_aligned(tensors: &[&Tensor]) -> bool {
    let mut start = 0;
    tensors.iter().all(|tensor| {
        let is_aligned = start % u64::from(tensor.dtype.bits() / 8).max(1) == 0;
        start += tensor.byte_len();
        is_aligned
    })
}

/// A header that serialises like the reference writer's, with the entries of `metadata` in the given order.
struct OrderedHeader {
    metadata: Vec<(String, String)>,
    infos: Vec<(String, TensorInfo)>,
}

impl Serialize for OrderedHeader {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if !self.metadata.is_empty() {
            map.serialize_entry(METADATA_KEY, &Entries(&self.metadata))?;
        }
        for (name, info) in &self.infos {
            map.serialize_entry(name, info)?;
        }
        map.end()
    }
}

struct Entries<'a>(&'a [(String, String)]);

impl Serialize for Entries<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

fn head(header: &OrderedHeader) -> Result<Vec<u8>, SafetensorsError> {
    let mut json = serde_json::to_vec(header)?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut head = (json.len() as u64).to_le_bytes().to_vec();
    head.append(&mut json);
    Ok(head)
}

/// The pairs of equal dtypes: safetensors' and tensor-relay's.
const DTYPES: &[(FileDtype, Dtype)] = &[
    (FileDtype::BOOL, Dtype::Bool),
    (FileDtype::F4, Dtype::F4E2M1),
    (FileDtype::F6_E2M3, Dtype::F6E2M3),
    (FileDtype::F6_E3M2, Dtype::F6E3M2),
    (FileDtype::U8, Dtype::U8),
    (FileDtype::I8, Dtype::I8),
    (FileDtype::F8_E5M2, Dtype::F8E5M2),
    (FileDtype::F8_E4M3, Dtype::F8E4M3Fn),
    (FileDtype::F8_E8M0, Dtype::F8E8M0),
    (FileDtype::F8_E4M3FNUZ, Dtype::F8E4M3Fnuz),
    (FileDtype::F8_E5M2FNUZ, Dtype::F8E5M2Fnuz),
    (FileDtype::I16, Dtype::I16),
    (FileDtype::U16, Dtype::U16),
    (FileDtype::F16, Dtype::F16),
    (FileDtype::BF16, Dtype::Bf16),
    (FileDtype::I32, Dtype::I32),
    (FileDtype::U32, Dtype::U32),
    (FileDtype::F32, Dtype::F32),
    (FileDtype::C64, Dtype::C64),
    (FileDtype::F64, Dtype::F64),
    (FileDtype::I64, Dtype::I64),
    (FileDtype::U64, Dtype::U64),
];

fn from_file(dtype: FileDtype) -> Option<Dtype> {
    DTYPES.iter().find(|(file, _)| *file == dtype).map(|(_, relay)| *relay)
}

fn to_file(dtype: Dtype) -> Option<FileDtype> {
    DTYPES.iter().find(|(_, relay)| *relay == dtype).map(|(file, _)| *file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limits, Manifest, files::without_reserved};
    use proptest::prelude::*;

    #[test]
    fn paired_dtypes_have_equal_sizes() {
        for (file, relay) in DTYPES {
            assert_eq!(file.bitsize() as u32, relay.bits(), "{relay}");
        }
    }

    fn parse(json: &str, data_bytes: u64) -> Result<Header, SafetensorsError> {
        parse_header(json.as_bytes(), (PREFIX_BYTES + json.len()) as u64 + data_bytes)
    }

    #[test]
    fn hostile_headers_are_refused() {
        assert!(header_length([0xff; 8], 100).is_err());
        assert!(header_length(93u64.to_le_bytes(), 100).is_err());
        assert_eq!(header_length(92u64.to_le_bytes(), 100).unwrap(), 92);
        let too_long = header_length((HEADER_MAX_BYTES + 1).to_le_bytes(), 2 * HEADER_MAX_BYTES);
        assert!(matches!(too_long, Err(SafetensorsError::HeaderTooLong { .. })));
        let good = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        assert_eq!(parse(good, 8).unwrap().tensors[0].range, 62..70);
        assert!(matches!(parse(good, 7), Err(SafetensorsError::DataLength { .. })));
        assert!(matches!(parse(good, 9), Err(SafetensorsError::DataLength { .. })));
        for bad in [
            "",
            "{",
            "[]",
            r#"{"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}"#,
            r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#,
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#,
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}"#,
            r#"{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}"#,
            r#"{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}"#,
            r#"{"":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#,
            r#"{"a\nb":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#,
        ] {
            assert!(parse(bad, 8).is_err(), "{bad}");
        }
    }

    /// The plan of a file with all tensors of `manifest` and its metadata.
    fn plan_file(manifest: &Manifest) -> Result<FileLayout, SafetensorsError> {
        let tensors: Vec<&Tensor> = manifest.tensors().iter().collect();
        plan_tensors(&tensors, without_reserved(manifest.metadata()))
    }

    #[test]
    fn unsupported_tensors_are_refused() {
        let plan = |name: &str, dtype, elements| {
            let shape = Shape::new(&[elements]).unwrap();
            let specs = vec![TensorSpec::new(TensorName::new(name).unwrap(), dtype, shape)];
            plan_file(&Manifest::layout(specs, vec![], 4096, &Limits::default()).unwrap())
        };
        assert!(matches!(plan("__metadata__", Dtype::U8, 1), Err(SafetensorsError::ReservedName)));
        assert!(matches!(plan("a", Dtype::C128, 1), Err(SafetensorsError::Dtype { .. })));
        assert!(matches!(plan("a", Dtype::F4E2M1, 3), Err(SafetensorsError::Unwritable(_))));
    }

    /// Parses a header into a manifest and asserts that the file planned from it has the same header.
    fn assert_copied(json: &str, data_bytes: u64) {
        let Header { tensors, metadata } = parse(json, data_bytes).unwrap();
        let specs = tensors.into_iter().map(|tensor| tensor.spec).collect();
        let manifest = Manifest::layout(specs, metadata, 4096, &Limits::default()).unwrap();
        let copied = plan_file(&manifest).unwrap().head;
        assert_eq!(String::from_utf8_lossy(&copied[PREFIX_BYTES..]).trim_end(), json);
    }

    #[test]
    fn a_copy_has_the_same_order() {
        assert_copied(
            r#"{"__metadata__":{"z":"1","a":"2","m":"\"\n"},"w":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#,
            16,
        );
        // Several empty tensors at one position.
        assert_copied(
            r#"{"z":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"b":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]},"c":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
            1,
        );
    }

    #[test]
    fn tensors_that_would_not_be_aligned_are_sorted() {
        let json = r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"F32","shape":[1],"data_offsets":[3,7]}}"#;
        let specs = parse(json, 7).unwrap().tensors.into_iter().map(|tensor| tensor.spec).collect();
        let manifest = Manifest::layout(specs, vec![], 4096, &Limits::default()).unwrap();
        assert_eq!(plan_file(&manifest).unwrap().order, [1, 0]);
    }

    proptest! {
        /// For any supported tensors, the planned head is parsed to the same tensors and metadata.
        #[test]
        fn planned_heads_are_parsed_back(sizes in prop::collection::vec((0..DTYPES.len(), 0u64..40), 0..20), key in "[a-z]{0,4}") {
            let numbered = sizes.into_iter().enumerate();
            let specs: Vec<_> = numbered.map(|(i, (dtype, n))| {
                let shape = Shape::new(&[n * 8]).unwrap();
                TensorSpec::new(TensorName::new(&format!("t{i}")).unwrap(), DTYPES[dtype].1, shape)
            }).collect();
            let manifest = Manifest::layout(specs, vec![(key, "v".into())], 4096, &Limits::default()).unwrap();
            let layout = plan_file(&manifest).unwrap();
            let data_bytes: u64 = manifest.tensors().iter().map(|t| t.byte_len()).sum();
            let file_bytes = layout.head.len() as u64 + data_bytes;
            let json_bytes = header_length(layout.head[..8].try_into().unwrap(), file_bytes).unwrap();
            prop_assert_eq!(json_bytes + PREFIX_BYTES, layout.head.len());
            let header = parse_header(&layout.head[8..], file_bytes).unwrap();
            prop_assert_eq!(&header.metadata[..], manifest.metadata());
            let mut at = layout.head.len() as u64;
            for file in &header.tensors {
                prop_assert_eq!(file.range.start, at);
                let tensor = manifest.tensor(file.spec.name.as_str()).unwrap();
                prop_assert_eq!((tensor.dtype, &tensor.shape), (file.spec.dtype, &file.spec.shape));
                at = file.range.end;
            }
            prop_assert_eq!(at, file_bytes);
        }

        #[test]
        fn arbitrary_text_does_not_panic(json in "[\\[\\]{}\":,a-zA-Z0-9_ -]{0,120}", data_bytes in 0u64..100) {
            let _ = parse(&json, data_bytes);
        }
    }
}
