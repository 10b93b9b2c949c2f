"""Where the numbers come from, and how they are shown: environment, table, JSON."""

import datetime
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]


def environment(num_ranks: int, seed: int) -> dict[str, Any]:
    """Describes the process that measures; called there."""
    import jax
    import numpy as np

    device = jax.devices()[0]
    return {
        "device": f"{device.device_kind} x{num_ranks}",
        "platform": device.platform,
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "processes": jax.process_count(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seed": seed,
    }


def write_json(
    directory: pathlib.Path, environment: dict[str, Any], records: Sequence[dict[str, Any]]
) -> pathlib.Path:
    """Writes ``<device>-x<ranks>.json`` and returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{environment['device'].lower().replace(' ', '-')}.json"
    path.write_text(
        json.dumps({"environment": environment, "records": list(records)}, indent=1) + "\n"
    )
    return path


def show(environment: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    """Prints a table: an operation a line, a system a column, and native over the best other."""
    systems = list(dict.fromkeys(record["system"] for record in records))
    lines: dict[tuple, dict[str, float]] = {}
    for record in records:
        shape = tuple(f"{axis}={record[axis]}" for axis in "THKE")
        lines.setdefault((" ".join(shape), record["op"]), {})[record["system"]] = record["us"]
    header = [
        "shape",
        "operation",
        *(f"{system} (us)" for system in systems),
        "native / best other",
    ]
    rows = [
        [*line, *(f"{times[system]:,.0f}" for system in systems), _ratio(times)]
        for line, times in lines.items()
    ]
    facts = ("device", "cpu", "cores", "load_average", "jax", "seed")
    title = ", ".join(f"{fact} {environment[fact]}" for fact in facts)
    glue = max(record["glue_us"] for record in records)
    caption = (
        f"medians; chaining alone costs at most {max(glue, 0):,.0f} us for each loop of the chain"
    )
    _print_table(title, header, rows, caption)


def _ratio(times: dict[str, float]) -> str:
    """Empty where there is nothing to compare, or a slope drowned in noise."""
    others = [us for system, us in times.items() if system not in ("native", "reference")]
    if "native" not in times or not others or min(*others, times["native"]) <= 0:
        return ""
    return f"{times['native'] / min(others):.2f}"


def _print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], caption: str
) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)) for line in (header, *rows)]
        print("", title, *lines, caption, sep="\n")
        return
    table = Table(title=title, caption=caption)
    for place, name in enumerate(header):
        table.add_column(name, justify="left" if place < 2 else "right")
    for place, row in enumerate(rows):
        last_of_shape = place + 1 == len(rows) or rows[place + 1][0] != row[0]
        table.add_row(*row, end_section=last_of_shape)
    width = max(120, Console().width)
    Console(width=width).print(table)


def _cpu_model() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _commit() -> str:
    """The checkout's commit, "+" behind it if files differ; "unknown" outside a repository."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
