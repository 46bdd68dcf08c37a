"""verl's checkpoint engine: an actor with two ranks and three rollouts, driven as by verl's manager. Uses stubs of
verl, or its released base class if TENSOR_RELAY_VERL_SOURCE names the source."""

import asyncio
import importlib
import sys
from abc import ABC

import hosts
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import tensor_relay  # noqa: E402

RECORDED = hosts.recorded("verl")


class Registry:
    """A minimal version of verl's registry."""

    engines = {}

    @classmethod
    def register(cls, backend):
        return lambda engine: cls.engines.setdefault(backend, engine)


@pytest.fixture
def engine(monkeypatch):
    """The integration's class, imported with stubs of verl and Ray."""
    monkeypatch.setattr("importlib.metadata.version", lambda package: {"verl": RECORDED["version"]}[package])
    hosts.install_stub(monkeypatch, "ray", util=type("util", (), {"get_node_ip_address": staticmethod(lambda: "127.0.0.1")}))
    source = hosts.source_of("verl")
    if source:
        for name in (
            "verl.single_controller.base.decorator", "verl.single_controller.ray", "verl.utils.distributed",
            "verl.utils.import_utils", "verl.utils.ray_utils", "verl.workers.config", "verl.workers.rollout.utils",
            "verl.checkpoint_engine",
        ):
            hosts.install_stub(monkeypatch, name)
        monkeypatch.setattr(sys.modules["ray"], "remote", lambda decorated: decorated, raising=False)
        hosts.import_released(monkeypatch, "verl.checkpoint_engine.base", f"{source}/{hosts.INTERFACES['verl'][0]}")
    else:
        base = type("CheckpointEngine", (ABC,), {})
        hosts.install_stub(monkeypatch, "verl.checkpoint_engine.base", CheckpointEngine=base, CheckpointEngineRegistry=Registry)
    monkeypatch.delitem(sys.modules, "tensor_relay.integrations.verl", raising=False)
    yield importlib.import_module("tensor_relay.integrations.verl").TensorRelayCheckpointEngine
    sys.modules.pop("tensor_relay.integrations.verl", None)


@pytest.fixture
def actor_and_rollouts(engine):
    """An actor's two ranks and three rollouts."""
    actor = [engine(bucket_size=1 << 20, is_master=rank == 0, timeout=20) for rank in range(2)]
    rollout = [engine(bucket_size=1 << 20, timeout=20) for _ in range(3)]
    yield actor, rollout
    for each in rollout:
        each._disconnect()
    actor[0]._relay.close(0)


def connect(engine, actor, rollout):
    """The calls of verl's manager before each step."""
    metadata = [each.prepare() for each in actor + rollout]
    for group, kwargs in zip((actor, rollout), engine.build_topology(len(actor), len(rollout), metadata), strict=True):
        for rank, each in enumerate(group):
            assert all(len(values) == len(group) for values in kwargs.values())
            each.init_process_group(**{key: values[rank] for key, values in kwargs.items()})


def weights(step):
    """Yields weights in one buffer that is reused for each tensor, as engines do."""
    buffer = torch.empty(1_000)
    for name in ("layers.0.w", "layers.1.w", "norm"):
        yield name, buffer.fill_(step + len(name))


async def received(each, step):
    return {name: tensor async for name, tensor in each.receive_weights(global_steps=step)}


async def update(actor, rollout, sent, expected):
    """The calls of verl's manager in a step."""
    sending = [each.send_weights(weights(sent), global_steps=sent) for each in actor]
    return await asyncio.gather(*sending, *(received(each, expected) for each in rollout))


def test_the_interface_matches_verls(engine):
    assert list(hosts.differences(engine, RECORDED["classes"]["CheckpointEngine"])) == []
    assert hosts.unimplemented_methods(engine) == []
    if hosts.source_of("verl"):
        assert hosts.signatures_in(hosts.source_of("verl"), "verl") == RECORDED["classes"], "the recorded signatures are outdated"


def test_every_rollout_receives_every_step(engine, actor_and_rollouts, caplog):
    caplog.set_level("INFO", "tensor_relay")
    actor, rollout = actor_and_rollouts
    for step in (1, 2, 3):
        connect(engine, actor, rollout)
        metrics, nothing, *weights_received = asyncio.run(update(actor, rollout, step, step))
        assert metrics["tensor_relay/version"] == step and nothing is None
        for each in weights_received:
            assert {name: set(tensor.tolist()) for name, tensor in each.items()} == {
                "layers.0.w": {step + 10.0}, "layers.1.w": {step + 10.0}, "norm": {step + 4.0}
            }
        for each in actor + rollout:
            each.finalize()
    assert caplog.text.count("receives all weights whole: verl declares no layout") == len(rollout)


def test_rollouts_may_change_between_steps(engine, actor_and_rollouts):
    actor, rollout = actor_and_rollouts
    connect(engine, actor, rollout[:1])
    asyncio.run(update(actor, rollout[:1], 1, 1))
    rollout[0]._disconnect()
    connect(engine, actor, rollout[1:])
    *_, first, second = asyncio.run(update(actor, rollout[1:], 2, 2))
    assert first["norm"][0] == second["norm"][0] == 6, "the previous step is skipped"


def test_weights_of_another_step_are_refused(engine, actor_and_rollouts):
    actor, rollout = actor_and_rollouts
    connect(engine, actor, rollout)
    with pytest.raises(tensor_relay.DamagedError, match="step 1, and step 2 was expected"):
        asyncio.run(update(actor, rollout, 1, 2))


def test_a_missing_rollout_fails_the_step(engine, actor_and_rollouts):
    actor, rollout = actor_and_rollouts
    connect(engine, actor, rollout)
    actor[0]._timeout = 0.5
    with pytest.raises(tensor_relay.RelayTimeoutError):
        asyncio.run(update(actor, rollout[:2], 1, 1))


def test_an_actor_that_sends_nothing_fails_the_rollouts(engine, actor_and_rollouts):
    actor, rollout = actor_and_rollouts
    connect(engine, actor, rollout)
    rollout[0]._timeout = 0.5
    with pytest.raises(tensor_relay.RelayTimeoutError):
        asyncio.run(received(rollout[0], 1))


@pytest.mark.parametrize("timeout", [float("nan"), -1.0])
def test_an_invalid_timeout_is_refused_before_the_first_step(engine, timeout):
    with pytest.raises(ValueError, match="timeout is .*0 or more"):
        engine(bucket_size=1 << 20, timeout=timeout)


def test_duplicate_names_are_refused(engine, actor_and_rollouts):
    actor, rollout = actor_and_rollouts
    connect(engine, actor, rollout)
    with pytest.raises(tensor_relay.PublishError, match="two weights called norm"):
        asyncio.run(actor[0].send_weights(iter([("norm", torch.ones(1))] * 2)))
    with pytest.raises(tensor_relay.RequestError, match="here 2 do"):
        engine.build_topology(2, 1, [{"ticket": "a", "wanted": 1}, {"ticket": "b", "wanted": 1}, {}])


def test_another_version_of_verl_is_refused(engine, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.8.2")
    sys.modules.pop("tensor_relay.integrations.verl")
    with pytest.raises(tensor_relay.IntegrationError, match="from 0.9 to below 0.10, and 0.8.2 is installed"):
        importlib.import_module("tensor_relay.integrations.verl")
