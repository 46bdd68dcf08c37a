//! The NumPy array format (<https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>), without I/O.
//!
//! A file consists of a magic number, a version, the length of a header, the header (the text of a Python dictionary),
//! and the elements. Callers read and write files; this module parses and makes headers. An `.npz` file is a ZIP
//! archive of such files.

use crate::{Dtype, Shape, ShapeError};

/// The number of bytes in front of a header (magic, version and length) in the format versions with the longest length
/// field.
pub const PREFIX_BYTES: usize = 12;

/// The largest header accepted, in bytes. NumPy's default limit is 10,000 bytes.
const HEADER_MAX_BYTES: u64 = 64 << 10;

const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// NumPy aligns the elements to this many bytes.
const DATA_ALIGNMENT: usize = 64;

/// NumPy reserves room for this many digits in the first dimension, so that a file can be appended to.
const GROWTH_DIGITS: usize = 21;

/// The parsed header of an array file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The type of the elements.
    pub dtype: Dtype,
    /// The dimensions.
    pub shape: Shape,
    /// Whether the first dimension varies fastest. False if both orders are the same.
    pub fortran_order: bool,
    /// The offset of the first element in the file. The elements extend to the end of the file.
    pub data_start: u64,
}

/// Why a file is not a supported array file, or a tensor cannot become one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NpyError {
    /// Another kind of file, or a truncated one.
    #[error("it does not begin like a NumPy array file")]
    Magic,
    /// An unknown format version.
    #[error("it has version {major}.{minor} of the NumPy format, and 1.0 to 3.0 are supported")]
    Version {
        /// The major version.
        major: u8,
        /// The minor version.
        minor: u8,
    },
    /// A file that is shorter than its prefix and header.
    #[error("it claims a header of {header_bytes} bytes, which a file of {file_bytes} bytes cannot have")]
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
    /// A header that is not a dictionary of `descr`, `fortran_order` and `shape`.
    #[error("its header is not valid: {0}")]
    Header(&'static str),
    /// Elements that tensor-relay does not support.
    #[error("its elements have dtype {descr:?}: {why}")]
    Dtype {
        /// NumPy's name of the dtype, cut to a readable length.
        descr: String,
        /// The reason and the remedy.
        why: &'static str,
    },
    /// An unsupported shape.
    #[error("it has no usable shape: {0}")]
    Shape(#[from] ShapeError),
    /// Another number of bytes after the header than the header describes.
    #[error(
        "its header describes {described_bytes} bytes of elements, but {found_bytes} follow it: {}",
        data_length_hint(.described_bytes, .found_bytes)
    )]
    DataLength {
        /// The size by the header.
        described_bytes: u64,
        /// The actual size.
        found_bytes: u64,
    },
    /// A dtype that NumPy lacks.
    #[error("NumPy has no dtype {0}: save the tensor as safetensors")]
    Unwritable(Dtype),
}

fn data_length_hint(described_bytes: &u64, found_bytes: &u64) -> &'static str {
    match found_bytes < described_bytes {
        true => "was the file cut off?",
        false => "were several arrays written into one file?",
    }
}

/// The offset of the header's end. `prefix` is the first [`PREFIX_BYTES`] of a file of `file_bytes`, or all of a
/// shorter file.
///
/// # Errors
/// [`NpyError`] when the file is not an array file, is too short for its header, or has a header above the limit.
pub fn header_end(prefix: &[u8], file_bytes: u64) -> Result<usize, NpyError> {
    let start = header_start(prefix)?;
    let length = prefix.get(8..start).ok_or(NpyError::Magic)?;
    let header_bytes = length.iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte));
    let end = start as u64 + header_bytes;
    match () {
        () if end > file_bytes => Err(NpyError::HeaderLength { header_bytes, file_bytes }),
        () if header_bytes > HEADER_MAX_BYTES => Err(NpyError::HeaderTooLong { header_bytes }),
        () => Ok(end as usize),
    }
}

fn header_start(prefix: &[u8]) -> Result<usize, NpyError> {
    match prefix.strip_prefix(MAGIC) {
        Some([1, 0, ..]) => Ok(10),
        Some([2 | 3, 0, ..]) => Ok(12),
        Some([major, minor, ..]) => Err(NpyError::Version { major: *major, minor: *minor }),
        _ => Err(NpyError::Magic),
    }
}

