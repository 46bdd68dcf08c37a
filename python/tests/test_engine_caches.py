"""Caches of inference engines, sent with `publish_files` and unpacked by `pull`."""

import logging

import numpy as np
import pytest
from safetensors.numpy import save_file

import tensor_relay


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": np.arange(6, dtype="f4")}, folder / "model.safetensors")
    return folder


@pytest.fixture
def cache(tmp_path):
    """A filled cache, and the option that names it."""
    folder = tmp_path / "engine" / "cache"
    (folder / "key").mkdir(parents=True)
    (folder / "key" / "kernel.so").write_bytes(b"code" * 1000)
    (folder / "key" / "kernel.so").chmod(0o755)
    (folder / "key" / "kernel.json").write_text("{}")
    return folder, f"jit={folder}"


def moved_away(folder):
    """Moves a folder, as if the next step ran on another host."""
    return folder.rename(folder.with_name("filled"))


def test_a_cache_comes_with_the_model(relay, model, cache, tmp_path):
    folder, option = cache
    relay.publish_files("m", model, engine_caches=[option])
    filled = moved_away(folder)
    path = tensor_relay.pull(relay.ticket_for("m"), tmp_path / "out")
    assert (path / "jit.engine-cache.tar").is_file() and not folder.exists(), "it is unpacked only on request"
    assert (path / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    tensor_relay.pull(relay.ticket_for("m"), tmp_path / "out", engine_caches=[option])
    for name in ("kernel.so", "kernel.json"):
        found, sent = folder / "key" / name, filled / "key" / name
        assert found.read_bytes() == sent.read_bytes() and found.stat().st_mode == sent.stat().st_mode
    (folder / "key" / "kernel.json").write_text("own")
    assert tensor_relay.unpack_engine_caches(path, [option]) == {"jit": None}
    assert (folder / "key" / "kernel.json").read_text() == "own", "what exists stays"


def test_a_cache_of_another_machine_is_left_alone(relay, model, cache, tmp_path, caplog):
    folder, option = cache
    relay.publish_files("m", model, engine_caches=(option,), engine_facts={"gpu": "NVIDIA H200", "torch": "1.2.3"})
    moved_away(folder)
    with caplog.at_level(logging.WARNING, "tensor_relay"):
        path = tensor_relay.pull(relay.ticket_for("m"), tmp_path / "out", engine_caches=[option])
    assert "The engine cache jit was not unpacked: it was filled elsewhere: gpu: NVIDIA H200 there" in caplog.text
    assert not folder.exists()
    for facts, reason in (
        ({"gpu": "NVIDIA H100", "torch": "1.2.3"}, "it was filled elsewhere: gpu: NVIDIA H200 there, NVIDIA H100 here"),
        ({"gpu": "NVIDIA H200", "torch": "*"}, None),
    ):
        assert tensor_relay.unpack_engine_caches(path, [option], facts=facts) == {"jit": reason}
    assert (folder / "key" / "kernel.so").exists()
    assert tensor_relay.unpack_engine_caches(path, ["none=/none"]) == {"none": "the version has none of this name"}


def test_wrong_caches_are_refused(relay, model, tmp_path):
    reasons = {"jit": "name its folder", "jit=here": "not absolute", "A=/a": "is not the name of a cache"}
    for wrong, reason in reasons.items():
        with pytest.raises(tensor_relay.RequestError, match=reason):
            relay.publish_files("m", model, engine_caches=[wrong])
        with pytest.raises(tensor_relay.RequestError, match=reason):
            tensor_relay.unpack_engine_caches(tmp_path, [wrong])
    with pytest.raises(tensor_relay.PublishError, match="missing or has no file"):
        relay.publish_files("m", model, engine_caches=[f"jit={tmp_path / 'none'}"])
    with pytest.raises(tensor_relay.PublishError, match="is a single file"):
        relay.publish_files("m", model / "model.safetensors", engine_caches=[f"jit={model}"])
