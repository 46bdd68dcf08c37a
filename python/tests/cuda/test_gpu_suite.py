"""Every part of `bench/gpu/run frameworks`, in small sizes: on the fake CUDA driver, or on the host what needs a real
GPU otherwise. A part that can run on neither is skipped with its reason."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import wait_until

SUITE = Path(__file__).resolve().parents[3] / "bench" / "gpu" / "frameworks.py"
sys.path.insert(0, str(SUITE.parent))

import frameworks  # noqa: E402

# These use the CUDA driver without a framework. Frameworks refuse the fake driver.
ON_THE_FAKE_DRIVER = {"ctypes_arrays", "lanes", "socket", "ssl", "gloo", "nixl"}


def environment(driver_library, folder):
    """The environment of a process that finds the fake driver where it looks for a real one."""
    folder.mkdir()
    for name in ("libcuda.so", "libcuda.so.1"):
        (folder / name).symlink_to(Path(driver_library.path).resolve())
    paths = filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")])
    return os.environ | {"LD_LIBRARY_PATH": ":".join(paths), "TENSOR_RELAY_FAKE_CUDA": "1"}


@pytest.mark.parametrize("part", [part.__name__ for part in frameworks.PARTS])
def test_each_part_runs_alone(driver_library, tmp_path, part):
    is_fake = part in ON_THE_FAKE_DRIVER
    out = tmp_path / "folders" / "that it makes"
    words = [sys.executable, SUITE, "--quick", f"--parts={part}", f"--out={out}"]
    words.append(f"--device={'cuda:0' if is_fake else 'cpu'}")
    env = environment(driver_library, tmp_path / "driver") if is_fake else os.environ
    run = subprocess.run(words, env=env, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stdout + run.stderr
    (document,) = out.glob(f"*-gpu-{'FAKE' if is_fake else 'HOST'}-quick-frameworks.json")
    outcome = json.loads(document.read_text())["parts"][part]
    if outcome["outcome"] == "skipped":
        pytest.skip(outcome["why"])
    assert outcome["outcome"] == "passed", outcome


def test_a_part_that_exceeds_its_limit_ends_with_what_it_started(monkeypatch, tmp_path):
    """Goal: the suite ends in time, and says which part did not. Method: a part, here a shell script, that starts a
    process and waits for it. The limit grows until the part got that far on a busy machine."""
    script, child = tmp_path / "part", tmp_path / "child"
    script.write_text(f"sleep 600 & echo $! > {child}.new; mv {child}.new {child}; wait\n")
    monkeypatch.setattr(frameworks, "__file__", str(script))
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    options = type("Options", (), {"device": "cpu", "quick": True})
    for limit_s in (1, 5, 25, 125):
        outcome = frameworks.outcome_of("lanes", limit_s, options)
        assert outcome["outcome"] == "failed" and f"had not ended after {limit_s} s" in outcome["why"], outcome
        if child.exists():
            break
    state = Path(f"/proc/{int(child.read_text())}/stat")

    def has_ended():
        """Killed, and reaped or waiting to be by whoever adopted it."""
        try:
            return state.read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    wait_until("the child has ended", has_ended)


def test_unknown_parts_are_refused(tmp_path):
    run = subprocess.run([sys.executable, SUITE, "--parts=lane"], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 2 and "there is no part lane: choose from ctypes_arrays" in run.stderr, run.stderr
