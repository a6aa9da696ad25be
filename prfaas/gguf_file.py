"""A GGUF file, read through the `gguf` package: metadata, tensor shapes, dequantised tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from prfaas.errors import ConfigError


class GgufFile:
    """An open GGUF file; memory-mapped, so it is closed by dropping the object.

    Raises ConfigError, naming the file, if it is not a whole GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, KeyError, IndexError, OSError, OverflowError) as error:
            raise ConfigError(f"{path} is not a readable GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def scalars(self) -> dict[str, Any]:
        """All metadata that is not an array: numbers, booleans and strings by key."""
        return {
            key: field.contents()
            for key, field in self._reader.fields.items()
            if field.types[0] != gguf.GGUFValueType.ARRAY
        }

    def array(self, key: str) -> list[Any]:
        """An array of the metadata; raises ConfigError if the file has none of that name."""
        field = self._reader.get_field(key)
        if field is None or field.types[0] != gguf.GGUFValueType.ARRAY:
            raise ConfigError(f"{self.path}: metadata has no array {key}", field=key)
        values: list[Any] = field.contents()
        return values

    def has(self, key: str) -> bool:
        return self._reader.get_field(key) is not None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, slowest dimension first; None if there is no such tensor."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        return tuple(int(size) for size in reversed(tensor.shape.tolist()))

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor, dequantised to fp32; raises ConfigError for a quantisation not known."""
        tensor = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ConfigError(
                f"{self.path}: tensor {name} is quantised as {tensor.tensor_type.name}, "
                "which the gguf package cannot read",
                field=name,
            ) from error
        # Unquantised tensors are views of the read-only file.
        return np.require(values, dtype=np.float32, requirements=["C", "W"])