/// Parses the header of a file of `file_bytes`; `head` is the file up to its [`header_end`].
///
/// # Errors
/// [`NpyError`] when the header is invalid, the dtype is unsupported, or the file has another size than the header
/// describes.
pub fn parse_header(head: &[u8], file_bytes: u64) -> Result<Header, NpyError> {
    let text = head.get(header_start(head)?..).ok_or(NpyError::Magic)?;
    let text = std::str::from_utf8(text).map_err(|_| NpyError::Header("it is not text"))?;
    let Fields { descr, fortran_order, dimensions } = Fields::parse(text)?;
    let dtype = parse_dtype(descr)?;
    let shape = Shape::new(&dimensions)?;
    let described_bytes = shape.byte_len(dtype)?;
    let found_bytes = file_bytes.saturating_sub(head.len() as u64);
    if described_bytes != found_bytes {
        return Err(NpyError::DataLength { described_bytes, found_bytes });
    }
    let order_matters = shape.elements() > 0 && dimensions.iter().filter(|d| **d > 1).count() > 1;
    Ok(Header { dtype, shape, fortran_order: fortran_order && order_matters, data_start: head.len() as u64 })
}

/// The head of a tensor's file, equal to the one that NumPy writes. The elements, in C order, follow it.
///
/// # Errors
/// [`NpyError::Unwritable`] for a dtype that NumPy lacks.
pub fn file_head(dtype: Dtype, shape: &Shape) -> Result<Vec<u8>, NpyError> {
    let descr = DTYPES
        .iter()
        .find(|(_, numpy_dtype)| *numpy_dtype == dtype)
        .ok_or(NpyError::Unwritable(dtype))?
        .0;
    let first_digits = shape.dimensions().first().map(|d| d.to_string().len());
    let growth = first_digits.map_or(0, |digits| GROWTH_DIGITS - digits);
    let mut text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {}, }}", tuple(shape));
    text.extend(std::iter::repeat_n(' ', growth));
    let unpadded = MAGIC.len() + 4 + text.len() + 1;
    text.extend(std::iter::repeat_n(' ', DATA_ALIGNMENT - unpadded % DATA_ALIGNMENT));
    text.push('\n');
    // At most 16 dimensions of 20 digits, so the length fits two bytes.
    let length = (text.len() as u16).to_le_bytes();
    Ok([&MAGIC[..], &[1, 0], &length, text.as_bytes()].concat())
}

/// The dimensions as Python writes a tuple: `()`, `(3,)`, `(3, 4)`.
fn tuple(shape: &Shape) -> String {
    let numbers: Vec<String> = shape.dimensions().iter().map(u64::to_string).collect();
    match &numbers[..] {
        [one] => format!("({one},)"),
        _ => format!("({})", numbers.join(", ")),
    }
}

/// Copies the elements of an array in Fortran order to C order.
///
/// # Panics
/// When `from` or `to` is not exactly as long as the tensor.
pub fn to_c_order(from: &[u8], to: &mut [u8], dtype: Dtype, shape: &Shape) {
    let width = dtype.bits() as usize / 8;
    let dimensions = shape.dimensions();
    assert_eq!(from.len() as u64, shape.elements() * width as u64, "the source has another size");
    assert_eq!(from.len(), to.len(), "the destination has another size");
    let mut strides = vec![width; dimensions.len()];
    for axis in 1..dimensions.len() {
        strides[axis] = strides[axis - 1] * dimensions[axis - 1] as usize;
    }
    let mut index = vec![0u64; dimensions.len()];
    let mut offset = 0;
    for element in to.chunks_exact_mut(width) {
        element.copy_from_slice(&from[offset..offset + width]);
        // `index` counts like an odometer: the last dimension advances fastest.
        for axis in (0..dimensions.len()).rev() {
            index[axis] += 1;
            offset += strides[axis];
            if index[axis] < dimensions[axis] {
                break;
            }
            offset -= strides[axis] * index[axis] as usize;
            index[axis] = 0;
        }
    }
}

