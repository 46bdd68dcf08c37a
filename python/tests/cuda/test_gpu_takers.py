"""Versions on a GPU that processes of the host take over a Unix socket."""

import pytest
from conftest import TIMEOUT_S, noise
from cuda_by_hand import Imported

import tensor_relay

COPIED, IN_PLACE = "GPU memory, copied", "GPU memory"


@pytest.mark.parametrize(
    ("server_shares", "taker_shares", "sharing"),
    [(False, False, COPIED), (True, False, COPIED), (False, True, COPIED), (True, True, IN_PLACE)],
)
def test_a_taker_on_the_same_gpu_gets_memory_of_it(gpu, tmp_path, server_shares, taker_shares, sharing):
    content, socket = noise(1 << 20), tmp_path / "s"
    with (
        tensor_relay.serve("127.0.0.1:0", ephemeral=True, device="cuda:0", socket=socket, share_gpu=server_shares) as relay,
        tensor_relay.connect(f"unix:{socket}", device="cuda:0", share_gpu=taker_shares) as client,
    ):
        relay.publish("t", {"w": gpu.array(content, "u8")})
        snapshot = client.subscribe("t").next(TIMEOUT_S)
        assert snapshot.receipt.sharing == sharing
        assert snapshot.device == "cuda:0" and Imported(gpu, snapshot["w"]).bytes() == content
        out = {"w": gpu.array(bytes(len(content)), "u8")}
        client.get("t", out=out, atomic=False)
        assert out["w"].bytes() == content


def test_a_taker_without_a_gpu_gets_host_memory(gpu, tmp_path):
    content, socket = noise(1 << 20), tmp_path / "s"
    with (
        tensor_relay.serve("127.0.0.1:0", ephemeral=True, device="cuda:0", socket=socket) as relay,
        tensor_relay.connect(f"unix:{socket}") as client,
    ):
        relay.publish("t", {"w": gpu.array(content, "u8")})
        snapshot = client.subscribe("t").next(TIMEOUT_S)
        assert snapshot.receipt.sharing == "memory" and snapshot["w"].numpy().tobytes() == content
