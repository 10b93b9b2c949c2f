"""What workers saved of their arrays, put together."""

import pathlib

import jax
import numpy as np


def saved_by_rank(folder: pathlib.Path, num_processes: int) -> dict[str, dict[int, bytes]]:
    """Results of a job: by name, then by device, ascending, which is the order of ranks."""
    found: dict[str, dict[int, bytes]] = {}
    for process in range(num_processes):
        with np.load(folder / f"{process}.npz") as arrays:
            for key in arrays.files:
                name, device = key.rsplit(":", 1)
                found.setdefault(name, {})[int(device)] = arrays[key].tobytes()
    return {name: dict(sorted(parts.items())) for name, parts in found.items()}


def bytes_of_shards(array: jax.Array) -> list[bytes]:
    """Of an array of this process, by device."""
    return [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]
