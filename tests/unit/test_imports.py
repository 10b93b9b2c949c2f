"""What importing jax_ep must not do. (Who may import whom: test_architecture.py.)"""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = {path.stem: path for path in (ROOT / "jax_ep").glob("*.py")}


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
