"""What a paced engine asks of a profile beyond its times: a tokenizer, and a layout it can hold."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import Field

from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.profile import DecodeTimes as PacedDecode
from prfaas.profile import ModelKv as PacedModel
from prfaas.profile import PrefillTimes as PacedPrefill
from prfaas.profile import Profile, parse_as, read_yaml

__all__ = ["PacedDecode", "PacedModel", "PacedPrefill", "PacedProfile", "load_profile"]


class PacedProfile(Profile):
    """One paced engine; frozen, made by `load_profile`.

    The fixed state of a hybrid model is not paced: transfers carry the KV of tokens only.
    """

    tokenizer: Path = Field(
        strict=False, description="Model directory or GGUF; relative to the profile's file."
    )

    @property
    def layout(self) -> KvLayout:
        group = LayerGroup(
            GroupKind.FULL,
            tuple(range(self.model.layers)),
            self.model.kv_heads,
            self.model.head_dim,
            self.model.dtype,
        )
        return KvLayout((group,))

    @property
    def config_digest(self) -> str:
        """Digest of what decides KV values; times and context length are not part of it."""
        text = self.model.model_dump_json(include={"layers", "kv_heads", "head_dim", "seed"})
        return hashlib.blake2b(b"paced" + text.encode(), digest_size=16).hexdigest()


def load_profile(path: Path) -> PacedProfile:
    """Read and check a profile. Raises ConfigError naming the file and the key."""
    profile = parse_as(PacedProfile, read_yaml(path), str(path), "profile")
    return profile.model_copy(update={"tokenizer": path.parent / profile.tokenizer})
