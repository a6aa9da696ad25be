"""Prints the pinned packages that this Python lacks and the CUDA benchmark needs.

It imports nothing but the standard library, because it runs where nothing is installed yet.
"""

import importlib.util
from pathlib import Path

# Import name: distribution name. What these need in turn is listed with them.
NEEDED = {
    "aiohttp": "aiohttp",
    "aiohappyeyeballs": "aiohappyeyeballs",
    "aiosignal": "aiosignal",
    "annotated_types": "annotated-types",
    "attr": "attrs",
    "cffi": "cffi",
    "dns": "dnspython",
    "click": "click",
    "cryptography": "cryptography",
    "dotenv": "python-dotenv",
    "frozenlist": "frozenlist",
    "gguf": "gguf",
    "google_crc32c": "google-crc32c",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "httptools": "httptools",
    "idna": "idna",
    "jinja2": "jinja2",
    "markdown_it": "markdown-it-py",
    "markupsafe": "markupsafe",
    "mdurl": "mdurl",
    "msgspec": "msgspec",
    "multidict": "multidict",
    "numpy": "numpy",
    "prometheus_client": "prometheus-client",
    "propcache": "propcache",
    "psutil": "psutil",
    "pycparser": "pycparser",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic-core",
    "pydantic_settings": "pydantic-settings",
    "pygments": "pygments",
    "requests": "requests",
    "rich": "rich",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "tqdm": "tqdm",
    "typing_extensions": "typing-extensions",
    "typing_inspection": "typing-inspection",
    "uvloop": "uvloop",
    "yaml": "pyyaml",
    "yarl": "yarl",
    "zstandard": "zstandard",
}


def missing(pins: dict[str, str]) -> list[str]:
    """Requirements, pinned where the project pins them."""
    return [
        f"{name}=={pins[name]}" if name in pins else name
        for module, name in NEEDED.items()
        if not present(module)
    ]


def present(module: str) -> bool:
    """Whether it can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def read_pins() -> dict[str, str]:
    """Versions of constraints.txt by normalised name."""
    lines = (Path(__file__).parent.parent / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in pairs}


if __name__ == "__main__":
    print(" ".join(missing(read_pins())))
