"""Ray's actors and driver receive tensors directly from each other, and the death of a process is reported before the
timeout."""

import time

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")
torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import tensor_relay  # noqa: E402
import tensor_relay.integrations.ray as transport  # noqa: E402

transport.register()  # Must run before the actor classes are defined.
TIMEOUT_S = 50


@pytest.fixture(scope="module", autouse=True)
def cluster():
    environment = {"TENSOR_RELAY_RAY_TIMEOUT": "15", "XDG_STATE_HOME": "/nonexistent"}
    ray.init(
        "local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
        _system_config={"worker_niceness": 0},  # By default, workers starve on a busy machine.
    )
    transport.register()  # A second call does nothing.
    yield
    ray.shutdown()


@ray.remote(num_cpus=0.5)
class Source:
    @ray.method(tensor_transport="TENSOR_RELAY")
    def full(self, shape, value, dtype=torch.float32):
        return torch.full(shape, value, dtype=dtype)

    @ray.method(tensor_transport="TENSOR_RELAY")
    def nested(self):
        tied = torch.arange(10)
        return {"w": tied, "tied": tied, "b": [torch.ones(2, 3, dtype=torch.bfloat16).T, torch.tensor(7.0)], "n": 5}

    @ray.method(tensor_transport="TENSOR_RELAY")
    def without_tensors(self):
        return {"n": 5}

    @ray.method(tensor_transport="TENSOR_RELAY")
    def reused(self):
        self.buffer = torch.ones(5_000_000)
        return self.buffer

    def overwrite(self):
        self.buffer.fill_(9)

    def put(self, value):
        return [ray.put(torch.full((1_000,), value), _tensor_transport="TENSOR_RELAY")]

    def published_and_sessions(self):
        from ray.experimental.rdt.util import get_tensor_transport_manager

        manager = get_tensor_transport_manager("TENSOR_RELAY")
        return len(manager._published), manager._relay.stats()["sessions"]


@ray.remote(num_cpus=0.5, enable_tensor_transport=True)
class Sink:
    def describe(self, tensor):
        return tensor.double().sum().item(), tuple(tensor.shape), str(tensor.dtype)

    def check_nested(self, tree):
        tied = torch.arange(10)
        assert torch.equal(tree["w"], tied) and torch.equal(tree["tied"], tied) and tree["n"] == 5
        assert torch.equal(tree["b"][0], torch.ones(3, 2, dtype=torch.bfloat16)) and tree["b"][1].item() == 7.0
        return True

    def number(self, tree):
        return tree["n"]

    def get(self, refs):
        return ray.get(refs[0]).sum().item()


@pytest.fixture(scope="module")
def pair():
    return Source.remote(), Sink.remote()


def get(ref):
    return ray.get(ref, timeout=TIMEOUT_S)


def test_actors_pass_tensors(pair):
    source, sink = pair
    assert get(sink.describe.remote(source.full.remote((1_000, 3), 2.0))) == (6_000.0, (1_000, 3), "torch.float32")
    assert get(sink.describe.remote(source.full.remote((5_000_000,), 1, torch.bfloat16)))[0] == 5_000_000
    assert get(sink.describe.remote(source.full.remote((0, 3), 1.0))) == (0.0, (0, 3), "torch.float32")
    assert get(sink.check_nested.remote(source.nested.remote()))
    assert get(sink.number.remote(source.without_tensors.remote())) == 5
    twice = source.full.remote((10,), 1.0)
    assert [get(sink.describe.remote(twice))[0] for _ in range(2)] == [10.0, 10.0]


def test_tensors_arrive_as_they_were_returned(pair):
    source, sink = pair
    ref = source.reused.remote()
    get(source.overwrite.remote())
    assert get(sink.describe.remote(ref))[0] == 5_000_000
    with pytest.raises(tensor_relay.RequestError, match="registered before with stage=True"):
        transport.register(stage=False)


