"""Every supported dtype of every framework is published and received unchanged, and the consumer copies nothing."""

import gc

import ml_dtypes
import numpy as np
import pytest
from conftest import received

import tensor_relay

NUMPY = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 complex128".split()
ML_DTYPES = (
    "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu"
).split()
OURS = {
    "bool": "bool", "int8": "i8", "uint8": "u8", "int16": "i16", "uint16": "u16", "int32": "i32", "uint32": "u32",
    "int64": "i64", "uint64": "u64", "float16": "f16", "float32": "f32", "float64": "f64", "complex64": "c64",
    "complex128": "c128", "bfloat16": "bf16",
}  # fmt: skip


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name)) if name in ML_DTYPES else np.dtype(name)


def make_array(name, shape=(3, 5)):
    """An array of different bit patterns."""
    dtype = dtype_of(name)
    if name == "bool":
        return np.arange(np.prod(shape)).reshape(shape) % 3 == 0
    bits = np.arange(np.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return bits.view(dtype).reshape(shape)


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8).tobytes()


def address(array):
    return np.asarray(array).__array_interface__["data"][0]


@pytest.mark.parametrize("name", NUMPY + ML_DTYPES)
def test_numpy_arrays_are_unchanged(relay, client, name):
    sent = make_array(name)
    relay.publish("t", {"x": sent, "scalar": sent[1, 2].reshape(()), "empty": sent[:0]})
    snapshot = received(client)
    assert snapshot["x"].dtype == OURS.get(name, name.replace("float8", "f8"))
    assert snapshot["x"].shape == (3, 5) and snapshot["scalar"].shape == () and snapshot["empty"].shape == (0, 5)
    got = snapshot.numpy()
    assert got["x"].dtype == sent.dtype and got["empty"].dtype == sent.dtype
    assert bits(got["x"]) == bits(sent) and bits(got["scalar"]) == bits(sent[1, 2])
    assert got["empty"].shape == (0, 5)
    assert address(got["x"]) == address(snapshot["x"].raw.numpy()), "no copy"
    assert address(got["x"]) % 256 == 0


@pytest.mark.parametrize("name", NUMPY)
def test_tensors_support_the_buffer_protocol(relay, client, name):
    sent = make_array(name)
    relay.publish("t", {"x": sent})
    tensor = received(client)["x"]
    view = memoryview(tensor)
    assert (view.shape, view.strides, view.nbytes) == ((3, 5), sent.strides, sent.nbytes)
    assert np.asarray(tensor).dtype == sent.dtype
    assert bits(np.asarray(tensor)) == bits(sent)
    # A view keeps the memory, whatever else is dropped.
    relay.publish("t", {"x": np.zeros_like(sent)})
    del tensor
    gc.collect()
    received(client)
    assert bytes(view) == sent.tobytes()


def test_dtypes_without_a_buffer_format_are_refused(relay, client):
    relay.publish("t", {"x": make_array("bfloat16")})
    tensor = received(client)["x"]
    with pytest.raises(BufferError, match="take `bits` or `raw`"):
        memoryview(tensor)
    assert bytes(memoryview(tensor.bits)) == bytes(memoryview(tensor.raw)) == make_array("bfloat16").tobytes()
    assert tensor.bits.shape == (3, 5) and tensor.raw.shape == (30,)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn"])
def test_asarray_makes_arrays_of_numbers(relay, client, name):
    sent = make_array(name)
    relay.publish("t", {"x": sent})
    tensor = received(client)["x"]
    array = np.asarray(tensor)
    assert (array.dtype, array.shape, bits(array)) == (sent.dtype, (3, 5), bits(sent))
    assert address(array) == address(tensor.raw.numpy()), "no copy"
    assert np.array(tensor).ctypes.data != address(array)
    assert np.asarray(tensor, dtype="f8").tolist() == sent.astype("f8").tolist()


def test_plain_buffers_are_published(relay, client):
    import array as plain

    sent = {"bytes": b"abc", "bytearray": bytearray(b"xyz"), "doubles": plain.array("d", [1.5, 2.5])}
    relay.publish("t", sent)
    got = received(client)
    assert bytes(memoryview(got["bytes"])) == b"abc" and bytes(memoryview(got["bytearray"])) == b"xyz"
    assert memoryview(got["doubles"]).tolist() == [1.5, 2.5]


TORCH = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 bfloat16 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
).split()


