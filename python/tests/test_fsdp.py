"""docs/python-fsdp.md: a model sharded over two processes is gathered, published by one of them, and received into a
sharded model of two other processes."""

import re

import pytest
from conftest import HERE, python, wait_for_exit

pytest.importorskip("torch.distributed.fsdp", reason="PyTorch with FSDP2 is not installed")

RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def test_a_sharded_model_moves_to_a_sharded_model(tmp_path):
    """Runs the page's programs. Only the address, for a free port, and the key's folder differ."""
    page = (HERE.parents[1] / "docs" / "python-fsdp.md").read_text()
    trainer_code, worker_code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "0.0.0.0:4747" in trainer_code
    (tmp_path / "trainer.py").write_text(trainer_code.replace("0.0.0.0:4747", "127.0.0.1:0"))
    (tmp_path / "worker.py").write_text(worker_code)
    environment = {"XDG_STATE_HOME": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with python(*RANKS, tmp_path / "trainer.py", **environment) as trainer:
        ticket = trainer.stdout.readline().strip()
        with python(*RANKS, tmp_path / "worker.py", ticket, **environment) as worker:
            received = wait_for_exit(worker).split()
        published = wait_for_exit(trainer).split()
    assert received[:2] == ["received", "3"] and published[0] == "published"
    assert float(received[2]) == pytest.approx(float(published[1]), rel=1e-12) and float(received[2]) != 0
