"""Counters and tickets from C++: plain, and under the race detector."""

import os
import subprocess

import pytest
from native import build

pytestmark = pytest.mark.no_python

CHECK = build.ROOT / "tests/native/notice_check.cc"
NAMES = ("mapped_counters", "notice_board")
THREAD = ("-O1", "-g", "-fsanitize=thread")
REQUIRE = "JAX_EP_REQUIRE_SANITIZERS"


def give_up(reason):
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{reason}, and {REQUIRE}=1")
    pytest.skip(reason)


@pytest.mark.parametrize("flags", [("-O2",), THREAD], ids=["plain", "race_detector"])
def test_counters_and_their_reader(flags, tmp_path):
    if not build.compiler():
        give_up("no C++ compiler, so nothing here can be built")
    if flags == THREAD and not build.works_with("-fsanitize=thread"):
        give_up("this compiler has no race detector that starts here")
    core = [source for source in build.core_sources(flags) if source.path.stem in NAMES]
    assert len(core) == len(NAMES)
    objects = build.compile_objects([*core, build.Source(CHECK, flags)], tmp_path / "objects")
    build.link(objects, tmp_path / "check", flags)
    done = subprocess.run([tmp_path / "check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
