"""The admin ports of relays and clients, which equal those of `tensor-relay serve` and `subscribe`."""

import asyncio
import json
import time
import urllib.error
import urllib.request

import pytest

import tensor_relay


def request(address, path, token=None):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(f"http://{address}{path}", headers=headers), timeout=10) as answer:
        return answer.read().decode()


def test_a_relay_serves_its_status():
    with tensor_relay.serve("127.0.0.1:0", ephemeral=True, admin="127.0.0.1:0") as relay:
        relay.publish("weights", {"w": bytearray(1_024)})
        with tensor_relay.connect(relay.ticket) as client:
            client.get("weights")
        assert request(relay.admin, "/livez") and request(relay.admin, "/readyz")
        status = json.loads(request(relay.admin, "/status"))
        assert [topic["topic"] for topic in status["topics"]] == ["weights"], status
        assert 'tensor_relay_topic_version{topic="weights"} 1' in request(relay.admin, "/metrics")
        assert "<html" in request(relay.admin, "/")
        address = relay.admin
    with pytest.raises(OSError):
        request(address, "/livez")
    with tensor_relay.serve("127.0.0.1:0", ephemeral=True, admin=address) as relay:
        assert relay.admin == address, "the port is free again"


def readiness(address):
    """Whether `/readyz` succeeds, and the text of its response."""
    try:
        return True, request(address, "/readyz")
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return False, error.read().decode()


def topics_of(client):
    return {topic["topic"]: topic for topic in json.loads(request(client.admin, "/status"))["topics"]}


def test_a_client_serves_its_status():
    with (
        tensor_relay.serve("127.0.0.1:0", ephemeral=True) as relay,
        tensor_relay.connect(relay.ticket, admin="127.0.0.1:0") as client,
    ):
        assert request(client.admin, "/livez")
        assert readiness(client.admin) == (False, "not ready: no topic is followed yet\n")
        relay.publish("weights", {"w": bytearray(1_024)})
        with client.subscribe("weights") as weights, client.subscribe("other") as _other:
            weights.next(10)
            is_ready, reason = readiness(client.admin)
            assert not is_ready and "other" in reason
            relay.publish("weights", {"w": bytearray(1_024)})
            weights.next(10)
            topic = topics_of(client)["weights"]
            assert (topic["version"], topic["committed"], topic["received_payload_bytes"]) == (2, 2, 2_048)
            assert topic["followed"]
        # A received version keeps its topic ready. A topic whose subscription ended without a version does not count.
        assert readiness(client.admin)[0]
        assert list(topics_of(client)) == ["weights"] and not topics_of(client)["weights"]["followed"]
        assert 'tensor_relay_held_version{topic="weights"} 2' in request(client.admin, "/metrics")
        address = client.admin
    with pytest.raises(OSError):
        request(address, "/livez")


def test_every_kind_of_receiving_is_counted():
    with (
        tensor_relay.serve("127.0.0.1:0", ephemeral=True) as relay,
        tensor_relay.connect(relay.ticket, admin="127.0.0.1:0", ready_within=0.2) as client,
    ):
        relay.publish("weights", {"w": bytearray(1_024)})
        client.get("weights")
        client.get("weights", out={"w": bytearray(1_024)})
        client.get("weights", out={"w": bytearray(1_024)}, atomic=False)
        asyncio.run(client.get_async("weights"))
        topic = topics_of(client)["weights"]
        assert (topic["committed"], topic["received_payload_bytes"]) == (4, 4_096)
        time.sleep(0.3)
        is_ready, reason = readiness(client.admin)
        assert not is_ready and "version 1" in reason


def test_no_admin_port_by_default():
    with tensor_relay.serve("127.0.0.1:0", ephemeral=True) as relay:
        assert relay.admin is None
        with tensor_relay.connect(relay.ticket) as client:
            assert client.admin is None
        with pytest.raises(tensor_relay.RequestError, match="ready_within"):
            tensor_relay.connect(relay.ticket, ready_within=1)


def test_a_client_that_cannot_connect_frees_its_port():
    with tensor_relay.serve("127.0.0.1:0", ephemeral=True, admin="127.0.0.1:0") as relay:
        address, ticket = relay.admin, relay.ticket
        with pytest.raises(tensor_relay.TensorRelayError, match="cannot listen"):
            tensor_relay.connect(ticket, admin=address)
    with pytest.raises(tensor_relay.ServerUnreachableError):
        tensor_relay.connect(ticket, admin=address, timeout=0.2)
    with tensor_relay.serve("127.0.0.1:0", ephemeral=True, admin=address) as relay:
        assert relay.admin == address


def test_other_addresses_require_a_token(tmp_path):
    with pytest.raises(tensor_relay.TensorRelayError, match="token"):
        tensor_relay.serve("127.0.0.1:0", ephemeral=True, admin="0.0.0.0:0")
    token = tmp_path / "token"
    token.write_text("a-token-of-this-test")
    token.chmod(0o600)
    with tensor_relay.serve("127.0.0.1:0", ephemeral=True, admin="127.0.0.1:0", admin_token_file=token) as relay:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            request(relay.admin, "/metrics")
        assert "tensor_relay_topics" in request(relay.admin, "/metrics", "a-token-of-this-test")


@pytest.mark.parametrize("admin", ["nowhere", "127.0.0.1:99999"])
def test_invalid_addresses_are_refused(admin):
    with pytest.raises(tensor_relay.RequestError, match=admin):
        tensor_relay.serve("127.0.0.1:0", ephemeral=True, admin=admin)


def test_a_token_without_a_port_is_refused(tmp_path):
    with pytest.raises(tensor_relay.RequestError, match="admin_token_file"):
        tensor_relay.serve("127.0.0.1:0", ephemeral=True, admin_token_file=tmp_path / "token")
