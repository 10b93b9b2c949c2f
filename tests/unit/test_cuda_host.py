"""The host side of the CUDA backend on a fake runtime: needs CUDA's headers, no GPU, no nvcc."""

import os
import pathlib
import shutil
import subprocess

import pytest
from native import build

pytestmark = pytest.mark.no_python

REQUIRE = "JAX_EP_REQUIRE_NVCC"
NATIVE = build.ROOT / "tests/native"


def cuda_include() -> pathlib.Path | None:
    """The folder of CUDA's headers, beside nvcc or in the usual place."""
    nvcc = shutil.which("nvcc")
    roots = [pathlib.Path(nvcc).resolve().parents[1]] if nvcc else []
    for root in [*roots, pathlib.Path("/usr/local/cuda")]:
        if (root / "include" / "cuda_runtime_api.h").is_file():
            return root / "include"
    return None


def test_buffers_on_a_fake_runtime(tmp_path):
    include = cuda_include()
    if include is None:
        reason = "CUDA's headers were not found"
        if os.environ.get(REQUIRE, "0") not in ("", "0"):
            pytest.fail(f"{reason} ({REQUIRE} is set)")
        pytest.skip(reason)
    flags = ("-O0", "-isystem", str(include), f"-I{NATIVE}")
    memory = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    flags += memory if build.works_with(*memory) else ()
    paths = [NATIVE / "cuda_host_check.cc", NATIVE / "cuda_fake_runtime.cc"]
    paths += sorted((build.FFI / "cuda").glob("cuda_*.cc"))
    paths += sorted((build.FFI / "transport").glob("cuda_*.cc"))
    paths += [build.FFI / "cuda" / "ll_window.cc", build.FFI / "protocol" / "error_text.cc"]
    paths += [build.FFI / "transport" / "notice_board.cc"]
    objects = build.compile_objects([build.Source(path, flags) for path in paths], tmp_path)
    program = tmp_path / "cuda_host_check"
    build.link(objects, program, memory if build.works_with(*memory) else ())
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}  # some memory is kept on purpose
    done = subprocess.run(
        [str(program)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("fine\n")
