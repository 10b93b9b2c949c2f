"""A picture of one file of results: time against tokens, a panel an operation, the floor drawn."""

import collections
import pathlib
from collections.abc import Sequence
from typing import Any

# Nothing but the order of panels; results may hold fewer.
_OPS = ("dispatch", "combine", "roundtrip", "fwd_bwd")
_TITLES = {
    "dispatch": "dispatch",
    "combine": "combine",
    "roundtrip": "dispatch + combine",
    "fwd_bwd": "forward + backward",
}
_COLORS = {
    "native": "#0b5fa5",
    "native_unexpanded": "#5aa9e6",
    "native_notified": "#1b2a6b",
    "low_latency_compact": "#008080",
    "low_latency_padded": "#40b5ad",
    "low_latency_float8": "#9bd6d0",
    "padded_all_to_all": "#e07b00",
    "all_gather": "#2e8b57",
    "ragged_all_to_all": "#b03a2e",
    "argsort": "#2e8b57",
    "reference": "#888888",
}
_OTHER_COLOR = "#7d3c98"
# Beside a system's most multiprocessors, the number that people leave to communication.
FEW_SMS = 24


def draw(
    path: pathlib.Path, environment: dict[str, Any], records: Sequence[dict[str, Any]]
) -> pathlib.Path:
    """Draws the shape (H, K, E) with most records beside a JSON file, as PNG; returns its path.

    A system's line is that of its most multiprocessors; a dashed one is that of 24.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = collections.Counter((record["H"], record["K"], record["E"]) for record in records)
    (H, K, E), _ = shapes.most_common(1)[0]
    shown = [record for record in records if (record["H"], record["K"], record["E"]) == (H, K, E)]
    ops = [op for op in _OPS if any(record["op"] == op for record in shown)]
    columns = min(2, len(ops))
    lines = -(-len(ops) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(6.5 * columns, 4.6 * lines), squeeze=False, layout="constrained"
    )
    for panel in axes.flat[len(ops) :]:
        panel.remove()
    for op, panel in zip(ops, axes.flat, strict=False):
        _draw_op(panel, op, [record for record in shown if record["op"] == op])
    lines_of_label = {}
    for panel in figure.axes:
        handles, labels = panel.get_legend_handles_labels()
        lines_of_label |= dict(zip(labels, handles, strict=True))
    figure.legend(
        lines_of_label.values(), lines_of_label.keys(), loc="outside lower center", ncols=4
    )
    figure.suptitle(
        f"{environment['device']}, H={H}, K={K}, E={E}, {shown[0]['dtype']}, "
        f"jax {environment['jax']}"
    )
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=130)
    pyplot.close(figure)
    return target


def _draw_op(panel, op: str, records: Sequence[dict[str, Any]]) -> None:
    curves: dict[tuple[str, int | None], dict[int, float]] = {}
    for record in records:
        if record["us"] > 0:
            curve = curves.setdefault((record["system"], record["num_sms"]), {})
            curve[record["T"]] = record["us"]
    most = {system: max(sms or 0 for name, sms in curves if name == system) for system, _ in curves}
    for (system, num_sms), curve in sorted(curves.items(), key=lambda item: str(item[0])):
        few = num_sms == FEW_SMS and most[system] > FEW_SMS
        if not few and (num_sms or 0) < most[system]:
            continue
        style = {
            "color": _COLORS.get(system, _OTHER_COLOR),
            "marker": "o",
            "markersize": 4,
            "linestyle": "--" if few else "-",
        }
        if system == "floor":
            style = {"color": "black", "linestyle": ":", "linewidth": 2.5}
        label = system.replace("_", " ") + (f", {num_sms} SMs" if num_sms else "")
        tokens = sorted(curve)
        panel.plot(tokens, [curve[T] for T in tokens], label=label, **style)
    ticks = sorted({T for curve in curves.values() for T in curve})
    panel.set(title=_TITLES[op], xlabel="tokens on each rank", ylabel="microseconds")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(ticks, [str(T) for T in ticks])
    panel.grid(visible=True, which="both", alpha=0.25)
