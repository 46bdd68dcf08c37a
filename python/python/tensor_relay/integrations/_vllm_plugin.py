"""What vLLM calls in all of its processes, wherever tensor_relay is installed: nothing of the integration is imported, and no
version is checked, before somebody chooses its backend."""

from __future__ import annotations

import importlib

NAME = "tensor_relay"
"""What `weight_transfer_config.backend` calls it."""


def register() -> None:
    """Lets vLLM know both ends. A trainer calls it once. Again, and in a vLLM that has no such engines, it does nothing."""
    try:
        factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
    except ImportError:
        return
    ends = {"WeightTransferEngineFactory": "TensorRelayWorkerEngine", "WeightTransferTrainerFactory": "TensorRelayTrainerEngine"}
    for name, engine in ends.items():
        known = getattr(factory, name, None)
        if known is not None and NAME not in known._registry:
            known.register_engine(NAME, "tensor_relay.integrations.vllm", engine)