/// The dtypes that NumPy has, with NumPy's names.
const DTYPES: &[(&str, Dtype)] = &[
    ("|b1", Dtype::Bool),
    ("|i1", Dtype::I8),
    ("|u1", Dtype::U8),
    ("<i2", Dtype::I16),
    ("<u2", Dtype::U16),
    ("<i4", Dtype::I32),
    ("<u4", Dtype::U32),
    ("<i8", Dtype::I64),
    ("<u8", Dtype::U64),
    ("<f2", Dtype::F16),
    ("<f4", Dtype::F32),
    ("<f8", Dtype::F64),
    ("<c8", Dtype::C64),
    ("<c16", Dtype::C128),
];

fn parse_dtype(descr: &str) -> Result<Dtype, NpyError> {
    match DTYPES.iter().find(|(name, _)| *name == descr) {
        Some((_, dtype)) => Ok(*dtype),
        None => Err(NpyError::Dtype { descr: descr.chars().take(60).collect(), why: refusal(descr) }),
    }
}

fn refusal(descr: &str) -> &'static str {
    let mut chars = descr.chars();
    match (chars.next(), chars.next()) {
        (Some('['), _) => {
            "structured arrays are several tensors in one; save each field as an array of its own"
        }
        (_, Some('O')) => "objects are pickled Python values, which are never read here; save numbers",
        (_, Some('S' | 'U' | 'a')) => "text is not a tensor; save it as a file beside the tensors",
        (_, Some('M' | 'm')) => "dates and times are not supported; save them as integers",
        (_, Some('V')) => {
            "void elements have no known dtype; NumPy saves bfloat16 and float8 arrays as such, so save them as safetensors"
        }
        (Some('>'), _) => {
            "big-endian elements are not supported; convert the array to little-endian with astype"
        }
        _ => "tensor-relay does not support it",
    }
}

/// The three entries of a header.
#[derive(Debug)]
struct Fields<'a> {
    descr: &'a str,
    fortran_order: bool,
    dimensions: Vec<u64>,
}

impl<'a> Fields<'a> {
    fn parse(text: &'a str) -> Result<Self, NpyError> {
        let mut text = Literal { rest: text };
        let (mut descr, mut fortran_order, mut dimensions) = (None, None, None);
        text.expect("{", "it is not a dictionary")?;
        while !text.eat("}") {
            let key = text.string()?;
            text.expect(":", "a key has no value")?;
            match key {
                "descr" => descr = Some(text.descr()?),
                "fortran_order" => fortran_order = Some(text.boolean()?),
                "shape" => dimensions = Some(text.dimensions()?),
                _ => return Err(NpyError::Header("it has a key that is not descr, fortran_order or shape")),
            }
            if !text.eat(",") {
                text.expect("}", "an entry has no end")?;
                break;
            }
        }
        if !text.rest.trim_start().is_empty() {
            return Err(NpyError::Header("the dictionary is followed by other text"));
        }
        let fields = descr.zip(fortran_order).zip(dimensions);
        let ((descr, fortran_order), dimensions) =
            fields.ok_or(NpyError::Header("descr, fortran_order or shape is missing"))?;
        Ok(Self { descr, fortran_order, dimensions })
    }
}

/// A parser of the Python literals in headers.
struct Literal<'a> {
    rest: &'a str,
}

impl<'a> Literal<'a> {
    fn eat(&mut self, token: &str) -> bool {
        let after = self.rest.trim_start().strip_prefix(token);
        self.rest = after.unwrap_or(self.rest);
        after.is_some()
    }

    fn expect(&mut self, token: &str, error: &'static str) -> Result<(), NpyError> {
        self.eat(token).then_some(()).ok_or(NpyError::Header(error))
    }

