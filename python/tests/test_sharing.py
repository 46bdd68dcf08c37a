"""`shared_client`: one client for each server in a process, and tickets that are passed to other processes."""

import pickle
import threading
import weakref

import numpy as np
import pytest

import tensor_relay
from conftest import python, serve_again, wait_for_exit
from tensor_relay import _shared


def test_a_server_has_one_client(relay):
    client = tensor_relay.shared_client(relay.ticket)
    assert tensor_relay.shared_client(relay.ticket.replace("?", "/a/topic?")) is client, "whatever topic the ticket names"
    other = tensor_relay.shared_client(relay.ticket_for("a/topic"))
    assert other is not client, "another token has other rights"
    other.close()
    assert tensor_relay.shared_client(pickle.loads(pickle.dumps(relay.ticket))) is client
    client.close()
    assert client.closed
    again = tensor_relay.shared_client(relay.ticket)
    assert again is not client and not again.closed
    again.close()


def test_threads_connect_once(relay):
    ready, clients = threading.Barrier(8), []

    def connect():
        ready.wait()
        clients.append(tensor_relay.shared_client(relay.ticket))

    threads = [threading.Thread(target=connect) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, clients))) == 1 and len(clients) == 8
    clients[0].close()


def test_clients_beyond_the_bound_close_when_unreferenced(tmp_path, monkeypatch):
    monkeypatch.setattr(_shared, "RECENT_MAX", 1)
    shared = _shared.SharedClients()
    relays = [tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path / str(number)) for number in range(2)]
    held = shared.get(relays[0].ticket, 10)
    unreferenced = weakref.ref(shared.get(relays[1].ticket, 10))
    assert unreferenced() is not None, "the bound keeps one"
    assert shared.get(relays[0].ticket, 10) is held, "a referenced client stays connected"
    assert unreferenced() is None
    held.close()
    for relay in relays:
        relay.close(0)


def test_a_closed_client_is_replaced(tmp_path):
    relay = tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path)
    shared = _shared.SharedClients(reconnect_timeout=0.1)
    client = shared.get(relay.ticket, 10)
    address, ticket = relay.address, relay.ticket
    relay.close(end=False)
    with pytest.raises(tensor_relay.ServerUnreachableError):
        client.get("t")
    assert client.closed
    with pytest.raises(tensor_relay.ServerUnreachableError):
        shared.get(ticket, 0.5)
    with serve_again(address, state_dir=tmp_path) as relay:
        relay.publish("t", {"x": np.ones(3)})
        assert shared.get(ticket, 10).get("t").version == 1


def test_a_ticket_can_be_passed_to_another_process(relay, tmp_path):
    relay.publish("t", {"x": np.ones(3)})
    script = tmp_path / "other.py"
    script.write_text(
        "import pickle, sys, tensor_relay\n"
        "ticket = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "print(tensor_relay.shared_client(ticket).get('t')['x'].numpy().sum())\n"
    )
    with python(script, pickle.dumps(relay.ticket).hex()) as other:
        assert wait_for_exit(other).strip() == "3.0"
