"""`Relay.publish_files` and `pull`: files and folders, published and received as they were."""

import itertools
import json
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tensor_relay

WEIGHTS = {"layer.w": np.arange(600, dtype="f4").reshape(20, 30), "layer.b": np.ones(3, "f2")}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(WEIGHTS, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_folder_is_pulled_as_it_was(relay, model, tmp_path):
    published = relay.publish_files("models/tiny", model, metadata={"step": 3})
    assert published.version == 1 and published.copied_bytes > 2_400
    pulled = tensor_relay.pull(relay.ticket_for("models/tiny"), tmp_path / "out")
    assert pulled == tmp_path / "out" / "models" / "tiny"
    assert contents(pulled) == contents(model)
    (model / "config.json").write_text(json.dumps({"hidden_size": 5}))
    relay.publish_files("models/tiny", model)
    with tensor_relay.connect(relay.ticket) as client:
        assert tensor_relay.pull(client, tmp_path / "out", "models/tiny", 2) == pulled
        with pytest.raises(tensor_relay.VersionNotFoundError):
            tensor_relay.pull(client, tmp_path / "out", "models/tiny", 1)
    assert contents(pulled) == contents(model)


def test_kept_versions_have_paths_of_their_own(relay, model, tmp_path):
    """A program that loads a folder's files one by one is not affected by a later pull."""
    pulled, published = [], []
    for number in range(4):
        (model / "config.json").write_text(json.dumps({"hidden_size": number}))
        published.append(contents(model))
        relay.publish_files("m", model)
        pulled.append(tensor_relay.pull(relay.ticket, tmp_path, "m", keep=2))
        for path, files in list(zip(pulled, published))[-2:]:
            assert contents(path) == files
    assert len(set(pulled)) == 4 and [path.exists() for path in pulled] == [False, False, True, True]
    assert all(path.parent == tmp_path / "m" for path in pulled)
    assert (tmp_path / "m" / "latest").resolve() == pulled[-1].resolve()
    assert tensor_relay.pull(relay.ticket, tmp_path, "m", keep=2) == pulled[-1], "the same version again"
    with pytest.raises(tensor_relay.RequestError, match="keep is 0"):
        tensor_relay.pull(relay.ticket, tmp_path, "m", keep=0)


def test_single_files_and_plain_tensors_are_pulled(relay, model, tmp_path):
    relay.publish_files("one", model / "model.safetensors")
    assert tensor_relay.pull(relay.ticket, tmp_path, "one").read_bytes() == (model / "model.safetensors").read_bytes()
    relay.publish("tensors", WEIGHTS)
    pulled = tensor_relay.pull(relay.ticket, tmp_path, "tensors")
    assert pulled == tmp_path / "tensors.safetensors"
    assert all(np.array_equal(value, WEIGHTS[name]) for name, value in load_file(pulled).items())


def test_files_saved_during_writes_are_readable(relay, client, tmp_path):
    """Goal: whoever saves a snapshot while another thread writes to its tensors gets a file that can be read, with old
    or new elements.

    Method: the writer fills the array all the time, without the GIL.
    """
    save_file({"x": np.zeros(4 << 20, np.uint8), "y": np.ones(3)}, tmp_path / "state.safetensors")
    relay.publish_files("t", tmp_path / "state.safetensors")
    snapshot, saved, done = client.get("t"), [], threading.Event()
    array = snapshot["x"].numpy()

    def write():
        for value in itertools.cycle(range(256)):
            if done.is_set():
                return
            array.fill(value)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(10):
            saved.append(snapshot.save_files(tmp_path / str(number)))
    finally:
        done.set()
        writer.join()
    for path in saved:
        found = load_file(path)
        assert found["x"].shape == (4 << 20,) and np.array_equal(found["y"], np.ones(3))


def test_publish_files_and_pull_report_errors(relay, client, tmp_path):
    with pytest.raises(tensor_relay.PublishError, match="missing"):
        relay.publish_files("t", tmp_path / "missing")
    relay.publish("t", WEIGHTS)
    (tmp_path / "file").write_text("")
    with pytest.raises(tensor_relay.TensorRelayError):
        tensor_relay.pull(client, tmp_path / "file", "t")
    with pytest.raises(tensor_relay.TensorRelayError, match="received into `out`"):
        client.get("t", out={name: np.empty_like(value) for name, value in WEIGHTS.items()}).save_files(tmp_path)
