"""A minimal framework with GPU arrays: the CUDA driver API and DLPack by ctypes, without PyTorch.

It behaves as other frameworks do: work goes to a current stream, and arrays are exported in DLPack capsules, versioned
or legacy, for the stream that the consumer names.
"""

import contextlib
import ctypes
import math
from ctypes import CFUNCTYPE, POINTER, Structure, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

CUDA = 2
LEGACY = 1

# DLPack's type code and bits for each dtype of tensor_relay.
DTYPES = {
    "i8": (0, 8), "i16": (0, 16), "i32": (0, 32), "i64": (0, 64), "u8": (1, 8), "u16": (1, 16), "u32": (1, 32),
    "u64": (1, 64), "f16": (2, 16), "f32": (2, 32), "f64": (2, 64), "bf16": (4, 16), "c64": (5, 64), "c128": (5, 128),
    "bool": (6, 8), "f8_e4m3fn": (10, 8), "f8_e5m2": (12, 8), "f8_e8m0fnu": (14, 8),
}  # fmt: skip


class CudaError(Exception):
    pass


class Driver:
    """The CUDA driver API."""

    def __init__(self, library="libcuda.so.1"):
        self._library = ctypes.CDLL(library)
        self.call("cuInit", 0)

    def call(self, name, *arguments):
        code = getattr(self._library, name)(*arguments)
        if code:
            raise CudaError(f"{name} returned {code}")

    def create(self, name, kind, *arguments):
        """Calls a function that returns a value through its first argument, a pointer to the type `kind`."""
        value = kind()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value


class Gpu:
    """A GPU's primary context, and the current stream."""

    def __init__(self, driver, ordinal=0):
        self.driver, self.ordinal = driver, ordinal
        self.context = driver.create("cuDevicePrimaryCtxRetain", c_void_p, ordinal)
        self.current = LEGACY
        self.streams = []

    def close(self):
        for stream in self.streams:
            self("cuStreamDestroy_v2", c_void_p(stream))
        self.driver.call("cuDevicePrimaryCtxRelease_v2", self.ordinal)

    def name(self):
        """The GPU's model name."""
        text = ctypes.create_string_buffer(100)
        self("cuDeviceGetName", text, c_int(len(text)), c_int(self.ordinal))
        return text.value.decode()

    def __call__(self, name, *arguments):
        self.driver.call("cuCtxSetCurrent", c_void_p(self.context))
        self.driver.call(name, *arguments)

    def create(self, name, kind, *arguments):
        value = kind()
        self(name, ctypes.byref(value), *arguments)
        return value.value

    def stream(self):
        """A new non-blocking stream."""
        self.streams.append(self.create("cuStreamCreate", c_void_p, c_uint32(1)))
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream):
        """Makes this stream the current one within the block."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def wait_for_current(self, stream):
        """Makes `stream` wait for the work queued on the current stream."""
        event = self.create("cuEventCreate", c_void_p, c_uint32(2))
        self("cuEventRecord", c_void_p(event), c_void_p(self.current))
        self("cuStreamWaitEvent", c_void_p(stream), c_void_p(event), c_uint32(0))
        self("cuEventDestroy_v2", c_void_p(event))

    def synchronize(self):
        self("cuStreamSynchronize", c_void_p(self.current))

    def array(self, content, dtype="u8", shape=None):
        """An array with this content: bytes, or any object with the buffer protocol."""
        content = bytes(content)
        if shape is None:
            shape = (len(content) * 8 // DTYPES[dtype][1],)
        array = Array(self, len(content), dtype, shape)
        if content:
            self("cuMemcpyHtoD_v2", c_uint64(array.address), content, c_size_t(len(content)))
        return array

    def empty(self, nbytes):
        """An array of bytes without content."""
        return Array(self, nbytes, "u8", (nbytes,))

    def copy(self, to, source, nbytes):
        """Copies on the current stream."""
        self("cuMemcpyDtoDAsync_v2", c_uint64(to), c_uint64(source), c_size_t(nbytes), c_void_p(self.current))

    def read(self, address, nbytes):
        """The bytes at an address, after the current stream's work has ended."""
        out = ctypes.create_string_buffer(nbytes)
        self.synchronize()
        if nbytes:
            self("cuMemcpyDtoH_v2", out, c_uint64(address), c_size_t(nbytes))
        return out.raw


