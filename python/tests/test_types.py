"""The type stubs match the package; the package and a typed program pass mypy; every public item has a docstring."""

import subprocess
import sys

from conftest import HERE

CONFIG = HERE.parent / "pyproject.toml"


def run(*words):
    result = subprocess.run([sys.executable, "-m", *map(str, words)], capture_output=True, text=True, cwd=HERE.parent)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_stubs_match_the_package(tmp_path):
    # The integrations are excluded: they derive from untyped classes of packages that need not be installed.
    allowlist = tmp_path / "allowlist"
    allowlist.write_text("tensor_relay\\.integrations\\..*\n")
    options = ("--mypy-config-file", CONFIG, "--allowlist", allowlist, "--ignore-unused-allowlist")
    run("mypy.stubtest", "tensor_relay", *options)


def test_the_package_and_programs_pass_the_checker(tmp_path):
    program = tmp_path / "typed.py"
    program.write_text(
        "import asyncio, collections, tensor_relay\n"
        "class Model:\n"
        "    def state_dict(self, *, prefix: str = '') -> dict[str, bytes]:\n"
        "        return {}\n"
        "def publish(relay: tensor_relay.Relay, numbers: dict[str, int], words: collections.OrderedDict[str, str]) -> str:\n"
        "    relay.publish('t', Model(), metadata=numbers, dtype='bfloat16')\n"
        "    relay.publish('t', {'x': b'abc'}, metadata=words, dtype=float)\n"
        "    return tensor_relay.__version__\n"
        "async def follow(client: tensor_relay.Client) -> int:\n"
        "    async for snapshot in client.subscribe('t', mode='every', start=3):\n"
        "        tensor: tensor_relay.Tensor | None = snapshot.get('x')\n"
        "        for name, each in snapshot.items():\n"
        "            length: int = len(name) + each.nbytes\n"
        "    async with client.subscribe('t', select='x') as subscription:\n"
        "        await subscription.next_async()\n"
        "    task = asyncio.create_task(client.subscribe('t').next_async())\n"
        "    return (await task).version\n"
    )
    run("mypy", "--config-file", CONFIG, "-p", "tensor_relay")
    run("mypy", "--config-file", CONFIG, program)


def test_everything_has_a_docstring():
    import tensor_relay

    for name in tensor_relay.__all__:
        public = getattr(tensor_relay, name)
        assert public.__doc__, name
        if public.__module__ == "tensor_relay":
            for member, value in vars(public).items():
                if not member.startswith("_"):
                    assert value.__doc__, f"{name}.{member}"
