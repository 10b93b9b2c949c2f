"""Starts a scenario of ``scenarios.py`` in several processes that find each other through JAX."""

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

WORKER = pathlib.Path(__file__).with_name("worker.py")
LIMIT_S = 150.0


@dataclasses.dataclass
class Job:
    """Running workers, each with a log and a folder for results."""

    workers: list[subprocess.Popen]
    folder: pathlib.Path

    def log(self, process: int) -> str:
        return (self.folder / f"{process}.log").read_text(errors="replace")

    def results(self, process: int) -> dict[str, Any]:
        """What the scenario returned there."""
        path = self.folder / f"{process}.json"
        assert path.exists(), f"process {process} has no result\n{self.logs()}"
        return json.loads(path.read_text())

    def logs(self) -> str:
        tails = [
            f"--- process {process}, exit status {worker.poll()}\n{self.log(process)[-6000:]}"
            for process, worker in enumerate(self.workers)
        ]
        return "\n".join(tails)

    def wait_for_file(self, name: str, limit_s: float = LIMIT_S) -> pathlib.Path:
        """Waits for a file that a scenario writes."""
        end = time.monotonic() + limit_s
        while not (self.folder / name).exists():
            assert time.monotonic() < end, f"{name} did not appear\n{self.logs()}"
            assert any(w.poll() is None for w in self.workers), f"all have ended\n{self.logs()}"
            time.sleep(0.02)
        return self.folder / name

    def kill(self, process: int) -> None:
        self.workers[process].send_signal(signal.SIGKILL)
        self.workers[process].wait(30)

    def finish(self, *, killed: tuple[int, ...] = (), limit_s: float = LIMIT_S) -> list[dict]:
        """Waits for the end of all; returns the results of those that were not killed."""
        end = time.monotonic() + limit_s
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.1, end - time.monotonic()))
        for process, worker in enumerate(self.workers):
            if process not in killed:
                assert worker.poll() == 0, f"process {process} failed\n{self.logs()}"
        return [self.results(p) for p in range(len(self.workers)) if p not in killed]


@contextlib.contextmanager
def job(
    folder: pathlib.Path,
    scenario: str,
    *,
    processes: int,
    devices: int = 1,
    gpus: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[Job]:
    """A job of ``processes`` workers with ``devices`` CPU devices each, or with one of ``gpus``,
    which they share where there are fewer; none outlives the block."""
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    if gpus:  # beside the test's own process, which may have taken most of their memory
        environment |= {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    workers = []
    try:
        for process in range(processes):
            command = [
                sys.executable,
                str(WORKER),
                scenario,
                str(folder),
                json.dumps({**(settings or {}), "gpus": gpus}),
            ]
            command += [f"127.0.0.1:{port}", str(processes), str(process)]
            with open(folder / f"{process}.log", "wb") as log:
                workers.append(
                    subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
                )
        yield Job(workers, folder)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait(30)


def run(folder: pathlib.Path, scenario: str, **options: Any) -> list[dict]:
    """Runs a scenario to its end; returns what it returned, by process."""
    with job(folder, scenario, **options) as running:
        return running.finish()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
