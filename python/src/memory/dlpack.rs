//! DLPack's C structures (`dlpack.h` 1.1, <https://github.com/dmlc/dlpack>), and the conversion of its dtypes to ours.

use std::ffi::{CStr, c_void};
use tensor_relay_client::Dtype;

/// Host memory.
pub(crate) const DEVICE_CPU: i32 = 1;
/// Memory of an NVIDIA GPU.
pub(crate) const DEVICE_CUDA: i32 = 2;
/// Host memory that CUDA has page-locked.
pub(crate) const DEVICE_CUDA_HOST: i32 = 3;
/// Memory that CUDA moves between the host and a GPU.
pub(crate) const DEVICE_CUDA_MANAGED: i32 = 13;

/// The numbers and names of DLPack's other kinds of devices.
const DEVICES: &[(i32, &str)] = &[
    (4, "OpenCL"),
    (7, "Vulkan"),
    (8, "Metal"),
    (9, "VPI"),
    (10, "ROCm"),
    (11, "page-locked ROCm host memory"),
    (12, "a vendor extension"),
    (14, "oneAPI"),
    (15, "WebGPU"),
    (16, "Hexagon"),
    (17, "MAIA"),
    (18, "Trainium"),
];

/// The name of a kind of device.
pub(crate) fn device_name(kind: i32) -> &'static str {
    let found = DEVICES.iter().find(|(number, _)| *number == kind);
    found.map_or("an unknown kind of device", |(_, name)| name)
}

/// The version of these structures. All versions with the same major number have the same layout.
pub(crate) const VERSION: Version = Version { major: 1, minor: 1 };

/// In `VersionedTensor::flags`: the memory is read-only.
pub(crate) const READ_ONLY: u64 = 1;
/// In `VersionedTensor::flags`: the memory is a copy for this consumer.
pub(crate) const IS_COPIED: u64 = 2;

/// The names of a capsule before and after a consumer has taken its contents.
pub(crate) const VERSIONED: Names = Names { unused: c"dltensor_versioned", used: c"used_dltensor_versioned" };
/// The names of a capsule of DLPack before 1.0.
pub(crate) const LEGACY: Names = Names { unused: c"dltensor", used: c"used_dltensor" };

pub(crate) struct Names {
    pub(crate) unused: &'static CStr,
    pub(crate) used: &'static CStr,
}

/// `DLDevice`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Device {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DataType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Tensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: Device,
    pub(crate) ndim: i32,
    pub(crate) dtype: DataType,
    pub(crate) shape: *mut i64,
    /// In elements. May be null in old versions: the tensor is then contiguous.
    pub(crate) strides: *mut i64,
    pub(crate) byte_offset: u64,
}

/// `DLPackVersion`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Version {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
pub(crate) struct VersionedTensor {
    pub(crate) version: Version,
    pub(crate) context: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut Self)>,
    pub(crate) flags: u64,
    pub(crate) tensor: Tensor,
}

/// `DLManagedTensor`.
#[repr(C)]
pub(crate) struct LegacyTensor {
    pub(crate) tensor: Tensor,
    pub(crate) context: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLDataTypeCode` and the number of bits of every dtype whose elements are whole bytes.
const CODES: &[(u8, u8, Dtype)] = &[
    (0, 8, Dtype::I8),
    (0, 16, Dtype::I16),
    (0, 32, Dtype::I32),
    (0, 64, Dtype::I64),
    (1, 8, Dtype::U8),
    (1, 16, Dtype::U16),
    (1, 32, Dtype::U32),
    (1, 64, Dtype::U64),
    (2, 16, Dtype::F16),
    (2, 32, Dtype::F32),
    (2, 64, Dtype::F64),
    (4, 16, Dtype::Bf16),
    (5, 32, Dtype::C32),
    (5, 64, Dtype::C64),
    (5, 128, Dtype::C128),
    (6, 8, Dtype::Bool),
    (7, 8, Dtype::F8E3M4),
    (8, 8, Dtype::F8E4M3),
    (9, 8, Dtype::F8E4M3B11Fnuz),
    (10, 8, Dtype::F8E4M3Fn),
    (11, 8, Dtype::F8E4M3Fnuz),
    (12, 8, Dtype::F8E5M2),
    (13, 8, Dtype::F8E5M2Fnuz),
    (14, 8, Dtype::F8E8M0),
];

/// Two floats of 4 bits in a byte: the export of PyTorch's `float4_e2m1fn_x2`.
const PAIR: DataType = DataType { code: 17, bits: 4, lanes: 2 };

/// Our dtype for a DLPack type, and how many of our elements one DLPack element contains.
pub(crate) fn from_dlpack(data_type: DataType) -> Option<(Dtype, u64)> {
    if data_type == PAIR {
        return Some((Dtype::F4E2M1, 2));
    }
    let DataType { code, bits, lanes } = data_type;
    let found = CODES
        .iter()
        .find(|(known_code, known_bits, _)| (*known_code, *known_bits, 1) == (code, bits, lanes));
    found.map(|(.., dtype)| (*dtype, 1))
}

/// The DLPack type for our dtype, and how many of our elements one DLPack element contains. `None` for elements of less
/// than a byte that DLPack's consumers do not support.
pub(crate) fn to_dlpack(dtype: Dtype) -> Option<(DataType, u64)> {
    if dtype == Dtype::F4E2M1 {
        return Some((PAIR, 2));
    }
    let found = CODES.iter().find(|(.., ours)| *ours == dtype);
    found.map(|(code, bits, _)| (DataType { code: *code, bits: *bits, lanes: 1 }, 1))
}
