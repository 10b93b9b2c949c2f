"""Who imports whom, and what importing jax_ep must not do."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = {path.stem: path for path in (ROOT / "jax_ep").glob("*.py")}

# Each module, and those of ours it may import. Everything points downwards.
_FACTS = {"errors", "config", "routed"}
ALLOWED = {
    "errors": set(),
    "config": {"errors"},
    "routed": set(),
    "_native": {"errors"},
    "buffer": _FACTS | {"_native"},
    "_reference": {"routed"},
    "_primitives": {"routed"},
    "_vjp": {"routed", "_primitives"},
    "ops": _FACTS | {"buffer", "_vjp", "_primitives", "_reference"},
    "__init__": _FACTS | {"buffer", "ops"},
    "nn": _FACTS | {"buffer", "ops", "__init__"},
}

CPP_LEVEL = {"layout": 0, "protocol": 1, "transport": 2, "cpu": 3, "cuda": 3, "handlers": 4}


def imported(path: pathlib.Path) -> set[str]:
    """Names of our modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            names |= {node.module.split(".")[0]} if node.module else {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax_ep":
            names.add([*node.module.split("."), "__init__"][1])
        elif isinstance(node, ast.Import):
            ours = [a.name.split(".") for a in node.names if a.name.split(".")[0] == "jax_ep"]
            names |= {[*parts, "__init__"][1] for parts in ours}
    return names


@pytest.mark.parametrize("module", sorted(MODULES))
def test_python_imports_point_downwards(module):
    assert module in ALLOWED, f"say in ALLOWED what {module} may import"
    assert imported(MODULES[module]) <= ALLOWED[module]


def cpp_files() -> list[pathlib.Path]:
    files = [
        path for path in (ROOT / "ffi").rglob("*") if path.suffix in {".h", ".cc", ".cu", ".cuh"}
    ]
    assert files, "ffi holds no sources"
    return files


@pytest.mark.parametrize("path", cpp_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_cpp_includes_point_downwards(path):
    folder = path.relative_to(ROOT / "ffi").parts[0]
    text = path.read_text()
    for include in re.findall(r'#include\s+"(?:ffi/)?(\w+)/', text):
        if include in CPP_LEVEL and folder in CPP_LEVEL:
            below = CPP_LEVEL[include] < CPP_LEVEL[folder]
            assert below or include == folder, f"{path} includes {include}"
    if folder != "handlers":
        assert "xla/ffi" not in text, "XLA headers belong in ffi/handlers"
    if path.parent != ROOT / "ffi":
        assert "nanobind/" not in text, "nanobind belongs to the modules, at the top of ffi"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_library_code_neither_prints_nor_writes_the_environment(module):
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"print", "exit", "quit"}, ast.unparse(node)
        assert "environ" not in getattr(node, "attr", ""), ast.unparse(node)


def test_import_loads_no_native_code_and_no_extras():
    program = (
        "import sys, jax_ep\n"
        "loaded = [m for m in sys.modules if m.split('.')[0] in ('flax', 'optax', 'rich')"
        " or m.startswith('jax_ep._ffi')]\n"
        "assert not loaded, loaded\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "missing = [name for name in jax_ep.__all__ if not hasattr(jax_ep, name)]\n"
        "assert not missing, missing\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=120)


def test_old_jax_warns_and_still_imports():
    program = (
        "import warnings, jax\n"
        "jax.__version_info__ = (0, 9, 0); jax.__version__ = '0.9.0'\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import jax_ep\n"
        "assert any('0.9.0' in str(w.message) for w in caught), caught\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=120)
