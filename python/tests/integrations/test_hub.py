"""Hugging Face's own client, and transformers, against `tensor-relay hub`.

Each test runs in a Python process of its own, because huggingface_hub reads its endpoint when it is imported."""

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading

import numpy
import pytest
from safetensors.numpy import save_file

from conftest import TIMEOUT_S, python, wait_for_exit

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")


def write_model(folder, seed):
    """A model of two shards with an index, and two small files."""
    folder.mkdir(exist_ok=True)
    random = numpy.random.default_rng(seed)
    weight_map = {}
    for shard in (1, 2):
        name = f"model-0000{shard}-of-00002.safetensors"
        tensors = {f"layers.{shard}.{part}": random.random((700, 1000), "float32") for part in "ab"}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 4 * 2_800_000}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"seed": seed}))
    (folder / "README.md").write_text("# A model\n")


def assert_same(left, right):
    for name in ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                 "model.safetensors.index.json", "README.md"):  # fmt: skip
        assert (left / name).read_bytes() == (right / name).read_bytes(), name


@contextlib.contextmanager
def running(program, home, *words):
    """Runs the program, and yields the process and the object that it prints first."""
    process = subprocess.Popen(
        [program, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=home
    )
    errors = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True)
    reader.start()
    killer = threading.Timer(4 * TIMEOUT_S, process.kill)
    killer.start()
    try:
        line = process.stdout.readline()
        assert line, f"{words} ended with {process.wait()}: {errors}"
        yield process, json.loads(line)
    finally:
        killer.cancel()
        process.kill()
        process.wait()


@contextlib.contextmanager
def served(program, home, *more, listen="127.0.0.1:0"):
    command = ("serve", "--json", f"--listen={listen}", "--admin=none", "--state-dir=state", "--topic=org/m=model")
    with running(program, home, *command, *more) as (process, report):
        yield process, report


@contextlib.contextmanager
def hub(program, home, report, *more):
    """A hub, as the environment of its clients."""
    with running(program, home, "hub", report["ticket_file"], "--json", "--listen=127.0.0.1:0", *more) as (_, started):
        yield {
            "HF_ENDPOINT": started["hub"],
            "HF_TOKEN": started["token"],
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HOME": str(home / "hf"),
        }


def run(environment, code, returncode=0):
    """Runs Python code, and returns what it prints."""
    with python("-c", "from huggingface_hub import *\n" + code, **environment) as process:
        return wait_for_exit(process, returncode).strip()


def test_snapshots_files_and_the_cache(program, tmp_path):
    """Goal: whole and partial snapshots, single files, revisions, and what is in the cache, are as with the real hub.
    Method: two versions of a model, which the server retains."""
    write_model(tmp_path / "model", 1)
    with served(program, tmp_path, "--watch", "--keep-versions=2") as (_, report), hub(program, tmp_path, report) as env:
        first = run(env, "print(snapshot_download('org/m'))")
        assert_same(tmp_path / "model", tmp_path / first)
        old = tmp_path / "old"
        os.rename(tmp_path / "model", old)
        write_model(tmp_path / "new", 2)
        os.rename(tmp_path / "new", tmp_path / "model")
        run(env, """if True:
            import time
            deadline = time.monotonic() + 60
            while not revision_exists("org/m", "v2"):
                assert time.monotonic() < deadline
                time.sleep(0.2)""")
        second = run(env, "print(snapshot_download('org/m'))")
        assert_same(tmp_path / "model", tmp_path / second)
        assert first != second
        # Both are in the cache, under their commits.
        assert run(env, "print(snapshot_download('org/m', revision='v1'))") == first
        commit = os.path.basename(first)
        part = f"snapshot_download('org/m', revision='{commit}', allow_patterns='*.json', local_dir='part')"
        assert sorted(os.listdir(run(env | {"PWD": str(tmp_path)}, f"import os; os.chdir('{tmp_path}'); print({part})"))) == [
            ".cache", "config.json", "model.safetensors.index.json"
        ]  # fmt: skip
        one = run(env, "print(hf_hub_download('org/m', 'config.json', revision='v1', force_download=True))")
        assert json.loads(open(one).read()) == {"seed": 1}
        # What the cache has is used without the hub.
        assert run(env | {"HF_HUB_OFFLINE": "1"}, "print(snapshot_download('org/m'))") == second


