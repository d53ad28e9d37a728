"""Rules that the whole project keeps: who imports whom, generated code, exit codes, docstrings, no pickle."""

import ast
import graphlib
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("swarm", "protocol", "node", "lab")
GENERATED = ROOT / "protocol" / "generated"
MOST_FILES = 15
"""In a folder."""
NO_IO = {"asyncio", "socket", "ssl", "subprocess", "threading", "multiprocessing", "selectors"}
SELF_EXPLAINING_LINES = 10
CODE_AS_DATA = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if GENERATED not in path.parents]


@cache
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


@cache
def imported_by(path: Path) -> frozenset[str]:
    package = ".".join((*path.relative_to(ROOT).parent.parts, path.stem))
    return frozenset(imports(parsed(path), package))


def top(name: str) -> str:
    return name.partition(".")[0]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_swarm_imports_the_standard_library_and_itself_and_does_no_io() -> None:
    allowed = ({"swarm"} | sys.stdlib_module_names) - NO_IO
    found = [(name_of(path), name) for path in sources("swarm") for name in imported_by(path)]
    assert [each for each in found if top(each[1]) not in allowed] == []


def test_the_product_imports_neither_tests_nor_benchmarks() -> None:
    for path in sources("node", "protocol", "lab"):
        assert not {top(name) for name in imported_by(path)} & {"tests", "benchmarks"}, path


def test_only_the_entry_point_imports_the_laboratory_and_not_before_a_command_asks_for_it() -> None:
    for path in sources("node", "protocol"):
        tree = parsed(path)
        at_load = ast.Module([node for node in tree.body if not isinstance(node, ast.FunctionDef)], [])
        looked_at = at_load if name_of(path) == "node/__main__.py" else tree
        assert "lab" not in {top(name) for name in imports(looked_at, "")}, path


@pytest.mark.parametrize("module", ["node.__main__", "lab.commands", "lab.simulate"])
def test_the_command_line_loads_nothing_heavy(module: str) -> None:
    program = f"import {module}, sys; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"torch", "grpc", "google", "hivemind", "numpy", "pydantic", "cryptography", "datasets", "tokenizers"}
    assert not {top(name) for name in ran.stdout.split()} & heavy


@cache
def modules_of_ours() -> dict[str, set[str]]:
    """What each of our modules imports of the others, at load or later."""
    paths = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources(*PACKAGES)}
    names = {name.removesuffix(".__init__") for name in paths.values()}
    return {name.removesuffix(".__init__"): set(imported_by(path) & names) for path, name in paths.items()}


def folders() -> dict[str, set[str]]:
    """What each folder imports of the others. The entry point is a folder of its own."""
    found: dict[str, set[str]] = {}
    packages = {".".join(path.relative_to(ROOT).parent.parts) for path in sources(*PACKAGES)}
    for name, others in modules_of_ours().items():
        folder = name if name in packages else name.rpartition(".")[0]
        of_others = {other if other in packages else other.rpartition(".")[0] for other in others}
        found.setdefault(folder, set()).update(of_others - {folder, "node", "swarm", "protocol"})
    return found


def test_protocol_knows_only_the_vocabulary_of_swarm() -> None:
    found = {other for name, others in folders().items() if top(name) == "protocol" for other in others}
    assert {other for other in found if top(other) != "protocol"} == {"swarm.vocabulary"}


def test_folders_import_each_other_in_no_circle() -> None:
    graphlib.TopologicalSorter(folders()).prepare()


def test_modules_import_each_other_in_no_circle() -> None:
    graphlib.TopologicalSorter({name: others - {name} for name, others in modules_of_ours().items()}).prepare()


def test_no_module_lies_loose_and_no_folder_is_crowded() -> None:
    paths = [path for path in sources(*PACKAGES) if path.name != "__init__.py"]
    count = Counter(path.parent.relative_to(ROOT) for path in paths)
    loose = [path.name for path in paths if path.parent in (ROOT / "node", ROOT / "swarm", ROOT / "protocol")]
    assert loose == ["__main__.py"]
    assert {folder: files for folder, files in count.items() if files > MOST_FILES} == {}


def test_every_folder_says_what_lives_there() -> None:
    said = {path: ast.get_docstring(parsed(path)) or "" for path in sources(*PACKAGES) if path.name == "__init__.py"}
    assert said
    assert [path for path, docstring in said.items() if not docstring.endswith(".")] == []


def test_the_rules_themselves_can_fail() -> None:
    tree = ast.parse("import asyncio\nfrom swarm import planner\nfrom . import seams\nfrom torch import nn")
    assert set(imports(tree, "protocol.link")) >= {"asyncio", "swarm.planner", "protocol.seams", "torch.nn"}


def test_nothing_is_unpickled() -> None:
    for path in sources(*PACKAGES, "tests", "benchmarks"):
        assert not {top(name) for name in imported_by(path)} & CODE_AS_DATA, path
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), f"{path}:{node.lineno}"
            if isinstance(node, ast.keyword):
                assert node.arg != "allow_pickle", f"{path}:{node.value.lineno}"


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


def test_what_is_imported_from_us_is_there() -> None:
    """mypy looks at the packages only; a benchmark that nobody runs in the tests would be found broken by its user."""
    nodes = ((path, node) for path in sources("tests", "benchmarks") for node in ast.walk(parsed(path)))
    for path, node in nodes:
        if not isinstance(node, ast.ImportFrom) or top(node.module or "") not in {*PACKAGES, "tests", "benchmarks"}:
            continue
        place = ROOT / (node.module or "").replace(".", "/")
        module = place.with_suffix(".py") if place.with_suffix(".py").exists() else place / "__init__.py"
        for alias in node.names:
            there = (place / f"{alias.name}.py").exists() or (place / alias.name).is_dir()
            assert there or (module.exists() and alias.name in names_in(module)), f"{path}: {node.module}.{alias.name}"


def public_definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Top-level public functions and classes, without the shortest, enums, protocols and sections."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        bases = {ast.unparse(base) for base in node.bases} if isinstance(node, ast.ClassDef) else set()
        if lines_of(node) > SELF_EXPLAINING_LINES and not bases & {"enum.Enum", "enum.IntEnum", "Protocol", "Section"}:
            yield node


def lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_what_is_public_says_what_it_is() -> None:
    for path in sources(*PACKAGES):
        assert ast.get_docstring(parsed(path)), f"{path} has no docstring"
        silent = [node.name for node in public_definitions(parsed(path)) if not ast.get_docstring(node)]
        assert not silent, path


def descriptor(generated: Path) -> bytes:
    """The serialized contract inside a generated module; the code around it changes with the generator's version."""
    for node in ast.walk(parsed(generated)):
        match node:
            case ast.Call(ast.Attribute(attr="AddSerializedFile"), [ast.Constant(bytes() as value)]):
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
