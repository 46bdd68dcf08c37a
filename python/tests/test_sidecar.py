"""`publish_to`: publishing through a sidecar."""

import json
import os
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import TIMEOUT_S, python, wait_for_exit

import tensor_relay


class Server:
    """A sidecar process, which can be restarted."""

    def __init__(self, program, folder):
        self.socket = folder / "s"
        self.words = [program, "serve", "--json", "--listen=127.0.0.1:0", f"--state-dir={folder}/state"]
        self.words += [f"--publish-socket={self.socket}"]
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.words, stdout=subprocess.PIPE, text=True)
        self.ticket = Path(json.loads(self.process.stdout.readline())["ticket_file"]).read_text().splitlines()[-1]

    def end(self):
        self.process.terminate()
        assert self.process.wait(TIMEOUT_S) == 0


@pytest.fixture
def server(program, tmp_path):
    server = Server(program, tmp_path)
    yield server
    if server.process.poll() is None:
        server.end()


def test_tensors_are_passed_in_shared_memory(server):
    sent = {"w": np.arange(60_000, dtype=np.float32).reshape(200, 300), "transposed": np.arange(12).reshape(3, 4).T, "step": 3}
    with tensor_relay.publish_to(server.socket) as producer, tensor_relay.connect(server.ticket) as client:
        publication = producer.publish("policy", sent, metadata={"run": "a"})
        assert (publication.topic, publication.version, publication.path) == ("policy", 1, "memfd")
        assert "host memory" in publication.path_reason
        assert publication.copied_bytes == sent["w"].nbytes + 2 * sent["transposed"].nbytes, "gathered before it is staged"
        publication.wait_released(timeout=0)  # Copied: `sent` may be changed.
        sent["w"] += 1
        subscription = client.subscribe("policy")
        snapshot = subscription.next(timeout=TIMEOUT_S)
        publication.wait_committed(timeout=TIMEOUT_S)
        assert publication.committed == 1
        snapshot.loaded()
        publication.wait_loaded(timeout=TIMEOUT_S)
        assert publication.loaded == 1
        assert snapshot.metadata["run"] == "a" and snapshot.entries == {"step": 3}
        np.testing.assert_array_equal(snapshot["w"].numpy(), sent["w"] - 1)
        np.testing.assert_array_equal(snapshot["transposed"].numpy(), sent["transposed"])
        second = producer.publish("policy", {"w": sent["w"]}, dtype="f16")
        snapshot = subscription.next(timeout=TIMEOUT_S)
        assert snapshot.version == second.version == 2 and snapshot["w"].dtype == "f16"
        producer.end("policy")
        with pytest.raises(tensor_relay.TopicEndedError):
            subscription.next(timeout=TIMEOUT_S)
        producer.end("policy")  # Ending an ended topic does nothing.
        with pytest.raises(tensor_relay.PublishError, match="never published"):
            producer.end("never")


def test_another_process_publishes(server, tmp_path):
    code = tmp_path / "trainer.py"
    code.write_text(
        "import sys, numpy as np, tensor_relay\n"
        "w = np.zeros(1000)\n"
        "with tensor_relay.publish_to(sys.argv[1]) as producer:\n"
        "    for step in range(1, 4):\n"
        "        w += 1\n"
        "        producer.publish('policy', {'w': w}, metadata={'step': step}).wait_committed()\n"
    )
    with tensor_relay.connect(server.ticket, topic_timeout=TIMEOUT_S) as client, python(code, server.socket) as trainer:
        versions = client.subscribe("policy", mode="every")
        for step in range(1, 4):
            snapshot = versions.next(timeout=TIMEOUT_S)
            assert snapshot.version == step and snapshot.metadata["step"] == step
            np.testing.assert_array_equal(snapshot["w"].numpy(), np.full(1000, float(step)))
        wait_for_exit(trainer)
        late = client.subscribe("policy").next(timeout=TIMEOUT_S)
        assert late.version == 3, "a version stays available after its producer has exited"


def test_a_producer_publishes_to_a_restarted_server(server):
    with tensor_relay.publish_to(server.socket) as producer:
        first = producer.publish("t", {"x": np.ones(3)})
        server.end()
        with pytest.raises(tensor_relay.ServerUnreachableError, match="has ended"):
            first.wait_committed(timeout=TIMEOUT_S)
        server.start()
        second = producer.publish("t", {"x": np.ones(3)})
        assert second.version == 1 and second.epoch != first.epoch


def test_threads_share_the_connection_to_a_restarted_server(server):
    with tensor_relay.publish_to(server.socket) as producer:
        producer.publish("t", {"x": np.ones(3)})
        server.end()
        server.start()
        threads = 8
        barrier, publications = threading.Barrier(threads), []

        def publish(number):
            barrier.wait(TIMEOUT_S)
            publications.append(producer.publish(f"t{number}", {"x": np.ones(3)}))

        running = [threading.Thread(target=publish, args=[number]) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(TIMEOUT_S)
        assert len(publications) == threads
        with tensor_relay.connect(server.ticket) as client:
            for publication in publications:  # All of them share the new connection.
                client.subscribe(publication.topic).next(timeout=TIMEOUT_S)
                publication.wait_committed(timeout=TIMEOUT_S)


def test_publish_to_and_its_producer_report_errors(server, tmp_path):
    with pytest.raises(tensor_relay.ServerUnreachableError, match="there is no socket"):
        tensor_relay.publish_to(tmp_path / "none", timeout=0)
    with pytest.raises(tensor_relay.ServerRefusedError, match="not of user 54321"):
        tensor_relay.publish_to(server.socket, server_uid=54321)
    producer = tensor_relay.publish_to(server.socket, server_uid=os.geteuid())
    with pytest.raises(tensor_relay.UnsupportedTensorError, match="optimizer"):
        producer.publish("t", {"optimizer": object()})
    with pytest.raises(tensor_relay.RequestError):
        producer.publish("../t", {})
    assert "Producer(" in repr(producer) and producer.path == server.socket
    producer.close()
    producer.close()
    with pytest.raises(tensor_relay.ClosedError):
        producer.publish("t", {"x": np.ones(3)})
