"""`relay://` through fsspec, pandas and pyarrow; and a model through `pull` and transformers."""

import pickle

import numpy as np
import pytest

import tensor_relay
from conftest import serve_again

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")

from tensor_relay.integrations.fsspec import RelayFileSystem, publish_folder  # noqa: E402

CSV = "a,b\n1,x\n2,y\n"


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