class Array:
    """An array on a GPU, freed when neither Python nor a DLPack consumer refers to it any more."""

    def __init__(self, gpu, nbytes, dtype, shape, *, base=None, strides=None, offset=0):
        self.gpu, self.nbytes, self.dtype, self.shape, self.strides, self.base = gpu, nbytes, dtype, shape, strides, base
        if base:
            self.address = base.address + offset
        else:
            self.address = gpu.create("cuMemAlloc_v2", c_uint64, c_size_t(nbytes)) if nbytes else 0
        self.supports_dlpack_versions, self.kind = True, CUDA

    def view(self, shape, strides=None, offset=0):
        """The same memory in another shape; strides in elements, offset in bytes."""
        nbytes = math.prod(shape) * DTYPES[self.dtype][1] // 8
        return Array(self.gpu, nbytes, self.dtype, shape, base=self, strides=strides, offset=offset)

    def bytes(self):
        return self.gpu.read(self.address, self.nbytes)

    def __del__(self):
        if self.base is None and self.address:
            with contextlib.suppress(CudaError):  # A broken GPU cannot free memory.
                self.gpu("cuMemFree_v2", c_uint64(self.address))

    def __dlpack_device__(self):
        return self.kind, self.gpu.ordinal

    def __dlpack__(self, *, stream=None, **options):
        if options and not self.supports_dlpack_versions:
            raise TypeError("unexpected keyword argument")
        if stream != -1:
            self.gpu.wait_for_current(LEGACY if stream is None else stream)
        return _capsule(self, options.get("max_version") is not None)


class Imported:
    """A tensor imported by DLPack, until it is closed."""

    def __init__(self, gpu, tensor, stream=None, **options):
        stream = gpu.current if stream is None else stream
        capsule = tensor.__dlpack__(stream=stream, **options)
        self.is_versioned = bool(_valid(capsule, _VERSIONED))
        name, used = (_VERSIONED, _USED_VERSIONED) if self.is_versioned else (_LEGACY, _USED_LEGACY)
        pointer = _pointer(capsule, name)
        _rename(capsule, used)
        self._managed = ctypes.cast(pointer, POINTER(_Versioned if self.is_versioned else _Managed))
        tensor = self._managed.contents.tensor
        self.device = tensor.device.kind, tensor.device.id
        self.shape = tuple(tensor.shape[: tensor.ndim])
        self.code = tensor.dtype.code, tensor.dtype.bits
        self.address = (tensor.data or 0) + tensor.byte_offset
        self.nbytes = math.prod(self.shape) * tensor.dtype.bits * tensor.dtype.lanes // 8
        self.gpu = gpu

    def bytes(self):
        if self.device[0] == CUDA:
            return self.gpu.read(self.address, self.nbytes)
        return ctypes.string_at(self.address, self.nbytes)

    def close(self):
        managed, self._managed = self._managed, None
        if managed:
            _Deleter(managed.contents.deleter)(ctypes.cast(managed, c_void_p))

    def __del__(self):
        self.close()


class _Device(Structure):
    _fields_ = [("kind", c_int32), ("id", c_int32)]


class _DataType(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class _Tensor(Structure):
    _fields_ = [
        ("data", c_void_p), ("device", _Device), ("ndim", c_int32), ("dtype", _DataType), ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)), ("byte_offset", c_uint64),
    ]  # fmt: skip


class _Managed(Structure):
    _fields_ = [("tensor", _Tensor), ("context", c_void_p), ("deleter", c_void_p)]


class _Versioned(Structure):
    _fields_ = [
        ("major", c_uint32), ("minor", c_uint32), ("context", c_void_p), ("deleter", c_void_p), ("flags", c_uint64),
        ("tensor", _Tensor),
    ]  # fmt: skip


_Deleter = CFUNCTYPE(None, c_void_p)
_LEGACY, _USED_LEGACY = b"dltensor", b"used_dltensor"
_VERSIONED, _USED_VERSIONED = b"dltensor_versioned", b"used_dltensor_versioned"

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [c_void_p, ctypes.c_char_p, c_void_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = c_void_p, [ctypes.py_object, ctypes.c_char_p]
_valid = ctypes.pythonapi.PyCapsule_IsValid
_valid.restype, _valid.argtypes = c_int, [ctypes.py_object, ctypes.c_char_p]
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.restype, _rename.argtypes = c_int, [ctypes.py_object, ctypes.c_char_p]

# The exported tensors that consumers have not deleted yet, by address.
lent_tensors = {}


@_Deleter
def _delete(managed):
    # Drops the array first, whose destructor may run now: other threads must see the entry until the destructor has
    # ended.
    lent_tensors[managed] = None
    del lent_tensors[managed]


def _capsule(array, is_versioned):
    shape = (c_int64 * len(array.shape))(*array.shape)
    strides = None if array.strides is None else (c_int64 * len(array.shape))(*array.strides)
    managed = (_Versioned if is_versioned else _Managed)()
    tensor = managed.tensor
    # A view has its base's address and an offset, as in some frameworks.
    tensor.data = array.base.address if array.base else array.address
    tensor.byte_offset = array.address - (tensor.data or 0)
    tensor.device = _Device(array.kind, array.gpu.ordinal)
    tensor.ndim = len(array.shape)
    tensor.dtype = _DataType(*DTYPES[array.dtype], 1)
    tensor.shape = ctypes.cast(shape, POINTER(c_int64))
    if strides is not None:
        tensor.strides = ctypes.cast(strides, POINTER(c_int64))
    managed.deleter = ctypes.cast(_delete, c_void_p).value
    if is_versioned:
        managed.major, managed.minor = 1, 0
    lent_tensors[ctypes.addressof(managed)] = managed, array, shape, strides
    return _new(ctypes.addressof(managed), _VERSIONED if is_versioned else _LEGACY, None)
