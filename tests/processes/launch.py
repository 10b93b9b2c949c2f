"""Starts processes that find each other through JAX, and has them run scenarios."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import xla_flags

WORKER = pathlib.Path(__file__).with_name("worker.py")
LIMIT_S = 150.0


@dataclasses.dataclass
class Crew:
    """Workers that run one scenario after another, each with a log."""

    workers: list[subprocess.Popen]
    folder: pathlib.Path

    def start(
        self, folder: pathlib.Path, scenario: str, settings: Mapping[str, Any] | None = None
    ) -> "Job":
        """Has all workers run a scenario, after those that they were given before."""
        folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps([scenario, str(folder), settings or {}]) + "\n"
        for worker in self.workers:
            worker.stdin.write(line.encode())
            worker.stdin.flush()
        return Job(self, folder)

    def run(
        self, folder: pathlib.Path, scenario: str, settings: Mapping[str, Any] | None = None
    ) -> list[dict]:
        """Runs a scenario to its end; returns what it returned, by process."""
        return self.start(folder, scenario, settings).finish()

    def is_sound(self) -> bool:
        return all(worker.poll() is None for worker in self.workers)

    def log(self, process: int) -> str:
        return (self.folder / f"{process}.log").read_text(errors="replace")

    def logs(self) -> str:
        tails = [
            f"--- process {process}, exit status {worker.poll()}\n{self.log(process)[-6000:]}"
            for process, worker in enumerate(self.workers)
        ]
        return "\n".join(tails)

    def release(self, process: int) -> None:
        """Nothing more is asked of this process."""
        with contextlib.suppress(BrokenPipeError):
            self.workers[process].stdin.close()

    def dismiss(self, *, killed: tuple[int, ...] = (), limit_s: float = LIMIT_S) -> None:
        """Nothing more is asked for; waits until all have ended, and well but for ``killed``."""
        for process in range(len(self.workers)):
            self.release(process)
        end = time.monotonic() + limit_s
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.1, end - time.monotonic()))
        for process, worker in enumerate(self.workers):
            if process not in killed:
                assert worker.poll() == 0, f"process {process} failed\n{self.logs()}"


@dataclasses.dataclass
class Job:
    """A scenario under way."""

    crew: Crew
    folder: pathlib.Path

    def wait_for_file(self, name: str, limit_s: float = LIMIT_S) -> pathlib.Path:
        """Waits for a file that a scenario writes."""
        end = time.monotonic() + limit_s
        path = self.folder / name
        while not path.exists():
            assert time.monotonic() < end, f"{name} did not appear\n{self.crew.logs()}"
            ended = any(worker.poll() not in (None, 0, -signal.SIGKILL) for worker in self.workers)
            assert not ended or path.exists(), f"a process failed\n{self.crew.logs()}"
            time.sleep(0.01)
        return path

    @property
    def workers(self) -> list[subprocess.Popen]:
        return self.crew.workers

    def kill(self, process: int) -> None:
        self.workers[process].send_signal(signal.SIGKILL)
        self.workers[process].wait(30)

    def finish(self, *, killed: tuple[int, ...] = (), limit_s: float = LIMIT_S) -> list[dict]:
        """Waits until all have run the scenario; returns the results of those not killed."""
        end = time.monotonic() + limit_s
        there = [process for process in range(len(self.workers)) if process not in killed]
        paths = [self.wait_for_file(f"{p}.json", end - time.monotonic()) for p in there]
        return [json.loads(path.read_text()) for path in paths]


@contextlib.contextmanager
def crew(
    folder: pathlib.Path,
    *,
    processes: int,
    devices: int = 1,
    gpus: int = 0,
    gpus_each: int = 1,
    late_s: Mapping[int, float] = {},
    variables: Mapping[str, str] = {},
) -> Iterator[Crew]:
    """``processes`` workers with ``devices`` CPU devices each, or with ``gpus_each`` of ``gpus``,
    which they share where there are fewer; none outlives the block.

    late_s: how long processes wait before they join, by process.
    variables: of their environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{free_port()}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": f"--xla_backend_optimization_level=0 {xla_flags.quick_to_compile()}".strip(),
    }
    if gpus:  # beside the test's own process, which may have taken most of their memory
        environment |= {
            "JAX_PLATFORMS": "cuda,cpu",
            "XLA_FLAGS": "",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
    environment |= variables
    workers = []
    try:
        for process in range(processes):
            first = process * gpus_each
            own_gpus = [str(gpu % gpus) for gpu in range(first, first + gpus_each) if gpus]
            place = [address, str(processes), str(process), ",".join(own_gpus)]
            place.append(str(late_s.get(process, 0)))
            with open(folder / f"{process}.log", "wb") as log:
                workers.append(
                    subprocess.Popen(
                        [sys.executable, str(WORKER), *place],
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
                )
        yield Crew(workers, folder)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait(30)


def run(
    folder: pathlib.Path, scenario: str, settings: Mapping[str, Any] | None = None, **options: Any
) -> list[dict]:
    """Runs a scenario in processes of its own; returns what it returned, by process."""
    with crew(folder, **options) as own:
        results = own.run(folder, scenario, settings)
        own.dismiss()
        return results


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
