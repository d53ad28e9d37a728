"""Rules that the whole project keeps: who imports whom, generated code, exit codes, docstrings, no pickle."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs import generate_architecture
from swarm.vocabulary import errors

ROOT = Path(__file__).parent.parent
PACKAGES = ("swarm", "protocol", "node")
GENERATED = ROOT / "protocol" / "generated"
# Who may import whom, from the ground up; `swarm/vocabulary` is free for all. `protocol` imports nothing else of
# `swarm`, only the entry point imports the
# laboratory, and there is no circle.
FOLDERS_TABLE = """
swarm/vocabulary:
protocol/interfaces:
protocol/libp2p:
swarm/compression:
swarm/experts:
swarm/membership:
swarm/workload:
node/lab/emulation: protocol/libp2p
node/observability: protocol/interfaces swarm/workload
protocol/codecs: protocol/interfaces
protocol/frames: protocol/interfaces
swarm/averaging: swarm/compression
swarm/pipeline: swarm/workload
swarm/routing: swarm/experts swarm/membership swarm/workload
node/lab/audit: node/observability
protocol/identity: protocol/frames
protocol/manifest: protocol/identity
protocol/transport: protocol/frames protocol/identity protocol/interfaces
swarm/simulation: swarm/membership swarm/pipeline swarm/routing
node/experts: protocol/manifest swarm/experts
protocol/nat: protocol/frames protocol/interfaces protocol/libp2p protocol/transport
node/data/formats: protocol/manifest
node/data: node/data/formats node/experts protocol/manifest swarm/experts swarm/workload
protocol/dht: protocol/identity protocol/interfaces protocol/libp2p protocol/nat protocol/transport
node/model/packed:
node/model/optimizers: node/model/packed protocol/manifest
node/model: node/data node/model/optimizers node/model/packed protocol/manifest swarm/membership swarm/pipeline
    swarm/workload
node/concurrency: node/model protocol/interfaces swarm/pipeline
node/checkpoint: node/concurrency node/data node/model node/model/optimizers node/model/packed node/observability
    protocol/manifest
node/network: node/concurrency node/experts node/observability protocol/dht protocol/identity protocol/interfaces
    protocol/manifest protocol/nat protocol/transport swarm/experts swarm/membership swarm/routing swarm/workload
node/averaging/anchor: node/checkpoint node/model node/model/packed protocol/manifest
node/start: node/averaging/anchor node/data/formats node/model protocol/manifest
node/context: node/checkpoint node/concurrency node/data node/experts node/model node/network node/observability
    node/start protocol/identity protocol/manifest swarm/pipeline
node/pipeline: node/concurrency node/data node/experts node/model node/model/optimizers node/model/packed node/network
    node/observability protocol/codecs protocol/interfaces protocol/manifest protocol/transport swarm/compression
    swarm/pipeline swarm/routing swarm/workload
node/reachability: node/concurrency node/network node/observability protocol/identity protocol/interfaces
    protocol/manifest protocol/nat protocol/transport swarm/membership
node/averaging/exchange: node/averaging/anchor node/concurrency node/model node/observability protocol/codecs
    protocol/identity protocol/interfaces swarm/averaging swarm/compression
node/averaging/state_sync: node/averaging/anchor node/concurrency node/network node/observability node/start
    protocol/codecs protocol/frames protocol/interfaces protocol/transport swarm/averaging
node/lab/doctor: node/concurrency node/model node/network node/reachability protocol/interfaces protocol/manifest
    swarm/membership swarm/pipeline
node/local_swarm: node/context node/data node/experts node/model node/observability protocol/identity protocol/libp2p
    protocol/manifest swarm/pipeline swarm/workload
node/routing: node/concurrency node/context node/data node/experts node/network node/observability
    node/pipeline protocol/interfaces protocol/manifest swarm/experts swarm/membership swarm/pipeline swarm/routing
    swarm/workload
node/solo: node/averaging/anchor node/checkpoint node/data node/experts node/model node/network node/observability
    node/pipeline node/start protocol/manifest swarm/experts swarm/routing
node/averaging/audit: node/averaging/anchor node/averaging/exchange node/concurrency protocol/codecs protocol/identity
    protocol/interfaces swarm/averaging
node/cli/views: node/local_swarm node/observability swarm/compression swarm/workload
node/export: node/averaging/anchor node/averaging/state_sync node/checkpoint node/context node/data node/experts
    node/model node/network node/observability protocol/manifest swarm/averaging swarm/experts swarm/workload
node/lab/experiment: node/concurrency node/data node/lab/audit node/lab/emulation node/local_swarm node/network
    node/observability protocol/manifest