@pytest.mark.parametrize("name", TORCH)
def test_pytorch_tensors_are_unchanged(relay, client, name):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    raw = torch.arange(4 * 6 * dtype.itemsize, dtype=torch.uint8)
    sent = (raw % 2).bool().reshape(4, 6) if name == "bool" else raw.view(dtype).reshape(4, 6)
    scalar = {} if name.endswith("_x2") else {"scalar": sent[1, 2]}
    relay.publish("t", {"x": sent, "transposed": sent.t(), **scalar})
    snapshot = received(client)
    got = snapshot.torch()
    assert all(got[name].shape == () for name in scalar)
    assert got["x"].dtype == dtype and got["x"].shape == (4, 6) and got["transposed"].shape == (6, 4)
    assert torch.equal(got["x"].view(torch.uint8), sent.view(torch.uint8))
    assert torch.equal(got["transposed"].contiguous().view(torch.uint8), sent.t().contiguous().view(torch.uint8))
    assert got["x"].data_ptr() == snapshot["x"].raw.torch().data_ptr(), "no copy"


JAX = "bool int8 uint8 int16 uint16 int32 uint32 float16 float32 bfloat16 complex64".split()
JAX += [name for name in ML_DTYPES if name.startswith("float8")]


@pytest.mark.parametrize("name", JAX)
def test_jax_arrays_are_unchanged(relay, client, name):
    jax = pytest.importorskip("jax")
    sent = jax.numpy.asarray(make_array(name))
    assert sent.dtype == dtype_of(name)
    relay.publish("t", {"x": sent})
    snapshot = received(client)
    got = snapshot.jax()["x"]
    assert got.dtype == sent.dtype and bits(np.asarray(got)) == bits(np.asarray(sent))
    assert got.unsafe_buffer_pointer() == address(snapshot["x"].raw.numpy()), "no copy"


def test_casts_are_made_by_the_framework(relay, client):
    torch = pytest.importorskip("torch")
    jax = pytest.importorskip("jax")
    sent = {
        "torch": torch.randn(7, 3, requires_grad=True),
        "numpy": np.random.default_rng(1).normal(size=(7, 3)),
        "jax": jax.numpy.linspace(0, 1, 21),
        "integers": np.arange(4),
    }
    relay.publish("t", sent, dtype="bf16")
    got = received(client)
    assert {name: tensor.dtype for name, tensor in got.items()} == {
        "torch": "bf16", "numpy": "bf16", "jax": "bf16", "integers": "i64",
    }  # fmt: skip
    assert torch.equal(got["torch"].torch(), sent["torch"].detach().bfloat16())
    assert bits(got["numpy"].numpy()) == bits(sent["numpy"].astype(ml_dtypes.bfloat16))
    assert bits(got["jax"].numpy()) == bits(np.asarray(sent["jax"].astype("bfloat16")))
    relay.publish("t", {"x": sent["numpy"]}, dtype="f8_e4m3fn")
    assert bits(received(client)["x"].numpy()) == bits(sent["numpy"].astype(ml_dtypes.float8_e4m3fn))
    large = np.array([1, 448, 464, 465, -1e5, np.inf, -np.inf, np.nan], "f4")
    frameworks = {"numpy": large, "torch": torch.from_numpy(large.copy()), "jax": jax.numpy.asarray(large)}
    frameworks["bf16"] = large.astype(ml_dtypes.bfloat16)
    relay.publish("t", frameworks, dtype="f8_e4m3fn")
    for name, tensor in received(client).items():
        expected = [1, 448, 448, 448, -448, 448, -448, np.nan]
        np.testing.assert_array_equal(tensor.numpy().astype("f4"), np.array(expected, "f4"), err_msg=name)
    with pytest.raises(tensor_relay.RequestError, match='there is no dtype "bfloat"'):
        relay.publish("t", sent, dtype="bfloat")
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="cannot be cast to i32"):
        relay.publish("t", sent, dtype=np.int32)
    for tensor in frameworks.values():
        with pytest.raises(tensor_relay.UnsupportedTensorError, match="f8_e8m0fnu has no sign"):
            relay.publish("t", {"x": tensor}, dtype="f8_e8m0fnu")


