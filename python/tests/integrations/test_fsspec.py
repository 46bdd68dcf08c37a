"""`relay://` through fsspec, pandas and pyarrow; and a model through `pull` and transformers."""

import errno
import os
import pathlib
import pickle

import numpy as np
import pytest

import tensor_relay
from conftest import serve_again

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")

from tensor_relay.integrations.fsspec import RelayFileSystem, publish_folder  # noqa: E402

CSV = "a,b\n1,x\n2,y\n"
NO_SERVER = "relay://127.0.0.1:9?key=sha256:" + "ab" * 32


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "files"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "table.csv").write_text(CSV)
    (folder / "deep" / "er" / "bytes.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "empty").touch()
    return folder


@pytest.fixture
def files(relay, folder):
    publish_folder(relay, "data/one", folder, metadata={"day": 3})
    return fsspec.filesystem("relay", ticket=relay.ticket, skip_instance_cache=True)


def test_fsspec_finds_the_protocol(relay):
    assert fsspec.get_filesystem_class("relay") is RelayFileSystem


def test_topics_are_folders(files, relay):
    assert files.ls("", detail=False) == ["data"]
    assert files.ls("relay://data", detail=False) == ["data/one"]
    assert files.ls("data/one", detail=False) == ["data/one/deep", "data/one/empty", "data/one/table.csv"]
    assert files.find("data") == ["data/one/deep/er/bytes.bin", "data/one/empty", "data/one/table.csv"]
    assert files.glob("data/one/*.csv") == ["data/one/table.csv"]
    info = files.info("data/one/table.csv")
    assert (info["size"], info["type"], info["version"], info["dtype"]) == (len(CSV), "file", 1, "u8")
    assert files.isdir("data/one/deep") and not files.exists("data/one/none") and not files.exists("other")
    for missing in ("other", "data/one/none", "data/on"):
        with pytest.raises(FileNotFoundError):
            files.ls(missing)


def test_a_topic_may_lie_in_a_folder_of_another(relay):
    """Goal: every file of a topic is listed and read although another topic's name begins like its path. Of two entries
    of one name the one in the longer topic is seen, and a folder rather than a file."""
    relay.publish("a", {name: name.encode() for name in ("one", "b/two", "b/both", "b/c/three", "d")})
    relay.publish("a/b", {name: b"longer" for name in ("both", "four")})
    relay.publish("a/d", {"five": b"5"})
    files = RelayFileSystem(relay.ticket, skip_instance_cache=True)
    assert files.ls("a", detail=False) == ["a/b", "a/d", "a/one"]
    assert files.ls("a/b", detail=False) == ["a/b/both", "a/b/c", "a/b/four", "a/b/two"]
    assert {path: files.cat(path) for path in files.find("")} == {
        "a/b/both": b"longer", "a/b/c/three": b"b/c/three", "a/b/four": b"longer", "a/b/two": b"b/two", "a/d/five": b"5",
        "a/one": b"one",
    }  # fmt: skip
    assert files.info("a/d")["type"] == "directory" and files.ls("a/b/two", detail=False) == ["a/b/two"]
    # A file of the longest topic needs no other one: `a` has no version 2.
    relay.publish("a/b", {"four": b"4"})
    assert RelayFileSystem(relay.ticket, version=2, skip_instance_cache=True).cat("a/b/four") == b"4"


def test_files_are_read_whole_and_in_ranges(files, folder):
    content = (folder / "deep/er/bytes.bin").read_bytes()
    path = "relay://data/one/deep/er/bytes.bin"
    assert files.cat(path) == content
    assert files.cat_file(path, 100, 300) == content[100:300] and files.cat_file(path, -5) == content[-5:]
    with files.open(path) as file:
        file.seek(-3, 2)
        assert (file.read(), file.read()) == (content[-3:], b"")
        file.seek(7)
        assert file.read(5) == content[7:12] and file.tell() == 12
    assert files.cat("data/one/empty") == b""
    assert files.open("data/one/table.csv", "r").read() == CSV
    with pytest.raises(OSError, match="published by a relay"):
        files.open("data/one/new", "wb")
    with pytest.raises(IsADirectoryError):
        files.open("data/one/deep")


@pytest.mark.parametrize("call", [
    lambda files, _: files.find("data"), lambda files, _: files.glob("data/*/*.csv"), lambda files, _: list(files.walk("data")),
    lambda files, _: files.du("data"), lambda files, _: files.exists("data/one"), lambda files, _: files.isdir("data/one"),
    lambda files, _: files.isfile("data/one/empty"), lambda files, to: files.get("data", str(to), recursive=True),
])  # fmt: skip
def test_an_error_is_not_an_empty_folder(files, tmp_path, call):
    unreachable = RelayFileSystem(NO_SERVER, timeout=0.2, skip_instance_cache=True)
    with pytest.raises(tensor_relay.RelayConnectionError):
        call(unreachable, tmp_path / "none")

    def fail(topic):
        raise tensor_relay.RelayTimeoutError(f"{topic} was not described in time")

    files._describe = fail
    with pytest.raises(tensor_relay.RelayTimeoutError, match="data/one"):
        call(files, tmp_path / "some")


def test_walk_leaves_out_what_is_missing_or_as_the_caller_says(files):
    assert list(files.walk("other")) == files.find("other") == files.glob("other/*") == []
    unreachable = RelayFileSystem(NO_SERVER, timeout=0.2, skip_instance_cache=True)
    assert list(unreachable.walk("data", on_error="omit")) == []


def test_a_file_that_changes_while_it_is_read_is_refused(relay, folder, monkeypatch):
    def publish_while(change):
        plain_open = pathlib.Path.open

        def open_and_change(path, *arguments, **options):
            file = plain_open(path, *arguments, **options)
            if path.name == "table.csv":  # The last one that is read.
                change()
            return file

        monkeypatch.setattr(pathlib.Path, "open", open_and_change)
        try:
            return publish_folder(relay, "t", folder)
        finally:
            monkeypatch.undo()

    changed = folder / "deep" / "er" / "bytes.bin"
    other = folder.parent / "other"
    other.write_bytes(bytes(changed.stat().st_size))
    changes = {
        "shorter": lambda: os.truncate(changed, 10),
        "rewritten": lambda: (changed.write_bytes(bytes(256 * 40)), os.utime(changed, ns=(1, 1))),
        "replaced": lambda: other.rename(changed),
    }
    for how, change in changes.items():
        with pytest.raises(OSError, match="bytes.bin") as refused:
            publish_while(change)
        assert refused.value.errno == errno.EBUSY, how
    assert publish_while(lambda: None).version == 1, "nothing was published before"


def test_a_file_that_shrinks_while_it_is_read_does_not_end_the_program(relay, folder, monkeypatch):
    plain_fstat, changed = os.fstat, folder / "deep" / "er" / "bytes.bin"

    def fstat_and_shrink(file):
        status = plain_fstat(file)
        if status.st_ino == changed.stat().st_ino:
            os.truncate(changed, 10)
        return status

    monkeypatch.setattr(os, "fstat", fstat_and_shrink)
    with pytest.raises(OSError, match="changed while.*bytes.bin"):
        publish_folder(relay, "t", folder)


@pytest.mark.parametrize("to, error", [
    ("deep/er", IsADirectoryError), ("none", FileNotFoundError), ("link", OSError), ("../outside", PermissionError),
])  # fmt: skip
def test_links_that_are_not_followed_are_refused_by_name(relay, folder, to, error):
    (folder.parent / "outside").write_text("secret")
    (folder / "link").symlink_to(folder / to)
    with pytest.raises(error, match="link"):
        publish_folder(relay, "t", folder)


def test_links_to_files_within_the_folder_are_published(relay, client, folder):
    (folder / "link").symlink_to("deep/er/bytes.bin")
    blobs = folder.parent / "model" / "blobs"
    snapshot = folder.parent / "model" / "snapshots" / "abc"
    blobs.mkdir(parents=True), snapshot.mkdir(parents=True)
    (blobs / "0123").write_text(CSV)
    (snapshot / "table.csv").symlink_to("../../blobs/0123")
    publish_folder(relay, "t", folder)
    publish_folder(relay, "cached", snapshot)
    assert client.get("t")["link"].nbytes == 256 * 40
    assert client.get("cached")["table.csv"].nbytes == len(CSV)


def test_what_is_no_readable_folder_is_refused_by_name(relay, folder, monkeypatch):
    with pytest.raises(NotADirectoryError, match="is a file.*table.csv"):
        publish_folder(relay, "t", folder / "table.csv")
    with pytest.raises(FileNotFoundError, match="none"):
        publish_folder(relay, "t", folder / "none")
    plain_scandir = os.scandir

    def scandir(path):  # Permissions would not bind a test that runs as root.
        if os.fspath(path).endswith("deep"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return plain_scandir(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match="deep"):
        publish_folder(relay, "t", folder)


def test_listing_and_opening_transfer_no_payload(relay):
    relay.publish("big", {"x": np.zeros(8 << 20, "u1")})
    files = RelayFileSystem(relay.ticket, skip_instance_cache=True)
    before = relay.stats()["sent_bytes"]
    with files.open("big/x") as file:
        assert file.seek(0, 2) == 8 << 20 and files.du("big") == 8 << 20
    assert relay.stats()["sent_bytes"] - before < 1 << 20


def test_a_file_is_of_one_version(relay, files, folder):
    opened = files.open("data/one/table.csv")
    (folder / "table.csv").write_text("a,b\n")
    publish_folder(relay, "data/one", folder)
    with pytest.raises(tensor_relay.VersionNotFoundError, match="table.csv.*open it again"):
        opened.read()
    assert files.cat("data/one/table.csv") == b"a,b\n", "the newest version by default"
    assert files.ukey("data/one/table.csv") != files.ukey("data/one/empty")
    pinned = RelayFileSystem(relay.ticket, version=2)
    publish_folder(relay, "data/one", folder)
    with pytest.raises(tensor_relay.VersionNotFoundError, match="version 2"):
        pinned.cat("data/one/table.csv")


def test_the_cache_is_bounded(relay, files):
    relay.publish("more", {name: np.zeros(600, "u1") for name in "abc"})
    bounded = RelayFileSystem(relay.ticket, cache_bytes=1_000, skip_instance_cache=True)
    for name in "aabc":
        assert len(bounded.cat(f"more/{name}")) == 600
    assert len(bounded._file_cache._files) == 1
    bounded.invalidate_cache()
    assert not bounded._file_cache._files


def test_reading_continues_after_a_server_restart(tmp_path, folder):
    state = tmp_path / "again"
    relay = tensor_relay.serve("127.0.0.1:0", state_dir=state)
    publish_folder(relay, "data", folder)
    files = RelayFileSystem(relay.ticket, skip_instance_cache=True)
    assert files.cat("data/table.csv") == CSV.encode()
    opened, address = files.open("data/deep/er/bytes.bin"), relay.address
    relay.close(end=False)
    with serve_again(address, state_dir=state) as relay:
        publish_folder(relay, "data", folder)
        assert files.cat("data/table.csv") == CSV.encode()
        with pytest.raises(tensor_relay.VersionNotFoundError, match="open it again"):
            opened.read()  # The file was opened in the previous epoch.


def test_a_file_system_can_be_pickled(files):
    assert pickle.loads(pickle.dumps(files)).cat("data/one/table.csv") == CSV.encode()


def test_a_ticket_is_a_url(relay, files):
    with fsspec.open(relay.ticket.replace("?", "/data/one/table.csv?"), "r") as file:
        assert file.read() == CSV


def test_pandas_reads_topics(relay, files, folder):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    options = {"ticket": relay.ticket}
    table = pandas.read_csv("relay://data/one/table.csv", storage_options=options)
    assert table.to_dict("list") == {"a": [1, 2], "b": ["x", "y"]}
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    frame = pandas.DataFrame({"x": np.arange(1_000), "y": [str(number) for number in range(1_000)]})
    frame.to_parquet(folder / "frame.parquet")
    publish_folder(relay, "data/one", folder)
    assert pandas.read_parquet("relay://data/one/frame.parquet", storage_options=options).equals(frame)


def test_a_model_is_received_by_pull(relay, tmp_path):
    """The example of docs/integrations-fsspec.md."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "saved")
    relay.publish_files("policy", tmp_path / "saved")
    path = tensor_relay.pull(relay.ticket_for("policy"), tmp_path / "pulled")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    files = fsspec.filesystem("relay", ticket=relay.ticket)
    assert b"GPT2" in files.cat("policy/config.json"), "files beside the weights keep their names"