node/averaging: node/averaging/anchor node/averaging/audit node/averaging/exchange node/averaging/state_sync
    node/checkpoint node/concurrency node/context node/model node/network node/observability node/start protocol/codecs
    protocol/identity protocol/interfaces protocol/manifest swarm/averaging swarm/compression
node/lab/wan: node/lab/audit node/lab/experiment node/local_swarm protocol/manifest
node/runtime: node/averaging node/averaging/anchor node/checkpoint node/concurrency node/context node/data node/experts
    node/model node/network node/observability node/pipeline node/reachability node/routing node/start protocol/dht
    protocol/identity protocol/interfaces protocol/manifest swarm/experts swarm/membership swarm/pipeline swarm/routing
node/dial: node/model protocol/interfaces protocol/manifest swarm/membership swarm/pipeline
node/cli: node/checkpoint node/cli/views node/context node/data node/data/formats node/dial node/experts node/export
    node/local_swarm node/model node/network node/observability node/runtime node/solo node/start protocol/identity
    protocol/manifest swarm/experts swarm/membership swarm/pipeline swarm/workload
node/lab/chaos: node/averaging node/averaging/anchor node/averaging/exchange node/cli node/lab/audit
    node/lab/emulation node/lab/experiment node/local_swarm node/network node/observability protocol/codecs
    protocol/identity protocol/interfaces protocol/transport swarm/pipeline
node/lab/commands: node/cli/views node/context node/data node/lab/audit node/lab/chaos node/lab/doctor
    node/lab/emulation node/lab/experiment node/lab/wan node/model node/network protocol/manifest
    swarm/routing swarm/simulation
