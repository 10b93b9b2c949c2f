"""Workers that stay for many tests, since to start them costs more than most scenarios."""

import contextlib
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import launch  # noqa: E402  (after the path)

# The first process of two with two devices each, JAX's coordinator, starts late.
LATE_S = {(2, 2): {0: 3.0}}


@pytest.fixture(scope="session")
def crews(tmp_path_factory):
    """``crews(processes, devices)``: a crew of this size, a new one after a failure."""
    running: dict[tuple[int, int], launch.Crew] = {}
    with contextlib.ExitStack() as stack:

        def crew(processes: int, devices: int) -> launch.Crew:
            size = processes, devices
            if size not in running or not running[size].is_sound():
                started = launch.crew(
                    tmp_path_factory.mktemp("crew"),
                    processes=processes,
                    devices=devices,
                    late_s=LATE_S.get(size, {}),
                )
                running[size] = stack.enter_context(started)
            return running[size]

        yield crew
        for one in running.values():
            if one.is_sound():
                one.dismiss()
