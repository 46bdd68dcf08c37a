"""Host packages are imported only with their integration, and unsupported versions are refused."""

import subprocess
import sys

import pytest

import tensor_relay
from tensor_relay._versions import numbers
from tensor_relay.integrations import check_host, check_timeout


def test_the_package_alone_imports_no_host():
    script = (
        "import sys, tensor_relay, tensor_relay.integrations\n"
        "print([host for host in ('fsspec', 'ray', 'torch', 'numpy', 'verl', 'vllm') if host in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_missing_host_is_named():
    with pytest.raises(tensor_relay.IntegrationError, match="needs that package: pip install 'no-such-host>=1,<2'"):
        check_host("no-such-host", "1", "2")
    assert issubclass(tensor_relay.IntegrationError, ImportError), "so that `except ImportError` works"


@pytest.mark.parametrize(
    ("found", "is_known"),
    [("1.9.9", False), ("2.0", True), ("2.0.1rc1", True), ("2.10", True), ("3.0.dev1", False), ("3", False), ("unknown", False)],
)
def test_versions_are_compared_by_their_numbers(monkeypatch, found, is_known):
    monkeypatch.setattr("importlib.metadata.version", lambda package: found)
    if is_known:
        assert check_host("host", "2.0", "3") == found
    else:
        with pytest.raises(tensor_relay.IntegrationError, match=f"{found} is installed"):
            check_host("host", "2.0", "3")


def test_numbers_of_a_version_are_parsed():
    assert numbers("2.55.0rc1") == (2, 55, 0) and numbers("0.33.0+cu128") == (0, 33, 0) and numbers("dev") == ()


def test_timeouts_that_no_clock_reaches_are_refused():
    assert [check_timeout("wait", seconds) for seconds in (0, 1.5, float("inf"))] == [0, 1.5, float("inf")]
    for seconds in (float("nan"), -0.1):
        with pytest.raises(ValueError, match="wait is .*0 or more"):
            check_timeout("wait", seconds)
