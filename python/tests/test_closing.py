"""Closing ends other callers' waits at once, whether it is called from an event loop, a thread or a signal handler.

Method: each case is a program of its own, which is killed when it hangs. Nothing is published, or nobody receives the
version, so that no wait would end by itself. A case whose close comes before the wait proves less, but does not fail.
"""

import asyncio
import time

import pytest
from conftest import python, wait_for_exit

PROGRAM = """
import asyncio, faulthandler, gc, signal, sys, threading, time
import numpy, tensor_relay

faulthandler.dump_traceback_later(50, exit=True)
relay = tensor_relay.serve("127.0.0.1:0", state_dir=sys.argv[1])
client = tensor_relay.connect(relay.ticket, topic_timeout=600)
PAUSE_DURATION_S = 0.3

def outcome(call):
    try:
        return call()
    except Exception as error:
        return type(error).__name__

def in_thread(wait, close):
    ended = []
    waiting = threading.Thread(target=lambda: ended.append(outcome(wait)))
    waiting.start()
    time.sleep(PAUSE_DURATION_S)
    close()
    waiting.join()
    return ended[0]

def in_handler(wait, close):
    signal.signal(signal.SIGALRM, lambda *_: close())
    signal.setitimer(signal.ITIMER_REAL, PAUSE_DURATION_S)
    return outcome(wait)
"""


def output_of(tmp_path, program):
    path = tmp_path / "closes.py"
    path.write_text(PROGRAM + program)
    with python(path, tmp_path / "state") as closing:
        return wait_for_exit(closing).split()


CALLERS = pytest.mark.parametrize("caller", ["in_thread", "in_handler"])


@CALLERS
@pytest.mark.parametrize("out", ["", ", out={'x': numpy.zeros(3)}", ", out={'x': numpy.zeros(3)}, atomic=False"])
def test_closing_ends_the_wait_for_a_version(tmp_path, caller, out):
    output = output_of(tmp_path, f"""
subscription = client.subscribe("t"{out})
print({caller}(subscription.next, lambda: (subscription.acknowledge(), subscription.close())))
subscription = client.subscribe("t"{out})
print({caller}(lambda: list(subscription), subscription.close))
print(outcome(subscription.next), list(subscription))
subscription = client.subscribe("t"{out})
print({caller}(subscription.next, client.close))
""")
    assert output == ["ClosedError", "[]", "ClosedError", "[]", "ClosedError"]


@pytest.mark.parametrize("out", ["", ", out={'x': numpy.zeros(3)}"])
def test_closing_in_an_event_loop_ends_its_coroutines(tmp_path, out):
    output = output_of(tmp_path, f"""
async def iterate(subscription):
    async for snapshot in subscription:
        raise AssertionError(snapshot)
    return "over"

async def close():
    for waits in (1, 2):
        subscription = client.subscribe("t"{out})
        waiting = [asyncio.create_task(iterate(subscription)) for _ in range(waits)]
        called = asyncio.ensure_future(subscription.next_async())
        await asyncio.sleep(PAUSE_DURATION_S)
        subscription.acknowledge()
        subscription.close()
        print(*await asyncio.gather(*waiting))
        print(type((await asyncio.gather(called, return_exceptions=True))[0]).__name__)

asyncio.run(close())
""")
    assert output == ["over", "ClosedError", "over", "over", "ClosedError"]


def test_collecting_a_subscription_ends_no_wait_and_does_not_block(tmp_path):
    output = output_of(tmp_path, """
class Owner:
    def __init__(self):
        self.subscription = client.subscribe("t")
    def __del__(self):
        self.subscription.close()

async def collect():
    subscription = client.subscribe("t")
    waiting = asyncio.ensure_future(subscription.next_async())
    await asyncio.sleep(PAUSE_DURATION_S)
    del subscription
    gc.collect()
    owner = Owner()
    closed = asyncio.ensure_future(owner.subscription.next_async())
    await asyncio.sleep(PAUSE_DURATION_S)
    del owner
    gc.collect()
    print(type((await asyncio.gather(closed, return_exceptions=True))[0]).__name__)
    relay.publish("t", {"x": b"abc"})
    print((await waiting).version)

asyncio.run(collect())
""")
    assert output == ["ClosedError", "1"]


def test_a_cancelled_coroutines_version_is_not_acknowledged(relay, client):
    """Goal: in mode "every", `acknowledge` acknowledges the version that the program received last, not one that was
    never returned to it.

    Method: the event loop is blocked while a version arrives for a coroutine, which is cancelled before it runs again.
    """
    relay.open("t", keep_versions=9)

    async def leave_one(subscription):
        waiting = asyncio.ensure_future(subscription.next_async())
        await asyncio.sleep(0)  # Lets the coroutine begin.
        time.sleep(0.5)
        waiting.cancel()
        await asyncio.sleep(0.1)

    with client.subscribe("t", mode="every", reader="r") as subscription:
        for number in range(3):
            relay.publish("t", {"x": bytes([number])})
        assert subscription.next(10).version == 1
        asyncio.run(leave_one(subscription))
        subscription.acknowledge()
        time.sleep(0.2)  # Until the server has received the acknowledgement.
    assert client.subscribe("t", mode="every", reader="r").next(10).version == 2


@CALLERS
@pytest.mark.parametrize("close, expected", [
    ("relay.close(0)", "PublishError"), ("relay.withdraw('t')", "PublishError"), ("relay.end('t')", "RelayTimeoutError"),
])  # fmt: skip
def test_closing_ends_a_publish_that_waits_for_readers(tmp_path, caller, close, expected):
    """After `end`, a publish in progress still waits for its readers, and `end` does not wait for the publish."""
    output = output_of(tmp_path, f"""
relay.open("t", when_full="block")
reader = client.subscribe("t", mode="every", window=1)

def publish():
    while True:
        relay.publish("t", {{"x": b"abc"}}, timeout=10 if {close!r}.startswith("relay.end") else None)

relay.publish("t", {{"x": b"abc"}})
reader.next(10)
print({caller}(publish, lambda: {close}))
print(outcome(lambda: relay.end("t")))
""")
    assert output == [expected, "ClosedError" if "close" in close else "None"]


@CALLERS
def test_closing_a_relay_ends_the_wait_for_its_readers(tmp_path, caller):
    output = output_of(tmp_path, f"""
published = relay.publish("t", {{"x": b"abc"}}, hold="borrow")
print({caller}(lambda: published.wait_committed(timeout=None), lambda: relay.close(0)))
print(published.wait_released())
""")
    assert output == ["PublishError", "None"]
