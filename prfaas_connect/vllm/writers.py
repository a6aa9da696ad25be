"""vLLM's own write into its paged KV, which a layout is checked against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prfaas_connect.port.layout import LayoutError
from prfaas_connect.vllm.layouts import CacheWriter


def cache_writer(vllm_config: Any, name: str, cache: Tensor) -> CacheWriter:
    """What the attention layer `name` stores new K and V with.

    Raises LayoutError where this vLLM has no such operation apart from attention itself.
    """
    layer = vllm_config.compilation_config.static_forward_context.get(name)
    update = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
    if update is None:
        backend = type(getattr(layer, "impl", layer)).__name__
        raise LayoutError(
            f"the attention backend {backend} of vLLM does not write KV by an operation of its "
            "own, so how its KV lies cannot be checked"
        )

    def write(key: Tensor, value: Tensor, paged: Tensor, slots: Tensor) -> None:
        with torch.inference_mode():
            update(layer, key, value, paged, slots)

    return write
