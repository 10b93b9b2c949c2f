"""Compiles the native core without Python and XLA, for the tests that drive it from C++."""

import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
FFI = ROOT / "ffi"
COMPILE_TIMEOUT_S = 120
# As in CMakeLists.txt, where they decide what a sum rounds to.
CORE_FLAGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-fno-math-errno")
CORE_FLAGS += ("-fno-trapping-math", "-ffp-contract=off", "-DJAX_EP_TEST_HOOKS", "-pthread")


@dataclasses.dataclass(frozen=True)
class Source:
    """A file to compile, with flags of its own."""

    path: pathlib.Path
    flags: tuple[str, ...] = ()


def compiler() -> list[str]:
    """The C++ compiler as a command; empty where there is none."""
    command = shlex.split(os.environ.get("CXX", "c++"))
    return command if shutil.which(command[0]) else []


@functools.cache
def works_with(*flags: str) -> bool:
    """Whether a program compiled with these flags starts: a sanitizer's runtime may be missing."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = pathlib.Path(folder, "empty.cc"), pathlib.Path(folder, "empty")
        source.write_text("#include <thread>\nint main() { std::thread([] {}).join(); }\n")
        command = [*compiler(), "-std=c++17", "-pthread", *flags, str(source), "-o", str(program)]
        built = subprocess.run(command, capture_output=True, timeout=COMPILE_TIMEOUT_S)
        return built.returncode == 0 and not subprocess.run([program], timeout=60).returncode


def core_sources(flags: tuple[str, ...] = ()) -> list[Source]:
    """The CPU backend below the handlers, as CMakeLists.txt compiles it."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    sources = []
    for folder in ("protocol", "transport", "cpu"):
        for path in sorted((FFI / folder).glob("*.cc")):
            if path.name.startswith("cuda_") or (path.stem == "row_math_avx2" and not x86):
                continue
            extra = ("-mavx2", "-mfma") if path.stem == "row_math_avx2" else ()
            extra += ("-DJAX_EP_HAS_AVX2",) if path.stem == "row_math" and x86 else ()
            sources.append(Source(path, flags + extra))
    return sources


def compile_objects(sources: list[Source], folder: pathlib.Path) -> list[pathlib.Path]:
    """Compiles into ``folder``, as many files at a time as there are cores.

    Raises:
        RuntimeError: a file does not compile, or only with warnings; the message is the compiler's.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Source) -> pathlib.Path:
        made = folder / f"{source.path.stem}.o"
        _run([*CORE_FLAGS, f"-I{FFI}", *source.flags, "-c", str(source.path), "-o", str(made)])
        return made

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        largest_first = sorted(sources, key=lambda source: -source.path.stat().st_size)
        return list(pool.map(compile_one, largest_first))


def link(objects: list[pathlib.Path], program: pathlib.Path, flags: tuple[str, ...] = ()) -> None:
    """Links objects into ``program``."""
    _run(["-pthread", *flags, *map(str, objects), "-o", str(program)])


def _run(arguments: list[str]) -> None:
    command = [*compiler(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