def test_the_api_and_the_file_system(program, tmp_path):
    write_model(tmp_path / "model", 1)
    with served(program, tmp_path) as (_, report), hub(program, tmp_path, report) as env:
        found = json.loads(run(env, """if True:
            import json
            api, files = HfApi(), HfFileSystem()
            shard = "org/m/model-00002-of-00002.safetensors"
            with files.open(shard, "rb") as file:
                file.seek(-10, 2)
                end = file.read()
            print(json.dumps({
                "models": [model.id for model in api.list_models()],
                "files": api.list_repo_files("org/m"),
                "sizes": {it.path: it.size for it in api.get_paths_info("org/m", ["config.json", "none"])},
                "exists": [api.file_exists("org/m", "config.json"), api.file_exists("org/m", "none"),
                           api.repo_exists("org/m"), api.repo_exists("none"), api.revision_exists("org/m", "v9")],
                "glob": files.glob("org/m/*.safetensors"),
                "end": end.hex(),
                "tensors": len(get_safetensors_metadata("org/m").weight_map),
                "refs": [branch.name for branch in api.list_repo_refs("org/m").branches],
                "who": api.whoami()["name"],
            }))"""))  # fmt: skip
        content = (tmp_path / "model" / "model-00002-of-00002.safetensors").read_bytes()
        assert found == {
            "models": ["org/m"],
            "files": found["files"],
            "sizes": {"config.json": (tmp_path / "model" / "config.json").stat().st_size},
            "exists": [True, False, True, False, False],
            "glob": ["org/m/model-00001-of-00002.safetensors", "org/m/model-00002-of-00002.safetensors"],
            "end": content[-10:].hex(),
            "tensors": 4,
            "refs": ["main"],
            "who": "tensor-relay",
        }
        assert sorted(found["files"]) == sorted(os.listdir(tmp_path / "model"))


def test_errors_have_their_classes_and_the_reason(program, tmp_path):
    write_model(tmp_path / "model", 1)
    with served(program, tmp_path) as (_, report), hub(program, tmp_path, report) as env:
        for call, name, reason in (
            ("snapshot_download('none')", "RepositoryNotFoundError", "tensor-relay list"),
            ("snapshot_download('org/m', revision='v7')", "RevisionNotFoundError", "not published yet"),
            ("hf_hub_download('org/m', 'none')", "EntryNotFoundError", "has no file none"),
            ("snapshot_download('org/m', token='hf_00000000000000000000')", "GatedRepoError", "set HF_TOKEN"),
        ):
            caught = run(env, f"""if True:
                from huggingface_hub import errors
                try:
                    {call}
                except errors.{name} as error:
                    print(error)""")
            assert reason in caught, (call, caught)


def test_a_download_continues_after_the_server_was_lost(program, tmp_path):
    """Goal: if the server is killed midway, the download fails with its reason or waits, and what it received is used.
    Method: kill the server after the first shard, start it again, and download again."""
    write_model(tmp_path / "model", 1)
    with served(program, tmp_path) as (process, report), hub(program, tmp_path, report) as env:
        run(env, "hf_hub_download('org/m', 'model-00001-of-00002.safetensors')")
        process.send_signal(signal.SIGKILL)
        process.wait()
        with python("-c", "from huggingface_hub import *; snapshot_download('org/m')", **env) as lost:
            _, errors = lost.communicate(timeout=2 * TIMEOUT_S)
        assert lost.returncode == 1 and "503" in errors, errors
        with served(program, tmp_path, listen=report["listen"]):
            path = run(env, """if True:
                import time
                from huggingface_hub import errors
                deadline = time.monotonic() + 60
                while True:
                    try:
                        print(snapshot_download('org/m'))
                        break
                    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError):
                        assert time.monotonic() < deadline
                        time.sleep(1)""")
            assert_same(tmp_path / "model", tmp_path / path)


def test_hf_download(program, tmp_path):
    write_model(tmp_path / "model", 1)
    command = os.path.join(os.path.dirname(sys.executable), "hf")
    if not os.path.exists(command):
        pytest.skip(f"huggingface_hub {importlib.metadata.version('huggingface_hub')} has no command hf")
    with served(program, tmp_path) as (_, report), hub(program, tmp_path, report) as env:
        subprocess.run(
            [command, "download", "org/m", "--local-dir", tmp_path / "out"],
            env=os.environ | env, check=True, timeout=2 * TIMEOUT_S, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        assert_same(tmp_path / "model", tmp_path / "out")


def test_tensors_are_one_file(relay, program, tmp_path):
    """Tensors that were published from Python, and not from files, are one safetensors file."""
    weights = {"a": numpy.arange(6, dtype="float32").reshape(2, 3), "b": numpy.zeros(0, "int8")}
    relay.publish("run/7/policy", weights, metadata={"step": 3})
    (tmp_path / "ticket").write_text(relay.ticket)
    with hub(program, tmp_path, {"ticket_file": tmp_path / "ticket"}, "--hub-repo=run/policy=run/7/policy") as env:
        found = run(env, """if True:
            from safetensors.numpy import load_file
            assert HfApi().list_repo_files("run/policy") == ["model.safetensors"]
            tensors = load_file(hf_hub_download("run/policy", "model.safetensors"))
            print(tensors["a"].tolist(), tensors["b"].shape, len(tensors))""")
        assert found == "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] (0,) 2"


def test_from_pretrained(program, tmp_path):
    """Goal: transformers loads a sharded model by its name. Method: a small Llama, made here, and compared with it."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=500, tie_word_embeddings=False, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="200KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    with served(program, tmp_path) as (_, report), hub(program, tmp_path, report) as env:
        compared = run(env, f"""if True:
            import torch
            from transformers import AutoModelForCausalLM
            loaded = AutoModelForCausalLM.from_pretrained("org/m").state_dict()
            saved = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}).state_dict()
            print(loaded.keys() == saved.keys() and all(torch.equal(loaded[name], saved[name]) for name in saved))""")
        assert compared.endswith("True"), compared
