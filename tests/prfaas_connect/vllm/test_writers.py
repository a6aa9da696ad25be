"""The write that layouts are checked against is the attention layer's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prfaas_connect.port.layout import LayoutError
from prfaas_connect.vllm.layouts import HeadRange, require_layout
from prfaas_connect.vllm.writers import cache_writer

NAME = "model.layers.0.self_attn.attn"


def config_with(layer: Any) -> Any:
    context = {NAME: layer}
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))


class Impl:
    """Stores token by token in [block, token, head, k | v]."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        assert layer.impl is self
        for token, slot in enumerate(slots.tolist()):
            block, at = divmod(slot, cache.shape[1])
            cache[block, at] = torch.cat((key[token], value[token]), dim=-1)


def test_the_layer_s_own_operation_writes() -> None:
    cache = torch.zeros(6, 16, 2, 16)
    write = cache_writer(config_with(SimpleNamespace(impl=Impl())), NAME, cache)
    found = require_layout(cache, write, HeadRange(0, 2, 2), dim=8, block_tokens=16)
    assert found.name == "nhd"


@pytest.mark.parametrize("layer", [None, SimpleNamespace(impl=object()), SimpleNamespace()])
def test_a_backend_without_one_is_refused_with_a_sentence(layer: Any) -> None:
    with pytest.raises(LayoutError, match="cannot be checked"):
        cache_writer(config_with(layer), NAME, torch.zeros(1))
