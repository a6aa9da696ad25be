"""A GGUF file, read through the `gguf` package: metadata, tensor shapes, dequantised tensors."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from prfaas.errors import ConfigError


class _Reader(gguf.GGUFReader):
    """The package's reader makes an array object of every element, seconds for a vocabulary.

    This one reads arrays in one go; should the package stop calling the method, it is only slow.
    """

    def __init__(self, path: Path) -> None:
        self.arrays: dict[int, list[Any]] = {}
        super().__init__(path)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        kind = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        if kind == gguf.GGUFValueType.STRING:
            values, end = _read_strings(self.data, start, count)
        elif kind in self.gguf_scalar_to_np:
            numbers = self._get(start, self.gguf_scalar_to_np[kind], count)
            if len(numbers) != count:
                raise ValueError(f"an array of {count} elements is cut off")
            values, end = numbers.tolist(), start + numbers.nbytes
        elif kind == gguf.GGUFValueType.ARRAY:
            values, end = [], start
            for _ in range(count):
                size = self._get_field_parts(end, kind)[0]
                values += self.arrays.pop(end)  # flat, as the package has it
                end += size
        else:
            raise ValueError(f"an array of unknown kind {kind}")
        self.arrays[orig_offs] = values
        head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        return end - orig_offs, head, [], [gguf.GGUFValueType.ARRAY, kind]


class GgufFile:
    """An open GGUF file; memory-mapped, so it is closed by dropping the object.

    Raises ConfigError, naming the file, if it is not a whole GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = _Reader(path)
        except (ValueError, KeyError, IndexError, OSError, OverflowError, struct.error) as error:
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
        # A field starts with its key: length, text, type.
        key_bytes = sum(int(part.nbytes) for part in field.parts[:3])
        values: list[Any] | None = self._reader.arrays.get(field.offset + key_bytes)
        return field.contents() if values is None else values

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


def _read_strings(data: npt.NDArray[np.uint8], start: int, count: int) -> tuple[list[str], int]:
    """`count` strings, each behind its uint64 length, and the offset after the last."""
    view, unpack = data.data, struct.Struct("<Q").unpack_from
    values, offset = [], start
    for _ in range(count):
        (length,) = unpack(view, offset)
        offset += 8
        if length > len(view) - offset:
            raise ValueError(f"a string of {length} bytes is cut off")
        values.append(str(view[offset : offset + length], "utf-8"))
        offset += length
    return values, offset
