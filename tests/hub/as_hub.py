"""Runs pytest on tests of huggingface_hub, with `tensor-relay hub` as the server: what a test writes through `HfApi`
is published as a version of a topic, and what it reads comes from the hub.

A folder of a topic is flat, has weights and no hidden files, and a topic has no branches. A repository here is as near
to the real one as that allows: it has a file of weights in addition, and lacks files in subfolders and commits to
branches. Tests that need these fail, and the report says why."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

PROGRAM = os.environ["TENSOR_RELAY_PROGRAM"]
TIMEOUT_S = 60


class Server:
    """A server that has no topic yet, and a hub of all its topics."""

    def __init__(self, folder, stack):
        self.folder, self.socket = folder, folder / "publish"
        serve = (f"--publish-socket={self.socket}", "--listen=127.0.0.1:0", "--keep-versions=16", f"--state-dir={folder}")
        report = self._start(stack, "serve", "--json", "--admin=none", *serve)
        ticket = self._run("tickets", "create", "--topic=**", f"--address={report['listen']}", f"--state-dir={folder}", "--json")
        (folder / "ticket").write_text(json.loads(ticket)["ticket"])
        hub = self._start(stack, "hub", folder / "ticket", "--json", "--listen=127.0.0.1:0", "--hub-anonymous")
        self.url = hub["hub"]

    def _start(self, stack, *words):
        errors = stack.enter_context(open(self.folder / f"{words[0]}.log", "w"))
        process = subprocess.Popen([PROGRAM, *words], stdout=subprocess.PIPE, stderr=errors, text=True)
        stack.callback(process.wait)
        stack.callback(process.kill)
        return json.loads(process.stdout.readline())

    def _run(self, *words):
        return subprocess.run([PROGRAM, *words], check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout

    def publish(self, topic, folder):
        """Publishes a folder, and returns the commit that the hub shows for it."""
        published = json.loads(self._run("publish", self.socket, topic, folder, "--all-files", "--json"))
        commit = self._commit(topic, f"v{published['version']}")
        deadline = time.monotonic() + TIMEOUT_S
        while self._commit(topic, "main") != commit:
            assert time.monotonic() < deadline, (topic, published)
            time.sleep(0.1)
        return commit

    def _commit(self, topic, revision):
        """The commit of a revision, once the hub knows it."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/api/models/{topic}/revision/{revision}") as answer:
                    return json.load(answer)["sha"]
            except urllib.error.HTTPError:
                assert time.monotonic() < deadline, (topic, revision)
                time.sleep(0.1)


class Repositories:
    """What tests create, as folders."""

    def __init__(self, server):
        self.server, self.folder = server, server.folder / "repositories"

    def folder_of(self, repo_id):
        return self.folder / repo_id

    def create(self, repo_id):
        """An empty repository: a topic needs a file of weights."""
        folder = self.folder_of(repo_id)
        folder.mkdir(parents=True, exist_ok=True)
        header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
        header += b" " * (-len(header) % 8)
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
        return self.server.publish(repo_id, folder)

    def commit(self, repo_id, operations):
        folder = self.folder_of(repo_id)
        for operation in operations:
            path = folder / operation.path_in_repo
            if path.parent != folder:
                continue  # A folder of a topic is flat.
            if type(operation).__name__ == "CommitOperationAdd":
                with operation.as_file() as file:
                    path.write_bytes(file.read())
            elif type(operation).__name__ == "CommitOperationDelete":
                path.unlink(missing_ok=True)
        return self.server.publish(repo_id, folder)


def replace_writes(repositories, user):
    """Replaces the methods by which a test writes to the staging server."""
    import pytest
    from huggingface_hub import CommitInfo, HfApi, RepoUrl

    def refuse_other_types(repo_type):
        if repo_type not in (None, "model"):
            pytest.skip("the hub has no datasets and Spaces")

    def create_repo(self, repo_id, *, repo_type=None, **_options):
        refuse_other_types(repo_type)
        repo_id = repo_id if "/" in repo_id else f"{user}/{repo_id}"
        if not repositories.folder_of(repo_id).exists():
            repositories.create(repo_id)
        return RepoUrl(f"{repositories.server.url}/{repo_id}", endpoint=repositories.server.url)

    def create_commit(self, repo_id, operations, *, commit_message="", repo_type=None, revision=None, **_options):
        refuse_other_types(repo_type)
        is_main = revision in (None, "main")
        oid = repositories.commit(repo_id, list(operations)) if is_main else "0" * 40
        url = f"{repositories.server.url}/{repo_id}/commit/{oid}"
        return CommitInfo(commit_url=url, commit_message=commit_message, commit_description="", oid=oid)

    def nothing(self, *_values, **_options):
        return None

    HfApi.create_repo, HfApi.create_commit = create_repo, create_commit
    HfApi.create_branch = HfApi.delete_repo = nothing


def main():
    import pytest

    source, options = Path(sys.argv[1]), sys.argv[2:]
    with contextlib.ExitStack() as stack:
        server = Server(Path(stack.enter_context(tempfile.TemporaryDirectory())), stack)
        constants = source / "tests" / "testing_constants.py"
        text = re.sub(r'"https://(hub-ci\.)?huggingface\.co"', json.dumps(server.url), constants.read_text())
        constants.write_text(text)
        os.environ["HF_ENDPOINT"] = server.url
        os.chdir(source)
        replace_writes(Repositories(server), re.search(r'^USER = "(.*)"', text, re.MULTILINE)[1])
        names = ("test_snapshot_download.py", "test_file_download.py", "test_hf_api.py", "test_hf_file_system.py")
        files = [f"tests/{name}" for name in names]
        quiet = ["-o", "addopts=", "-q", "-rA", "--tb=line", "-p", "no:cacheprovider", "-W", "ignore", f"--timeout={TIMEOUT_S}"]
        return pytest.main([*quiet, *files, *options])


if __name__ == "__main__":
    sys.exit(main())
