"""The project's shape: who imports whom, what the wheels hold, what must be fresh, what must not.

Import rules are read from the source, so that an import inside a function counts too.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.gen_docs import stale_pages

ROOT = Path(__file__).parents[1]
PARTS = ("gateway", "policies", "local_engine", "remote_prefill")
PACKAGES = ("prfaas", *PARTS)
COMPOSITION_ROOTS = ("prfaas/cli.py", "prfaas/cli_planning.py", "prfaas/up/")
MAX_LINES = 600


def tracked() -> list[Path]:
    """Files of the project, those about to be added among them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def sources(package: str) -> list[Path]:
    """Not what pip leaves where it builds a wheel."""
    found = sorted((ROOT / package).rglob("*.py"))
    return [path for path in found if "build" not in path.relative_to(ROOT).parts]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module imported anywhere in a file, with the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or "", node.lineno


def offences(package: str, forbidden: set[str], allowed: tuple[str, ...] = ()) -> list[str]:
    found = []
    for path in sources(package):
        name = path.relative_to(ROOT).as_posix()
        for module, line in imports(path):
            if module.split(".")[0] in forbidden and not name.startswith(allowed or ("//",)):
                found.append(f"{name}:{line} imports {module}")
    return found


@pytest.mark.parametrize("part", PARTS)
def test_parts_never_import_each_other(part: str) -> None:
    others = {*PARTS, "bench", "tests", "scripts"} - {part}
    assert offences(part, others) == []


def test_prfaas_imports_no_part_but_in_the_composition_roots() -> None:
    forbidden = {*PARTS, "bench", "tests", "scripts"}
    assert offences("prfaas", forbidden, COMPOSITION_ROOTS) == []


def test_composition_roots_import_parts_only_inside_functions() -> None:
    roots = [ROOT / "prfaas" / "cli.py", ROOT / "prfaas" / "cli_planning.py"]
    for path in [*roots, *sources("prfaas/up")]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in PARTS, path


def test_the_plug_in_imports_the_standard_library_numpy_and_its_engine_only() -> None:
    allowed = sys.stdlib_module_names | {"numpy", "prfaas_connect"}
    engines = {"device": {"torch"}, "vllm": {"torch", "vllm", "transformers"}}
    for path in sources("prfaas_connect"):
        package = path.relative_to(ROOT / "prfaas_connect").parts[0]
        for module, line in imports(path):
            here = allowed | engines.get(package, set())
            assert module.split(".")[0] in here, f"{path}:{line} imports {module}"


_IMPORT_ALL = """
import importlib, pkgutil, sys
for name in sys.argv[1].split(","):
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        if (
            ".testing" not in found.name
            and not found.name.endswith("__main__")
            and not found.name.startswith(("prfaas_connect.vllm.", "prfaas_connect.device."))
            # These need an engine's packages.
        ):
            importlib.import_module(found.name)
print(",".join(sorted(sys.modules)))
"""


def loaded_by(packages: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, packages],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.strip().split(","))


def test_gateway_and_policies_load_no_torch() -> None:
    heavy = {"torch", "transformers", "optuna", "matplotlib"}
    assert loaded_by("gateway,policies") & heavy == set()


def test_agents_load_no_http_client_until_a_vllm_is_beside_them() -> None:
    code = "import remote_prefill.agent_main, remote_prefill.prefill_main, sys; "
    code += "print('aiohttp' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False False\n", done.stderr


def test_policies_load_no_server() -> None:
    assert loaded_by("policies") & {"aiohttp", "grpc", "uvloop"} == set()


def test_the_plug_in_loads_no_grpc() -> None:
    assert loaded_by("prfaas_connect") & {"torch", "grpc", "google.protobuf", "prfaas"} == set()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels, built from a copy so that the working tree stays as it is."""
    copy = tmp_path_factory.mktemp("source")
    for path in tracked():
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    out = tmp_path_factory.mktemp("wheels")
    for project in (copy, copy / "prfaas_connect"):
        built = subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", out, project],
            capture_output=True,
            text=True,
            timeout=200,
            env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )
        assert built.returncode == 0, built.stderr
    return {path.name.split("-")[0]: path for path in out.glob("*.whl")}


def installed_top_levels(wheel: Path, target: Path) -> set[str]:
    """What appears in an empty environment; metadata and console scripts aside."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, "--target", target, wheel], check=True, timeout=60)
    names = {path.name for path in target.iterdir()}
    return {name for name in names if not name.endswith(".dist-info")} - {"bin"}


