"""The CPU protocol under stress, from C++: plain, and under the race and memory detectors.

tests/native/protocol_stress.cc runs thousands of epochs in random worlds and checks every result.
Here it is compiled three times. Under the race detector this proves the memory order: it knows
atomics, and nothing else orders a payload's writer and its reader. The detector does not model
``std::atomic_thread_fence`` (gcc warns, hence -Wno-tsan). The only fences are in Doorbell, where
they keep a wake-up from being lost; no payload's order depends on them, so ignoring them can
neither hide a race nor invent one. That the detector sees what it should is tested as well:
protocols with one memory order or one wait taken out must fail.
"""

import os
import subprocess

import cases
import pytest
from native import build

pytestmark = pytest.mark.no_python

STRESS = build.ROOT / "tests/native/protocol_stress.cc"
PROCESSES = build.ROOT / "tests/native/process_stress.cc"
REQUIRE = "JAX_EP_REQUIRE_SANITIZERS"
RUN_TIMEOUT_S = 100

THREAD = ("-O1", "-g1", "-fsanitize=thread")
MEMORY = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RACE = "ThreadSanitizer: data race"
ENVIRONMENT = os.environ | {
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
    "ASAN_OPTIONS": "detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}

# One line of session.cc changed: release and acquire of payload and credit, the waits themselves.
UNORDERED = {
    "flag_store_relaxed": (
        ".store(arrival_flag(epoch, arrived), std::memory_order_release)",
        ".store(arrival_flag(epoch, arrived), std::memory_order_relaxed)",
    ),
    "flag_load_relaxed": (
        ".load(std::memory_order_acquire);\n  return read_arrival(flag, epoch);",
        ".load(std::memory_order_relaxed);\n  return read_arrival(flag, epoch);",
    ),
    "credit_store_relaxed": (
        ".store(epoch, std::memory_order_release)",
        ".store(epoch, std::memory_order_relaxed)",
    ),
    "credit_load_relaxed": (
        "credit.load(std::memory_order_acquire)",
        "credit.load(std::memory_order_relaxed)",
    ),
    "credit_off_by_one": ("may_write(epoch, seen())", "may_write(epoch, seen() + 1)"),
    "credit_past_an_open_start": (
        "epoch = std::min(epoch, context_.read_through);",
        "",
    ),
    "flag_of_any_epoch": (
        "return read_arrival(flag, epoch);",
        "return read_arrival(flag, flag == 0 ? epoch : flag / 2);",
    ),
}

# One check of dispatch.cc taken out, of those that keep a peer's garbage from addressing memory.
UNCHECKED = {
    "expert_of_route": ("if (expert >= experts_per_rank_) return;", ""),
    "row": ("if (to < 0 || to >= args_.capacity) return;", ""),
}

# One line of group.cc: a rank is told the end, and frees its operands, while peers still read them.
EARLY = ("if (started->operands.empty()) return [done", "return [done")


def require_compiler(*flags: str) -> None:
    """Skips where the compiler, or its runtime for these flags, is missing; fails if required."""
    if not build.compiler():
        reason = "no C++ compiler: set CXX"
    elif not build.works_with(*flags):
        reason = f"programs compiled by {build.compiler()[0]} with {' '.join(flags)} do not start"
    else:
        return
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{reason}, and {REQUIRE}=1")
    pytest.skip(reason)


def sanitizer_flags(flags: tuple[str, ...]) -> tuple[str, ...]:
    quiet = (
        ("-Wno-tsan",)
        if flags == THREAD and build.works_with(*flags, "-Werror", "-Wno-tsan")
        else ()
    )
    return flags + quiet


def compile_stress(folder, flags, *others):
    """Objects of the core, of the stress program and of others, by name."""
    sources = [source for source in build.core_sources(flags) if source.path.stem != "cpu_buffer"]
    sources += [build.Source(program, flags) for program in (STRESS, *others)]
    return {path.stem: path for path in build.compile_objects(sources, folder)}


def run(program, epochs):
    seed = cases.fresh_seed()
    command = [str(program), str(seed), str(epochs)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, env=ENVIRONMENT
    )
    print(f"{done.stdout}{done.stderr}"[:6000] + f"\nrerun with {cases.SEED_VARIABLE}={seed}")
    return done


@pytest.fixture(scope="module")
def plain_objects(tmp_path_factory):
    """Optimised as in a release: timing as in production, on the vector code that this CPU runs."""
    require_compiler()
    return compile_stress(tmp_path_factory.mktemp("plain"), ("-O2",), PROCESSES)


@pytest.fixture(scope="module")
def thread_objects(tmp_path_factory):
    require_compiler(*THREAD)
    return compile_stress(tmp_path_factory.mktemp("thread"), sanitizer_flags(THREAD))


@pytest.fixture(scope="module")
def memory_objects(tmp_path_factory):
    require_compiler(*MEMORY)
    return compile_stress(tmp_path_factory.mktemp("memory"), MEMORY)


def run_broken(objects, name, changes, flags, folder):
    """Runs the stress with one line of one file of ffi/cpu changed."""
    text = (build.FFI / "cpu" / name).read_text()
    right, wrong = changes
    assert text.count(right) == 1, f"{name} has changed: say anew what to break"
    (folder / name).write_text(text.replace(right, wrong))
    (made,) = build.compile_objects([build.Source(folder / name, flags)], folder)
    build.link([*(objects | {made.stem: made}).values()], folder / "stress", flags)
    return run(folder / "stress", 20_000)


@pytest.mark.parametrize(("name", "other"), [(STRESS, PROCESSES), (PROCESSES, STRESS)])
def test_results(plain_objects, tmp_path, name, other):
    objects = [path for stem, path in plain_objects.items() if stem != other.stem]
    build.link(objects, tmp_path / "stress")
    done = run(tmp_path / "stress", 5000)
    assert done.returncode == 0
    assert "epochs in" in done.stdout


def test_no_races(thread_objects, tmp_path):
    build.link(list(thread_objects.values()), tmp_path / "stress", THREAD)
    assert run(tmp_path / "stress", 1500).returncode == 0


def test_no_bad_addresses_and_no_undefined_behaviour(memory_objects, tmp_path):
    build.link(list(memory_objects.values()), tmp_path / "stress", MEMORY)
    assert run(tmp_path / "stress", 1200).returncode == 0


@pytest.mark.parametrize("name", UNORDERED)
def test_race_detector_sees_a_broken_protocol(thread_objects, tmp_path, name):
    flags = sanitizer_flags(THREAD)
    done = run_broken(thread_objects, "session.cc", UNORDERED[name], flags, tmp_path)
    assert done.returncode != 0, "nothing was noticed in 20,000 epochs"
    # A memory order alone shows on no x86 machine except to the detector.
    wrong_results = "FAILED" in done.stdout and "relaxed" not in name
    assert RACE in done.stderr or wrong_results


def test_memory_detector_sees_operands_freed_too_early(memory_objects, tmp_path):
    done = run_broken(memory_objects, "group.cc", EARLY, MEMORY, tmp_path)
    assert done.returncode != 0, "nothing was noticed in 20,000 epochs"
    assert "heap-use-after-free" in done.stderr


@pytest.mark.parametrize("name", UNCHECKED)
def test_memory_detector_sees_garbage_that_is_believed(memory_objects, tmp_path, name):
    done = run_broken(memory_objects, "dispatch.cc", UNCHECKED[name], MEMORY, tmp_path)
    assert done.returncode != 0, "nothing was noticed in 20,000 epochs"
    assert "AddressSanitizer" in done.stderr or "FAILED" in done.stdout
