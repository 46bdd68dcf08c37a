"""The admin port of a relay, as `tensor-relay serve` has one."""

import json
import urllib.error
import urllib.request

import pytest

import tensor_relay


def ask(address, path, token=None):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(f"http://{address}{path}", headers=headers), timeout=10) as answer:
        return answer.read().decode()


def test_a_relay_tells_how_it_does():
    with tensor_relay.serve("127.0.0.1:0", ephemeral=True, admin="127.0.0.1:0") as relay:
        relay.publish("weights", {"w": bytearray(1_000)})
        with tensor_relay.connect(relay.ticket) as client:
            client.get("weights")
        assert ask(relay.admin, "/livez") and ask(relay.admin, "/readyz")
        status = json.loads(ask(relay.admin, "/status"))
        assert [topic["topic"] for topic in status["topics"]] == ["weights"], status
        assert 'tensor_relay_topic_version{topic="weights"} 1' in ask(relay.admin, "/metrics")
        assert "<html" in ask(relay.admin, "/")
        address = relay.admin
    with pytest.raises(OSError):
        ask(address, "/livez")
    with tensor_relay.serve("127.0.0.1:0", ephemeral=True, admin=address) as relay:
        assert relay.admin == address, "the port is free again"


def test_without_one_there_is_none():
    with tensor_relay.serve("127.0.0.1:0", ephemeral=True) as relay:
        assert relay.admin is None


def test_other_addresses_take_a_token(tmp_path):
    with pytest.raises(tensor_relay.TensorRelayError, match="token"):
        tensor_relay.serve("127.0.0.1:0", ephemeral=True, admin="0.0.0.0:0")
    token = tmp_path / "token"
    token.write_text("a-token-of-this-test")
    token.chmod(0o600)
    with tensor_relay.serve("127.0.0.1:0", ephemeral=True, admin="127.0.0.1:0", admin_token_file=token) as relay:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(relay.admin, "/metrics")
        assert "tensor_relay_topics" in ask(relay.admin, "/metrics", "a-token-of-this-test")


@pytest.mark.parametrize("admin", ["nowhere", "127.0.0.1:99999"])
def test_what_is_no_address_is_named(admin):
    with pytest.raises(tensor_relay.RequestError, match=admin):
        tensor_relay.serve("127.0.0.1:0", ephemeral=True, admin=admin)


def test_a_token_without_a_port_is_a_mistake(tmp_path):
    with pytest.raises(tensor_relay.RequestError, match="admin_token_file"):
        tensor_relay.serve("127.0.0.1:0", ephemeral=True, admin_token_file=tmp_path / "token")
