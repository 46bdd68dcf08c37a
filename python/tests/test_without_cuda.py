"""A machine without CUDA: host memory works, and calls that need a GPU report what is missing."""

from conftest import python, wait_for_exit

PROGRAM = """
import numpy, pytest, sys, tensor_relay

class OnGpu:
    def __dlpack_device__(self):
        return (2, 0)
    def __dlpack__(self, **options):
        raise AssertionError("must not be called: there is no stream to wait on")

relay = tensor_relay.serve("127.0.0.1:0", state_dir=sys.argv[1])
with pytest.raises(tensor_relay.UnsupportedTensorError, match="weights .* lies on cuda:0, .* libcuda.so.1 could not be loaded"):
    relay.publish("t", {"host": numpy.ones(3), "weights": OnGpu()})
relay.publish("t", {"host": numpy.ones(3)})
client = tensor_relay.connect(relay.ticket)
assert client.subscribe("t").next(10)["host"].numpy().sum() == 3
with pytest.raises(tensor_relay.TargetError, match="weights .*libcuda.so.1 could not be loaded"):
    client.subscribe("t", out={"weights": OnGpu()})
for begin in (
    lambda: tensor_relay.serve("127.0.0.1:0", state_dir=sys.argv[1], device="cuda:0"),
    lambda: tensor_relay.connect(relay.ticket, device="cuda:0"),
):
    with pytest.raises(tensor_relay.TensorRelayError, match="libcuda.so.1 could not be loaded.*Install NVIDIA's driver"):
        begin()
"""


def test_missing_cuda_is_reported(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for name in ("libcuda.so", "libcuda.so.1"):  # Hides the machine's own libraries.
        (tmp_path / name).write_text("This is no library.")
    with python(program, tmp_path / "state", LD_LIBRARY_PATH=str(tmp_path)) as running:
        wait_for_exit(running)
