"""Who may use whom, and how long things may be.

Every rule is a function over a tree, and is tried on planted violations.
"""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60  # the docstring not counted

# A module may import those of lower levels only.
PYTHON_LEVELS = {
    "errors": 0,
    "routed": 0,
    "routing": 0,
    "low_latency_routed": 1,
    "config": 1,
    "_native": 2,
    "_bootstrap": 2,
    "_transports": 2,
    "_windows": 3,
    "layout": 3,
    "buffer": 4,
    "_float8": 4,
    "_primitives": 5,
    "_reference": 5,
    "_order": 6,
    "_vjp": 6,
    "_low_latency_primitives": 6,
    "_low_latency_reference": 6,
    "_low_latency_vjp": 7,
    "ops": 7,
    "_route": 8,
    "_low_latency_checks": 8,
    "notify": 9,
    "low_latency": 9,
    "__init__": 10,
    "nn": 11,
    "cli": 11,
}
COMPILED = "_ffi_"  # how the names of compiled modules start
# Includes go to the own folder or to lower levels.
CPP_LEVELS = {"layout": 0, "protocol": 1, "transport": 2, "cpu": 3, "cuda": 3, "handlers": 4}
CPP_TOP = 5  # ffi/*module.cc and the header they share
CPP_SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
CUDA_HEADERS = re.compile(r"<(cuda|cub/|cooperative_groups|nvshmem)")


def python_layer_violations(root: pathlib.Path) -> Iterator[str]:
    """Imports inside jax_ep that do not point downwards; users of compiled modules but _native."""
    for path in sorted((root / "jax_ep").rglob("*.py")):
        module = path.relative_to(root / "jax_ep").parts[0].removesuffix(".py")
        if module not in PYTHON_LEVELS:
            yield f"{path}: no level in PYTHON_LEVELS"
            continue
        tree = ast.parse(path.read_text())
        for used in sorted(_imported_modules(tree)):
            inside = used == module and path.parent != root / "jax_ep"
            if inside or used.startswith(COMPILED):
                continue
            if PYTHON_LEVELS.get(used, len(PYTHON_LEVELS)) >= PYTHON_LEVELS[module]:
                yield f"{path}: {module} imports {used}"
        if module != "_native" and _names_compiled_module(tree):
            yield f"{path}: only _native may load compiled modules"


def _imported_modules(tree: ast.AST) -> set[str]:
    """Modules of jax_ep, by the first part of their name; "__init__" for the package itself."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            found |= {node.module.split(".")[0]} if node.module else {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = [*(node.module or "").split("."), "__init__"]
            found |= {parts[1]} if parts[0] == "jax_ep" else set()
        elif isinstance(node, ast.Import):
            names = [[*alias.name.split("."), "__init__"] for alias in node.names]
            found |= {parts[1] for parts in names if parts[0] == "jax_ep"}
    return found


def _names_compiled_module(tree: ast.AST) -> bool:
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    imported = _imported_modules(tree)
    return any(COMPILED in text for text in [*imported, *filter(_is_name, strings)])


def _is_name(value) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.]+", value) is not None


def cpp_layer_violations(root: pathlib.Path) -> Iterator[str]:
    """Includes inside ffi that do not point downwards, or that are not this layer's business."""
    for path in _cpp_files(root / "ffi"):
        parts = path.relative_to(root / "ffi").parts
        folder = parts[0] if len(parts) > 1 else None
        if folder is None and not path.name.endswith(("module.cc", "module.h")):
            yield f"{path}: only modules lie in ffi itself"
        if folder is not None and folder not in CPP_LEVELS:
            yield f"{path}: no level in CPP_LEVELS"
            continue
        for include in re.findall(r"^\s*#\s*include\s+(\S+)", path.read_text(), re.MULTILINE):
            problem = _include_problem(include, folder, path.name, root)
            if problem:
                yield f"{path}: {include} {problem}"


def _cpp_files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in CPP_SUFFIXES)


def _include_problem(include: str, folder: str | None, name: str, root: pathlib.Path) -> str:
    target = include.strip('"<>')
    of = target.split("/")[0]
    if of == "xla":
        return "" if folder in (None, "handlers") else "belongs in ffi/handlers"
    if of == "nanobind" or target == "Python.h":
        return "" if folder is None else "belongs in ffi/*module.cc"
    if CUDA_HEADERS.match(include):
        fits = folder == "cuda" or name.startswith("cuda_")
        return "" if fits else "belongs in ffi/cuda and files named cuda_*"
    if include.startswith("<"):
        return ""
    if not (root / "ffi" / target).is_file():
        return "is not a file below ffi"
    if of == target:  # a file in ffi itself
        return "" if folder is None else "does not lie below"
    level = CPP_LEVELS.get(folder, CPP_TOP)
    return "" if of == folder or CPP_LEVELS.get(of, CPP_TOP) < level else "does not lie below"


