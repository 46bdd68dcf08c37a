"""What vLLM calls in all of its processes, wherever tensor_relay is installed: nothing of the integration is imported, and no
version is checked, before somebody chooses its backend."""

from __future__ import annotations

import importlib
from typing import Any

NAME = "tensor_relay"
"""What `weight_transfer_config.backend` and `--load-format` call it."""


def register() -> None:
    """Lets vLLM know both ends and the model loader. A trainer calls it once. Again, and in a vLLM that has no such engines, it does
    nothing."""
    _register_engines()
    _register_loader()


def _register_engines() -> None:
    try:
        factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
    except ImportError:
        return
    ends = {"WeightTransferEngineFactory": "TensorRelayWorkerEngine", "WeightTransferTrainerFactory": "TensorRelayTrainerEngine"}
    for name, engine in ends.items():
        known = getattr(factory, name, None)
        if known is not None and NAME not in known._registry:
            known.register_engine(NAME, "tensor_relay.integrations.vllm", engine)


def _register_loader() -> None:
    try:
        loaders = importlib.import_module("vllm.model_executor.model_loader")
    except ImportError:
        return
    known = getattr(loaders, "_LOAD_FORMAT_TO_MODEL_LOADER", None)
    if not isinstance(known, dict) or NAME in known:
        return

    # vLLM takes nothing but a class of its kind, which is imported when it is chosen.
    class Chosen(loaders.BaseModelLoader):  # type: ignore[misc, name-defined]
        def __new__(cls, load_config: Any) -> Any:
            return importlib.import_module("tensor_relay.integrations.vllm_loader").TensorRelayModelLoader(load_config)

    loaders.register_model_loader(NAME)(Chosen)