node: node/cli node/lab/commands
"""
FOLDERS = {
    name: " ".join(others.split())
    for name, _, others in (row.partition(":") for row in re.sub(r"\n +", " ", FOLDERS_TABLE).split("\n") if row)
}
MOST_FILES = 15
"""In a folder."""
NO_IO = {"asyncio", "socket", "ssl", "subprocess", "threading", "multiprocessing", "selectors"}
SELF_EXPLAINING_LINES = 10
CODE_AS_DATA = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if GENERATED not in path.parents]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """The full name of everything imported, `from a import b` as both `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: -node.level], base]).rstrip(".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imported_by(path: Path) -> set[str]:
    package = ".".join((*path.relative_to(ROOT).parent.parts, path.stem))
    return set(imports(parsed(path), package))


def top(name: str) -> str:
    return name.partition(".")[0]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sources("swarm"), ids=name_of)
def test_swarm_imports_the_standard_library_and_itself_and_does_no_io(path: Path) -> None:
    for name in imported_by(path):
        assert top(name) == "swarm" or (top(name) in sys.stdlib_module_names and top(name) not in NO_IO), name


@pytest.mark.parametrize("path", sources("node"), ids=name_of)
def test_node_imports_neither_tests_nor_benchmarks(path: Path) -> None:
    assert not {top(name) for name in imported_by(path)} & {"tests", "benchmarks"}


@pytest.mark.parametrize(
    "path", [*sources("node/cli", "node/lab/commands"), ROOT / "node" / "__main__.py"], ids=name_of
)
def test_the_command_line_loads_nothing_heavy(path: Path) -> None:
    at_load = ast.Module([node for node in parsed(path).body if not isinstance(node, ast.FunctionDef)], [])
    heavy = {"torch", "grpc", "hivemind", "numpy", "pydantic", "cryptography", "datasets", "tokenizers"}
    assert not {top(name) for name in imports(at_load, "")} & heavy


def test_folders_import_what_the_table_says() -> None:
    found = {
        name: " ".join(other for other in folder.imports if other != generate_architecture.VOCABULARY)
        for name, folder in generate_architecture.folders().items()
    }
    assert found == FOLDERS


def test_folders_import_each_other_in_no_circle() -> None:
    below: set[str] = set()
    for name, others in FOLDERS.items():
        assert set(others.split()) <= below, name
        below.add(name)


def test_no_module_lies_loose_and_no_folder_is_crowded() -> None:
    found = generate_architecture.folders()
    assert [path.name for path in found["node"].files] == ["__main__.py"]
    assert not {"swarm", "protocol"} & found.keys()
    assert {name: len(folder.files) for name, folder in found.items() if len(folder.files) > MOST_FILES} == {}


def test_every_folder_says_what_lives_there() -> None:
    assert [name for name, folder in generate_architecture.folders().items() if not folder.purpose.endswith(".")] == []


def test_the_rules_themselves_can_fail() -> None:
    tree = ast.parse("import asyncio\nfrom swarm import planner\nfrom . import seams\nfrom torch import nn")
    assert set(imports(tree, "protocol.link")) >= {
        "asyncio",
        "swarm.planner",
        "protocol.seams",
        "torch.nn",
    }


@pytest.mark.parametrize("path", sources(*PACKAGES, "tests", "benchmarks"), ids=name_of)
def test_nothing_is_unpickled(path: Path) -> None:
    tree = parsed(path)
    assert not {top(name) for name in imported_by(path)} & CODE_AS_DATA
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("torch", "load"), f"line {node.lineno}"
        if isinstance(node, ast.keyword):
            assert node.arg != "allow_pickle", f"line {node.value.lineno}"


@cache
def names_in(path: Path) -> set[str]:
    """What a module defines or imports at its top level, also under a condition."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                found.add(name)
            case ast.Name(name, ast.Store()):
                found.add(name)
            case ast.alias(name, asname):
                found.add(asname or top(name))
    return found


@pytest.mark.parametrize("path", sources("tests", "benchmarks"), ids=name_of)
def test_what_is_imported_from_us_is_there(path: Path) -> None:
    """mypy looks at the packages only; a benchmark that nobody runs in the tests would be found broken by its user."""
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.ImportFrom) or top(node.module or "") not in {*PACKAGES, "tests", "benchmarks"}:
            continue
        place = ROOT / (node.module or "").replace(".", "/")
        module = place.with_suffix(".py") if place.with_suffix(".py").exists() else place / "__init__.py"
        for alias in node.names:
            there = (place / f"{alias.name}.py").exists() or (place / alias.name).is_dir()
            assert there or (module.exists() and alias.name in names_in(module)), f"{node.module}.{alias.name}"


def public_definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Top-level public functions and classes, but for those so short that their name and fields say it all, and for
    lists of names (enums) and shapes (protocols, sections), whose members are what is explained.
    """
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        bases = {ast.unparse(base) for base in node.bases} if isinstance(node, ast.ClassDef) else set()
        if lines_of(node) > SELF_EXPLAINING_LINES and not bases & {"enum.Enum", "enum.IntEnum", "Protocol", "Section"}:
            yield node


def lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=name_of)
def test_what_is_public_says_what_it_is(path: Path) -> None:
    tree = parsed(path)
    assert ast.get_docstring(tree), "the module has no docstring"
    silent = [node.name for node in public_definitions(tree) if not ast.get_docstring(node)]
    assert not silent


def error_classes() -> dict[str, int]:
    found = (value for value in vars(errors).values() if isinstance(value, type))
    return {kind.__name__: kind.exit_code for kind in found if issubclass(kind, errors.SkipstoneError)}


def test_the_exit_codes_in_the_readme_are_those_of_the_errors() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\|([^|]*)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    listed = {name: int(code) for code, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed == error_classes()


def test_every_command_is_in_the_readme() -> None:
    from typer.main import get_command

    from node.__main__ import app

    commands = set(getattr(get_command(app), "commands"))  # noqa: B009 - typer's group type says nothing of it
    listed = set(re.findall(r"^\| `skipstone (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert listed == commands


def descriptor(generated: Path) -> bytes:
    """The serialized contract inside a generated module; the code around it changes with the generator's version."""
    for node in ast.walk(parsed(generated)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "AddSerializedFile"
        ):
            value = ast.literal_eval(node.args[0])
            assert isinstance(value, bytes)
            return value
    raise AssertionError(f"{generated} has no descriptor")


def test_the_generated_code_is_that_of_the_contract(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    names = [path.stem for path in (ROOT / "proto").glob("*.proto")]
    protos = [f"protocol/generated/{name}.proto" for name in names]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotocol/generated=proto", "--python_out=.", "--pyi_out=."]
    subprocess.run([*command, *protos], cwd=tmp_path, check=True, capture_output=True)
    assert {path.name.removesuffix("_pb2.py") for path in GENERATED.glob("*_pb2.py")} == set(names)
    for name in names:
        fresh = tmp_path / "protocol" / "generated" / f"{name}_pb2.py"
        assert descriptor(GENERATED / fresh.name) == descriptor(fresh), "stale: run `make proto`"
        stub, fresh_stub = GENERATED / f"{name}_pb2.pyi", fresh.with_suffix(".pyi")
        assert declared(stub) == declared(fresh_stub), "stale: run `make proto`"


def declared(stub: Path) -> list[str]:
    return re.findall(r"^ *(?:class \w+|\w+: [^\n]*)", stub.read_text(), re.MULTILINE)
