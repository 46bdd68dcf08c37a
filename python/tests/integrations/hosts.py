"""Stubs of host packages that are too large to install, and the recorded signatures of their released interfaces.

    python hosts.py vllm 0.33.0 FOLDER-WITH-THE-RELEASED-SOURCE

This command records signatures/vllm.json again. If TENSOR_RELAY_VLLM_SOURCE or TENSOR_RELAY_VERL_SOURCE names such a folder, the
tests use the released base classes, and compare the recorded signatures with them.
"""

import ast
import importlib.util
import inspect
import json
import os
import sys
import types
from pathlib import Path

SIGNATURES = Path(__file__).parent / "signatures"
INTERFACES = {
    "vllm": (
        "vllm/distributed/weight_transfer/base.py",
        ["WeightTransferEngine", "TrainerWeightTransferEngine", "VLLMWeightSyncClient"],
    ),
    "vllm_loader": ("vllm/model_executor/model_loader/default_loader.py", ["DefaultModelLoader"]),
    "verl": ("verl/checkpoint_engine/base.py", ["CheckpointEngine"]),
}


def source_of(host):
    """The folder of the host's released source, if the environment names one."""
    return os.environ.get(f"TENSOR_RELAY_{host.upper()}_SOURCE")


def recorded(host):
    return json.loads((SIGNATURES / f"{host}.json").read_text())


def signatures_in(source, host):
    """The parameters of each method of the interface, and whether it is abstract."""
    path, classes = INTERFACES[host]
    found = {}
    for node in ast.parse((Path(source) / path).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            methods = [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
            found[node.name] = {each.name: signature_of(each) for each in methods if each.name != "__init_subclass__"}
    return found


def signature_of(method):
    names = [each.arg for each in method.args.args if each.arg not in ("self", "cls")]
    decorators = [ast.unparse(each) for each in method.decorator_list]
    return {
        "parameters": names + [each.arg for each in method.args.kwonlyargs],
        "keywords": bool(method.args.kwarg),
        "abstract": "abstractmethod" in decorators,
        "async": isinstance(method, ast.AsyncFunctionDef),
    }


def differences(ours, expected):
    """The differences between our class and the host's signatures: missing methods, other parameters, sync or async."""
    for name, signature in expected.items():
        method = getattr(ours, name, None)
        if method is None:
            yield f"{name} is missing"
            continue
        parameters = inspect.signature(method).parameters
        if name == "__init__" or signature["keywords"] or name not in vars(ours):
            continue
        if (found := [each for each in parameters if each != "self"]) != signature["parameters"]:
            yield f"{name} has the parameters {found}, and the host passes {signature['parameters']}"
        is_async = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
        if is_async != signature["async"]:
            yield f"{name} is {'' if is_async else 'not '}async"


def unimplemented_methods(ours):
    """The abstract methods of the host that our class does not implement."""
    return sorted(getattr(ours, "__abstractmethods__", ()))


class StubType(type):
    """The metaclass of stubs: each attribute is a `Stub`, and each call returns a decorator that does nothing."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub

    def __call__(cls, *args, **options):
        return lambda decorated: decorated


class Stub(metaclass=StubType):
    pass


def install_stub(monkeypatch, name, **content):
    """Installs a stub of a module and its parents. Attributes other than `content` are stub classes."""
    parent = name.rpartition(".")[0]
    if parent and parent not in sys.modules:
        install_stub(monkeypatch, parent)
    module = types.ModuleType(name)
    module.__path__ = []
    module.__getattr__ = lambda attr: StubType(attr, (), {}) if not attr.startswith("__") else raise_missing(name, attr)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def raise_missing(name, attribute):
    raise AttributeError(f"{name} has no {attribute}")


def import_released(monkeypatch, name, path):
    """Imports a single module of a released source."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    host, version, folder = sys.argv[1:]
    content = {"version": version, "source": INTERFACES[host][0], "classes": signatures_in(folder, host)}
    (SIGNATURES / f"{host}.json").write_text(json.dumps(content, indent=1) + "\n")