def long_files(root: pathlib.Path) -> Iterator[str]:
    """Source files of 400 lines or more."""
    for folder in ("jax_ep", "ffi", "tests", "examples", "benchmarks"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in CPP_SUFFIXES | {".py"}:
                continue
            lines = len(path.read_text().splitlines())
            if lines >= MAX_FILE_LINES:
                yield f"{path}: {lines} lines"


def long_functions(root: pathlib.Path) -> Iterator[str]:
    """Functions of the library of 60 lines or more."""
    for path in sorted((root / "jax_ep").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            if lines >= MAX_FUNCTION_LINES:
                yield f"{path}: {node.name} has {lines} lines"


RULES = [python_layer_violations, cpp_layer_violations, long_files, long_functions]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps_the_rule(rule):
    assert list(rule(ROOT)) == []


def test_the_rules_look_at_the_project():
    assert len(list((ROOT / "jax_ep").rglob("*.py"))) >= 10
    assert len(_cpp_files(ROOT / "ffi")) >= 30


# Rule, file, its text, what the rule must say about it.
PLANTED = [
    (python_layer_violations, "jax_ep/config.py", "from .buffer import Buffer\n", "config imports"),
    (python_layer_violations, "jax_ep/_vjp.py", "from . import ops\n", "_vjp imports ops"),
    (python_layer_violations, "jax_ep/routed.py", "import jax_ep\n", "routed imports __init__"),
    (python_layer_violations, "jax_ep/_reference.py", "from ._primitives import f\n", "imports"),
    (
        python_layer_violations,
        "jax_ep/errors.py",
        "def f():\n    from jax_ep.ops import x\n",
        "ops",
    ),
    (python_layer_violations, "jax_ep/buffer.py", "from . import _ffi_cpu\n", "only _native"),
    (python_layer_violations, "jax_ep/ops.py", "load('jax_ep._ffi_cpu')\n", "only _native"),
    (python_layer_violations, "jax_ep/new.py", "", "no level"),
    (cpp_layer_violations, "ffi/layout/a.h", '#include "protocol/b.h"\n', "does not lie below"),
    (cpp_layer_violations, "ffi/cpu/a.cc", '#include "cuda/b.h"\n', "does not lie below"),
    (cpp_layer_violations, "ffi/cpu/a.cc", '#include "xla/ffi/api/ffi.h"\n', "ffi/handlers"),
    (cpp_layer_violations, "ffi/handlers/a.cc", "#include <nanobind/nanobind.h>\n", "module.cc"),
    (cpp_layer_violations, "ffi/protocol/a.h", "#include <cuda_runtime.h>\n", "cuda_*"),
    (cpp_layer_violations, "ffi/transport/a.h", "#include <cuda/atomic>\n", "cuda_*"),
    (cpp_layer_violations, "ffi/cpu/a.cc", '#include "b.h"\n', "not a file"),
    (cpp_layer_violations, "ffi/other/a.h", "", "no level"),
    (cpp_layer_violations, "ffi/a.cc", "", "only modules"),
    (cpp_layer_violations, "ffi/cpu/a.cc", '#include "a_module.h"\n', "does not lie below"),
    (long_files, "ffi/cpu/a.cc", "int a;\n" * 400, "400 lines"),
    (long_files, "tests/test_a.py", "a = 1\n" * 400, "400 lines"),
    (long_functions, "jax_ep/ops.py", "def f():\n" + "    a = 1\n" * 59, "f has 60 lines"),
]

# Below the limits and layered as it should be.
SOUND = {
    "jax_ep/errors.py": "",
    "jax_ep/config.py": "from .errors import EpError\n",
    "jax_ep/_native.py": "MODULE = 'jax_ep._ffi_cpu'\n",
    "jax_ep/buffer.py": '"""Closes jax_ep._ffi_cpu\'s windows."""\nfrom . import _native, config\n',
    "jax_ep/cli/bench.py": "import jax_ep\nfrom ..ops import dispatch\nfrom ..cli import doctor\n",
    "jax_ep/ops.py": 'def f():\n    """' + "text\n" * 60 + '"""\n' + "    a = 1\n" * 58,
    "ffi/layout/b.h": "#include <cstdint>\n",
    "ffi/protocol/b.h": '#include "layout/b.h"\n',
    "ffi/cuda/b.h": '#include <cuda/ptx>\n#include "protocol/b.h"\n#include "cuda/b.h"\n',
    "ffi/handlers/b.h": '#include "xla/ffi/api/ffi.h"\n#include "cuda/b.h"\n',
    "ffi/a_module.h": "#include <nanobind/nanobind.h>\n",
    "ffi/module.cc": '#include "handlers/b.h"\n#include "a_module.h"\n',
    "tests/test_b.py": "a = 1\n" * 399,
}


def plant(root: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_sound_tree_passes(tmp_path):
    plant(tmp_path, SOUND)
    assert [problem for rule in RULES for problem in rule(tmp_path)] == []


@pytest.mark.parametrize(("rule", "name", "text", "said"), PLANTED)
def test_a_planted_violation_is_found(tmp_path, rule, name, text, said):
    plant(tmp_path, SOUND | {name: text})
    (problem,) = rule(tmp_path)
    assert name in problem
    assert said in problem
