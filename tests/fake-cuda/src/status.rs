use std::ffi::CStr;

/// A `CUresult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) u32);

/// The result of a call, with the status as its error.
pub(crate) type Answer<T = ()> = Result<T, Status>;

/// Prefixes a name with `CUDA_ERROR_`, except for `CUDA_SUCCESS`.
macro_rules! named {
    (SUCCESS) => {
        c"CUDA_SUCCESS"
    };
    ($name:ident) => {
        const {
            let name: &str = concat!("CUDA_ERROR_", stringify!($name), "\0");
            match CStr::from_bytes_with_nul(name.as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name of an error has a zero byte inside"),
            }
        }
    };
}
macro_rules! statuses {
    ($($name:ident = $code:literal, $text:literal;)*) => {
        impl Status {
            $(pub(crate) const $name: Self = Self($code);)*

            /// The name in CUDA's header, and the real driver's description. `None` for unknown codes.
            pub(crate) fn name_and_text(self) -> Option<(&'static CStr, &'static CStr)> {
                match self {
                    $(Self::$name => Some((named!($name), $text)),)*
                    _ => None,
                }
            }
        }
    };
}

statuses! {
    SUCCESS = 0, c"no error";
    INVALID_VALUE = 1, c"invalid argument";
    OUT_OF_MEMORY = 2, c"out of memory";
    NOT_INITIALIZED = 3, c"initialization error";
    STUB_LIBRARY = 34, c"CUDA driver is a stub library";
    NO_DEVICE = 100, c"no CUDA-capable device is detected";
    INVALID_DEVICE = 101, c"invalid device ordinal";
    INVALID_CONTEXT = 201, c"invalid device context";
    ECC_UNCORRECTABLE = 214, c"uncorrectable ECC error encountered";
    PEER_ACCESS_UNSUPPORTED = 217, c"peer access is not supported between these two devices";
    INVALID_HANDLE = 400, c"invalid resource handle";
    NOT_READY = 600, c"device not ready";
    ILLEGAL_ADDRESS = 700, c"an illegal memory access was encountered";
    CONTEXT_IS_DESTROYED = 709, c"context is destroyed";
    HOST_MEMORY_ALREADY_REGISTERED = 712, c"part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, c"pointer does not correspond to a registered memory region";
    LAUNCH_FAILED = 719, c"unspecified launch failure";
    NOT_PERMITTED = 800, c"operation not permitted";
    NOT_SUPPORTED = 801, c"operation not supported";
    SYSTEM_NOT_READY = 802, c"system not yet initialized";
    SYSTEM_DRIVER_MISMATCH = 803, c"system has unsupported display driver / cuda driver combination";
    UNKNOWN = 999, c"unknown error";
}

impl Status {
    /// The code that a call returns.
    pub(crate) fn of(answer: Answer) -> u32 {
        answer.err().unwrap_or(Self::SUCCESS).0
    }
}
