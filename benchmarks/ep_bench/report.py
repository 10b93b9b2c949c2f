"""How numbers are shown: tables and JSON."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from .environment import file_stem
from .points import HALVES, LOW_LATENCY


def write_json(
    directory: pathlib.Path, environment: dict[str, Any], records: Sequence[dict[str, Any]]
) -> pathlib.Path:
    """Writes ``<device>-x<ranks>[-p<processes, if several>].json`` and returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    several = f"-p{environment['processes']}" if environment["processes"] > 1 else ""
    path = directory / f"{file_stem(environment['device'])}{several}.json"
    path.write_text(
        json.dumps({"environment": environment, "records": list(records)}, indent=1) + "\n"
    )
    return path


def show(environment: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    """Prints the table that suits the platform."""
    if not records:
        print(f"{environment['device']}: nothing was measured")
    elif environment["platform"] == "gpu":
        _show_by_record(environment, records)
    else:
        _show_by_system(environment, records)


def _show_by_record(environment: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    """A record a line; of a shape and operation, the fastest first."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((_shape(record), record["op"]), []).append(record)
    header = ["shape", "operation", "system", "SMs", "us", "quartiles", "wire GB/s", "of floor"]
    rows = [
        [shape, op, *_cells(record)]
        for (shape, op), group in groups.items()
        for record in sorted(group, key=lambda record: record["us"])
    ]
    facts = ("device", "driver", "cuda", "jax", "commit", "seed")
    _print_table(_title(environment, facts), header, rows, _caption(records))


def _cells(record: dict[str, Any]) -> list[str]:
    quartiles = ""
    if "us_low" in record:
        quartiles = f"{record['us_low']:,.1f} - {record['us_high']:,.1f}"
    return [
        record["system"],
        _or_empty(record["num_sms"], "d"),
        f"{record['us']:,.1f}",
        quartiles,
        _or_empty(record["wire_gbps"], ",.1f"),
        _or_empty(record["floor_fraction"], ".2f"),
    ]


def _or_empty(number: float | None, spec: str) -> str:
    return "" if number is None else format(number, spec)


def _shape(record: dict[str, Any]) -> str:
    return " ".join(f"{axis}={record[axis]}" for axis in "THKE")


def _title(environment: dict[str, Any], facts: Sequence[str]) -> str:
    return ", ".join(f"{fact} {environment[fact]}" for fact in facts)


def _caption(records: Sequence[dict[str, Any]]) -> str:
    glue = max((record.get("glue_us") or 0 for record in records), default=0)
    return (
        f"medians; chaining alone costs at most {max(glue, 0):,.1f} us for each loop of the chain"
    )


def _show_by_system(environment: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    """An operation a line, a system a column, and native over the best other."""
    systems = list(dict.fromkeys(record["system"] for record in records))
    lines: dict[tuple, dict[str, float]] = {}
    for record in records:
        lines.setdefault((_shape(record), record["op"]), {})[record["system"]] = record["us"]
    header = [
        "shape",
        "operation",
        *(f"{system} (us)" for system in systems),
        "native / best other",
    ]
    rows = [
        [*line, *(_or_empty(times.get(system), ",.0f") for system in systems), _ratio(times)]
        for line, times in lines.items()
    ]
    facts = ("device", "cpu", "cores", "load_average", "jax", "seed")
    _print_table(_title(environment, facts), header, rows, _caption(records))


def _ratio(times: dict[str, float]) -> str:
    """Empty where there is nothing to compare, or a slope drowned in noise."""
    ours = ("native", "native_unexpanded", *LOW_LATENCY, *HALVES, "reference")
    others = [us for system, us in times.items() if system not in ours]
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
