"""Ray on several nodes: a cluster of three raylets on one machine, each with an address of its own."""

import time

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")
torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from ray.cluster_utils import Cluster  # noqa: E402

import tensor_relay  # noqa: E402
import tensor_relay.integrations.ray as transport  # noqa: E402

transport.register()  # Before the actors' classes.
TIMEOUT_S = 50
HEAD, LEFT, RIGHT = "head", "127.0.0.2", "127.0.0.3"  # Ray chooses the head's address.


@pytest.fixture(scope="module")
def kill_node():
    """Starts the cluster. Yields a function that kills the node of an address."""
    if ray.is_initialized():
        ray.shutdown()
    cluster = Cluster()
    options = {"object_store_memory": 100 << 20, "num_cpus": 2}
    niceness = {"worker_niceness": 0}
    cluster.add_node(include_dashboard=False, resources={HEAD: 2}, _system_config=niceness, **options)
    nodes = {
        address: cluster.add_node(node_ip_address=address, resources={address: 2}, **options)
        for address in (LEFT, RIGHT)
    }
    environment = {"TENSOR_RELAY_RAY_TIMEOUT": "15", "XDG_STATE_HOME": "/nonexistent"}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": environment})
    cluster.wait_for_nodes()
    yield lambda address: cluster.remove_node(nodes[address], allow_graceful=False)
    ray.shutdown()
    cluster.shutdown()


def create_on(address, actor, *args):
    """Creates an actor on the node of this address."""
    return actor.options(resources={address: 0.1}).remote(*args)


def get(ref):
    return ray.get(ref, timeout=TIMEOUT_S)


@ray.remote(num_cpus=0.2, enable_tensor_transport=True)
class TensorActor:
    @ray.method(tensor_transport="TENSOR_RELAY")
    def full(self, size, value):
        return torch.full((size,), value)

    def sum(self, tensor):
        return tensor.double().sum().item()

    def address(self):
        return ray.util.get_node_ip_address()

    def server_address(self):
        from ray.experimental.rdt.util import get_tensor_transport_manager

        return get_tensor_transport_manager("TENSOR_RELAY")._relay.address


@ray.remote(num_cpus=0.2)
class Trainer:
    def __init__(self, folder):
        self.relay = tensor_relay.serve(f"{ray.util.get_node_ip_address()}:0", state_dir=folder)

    def ticket(self):
        return self.relay.ticket_for("policy")

    def step(self, number):
        return self.relay.publish("policy", {"w": torch.full((1_000,), float(number))}).version


@ray.remote(num_cpus=0.2)
class Worker:
    def __init__(self, ticket):
        self.weights = {"w": torch.zeros(1_000)}
        self.client = tensor_relay.connect(ticket, reconnect_timeout=2)

    def follow(self, version):
        return self.client.get(version=version, out=self.weights, timeout=15).version, self.weights["w"].sum().item()


@pytest.mark.usefixtures("kill_node")
def test_tensors_pass_from_node_to_node():
    actors = {address: create_on(address, TensorActor) for address in (HEAD, LEFT, RIGHT)}
    addresses = {name: get(actor.address.remote()) for name, actor in actors.items()}
    assert len(set(addresses.values())) == 3 and addresses[LEFT] == LEFT and addresses[RIGHT] == RIGHT
    for source, sink in ((LEFT, RIGHT), (RIGHT, LEFT), (HEAD, RIGHT)):
        assert get(actors[sink].sum.remote(actors[source].full.remote(5_000_000, 2.0))) == 10_000_000
        assert get(actors[source].server_address.remote()).startswith(f"{addresses[source]}:")
    to_all = actors[LEFT].full.remote(1_000, 3.0)
    assert ray.get([actor.sum.remote(to_all) for actor in (actors[HEAD], actors[RIGHT])], timeout=TIMEOUT_S) == [3_000.0] * 2
    assert get(to_all).sum() == 3_000, "the driver gets it, too"


def test_a_dead_node_raises_in_time(kill_node, tmp_path):
    """After a node died, its actors, receivers of its objects, and subscribers on other nodes raise errors."""
    trainer = create_on(LEFT, Trainer, str(tmp_path))
    ticket = get(trainer.ticket.remote())
    assert get(trainer.step.remote(1)) == 1
    workers = [create_on(address, Worker, ticket) for address in (HEAD, RIGHT)]
    for version in (1, 2):
        results = ray.get([worker.follow.remote(version) for worker in workers], timeout=TIMEOUT_S)
        assert results == [(version, 1_000.0 * version)] * 2
        get(trainer.step.remote(version + 1))
    source, sink = create_on(LEFT, TensorActor), create_on(RIGHT, TensorActor)
    ref = source.full.remote(1_000_000, 1.0)
    ray.wait([ref], fetch_local=False)
    kill_node(LEFT)
    deadline = time.monotonic() + TIMEOUT_S
    with pytest.raises(ray.exceptions.RayActorError):
        while time.monotonic() < deadline:  # Until the actors of the dead node notice that their raylet has died.
            get(source.address.remote())
            time.sleep(0.1)
    for call in (sink.sum.remote(ref), workers[0].follow.remote(4)):
        began = time.monotonic()
        with pytest.raises((ray.exceptions.RayError, tensor_relay.TensorRelayError)) as failed:
            get(call)
        assert not isinstance(failed.value, ray.exceptions.GetTimeoutError)
        last_line = str(failed.value).strip().splitlines()[-1]
        print(f"\nA dead node was an error after {time.monotonic() - began:.1f} s: {last_line}")
    other = create_on(HEAD, TensorActor)
    assert get(sink.sum.remote(other.full.remote(10, 1.0))) == 10, "other actors still work"
