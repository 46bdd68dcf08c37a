"""A model loader for vLLM: the weights of a model come from a topic instead of files.

    vllm serve MODEL --load-format tensor_relay --model-loader-extra-config '{"ticket": "/run/policy.ticket"}'

vLLM finds the loader by its entry point (`vllm.general_plugins`). MODEL still names the configuration and the
tokenizer. vLLM's own check reports weights that the version lacks.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import tensor_relay

from .._pull import client_and_topic
from ..errors import RequestError
from . import check_host
from ._vllm_plugin import NAME

check_host("vllm", "0.33", "0.34")

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # noqa: E402

__all__ = ["NAME", "TensorRelayModelLoader"]

RESERVED_PREFIX = "tensor-relay."
"""The prefix of the names of tensors that are not weights, such as the files beside the weights."""

OPTIONS = {"ticket", "topic", "version", "timeout"}


class TensorRelayModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's default loader, with tensors from one version instead of files.

    Options, in `model_loader_extra_config`:

    ticket: the path of the file with the ticket.
    topic: the topic's name; by default the topic in the ticket.
    version: the number of the version; None is the newest.
    timeout: how long receiving may take, in seconds (600).

    The version occupies host memory until it is loaded. Each tensor parallel rank receives all weights.
    """

    def __init__(self, load_config: Any) -> None:
        options = dict(load_config.model_loader_extra_config or {})
        if unknown := sorted(options.keys() - OPTIONS):
            raise RequestError(f"model_loader_extra_config has {unknown[0]!r}, and the options are {sorted(OPTIONS)}")
        if not options.get("ticket"):
            raise RequestError("model_loader_extra_config names no ticket: {\"ticket\": PATH}")
        super().__init__(dataclasses.replace(load_config, model_loader_extra_config={}))
        self._options: dict[str, Any] = {"timeout": 600.0} | options
        self._snapshot: tensor_relay.Snapshot | None = None

    def download_model(self, model_config: Any) -> None:
        """Receives the version. Raises the errors of `tensor_relay.connect` and `Client.get`."""
        if self._snapshot is None:
            client, ticket_topic = client_and_topic(self._options["ticket"])
            topic = self._options.get("topic") or ticket_topic
            self._snapshot = client.get(topic, self._options.get("version"), timeout=self._options["timeout"])

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        """Yields the weights, after all of them were received and verified."""
        self.download_model(model_config)
        assert self._snapshot is not None
        self.counter_before_loading_weights = time.perf_counter()
        weights, self._snapshot = self._snapshot.torch(), None
        yield from ((name, tensor) for name, tensor in weights.items() if not name.startswith(RESERVED_PREFIX))
