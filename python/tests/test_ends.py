"""When a producer ends, its subscribers are informed at once, with the reason."""

import time

import numpy as np
import pytest
from conftest import TIMEOUT_S

import tensor_relay


@pytest.fixture
def relay_and_follow(tmp_path):
    """A relay, and a function that subscribes to it. By default, the clients of the function try to reconnect for
    longer than the timeouts of the tests."""
    relay = tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path / "state")
    clients = []

    def follow(mode="latest", reconnect_timeout=10 * TIMEOUT_S):
        clients.append(tensor_relay.connect(relay.ticket, reconnect_timeout=reconnect_timeout))
        subscription = clients[-1].subscribe("t", mode=mode, timeout=TIMEOUT_S)
        assert next(subscription).version == 1
        return subscription

    relay.open("t", keep_versions=3)
    relay.publish("t", {"x": np.zeros(3)})
    yield relay, follow
    for client in clients:
        client.close()
    relay.close()


def test_a_relay_that_is_closed_ends_its_topics(relay_and_follow):
    """Subscribers receive the end of the topic, and do not wait for the server to return."""
    relay, follow = relay_and_follow
    followers = [follow(), follow("every")]
    relay.close()
    for subscription in followers:
        assert list(subscription) == []
        with pytest.raises(tensor_relay.TopicEndedError):
            subscription.next(TIMEOUT_S)


def test_the_last_version_is_received_after_the_relay_closed(relay_and_follow):
    relay, follow = relay_and_follow
    subscription = follow("every")
    with relay:
        relay.publish("t", {"x": np.ones(3)})
    assert [snapshot.version for snapshot in subscription] == [2]


@pytest.mark.parametrize("close", [
    lambda relay: relay.close(end=False), lambda relay: relay.__exit__(ValueError, ValueError(), None),
])  # fmt: skip
def test_clients_wait_for_a_relay_that_restarts(relay_and_follow, close, tmp_path):
    """A relay that is closed with end=False, or by an exception, may be restarted: its topics have not ended."""
    relay, follow = relay_and_follow
    subscription, short_timeout = follow(), follow(reconnect_timeout=0.2)
    close(relay)
    with pytest.raises(tensor_relay.ServerUnreachableError, match="the server is shutting down"):
        short_timeout.next(TIMEOUT_S)
    with tensor_relay.serve(relay.address, state_dir=tmp_path / "state") as again:
        again.publish("t", {"x": np.full(3, 7)})
        snapshot = next(subscription)
        assert snapshot.is_new_epoch and snapshot["x"].numpy()[0] == 7
    assert list(subscription) == []


def test_a_timeout_without_a_connection_names_the_reason(relay_and_follow):
    relay, follow = relay_and_follow
    subscription = follow()
    relay.close(end=False)
    deadline = time.monotonic() + TIMEOUT_S
    message = ""
    while "shutting down" not in message:
        assert time.monotonic() < deadline, message
        with pytest.raises(tensor_relay.RelayTimeoutError) as raised:
            subscription.next(0.05)
        message = str(raised.value)
    assert "the connection was lost" in message
