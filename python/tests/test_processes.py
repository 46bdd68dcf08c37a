"""Transfers between processes, with the package or the command line at the other end."""

import json
import re
import subprocess

import numpy as np
import pytest
from conftest import HERE, TIMEOUT_S, python, wait_for_exit

import tensor_relay

EXAMPLES = HERE.parent / "examples"


def test_a_state_dict_moves_between_processes(tmp_path):
    pytest.importorskip("torch")
    producer_code = tmp_path / "producer.py"
    producer_code.write_text(
        "import sys, torch, tensor_relay\n"
        "torch.manual_seed(1)\n"
        "model = torch.nn.Linear(256, 256)\n"
        "with tensor_relay.serve('127.0.0.1:0', state_dir=sys.argv[1]) as relay:\n"
        "    print(relay.ticket)\n"
        "    for step in range(3):\n"
        "        with torch.no_grad(): model.weight.add_(1)\n"
        "        relay.publish('policy', model.state_dict(), metadata={'sum': model.weight.double().sum().item()}).wait_committed()\n"
        "    relay.end('policy')\n"
    )
    consumer_code = tmp_path / "consumer.py"
    consumer_code.write_text(
        "import sys, torch, tensor_relay\n"
        "model = torch.nn.Linear(256, 256)\n"
        "with tensor_relay.connect(sys.argv[1]) as client:\n"
        "    for snapshot in client.subscribe('policy', mode='every'):\n"
        "        model.load_state_dict(snapshot.torch())\n"
        "        assert model.weight.double().sum().item() == snapshot.metadata['sum']\n"
        "        print(snapshot.version)\n"
    )
    with python(producer_code, tmp_path / "state") as producer:
        with python(consumer_code, producer.stdout.readline().strip()) as consumer:
            output = wait_for_exit(consumer)
        wait_for_exit(producer)
    versions = [int(line) for line in output.split()]
    assert versions[-1] == 3 and versions == sorted(versions)


@pytest.mark.parametrize("readme", [HERE.parent / "README.md", HERE.parents[1] / "README.md"], ids=["package", "project"])
def test_the_readmes_first_example_works(readme, tmp_path):
    """Runs the README's first producer and consumer. Only the address, for a free port, and the key's folder differ."""
    pytest.importorskip("torch")
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    producer_code = next(block for block in blocks if "tensor_relay.serve(" in block)
    consumer_code = next(block for block in blocks if "tensor_relay.connect(" in block)
    assert "0.0.0.0:4747" in producer_code
    (tmp_path / "producer.py").write_text(producer_code.replace("0.0.0.0:4747", "127.0.0.1:0"))
    consumer_code += "print(snapshot.version, snapshot.metadata['step'], model.weight.sum().item())\n"
    (tmp_path / "consumer.py").write_text(consumer_code)
    with python(tmp_path / "producer.py", XDG_STATE_HOME=str(tmp_path)) as producer:
        with python(tmp_path / "consumer.py", producer.stdout.readline().strip()) as consumer:
            last = wait_for_exit(consumer).splitlines()[-1].split()
        wait_for_exit(producer)
    assert last[:2] == ["10", "9"] and float(last[2]) != 0


def test_the_command_line_receives_what_python_publishes(relay, program, tmp_path):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    sent = {"w": np.arange(1000, dtype=np.float32).reshape(10, 100), "transposed": np.ones((3, 4)).T, "step": 3}
    relay.publish("policy", sent, metadata={"run": "a", "step": 1, "done": False})
    words = [program, "subscribe", relay.ticket_for("policy"), "--once", "--json", "--out", tmp_path]
    result = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    metadata = json.loads(result.stdout)["metadata"]
    assert (metadata["run"], metadata["step"], metadata["done"]) == ("a", "1", "false")
    loaded = load_file(json.loads(result.stdout)["path"])
    assert loaded.keys() == {"w", "transposed"}
    np.testing.assert_array_equal(loaded["w"], sent["w"])
    np.testing.assert_array_equal(loaded["transposed"], sent["transposed"])
    listed = subprocess.run([program, "list", relay.ticket], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert "policy" in listed.stdout


def test_python_receives_what_the_command_line_serves(program, tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    sent = {"w": np.arange(1000, dtype=np.float32).reshape(10, 100), "b": np.arange(3)}
    save_file(sent, tmp_path / "m.safetensors", metadata={"format": "np"})
    words = [program, "serve", "--json", "--listen=127.0.0.1:0", f"--state-dir={tmp_path}/state"]
    words += [f"--topic=policy={tmp_path}/m.safetensors"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        ticket = json.loads(server.stdout.readline())["ticket_file"]
        with tensor_relay.connect(ticket) as client:
            snapshot = client.subscribe().next(TIMEOUT_S)
            assert snapshot.manifest_metadata["format"] == "np" and snapshot.entries == {}
            for name, array in snapshot.numpy().items():
                np.testing.assert_array_equal(array, sent[name])
            snapshot.save(tmp_path / "again.safetensors")
        assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()
    finally:
        server.terminate()
        assert server.wait(TIMEOUT_S) == 0


def test_the_examples_work_together(tmp_path):
    """Runs a trainer, a worker that stops early, and a worker that starts late."""
    pytest.importorskip("torch")
    ticket = tmp_path / "policy.ticket"
    words = ["--listen=127.0.0.1:0", f"--ticket-file={ticket}", f"--state-dir={tmp_path}/state", "--steps=400"]
    with python(EXAMPLES / "trainer.py", *words, "--pause=30") as trainer:
        assert trainer.stdout.readline().startswith("step 1: version 1")
        assert ticket.stat().st_mode & 0o777 == 0o600
        with python(EXAMPLES / "worker.py", f"--ticket={ticket}", "--batches=3") as worker:
            assert "3 batches" in wait_for_exit(worker)
        with python(EXAMPLES / "worker.py", f"--ticket={ticket}") as worker:
            output = wait_for_exit(worker)
        assert "the last with version 400" in output and "the publisher ended the topic" in output
        assert "step 400: version 400" in wait_for_exit(trainer)
