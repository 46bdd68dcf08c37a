"""Programs that exit with open objects on a GPU: memory is freed or left to the driver, without hangs or errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, tensor_relay
sys.path.append(sys.argv[2])
from cuda_by_hand import Driver, Gpu, Imported
gpu = Gpu(Driver())
relay = tensor_relay.serve("127.0.0.1:0", state_dir=sys.argv[1], pinned_bytes=16 << 20)
relay.publish("t", {"w": gpu.array(bytes(1 << 20))}, hold="borrow")
client = tensor_relay.connect(relay.ticket, device="cuda:0", pinned_bytes=16 << 20)
snapshot = client.subscribe("t").next(30)
imported = Imported(gpu, snapshot["w"], gpu.stream())
out = client.subscribe("t", out={"w": gpu.array(bytes(1 << 20))}, atomic=False)
out.next(30)
try:
    out.next(0.01)
except tensor_relay.RelayTimeoutError:
    print("timed out")
if sys.argv[3] == "drop":
    del snapshot, imported, out
"""


@pytest.mark.parametrize("how", ["drop", "hold"])
def test_a_program_exits_with_open_objects(driver_library, tmp_path, how):
    program, library = tmp_path / "program.py", tmp_path / "libcuda.so.1"
    program.write_text(PROGRAM)
    library.symlink_to(driver_library.path)
    (tmp_path / "libcuda.so").symlink_to(library)
    environment = {
        "LD_LIBRARY_PATH": str(tmp_path), "TENSOR_RELAY_FAKE_CUDA": "1", "FAKE_CUDA_REPORT": str(tmp_path / "report"),
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, program, tmp_path / "state", Path(__file__).parent, how],
        env=os.environ | environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "timed out\n"), result.stderr
    report = (tmp_path / "report").read_text()
    assert "violations=0" in report, report
    if how == "drop":
        assert "device_blocks=0 device_bytes=0 shared=0 host_blocks=0" in report, report
