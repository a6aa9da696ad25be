"""Metadata and tensors read as the `gguf` package reads them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from prfaas.errors import ConfigError
from prfaas.gguf_file import GgufFile
from prfaas.testing.tinygguf import write_tiny_gguf


@pytest.fixture(scope="module")
def path(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tiny_model_dir, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def write(path: Path, values: dict[str, object], tensors: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_string(key, str(value))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_all_metadata_equals_what_the_package_reads(path: Path) -> None:
    file, reader = GgufFile(path), gguf.GGUFReader(path)
    scalars = file.scalars()
    arrays = 0
    for key, field in reader.fields.items():
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            assert file.array(key) == field.contents()
            arrays += 1
        else:
            assert scalars.pop(key) == field.contents()
    assert arrays == 3
    assert scalars == {}
    assert file.tensor_names == {tensor.name for tensor in reader.tensors}


@pytest.mark.parametrize(
    "values", [["é", "", "b" * 300], [1, -2, 3], [1.5, 2.0], [True, False], [[1, 2], [3, 4]]]
)
def test_arrays_of_every_kind_equal_what_the_package_reads(
    tmp_path: Path, values: list[object]
) -> None:
    path = write(tmp_path / "a.gguf", {"x.values": values, "x.after": "end"}, {})
    file = GgufFile(path)
    field = gguf.GGUFReader(path).get_field("x.values")
    assert field is not None
    assert file.array("x.values") == field.contents()
    assert file.scalars()["x.after"] == "end"


def test_tensors_come_in_fp32_and_can_be_written_to(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((3, 64)).astype(np.float32)
    quantised = gguf.quantize(plain, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("plain", plain)
    writer.add_tensor("half", plain.astype(np.float16))
    writer.add_tensor("q8", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "t.gguf")
    for name, error in (("plain", 0.0), ("half", 2e-3), ("q8", 2e-2)):
        tensor = file.tensor(name)
        assert (tensor.dtype, tensor.shape, file.shape(name)) == (np.float32, (3, 64), (3, 64))
        assert tensor.flags.writeable
        assert np.abs(tensor - plain).max() <= error
    assert file.shape("absent") is None


def test_a_missing_array_is_named(path: Path) -> None:
    for key in ("tokenizer.ggml.scores", "general.architecture"):
        with pytest.raises(ConfigError, match=f"no array {key}"):
            GgufFile(path).array(key)


@pytest.mark.parametrize("cut", range(0, 60_000, 4_321))
def test_a_file_cut_off_anywhere_is_named(path: Path, tmp_path: Path, cut: int) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ConfigError, match=r"short\.gguf is not a readable GGUF file"):
        GgufFile(short)


def test_another_kind_of_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ConfigError, match=r"x\.gguf is not a readable GGUF file: .*magic"):
        GgufFile(tmp_path / "x.gguf")
    with pytest.raises(ConfigError, match=r"absent\.gguf"):
        GgufFile(tmp_path / "absent.gguf")
