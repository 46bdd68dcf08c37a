"""The exceptions: their classes, Python's base classes, and their messages."""

import builtins

import pytest

import tensor_relay
from tensor_relay import errors

NO_SERVER = "relay://127.0.0.1:9?key=sha256:" + "ab" * 32


def test_all_errors_have_one_base_class_and_hide_no_builtin():
    classes = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    assert len(classes) == 21
    for name, value in classes.items():
        assert issubclass(value, tensor_relay.TensorRelayError) and value.__doc__
        assert getattr(tensor_relay, name) is value and name in tensor_relay.__all__
        assert not hasattr(builtins, name)


@pytest.mark.parametrize("ticket", ["", "http://x", "relay://h:1", "relay://h:1?key=sha256:12", "/no/such/file"])
def test_invalid_tickets_are_refused(ticket):
    with pytest.raises(tensor_relay.TicketError) as refused:
        tensor_relay.connect(ticket)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize("ticket", [0, 3, -1, True, 1.5, b"/no/such/file", bytearray(b"relay://"), ["relay://"]])
def test_tickets_are_text_or_paths(ticket):
    with pytest.raises(TypeError, match="a ticket is text, or the path of a file"):
        tensor_relay.connect(ticket)


def test_descriptors_of_the_caller_stay_open(tmp_path, relay):
    """An integer is not a path, although Python's `open` accepts one as a descriptor."""
    relay.publish("t", {"x": b"abc"})
    with tensor_relay.connect(relay.ticket) as client, open(tmp_path / "mine", "w+") as mine:
        snapshot = client.subscribe("t").next(10)
        mine.write(relay.ticket)
        mine.seek(0)
        number = mine.fileno()
        for wrong in (
            lambda: tensor_relay.connect(number),
            lambda: tensor_relay.publish_to(number),
            lambda: tensor_relay.serve("127.0.0.1:0", state_dir=number),
            lambda: snapshot.save(number),
        ):
            with pytest.raises(TypeError):
                wrong()
        assert mine.read() == relay.ticket


def test_an_unreachable_server_is_reported():
    message = "no answer from 127.0.0.1:9: nothing over UDP within 200 ms, and over TCP: "
    with pytest.raises(tensor_relay.ServerUnreachableError, match=message) as refused:
        tensor_relay.connect(NO_SERVER, timeout=0.2)
    assert isinstance(refused.value, ConnectionError)


def test_a_server_with_another_key_is_refused(relay):
    ticket = f"relay://{relay.address}?key=sha256:{'ab' * 32}"
    with pytest.raises(tensor_relay.ServerRefusedError, match="the ticket expects sha256:abab"):
        tensor_relay.connect(ticket)


def test_a_missing_topic_is_reported(relay):
    with tensor_relay.connect(relay.ticket, topic_timeout=0.1) as client:
        with pytest.raises(tensor_relay.TopicNotFoundError, match="no topic policy appeared within 100 ms") as missing:
            client.subscribe("policy").next()
        assert isinstance(missing.value, TimeoutError)


def test_a_version_that_exceeds_memory_is_refused(relay):
    with tensor_relay.connect(relay.ticket, memory_bytes=1 << 20) as client:
        relay.publish("t", {"x": bytes(2 << 20)})
        with pytest.raises(tensor_relay.NoRoomError, match="does not fit"):
            client.subscribe("t").next(10)