def test_dtypes_have_the_names_of_all_frameworks(relay, client):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    names = {
        "bf16": ["bf16", "bfloat16", "BF16", "torch.bfloat16", torch.bfloat16, jax.numpy.bfloat16, ml_dtypes.bfloat16,
                 np.dtype(ml_dtypes.bfloat16)],
        "f32": ["f32", "float32", "F32", torch.float32, torch.float, np.float32, np.dtype("float32"), jax.numpy.float32],
        "f8_e4m3fn": ["f8_e4m3fn", "float8_e4m3fn", "F8_E4M3", torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn],
    }  # fmt: skip
    for ours, theirs in names.items():
        for name in theirs:
            relay.publish("t", {"x": np.linspace(0, 1, 5)}, dtype=name)
            assert received(client)["x"].dtype == ours, name
    for invalid in ("qint8", torch.qint8, 5, object()):
        with pytest.raises(tensor_relay.RequestError, match="there is no dtype"):
            relay.publish("t", {"x": np.zeros(3)}, dtype=invalid)


def test_another_byte_order_is_refused(relay):
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="another machine's byte order") as refused:
        relay.publish("t", {"x": np.array([1, 2], dtype=">i4")})
    assert "newbyteorder" in str(refused.value)


@pytest.mark.parametrize("atomic", [True, False])
def test_another_byte_order_is_not_received_into(relay, client, atomic):
    relay.publish("t", {"x": np.array([1, 2], dtype="i4")})
    with pytest.raises(tensor_relay.TargetError, match="receive into an array of this machine's") as refused:
        client.get("t", out={"x": np.array([1, 2], dtype=">i4")}, atomic=atomic)
    assert "astype" not in str(refused.value), "a copy would not be written"


SUB_BYTE = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]


@pytest.mark.parametrize("make, words", [
    *[(lambda torch, name=name: torch.empty(4, dtype=getattr(torch, name)), f"PyTorch's {name}: .*view") for name in SUB_BYTE],
    (lambda torch: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "int_repr"),
    (lambda torch: torch.eye(3).to_sparse(), "to_dense"), (lambda torch: torch.eye(3).to_sparse_csr(), "to_dense"),
    (lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind"),
    (lambda torch: torch.ones(3, device="meta"), "meta"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_unsupported_pytorch_tensors_are_refused(relay, client, make, words):
    torch = pytest.importorskip("torch")
    try:
        value = make(torch)
    except (AttributeError, RuntimeError) as missing:
        pytest.skip(f"this PyTorch cannot make such a tensor: {missing}")
    with pytest.raises(tensor_relay.UnsupportedTensorError, match=f"odd .*{words}"):
        relay.publish("t", {"odd": value})
    is_copy = words in ("int_repr", "to_dense")  # Nothing would read such a copy back.
    advice = "receive into a plain tensor, and copy from that" if is_copy else words
    with pytest.raises(tensor_relay.TargetError, match=f"odd .*{advice}") as refused:
        client.subscribe("t", out={"odd": value})
    assert not is_copy or words not in str(refused.value)
    # The relay still works after the refusals.
    relay.publish("t", {"bits": torch.empty(4, dtype=torch.uint8)})


def test_masked_arrays_are_refused(relay, client):
    masked = np.ma.array([1, 2, 3], mask=[0, 1, 0])
    for value in (masked, np.ma.masked):
        with pytest.raises(tensor_relay.UnsupportedTensorError, match="odd .*masks are not published"):
            relay.publish("t", {"odd": value})
    with pytest.raises(tensor_relay.TargetError, match="masks are not published: receive into a plain tensor"):
        client.subscribe("t", out={"odd": masked})
    relay.publish("t", {"x": masked.filled(0), "x.mask": masked.mask})
    assert received(client)["x"].numpy().tolist() == [1, 0, 3]


@pytest.mark.parametrize("value", [
    np.array([object()]), np.array(["text"]), np.array([b"a"]), np.zeros(1, "m8[s]"), np.zeros(1, "i4, f4"), np.longdouble(1), np.array([1], dtype=">i4"), np.zeros(3, ml_dtypes.int4), [1, 2], {"a": 1},
    np.datetime64("2026-01-01"), lambda: 1,
])  # fmt: skip
def test_the_error_for_an_unsupported_value_names_its_tensor(relay, value):
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="model.odd") as refused:
        relay.publish("t", {"fine": np.zeros(3), "model.odd": value})
    assert isinstance(refused.value, TypeError)
    foreign = ("does not give access", "DLPack only supports")
    assert not any(words in str(refused.value) for words in foreign), "the words are our own"
    with tensor_relay.connect(relay.ticket) as client:
        assert client.topics() == [], "nothing was published"
