"""vLLM's plugin entry point, which vLLM calls in each of its processes. It imports the integration, and checks vLLM's
version, only when the user chooses the backend or load format."""

from __future__ import annotations

import importlib
from typing import Any

NAME = "tensor_relay"
"""The name in `weight_transfer_config.backend` and `--load-format`."""


def register() -> None:
    """Registers both weight transfer engines and the model loader with vLLM. A trainer calls it once. A second call
    does nothing. An engine or loader that the installed vLLM has no place for is left out."""
    _register_engines()
    _register_loader()


def _register_engines() -> None:
    try:
        factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
    except ImportError:
        return
    engines = {"WeightTransferEngineFactory": "TensorRelayWorkerEngine", "WeightTransferTrainerFactory": "TensorRelayTrainerEngine"}
    for factory_name, engine in engines.items():
        registrar = getattr(factory, factory_name, None)
        if registrar is not None and NAME not in registrar._registry:
            registrar.register_engine(NAME, "tensor_relay.integrations.vllm", engine)


def _register_loader() -> None:
    try:
        loaders = importlib.import_module("vllm.model_executor.model_loader")
    except ImportError:
        return
    loader_classes = getattr(loaders, "_LOAD_FORMAT_TO_MODEL_LOADER", None)
    if not isinstance(loader_classes, dict) or NAME in loader_classes:
        return

    # vLLM accepts only a subclass of BaseModelLoader. This one imports the real loader when it is instantiated.
    class LazyLoader(loaders.BaseModelLoader):  # type: ignore[misc, name-defined]
        def __new__(cls, load_config: Any) -> Any:
            return importlib.import_module("tensor_relay.integrations.vllm_loader").TensorRelayModelLoader(load_config)

    loaders.register_model_loader(NAME)(LazyLoader)