def test_the_driver_gets_and_puts(pair):
    source, sink = pair
    assert get(source.full.remote((10,), 3.0)).sum() == 30
    many = ray.get([source.full.remote((10,), float(number)) for number in range(5)], timeout=TIMEOUT_S)
    assert [int(tensor[0]) for tensor in many] == [0, 1, 2, 3, 4]
    mine = ray.put(torch.full((10,), 2.0), _tensor_transport="TENSOR_RELAY")
    assert get(sink.describe.remote(mine))[0] == 20


def test_an_actor_gets_an_object_put_by_another(pair):
    source, sink = pair
    assert get(sink.get.remote(get(source.put.remote(2.0)))) == 2_000.0


def test_objects_leave_nothing_behind(pair):
    """Passes 300 objects, so that a leak would be visible."""
    source, sink = pair
    for _ in range(6):
        ray.get([sink.describe.remote(source.full.remote((10,), 1.0)) for _ in range(50)], timeout=TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    while (counts := get(source.published_and_sessions.remote()))[0] > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert counts[0] <= 1, "at most one object: Ray may still hold the last"
    assert counts[1] <= 2, "at most two sessions: the sink's and the driver's"


def test_a_dead_source_raises_before_the_timeout(pair):
    alive, sink = pair
    source = Source.remote()
    ref = source.full.remote((1_000_000,), 1.0)
    ray.wait([ref], fetch_local=False)
    ray.kill(source)
    began = time.monotonic()
    with pytest.raises(ray.exceptions.RayError) as failed:
        get(sink.describe.remote(ref))
    took = time.monotonic() - began
    print(f"\nThe dead source was reported after {took:.1f} s: {str(failed.value).strip().splitlines()[-1]}")
    assert took < 20 and not isinstance(failed.value, ray.exceptions.GetTimeoutError)
    assert get(sink.describe.remote(alive.full.remote((10,), 1.0)))[0] == 10, "the sink still works"


def test_a_dead_sink_affects_no_other(pair):
    source, alive = pair
    sink = Sink.remote()
    assert get(sink.describe.remote(source.full.remote((10,), 1.0)))[0] == 10
    pending = sink.describe.remote(source.full.remote((5_000_000,), 1.0))
    ray.kill(sink)
    with pytest.raises(ray.exceptions.RayActorError):
        get(pending)
    assert get(alive.describe.remote(source.full.remote((10,), 2.0)))[0] == 20


@ray.remote(num_cpus=0.5)
class Trainer:
    """The pattern without a tensor transport: an actor that publishes to a topic."""

    def __init__(self, folder):
        self.relay = tensor_relay.serve(f"{ray.util.get_node_ip_address()}:0", state_dir=folder)

    def ticket(self):
        return self.relay.ticket_for("policy")

    def step(self, number):
        return self.relay.publish("policy", {"w": torch.full((1_000,), float(number))}).version


@ray.remote(num_cpus=0.5)
class Worker:
    def __init__(self, ticket):
        self.weights = {"w": torch.zeros(1_000)}
        self.client = tensor_relay.connect(ticket, reconnect_timeout=2)

    def follow(self, version):
        return self.client.get(version=version, out=self.weights, timeout=15).version, self.weights["w"].sum().item()


def test_workers_follow_a_trainer_until_it_dies(tmp_path):
    """The pattern of docs/integrations-ray.md, with `get` instead of `subscribe`."""
    trainer = Trainer.remote(str(tmp_path))
    ticket = get(trainer.ticket.remote())
    assert get(trainer.step.remote(1)) == 1
    workers = [Worker.remote(ticket) for _ in range(2)]
    for version in (1, 2):
        results = ray.get([worker.follow.remote(version) for worker in workers], timeout=TIMEOUT_S)
        assert results == [(version, 1_000.0 * version)] * 2
        get(trainer.step.remote(version + 1))
    ray.kill(trainer)
    with pytest.raises(tensor_relay.TensorRelayError):
        get(workers[0].follow.remote(4))