    fn string(&mut self) -> Result<&'a str, NpyError> {
        let quote = ["'", "\""].into_iter().find(|quote| self.eat(quote));
        let split = quote.and_then(|quote| self.rest.split_once(quote));
        let (text, rest) = split.ok_or(NpyError::Header("a string in quotes was expected"))?;
        self.rest = rest;
        Ok(text)
    }

    /// Parses a dtype's name. For the list of a structured dtype, the error quotes the list.
    fn descr(&mut self) -> Result<&'a str, NpyError> {
        match self.rest.trim_start() {
            list if list.starts_with('[') => {
                let list = list.split_inclusive(']').next().unwrap_or(list);
                Err(parse_dtype(list).expect_err("no dtype begins with a bracket"))
            }
            _ => self.string(),
        }
    }

    fn boolean(&mut self) -> Result<bool, NpyError> {
        if self.eat("True") {
            return Ok(true);
        }
        self.expect("False", "fortran_order is neither True nor False").map(|()| false)
    }

    fn dimensions(&mut self) -> Result<Vec<u64>, NpyError> {
        let mut dimensions = vec![];
        self.expect("(", "the shape is not a tuple")?;
        while !self.eat(")") {
            dimensions.push(self.number()?);
            if !self.eat(",") {
                self.expect(")", "the shape has no end")?;
                break;
            }
        }
        Ok(dimensions)
    }

    fn number(&mut self) -> Result<u64, NpyError> {
        let text = self.rest.trim_start();
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let number = text[..end]
            .parse()
            .map_err(|_| NpyError::Header("a dimension is not a number"))?;
        self.rest = &text[end..];
        // Python 2 wrote long integers with this suffix.
        self.eat("L");
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(bytes: &[u8]) -> Result<Header, NpyError> {
        let end = header_end(&bytes[..bytes.len().min(PREFIX_BYTES)], bytes.len() as u64)?;
        parse_header(&bytes[..end], bytes.len() as u64)
    }

    fn file(header: &str, data_bytes: usize) -> Vec<u8> {
        let length = (header.len() as u16).to_le_bytes();
        [&MAGIC[..], &[1, 0], &length, header.as_bytes(), &vec![0; data_bytes]].concat()
    }

    /// `numpy.save` of `zeros((3, 4), '<f4')`, by NumPy 2.
    #[test]
    fn heads_equal_those_of_numpy() {
        let head = file_head(Dtype::F32, &Shape::new(&[3, 4]).unwrap()).unwrap();
        let text = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }";
        let spaces = " ".repeat(128 - 10 - text.len() - 1);
        assert_eq!(head, [b"\x93NUMPY\x01\x00\x76\x00", text.as_bytes(), spaces.as_bytes(), b"\n"].concat());
        let one = file_head(Dtype::U8, &Shape::new(&[7]).unwrap()).unwrap();
        assert!(String::from_utf8_lossy(&one).contains("'shape': (7,), }"));
        let scalar = file_head(Dtype::Bool, &Shape::new(&[]).unwrap()).unwrap();
        assert!(
            String::from_utf8_lossy(&scalar)
                .contains("'descr': '|b1', 'fortran_order': False, 'shape': (), }")
        );
        assert_eq!(file_head(Dtype::Bf16, &Shape::new(&[]).unwrap()), Err(NpyError::Unwritable(Dtype::Bf16)));
    }

    #[test]
    fn all_header_styles_and_versions_are_parsed() {
        for header in [
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }   \n",
            "{'shape': (2,3), 'fortran_order': False, 'descr': '<f4'}",
            "{\"descr\": \"<f4\", \"fortran_order\": False, \"shape\": (2L, 3L)}\n",
        ] {
            let parsed = parse(&file(header, 24)).unwrap();
            assert_eq!((parsed.dtype, parsed.shape.dimensions()), (Dtype::F32, &[2, 3][..]), "{header}");
            assert_eq!(parsed.data_start as usize, 10 + header.len());
        }
        let header = b"{'descr': '<i8', 'fortran_order': True, 'shape': (2, 2)}";
        for version in [2, 3] {
            let length = (header.len() as u32).to_le_bytes();
            let bytes = [&MAGIC[..], &[version, 0], &length, header, &[0; 32]].concat();
            assert!(parse(&bytes).unwrap().fortran_order);
        }
    }

    #[test]
    fn fortran_order_is_false_if_both_orders_are_equal() {
        for (shape, bytes, expected) in
            [("(3,)", 3, false), ("(1, 3, 1)", 3, false), ("(2, 2)", 4, true), ("(2, 0)", 0, false)]
        {
            let header = format!("{{'descr': '|u1', 'fortran_order': True, 'shape': {shape}}}");
            assert_eq!(parse(&file(&header, bytes)).unwrap().fortran_order, expected, "{shape}");
        }
    }

    #[test]
    fn unsupported_dtypes_are_refused_with_a_reason() {
        for (descr, word) in [
            ("'>f4'", "big-endian"),
            ("'|O'", "pickled"),
            ("[('a', '<f4'), ('b', '<i4')]", "structured"),
            ("'<U5'", "text"),
            ("'<M8[ns]'", "times"),
            ("'<V2'", "bfloat16"),
            ("'<f16'", "does not support"),
            ("''", "does not support"),
        ] {
            let header = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': (0,)}}");
            let error = parse(&file(&header, 0)).unwrap_err();
            assert!(matches!(error, NpyError::Dtype { .. }) && error.to_string().contains(word), "{error}");
        }
    }

    #[test]
    fn hostile_headers_are_refused() {
        let good = file("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", 8);
        for cut in [0, 5, 7, 9, 30, good.len() - 1] {
            assert!(parse(&good[..cut]).is_err(), "{cut}");
        }
        assert!(matches!(parse(&[&good[..], b"x"].concat()), Err(NpyError::DataLength { .. })));
        assert!(matches!(parse(b"\x93NUMPY\x04\x00\0\0\0\0"), Err(NpyError::Version { major: 4, minor: 0 })));
        assert!(matches!(parse(b"\x93NUMPY\x02\x00\xff\xff\xff\xff"), Err(NpyError::HeaderLength { .. })));
        let too_long = header_end(b"\x93NUMPY\x02\x00\xff\xff\xff\xff", u64::MAX);
        assert!(matches!(too_long, Err(NpyError::HeaderTooLong { .. })));
        for bad in [
            "",
            "{",
            "{}",
            "[]",
            "{'descr': '<f4', 'fortran_order': False}",
            "{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': [2]}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999999,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 8)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} import os",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'more': 1}",
            "{'descr: '<f4', 'fortran_order': False, 'shape': (2,)}",
        ] {
            assert!(parse(&file(bad, 8)).is_err(), "{bad}");
        }
    }

    #[test]
    fn fortran_order_becomes_c_order() {
        let shape = Shape::new(&[2, 3]).unwrap();
        let mut c_order = [0; 12];
        // Columns (1, 4), (2, 5), (3, 6) of a matrix with the rows 1 2 3 and 4 5 6.
        to_c_order(&[1, 0, 4, 0, 2, 0, 5, 0, 3, 0, 6, 0], &mut c_order, Dtype::U16, &shape);
        assert_eq!(c_order, [1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0]);
    }

    proptest! {
        #[test]
        fn written_heads_are_parsed_back(dtype in 0..DTYPES.len(), dimensions in prop::collection::vec(0u64..5, 0..6)) {
            let (dtype, shape) = (DTYPES[dtype].1, Shape::new(&dimensions).unwrap());
            let mut bytes = file_head(dtype, &shape).unwrap();
            prop_assert_eq!(bytes.len() % DATA_ALIGNMENT, 0);
            let data_start = bytes.len() as u64;
            bytes.resize(bytes.len() + shape.byte_len(dtype).unwrap() as usize, 0);
            prop_assert_eq!(parse(&bytes).unwrap(), Header { dtype, shape, fortran_order: false, data_start });
        }

        /// Each element of the result is found at the C-order position of its Fortran-order index.
        #[test]
        fn every_element_keeps_its_index(dimensions in prop::collection::vec(1u64..5, 0..5)) {
            let shape = Shape::new(&dimensions).unwrap();
            let n = shape.elements() as usize;
            let from: Vec<u8> = (0..n).flat_map(|i| (i as u16).to_le_bytes()).collect();
            let mut to = vec![0; from.len()];
            to_c_order(&from, &mut to, Dtype::U16, &shape);
            for i in 0..n {
                let (mut rest, mut c_index, mut c_stride) = (i, 0, n);
                for d in &dimensions {
                    let d = *d as usize;
                    c_stride /= d;
                    c_index += rest % d * c_stride;
                    rest /= d;
                }
                prop_assert_eq!(&to[2 * c_index..][..2], &from[2 * i..][..2]);
            }
        }

        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
            let _ = parse(&[&MAGIC[..], &[1, 0], &bytes].concat());
        }

        #[test]
        fn arbitrary_text_does_not_panic(header in "[(){}':,a-zA-Z0-9_ \\[\\]<|-]{0,120}", data_bytes in 0usize..100) {
            let _ = parse(&file(&header, data_bytes));
        }
    }
}
