"""What a person sees: progress while training, a picture and a summary at the end."""

import pathlib
from typing import Self

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .records import History, StepReport

_SMOOTHING_STEPS = 20


class ProgressBar:
    """A line that follows the run, and one that stays for each validation. Use with `with`."""

    def __init__(self, num_steps: int, *, quiet: bool = False):
        self._console = Console(quiet=quiet)
        self._last: StepReport | None = None
        self._bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("train", total=num_steps, figures="compiling")

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._bar.__exit__(*exception)

    def on_step(self, report: StepReport) -> None:
        self._last = report
        figures = f"loss {report.loss:.3f}, {_speed_and_load(report)}"
        self._bar.update(self._task, completed=report.step + 1, figures=figures)

    def on_validation(self, step: int, loss: float) -> None:
        line = f"step {step}: validation loss {loss:.3f}"
        if self._last is not None:
            line += f", training {self._last.loss:.3f}, {_speed_and_load(self._last)}"
            line += f", dropped {self._last.dropped_share:.1%}"
        self._console.print(line, highlight=False, soft_wrap=True)


def _speed_and_load(report: StepReport) -> str:
    """Load: the smallest and the largest share of tokens of an expert, 1 being an equal share."""
    return (
        f"{report.tokens_per_second:,.0f} tokens/s, load {report.smallest_share:.2f}-"
        f"{report.largest_share:.2f}"
    )


def draw_losses(history: History, unigram_entropy: float, title: str, path: pathlib.Path) -> None:
    """Writes a PNG of training and validation loss over steps, and the entropy as a line."""
    steps, losses = np.array(sorted(history.train.items())).T
    window = min(_SMOOTHING_STEPS, len(losses))
    smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=130, layout="constrained")
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1)
    axes.plot(
        steps[window // 2 :][: len(smooth)],
        smooth,
        color="tab:blue",
        linewidth=2,
        label=f"training (mean of {window} steps)",
    )
    axes.plot(
        *np.array(sorted(history.validation.items())).T,
        "o-",
        color="tab:orange",
        label="validation",
    )
    axes.axhline(
        unigram_entropy,
        color="tab:gray",
        linestyle="--",
        label=f"unigram entropy of the validation text, {unigram_entropy:.2f}",
    )
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title, xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
