"""Saving a run so that it goes on as if it had never stopped."""

import dataclasses
import pathlib
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from .records import History
from .settings import Settings

# A resumed run may be longer or measured differently; everything else would make it another run.
_FREE_TO_CHANGE = ("steps", "validate_every", "validation_batches")


class Checkpoints:
    """The checkpoints of one run in one folder; a context manager."""

    def __init__(self, folder: str | pathlib.Path, settings: Settings):
        self.folder = pathlib.Path(folder).absolute()
        self._settings = dataclasses.asdict(settings)
        # Saving waits for the write: the next step donates the very arrays that are being saved.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._manager.close()

    @property
    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: Any, history: History) -> None:
        """Saves the state after `step` steps, with the losses so far."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                history=ocp.args.JsonSave(history.to_json()),
                settings=ocp.args.JsonSave(self._settings),
            ),
        )

    def restore(self, like: Any) -> tuple[Any, History, int]:
        """The newest checkpoint: the state, placed as `like` is, the losses, and the steps done.

        Raises:
            FileNotFoundError: the folder holds no checkpoint.
            ValueError: it is the checkpoint of a run with other settings.
        """
        step = self.latest_step
        if step is None:
            raise FileNotFoundError(
                f"checkpoint folder {str(self.folder)!r} holds no checkpoint to resume from; "
                "start without --resume"
            )
        json = self._manager.restore(
            step,
            args=ocp.args.Composite(
                history=ocp.args.JsonRestore(), settings=ocp.args.JsonRestore()
            ),
        )
        self._check_settings(json["settings"])
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, like))
            ),
        )
        return restored["state"], History.from_json(json["history"]), step

    def _check_settings(self, saved: dict) -> None:
        changed = [
            f"{name} was {saved.get(name)!r} and is {value!r}"
            for name, value in self._settings.items()
            if name not in _FREE_TO_CHANGE and saved.get(name) != value
        ]
        if changed:
            raise ValueError(
                f"checkpoint folder {str(self.folder)!r} belongs to another run: "
                f"{'; '.join(changed)}; resume with the same settings or choose another folder"
            )