@pytest.mark.timeout(500)
def test_wheels_install_exactly_their_packages(wheels: dict[str, Path], tmp_path: Path) -> None:
    assert set(wheels) == {"prfaas", "prfaas_connect"}
    main, connect = tmp_path / "main", tmp_path / "connect"
    assert installed_top_levels(wheels["prfaas"], main) == set(PACKAGES)
    assert installed_top_levels(wheels["prfaas_connect"], connect) == {"prfaas_connect"}
    assert (main / "bin" / "prfaas").is_file()
    probe = "import prfaas_connect.port, sys; print(prfaas_connect.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(connect)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert str(connect) in done.stdout, done.stderr


@pytest.mark.timeout(500)
def test_wheels_carry_every_module_and_the_licence(wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels["prfaas"]) as archive:
        names = set(archive.namelist())
    for package in PACKAGES:
        for path in sources(package):
            assert path.relative_to(ROOT).as_posix() in names
    assert "prfaas/py.typed" in names
    for asset in (ROOT / "gateway" / "dashboard" / "static").iterdir():
        assert asset.relative_to(ROOT).as_posix() in names
    assert {name.rsplit("/", 1)[-1] for name in names} >= {"LICENSE", "NOTICE"}


@pytest.mark.timeout(240)
def test_grpc_stubs_are_what_the_proto_says(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gen_proto.sh", tmp_path],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    fresh = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert [path.name for path in fresh] == [
        "prefill_pb2.py",
        "prefill_pb2.pyi",
        "prefill_pb2_grpc.py",
    ]
    for path in fresh:
        committed = ROOT / path.relative_to(tmp_path)
        assert path.read_text() == committed.read_text(), f"{committed} is stale: run `make proto`"


def test_generated_documentation_is_fresh() -> None:
    assert stale_pages() == []


def test_make_targets_are_the_documented_ones() -> None:
    help_text = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    targets = {line.split()[0] for line in help_text.splitlines()}
    for target in ("venv", "run", "test", "test-real", "lint", "format", "bench", "proto", "clean"):
        assert target in targets


def test_ci_runs_the_same_targets_as_people() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "make lint" in script
    assert "make test" in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_pins_cover_every_dependency_and_name_no_local_build() -> None:
    import tomllib

    pins = {
        line.split("==")[0].lower().replace("_", "-"): line.split("==")[1]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    assert all("+" not in version for version in pins.values())
    assert pins["torch"] == "2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(item for extra in extras for item in extra)]
    names = {re.split(r"[<>=!;\[ ]", item)[0].lower().replace("_", "-") for item in wanted}
    assert names - {"prfaas-connect"} - set(pins) == set()


# Written in halves, so that this file passes its own test.
FORBIDDEN = (
    (r"\bTO" r"DO\b", "unfinished work"),
    (r"\bFIX" r"ME\b", "unfinished work"),
    (r"\bXX" r"X\b", "unfinished work"),
    (r"(?<![\w.])/wo" r"rk/", "a path of one machine"),
    (r"(?<![\w.])/ro" r"ot/", "a path of one machine"),
    (r"\.\./sha" r"red", "a path of one machine"),
    (r"pythonhos" r"ted\.org|py" r"pi\.org", "the host of a package registry"),
)
_TEXT = {".py", ".pyi", ".md", ".toml", ".txt", ".yaml", ".yml", ".sh", ".proto", ".json", ""}


@pytest.mark.parametrize(("pattern", "what"), FORBIDDEN)
def test_no_file_holds(pattern: str, what: str) -> None:
    found = []
    for path in tracked():
        if path.suffix in _TEXT and path.name != "LICENSE":
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if re.search(pattern, line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {what}: {line.strip()[:80]}")
    assert found == []


def test_files_stay_small() -> None:
    long = {
        path.relative_to(ROOT).as_posix(): count
        for path in tracked()
        if path.suffix == ".py"
        and "_pb2" not in path.name
        and (count := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_every_module_says_what_it_is() -> None:
    missing = [
        path.relative_to(ROOT).as_posix()
        for path in tracked()
        if path.suffix == ".py"
        and "_pb2" not in path.name
        and path.relative_to(ROOT).parts[0] != "tests"
        and path.read_text().strip()
        and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert missing == []
