"""The pool of worker threads from C++: plain, and under the race detector.

What tests/native/pool_check.cc asks is tried on pools that get it wrong, too.
"""

import os
import subprocess

import pytest
from native import build

pytestmark = pytest.mark.no_python

CHECK = build.ROOT / "tests/native/pool_check.cc"
THREAD = ("-O1", "-g", "-fsanitize=thread")
ENVIRONMENT = os.environ | {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
REQUIRE = "JAX_EP_REQUIRE_SANITIZERS"

# One line of strand.cc changed, and what then happens: a check fails, or nothing goes on and the
# program is ended by its alarm.
WRONG = {
    "no_limit": ("self.turn = admission_.begin(*kind);", "self.turn = ~Admission::Turn{0};"),
    "no_room_for_others_than_sleepers": (
        "  pool.admission_.fall_asleep(this_thread_->turn);\n",
        "",
    ),
    "no_watcher": ("    admission_.set_aside(", "    if (false) admission_.set_aside("),
    "no_order": (
        "Task task = std::move(strand->tasks_.front());\n  strand->tasks_.pop_front();",
        "Task task = std::move(strand->tasks_.back());\n  strand->tasks_.pop_back();",
    ),
}


def give_up(reason):
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{reason}, and {REQUIRE}=1")
    pytest.skip(reason)


def build_check(folder, flags, strand_cc=None):
    if not build.compiler():
        give_up("no C++ compiler, so nothing here can be built")
    sources = [strand_cc or build.FFI / "cpu/strand.cc", CHECK]
    objects = build.compile_objects([build.Source(path, flags) for path in sources], folder)
    build.link(objects, folder / "check", flags)
    return folder / "check"


def run(program, hang_s=60):
    return subprocess.run(
        [program, str(hang_s)], capture_output=True, text=True, timeout=100, env=ENVIRONMENT
    )


@pytest.mark.parametrize("flags", [("-O2",), THREAD], ids=["plain", "race_detector"])
def test_limits_order_and_progress(flags, tmp_path):
    if flags == THREAD and not build.works_with("-fsanitize=thread"):
        give_up("this compiler has no race detector that starts here")
    done = run(build_check(tmp_path, flags))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pool_is_found_out(name, tmp_path):
    right = (build.FFI / "cpu/strand.cc").read_text()
    line, changed = WRONG[name]
    assert right.count(line) == 1
    wrong = tmp_path / "strand.cc"
    wrong.write_text(right.replace(line, changed))
    done = run(build_check(tmp_path / "built", ("-O1",), wrong), hang_s=5)
    assert done.returncode != 0
