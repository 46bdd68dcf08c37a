"""verl's checkpoint engine: an actor of two ranks and three rollouts, driven as verl's manager drives them. Against
stand-ins of verl, or its released base class where TENSOR_RELAY_VERL_SOURCE names it."""

import asyncio
import importlib
import sys
from abc import ABC

import hosts
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import tensor_relay  # noqa: E402

TOLD = hosts.written_down("verl")


class Registry:
    """As verl's, in a few lines."""

    known = {}

    @classmethod
    def register(cls, backend):
        return lambda engine: cls.known.setdefault(backend, engine)


@pytest.fixture
def engine(monkeypatch):
    """The class of the integration, with verl as it is here, and Ray alone for the address."""
    monkeypatch.setattr("importlib.metadata.version", lambda package: {"verl": TOLD["version"]}[package])
    hosts.stand_in(monkeypatch, "ray", util=type("util", (), {"get_node_ip_address": staticmethod(lambda: "127.0.0.1")}))
    source = hosts.source_of("verl")
    if source:
        for name in (
            "verl.single_controller.base.decorator", "verl.single_controller.ray", "verl.utils.distributed",
            "verl.utils.import_utils", "verl.utils.ray_utils", "verl.workers.config", "verl.workers.rollout.utils",
            "verl.checkpoint_engine",
        ):
            hosts.stand_in(monkeypatch, name)
        monkeypatch.setattr(sys.modules["ray"], "remote", lambda decorated: decorated, raising=False)
        hosts.released(monkeypatch, "verl.checkpoint_engine.base", f"{source}/{hosts.INTERFACES['verl'][0]}")
    else:
        base = type("CheckpointEngine", (ABC,), {})
        hosts.stand_in(monkeypatch, "verl.checkpoint_engine.base", CheckpointEngine=base, CheckpointEngineRegistry=Registry)
    monkeypatch.delitem(sys.modules, "tensor_relay.integrations.verl", raising=False)
    yield importlib.import_module("tensor_relay.integrations.verl").TensorRelayCheckpointEngine
    sys.modules.pop("tensor_relay.integrations.verl", None)


@pytest.fixture
def ends(engine):
    """An actor's two ranks and three rollouts."""
    actor = [engine(bucket_size=1 << 20, is_master=rank == 0, timeout=20) for rank in range(2)]
    rollout = [engine(bucket_size=1 << 20, timeout=20) for _ in range(3)]
    yield actor, rollout
    for each in rollout:
        each._disconnect()
    actor[0]._relay.close(0)


def connect(engine, actor, rollout):
    """What verl's manager does before each step."""
    metadata = [each.prepare() for each in actor + rollout]
    for group, kwargs in zip((actor, rollout), engine.build_topology(len(actor), len(rollout), metadata), strict=True):
        for rank, each in enumerate(group):
            assert all(len(values) == len(group) for values in kwargs.values())
            each.init_process_group(**{key: values[rank] for key, values in kwargs.items()})


def weights(step):
    """One buffer, used again for each tensor, as engines do."""
    buffer = torch.empty(1_000)
    for name in ("layers.0.w", "layers.1.w", "norm"):
        yield name, buffer.fill_(step + len(name))


async def received(each, step):
    return {name: tensor async for name, tensor in each.receive_weights(global_steps=step)}


async def update(actor, rollout, sent, due):
    """What verl's manager does in a step."""
    sending = [each.send_weights(weights(sent), global_steps=sent) for each in actor]
    return await asyncio.gather(*sending, *(received(each, due) for each in rollout))


def test_it_has_what_verl_calls(engine):
    assert list(hosts.differences(engine, TOLD["classes"]["CheckpointEngine"])) == []
    assert hosts.abstract_left(engine) == []
    if hosts.source_of("verl"):
        assert hosts.signatures_in(hosts.source_of("verl"), "verl") == TOLD["classes"], "what was written down is no longer so"


def test_steps_arrive_whole_at_every_rollout(engine, ends):
    actor, rollout = ends
    for step in (1, 2, 3):
        connect(engine, actor, rollout)
        metrics, nothing, *came = asyncio.run(update(actor, rollout, step, step))
        assert metrics["tensor_relay/version"] == step and nothing is None
        for each in came:
            assert {name: set(tensor.tolist()) for name, tensor in each.items()} == {
                "layers.0.w": {step + 10.0}, "layers.1.w": {step + 10.0}, "norm": {step + 4.0}
            }
        for each in actor + rollout:
            each.finalize()


def test_rollouts_come_and_go(engine, ends):
    actor, rollout = ends
    connect(engine, actor, rollout[:1])
    asyncio.run(update(actor, rollout[:1], 1, 1))
    rollout[0]._disconnect()
    connect(engine, actor, rollout[1:])
    *_, one, other = asyncio.run(update(actor, rollout[1:], 2, 2))
    assert one["norm"][0] == other["norm"][0] == 6, "the step before is passed over"


def test_weights_of_another_step_are_refused(engine, ends):
    actor, rollout = ends
    connect(engine, actor, rollout)
    with pytest.raises(tensor_relay.DamagedError, match="step 1, and step 2 was expected"):
        asyncio.run(update(actor, rollout, 1, 2))


def test_a_rollout_that_is_missing_fails_the_step(engine, ends):
    actor, rollout = ends
    connect(engine, actor, rollout)
    actor[0]._timeout = 0.5
    with pytest.raises(tensor_relay.RelayTimeoutError):
        asyncio.run(update(actor, rollout[:2], 1, 1))


def test_an_actor_that_sends_nothing_fails_the_rollouts(engine, ends):
    actor, rollout = ends
    connect(engine, actor, rollout)
    rollout[0]._timeout = 0.5
    with pytest.raises(tensor_relay.RelayTimeoutError):
        asyncio.run(received(rollout[0], 1))


def test_names_that_are_there_twice_are_refused(engine, ends):
    actor, rollout = ends
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
