"""YAML as files of settings are read: each key once, and errors that do not repeat the text."""

from __future__ import annotations

from typing import Any

import yaml

from prfaas.errors import ConfigError


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            found = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if found in seen and key.value != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, "a key that is there already", key.start_mark
                )
            seen.add(found)
        return super().construct_mapping(node, deep)


def parse_yaml(raw: str | bytes, name: object, field: str | None = None) -> Any:
    """What is in it. Raises ConfigError naming the file and the line, without the line itself, as
    there may be a key in it.
    """
    try:
        return yaml.load(raw, _Loader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{name} is not YAML{where}: {exc.problem}", field=field) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(f"{name} is not YAML: it is no text", field=field) from None
    except (RecursionError, ValueError) as exc:
        raise ConfigError(f"{name} is not YAML: {exc}", field=field) from None
    except (AttributeError, LookupError, TypeError):  # the loader's, for `!!bool maybe` and such
        raise ConfigError(
            f"{name} is not YAML: a value is not of the type that its tag says", field=field
        ) from None