@pytest.mark.parametrize("call", [
    lambda relay, client: relay.publish("a//b", {}),
    lambda relay, client: relay.publish("t", {}, hold="lend"),
    lambda relay, client: relay.open("t", when_full="drop"),
    lambda relay, client: relay.ticket_for(""),
    lambda relay, client: client.subscribe("t", mode="some"),
    lambda relay, client: client.subscribe("t", start="first"),
    lambda relay, client: client.subscribe("t", mode="every", reader="a/b"),
    lambda relay, client: client.subscribe("t", reader="a"),
    lambda relay, client: client.subscribe("t", window=2),
    lambda relay, client: client.subscribe("t", rename=str.lower),
    lambda relay, client: client.get("t", rename=str.lower),
    lambda relay, client: relay.open("u", keep_versions=0),
    lambda relay, client: client.subscribe("t", on_gap="ignore"),
    lambda relay, client: client.subscribe(),
    lambda relay, client: tensor_relay.serve("localhost"),
    lambda relay, client: tensor_relay.serve("127.0.0.1:0", codec="gzip"),
    lambda relay, client: tensor_relay.serve("127.0.0.1:0", advertise="host:port"),
])  # fmt: skip
def test_invalid_names_and_options_are_refused(relay, client, call, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(tensor_relay.RequestError) as refused:
        call(relay, client)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize("option, value, words", [
    ("chunk_bytes", 0, "from 256 to 67108864"), ("chunk_bytes", 1, "from 256 to 67108864"),
    ("chunk_bytes", 300, "a multiple of 256"), ("chunk_bytes", 128 << 20, "from 256 to 67108864"),
    ("stall_timeout", 0, "more than 0"), ("sessions_max", 0, "1 or more"),
])  # fmt: skip
def test_serve_refuses_values_out_of_range(tmp_path, option, value, words):
    with pytest.raises(tensor_relay.RequestError, match=f"{option} is {value}.*{words}"):
        tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path, **{option: value})


@pytest.mark.parametrize("option, value, words", [
    ("lanes", 0, "from 1 to 16"), ("lanes", 17, "from 1 to 16"), ("versions_held_max", 0, "1 or more"),
    ("stall_timeout", 0, "more than 0"),
])  # fmt: skip
def test_connect_refuses_values_out_of_range(relay, option, value, words):
    with pytest.raises(tensor_relay.RequestError, match=f"{option} is {value}.*{words}"):
        tensor_relay.connect(relay.ticket, **{option: value})


def test_a_port_in_use_is_reported(relay, tmp_path):
    with pytest.raises(tensor_relay.TensorRelayError, match="in use by another process.*choose another port") as refused:
        tensor_relay.serve(relay.address, state_dir=tmp_path)
    assert "--" not in str(refused.value), "the message must not name options of the command line"


def test_serve_accepts_host_names(tmp_path):
    with tensor_relay.serve("localhost:0", state_dir=tmp_path) as relay:
        assert relay.address.rsplit(":", 1)[0] in ("127.0.0.1", "[::1]")
    with pytest.raises(tensor_relay.RequestError, match="no address to listen on .*HOST:PORT"):
        tensor_relay.serve("no-such-host.invalid:0", state_dir=tmp_path)


def test_arguments_of_wrong_types_are_refused(relay, client):
    with pytest.raises(TypeError, match="select is a pattern or several, each a text, and not 3"):
        client.subscribe("t", select=3)
    with pytest.raises(TypeError, match="metadata is a mapping of names to values, and not a str"):
        relay.publish("t", {}, metadata="step")


def test_the_ticket_has_the_advertised_addresses(tmp_path):
    for advertise, expected in [("gpu-7", "gpu-7:{port}"), (["a:1", "::1"], "a:1,[::1]:{port}")]:
        with tensor_relay.serve("127.0.0.1:0", state_dir=tmp_path, advertise=advertise) as relay:
            port = relay.address.rsplit(":", 1)[1]
            assert relay.ticket.startswith(f"relay://{expected.format(port=port)}?key=")


def test_a_missing_ticket_is_reported_as_such(tmp_path, monkeypatch):
    monkeypatch.delenv("TENSOR_RELAY_TICKET", raising=False)
    empty = tmp_path / "empty.ticket"
    empty.write_text("\n")
    calls = (tensor_relay.connect, tensor_relay.shared_client, lambda ticket=None: tensor_relay.pull(ticket, tmp_path))
    for call in calls:
        with pytest.raises(tensor_relay.TicketError, match="there is no ticket: pass one, .* or set TENSOR_RELAY_TICKET"):
            call()
        with pytest.raises(tensor_relay.TicketError, match="the ticket is an empty text"):
            call(" ")
        with pytest.raises(tensor_relay.TicketError, match="empty.ticket' holds no ticket: it is empty"):
            call(empty)


def test_only_public_names_are_listed():
    assert {"serve", "tree", "errors", "__version__"} < set(dir(tensor_relay))
    assert not {"re", "os", "atexit", "logging", "weakref", "annotations"} & set(dir(tensor_relay))
    assert dir(tensor_relay.tree) == ["STRUCTURE", "flatten", "unflatten"]
