"""Measures one number of ranks in this process, which has as many devices."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import cases
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import chains, hlo, timing, workload
from .systems import SYSTEMS, Operations

# Of the largest number in x, after the longest chain.
TOLERANCES = {"float32": 1e-5, "float16": 0.02, "bfloat16": 0.1}

OPS = ("dispatch", "combine", "roundtrip", "fwd_bwd")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, and how long.

    Attributes:
        shapes: of (T, H, K, E).
        systems: names in ``SYSTEMS``.
        dtype: of the rows.
        seed: of the inputs.
        lengths: of the short and the long chain.
        limits: of timing.
    """

    shapes: Sequence[tuple[int, int, int, int]]
    systems: Sequence[str]
    dtype: str
    seed: int
    lengths: tuple[int, int]
    limits: timing.Limits


def measure(num_ranks: int, settings: Settings) -> Iterator[dict[str, Any]]:
    """Yields the records of all shapes, operations and systems on ``num_ranks`` devices."""
    mesh = Mesh(np.array(jax.devices()[:num_ranks]), (workload.AXIS,))
    rng = np.random.default_rng(settings.seed)
    for T, H, K, E in settings.shapes:
        case = cases.Case(name="benchmark", T=T, H=H, K=K, E=E, R=num_ranks, dtype=settings.dtype)
        yield from _measure_workload(workload.make(case, rng), mesh, settings)


def _measure_workload(
    load: workload.Workload, mesh: Mesh, settings: Settings
) -> Iterator[dict[str, Any]]:
    args = device_args(load, mesh)
    with contextlib.ExitStack() as stack:
        opened = {
            name: stack.enter_context(SYSTEMS[name].open(load, mesh)) for name in settings.systems
        }
        for name, ops in opened.items():
            check_rows(name, ops, load, mesh, args)
        glue = _time_op("glue", opened, load, mesh, args, settings)
        for op in OPS:
            for name, slope in _time_op(op, opened, load, mesh, args, settings).items():
                yield _record(op, name, load, slope) | {"glue_us": round(glue[name].us, 1)}


def device_args(load: workload.Workload, mesh: Mesh) -> tuple[jax.Array, ...]:
    """Arguments of a chain: the inputs, split over the mesh, and the 0 of ``chains.opaque``."""
    split = NamedSharding(mesh, PartitionSpec(workload.AXIS))
    inputs = (load.inputs.x, load.inputs.topk_idx, load.inputs.topk_weights)
    never = jax.device_put(np.int32(0), NamedSharding(mesh, PartitionSpec()))
    return (*(jax.device_put(array, split) for array in inputs), never)


def check_rows(
    name: str, ops: Operations, load: workload.Workload, mesh: Mesh, args: tuple[jax.Array, ...]
) -> None:
    """Checks that a system dispatches exactly the rows and group sizes that the routing asks for.

    Raises:
        AssertionError: it does not.
    """

    def program(x, topk_idx, topk_weights):
        sent = ops.dispatch(x, topk_idx, topk_weights)
        return sent.tokens, sent.group_sizes

    split = PartitionSpec(workload.AXIS)
    sharded = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=split, out_specs=split))
    tokens, group_sizes = (np.asarray(array) for array in sharded(*args[:3]))
    tokens = tokens.reshape(load.sizes.R, load.sizes.capacity, load.sizes.H)
    group_sizes = group_sizes.reshape(load.sizes.R, -1)
    for rank in range(load.sizes.R):
        rows, counts = workload.expected_rows(load, rank)
        same = np.array_equal(tokens[rank, : len(rows)], rows)
        if not same or not np.array_equal(group_sizes[rank], counts):
            raise AssertionError(f"{name} does not dispatch the expected rows to rank {rank}")


def _time_op(
    op: str,
    opened: dict[str, Operations],
    load: workload.Workload,
    mesh: Mesh,
    args: tuple[jax.Array, ...],
    settings: Settings,
) -> dict[str, timing.Slope]:
    def compiled(name: str) -> dict[int, jax.stages.Compiled]:
        return compile_chains(op, name, opened[name], load, mesh, args, settings.lengths)

    # XLA compiles outside Python's lock, for the most part on one core a program. Only compiling is
    # done side by side: two programs that run at once may starve each other's collectives.
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        programs = dict(zip(opened, pool.map(compiled, opened), strict=True))
    calls = {}
    for name, by_length in programs.items():
        for length, program in by_length.items():
            check_result(f"{name} {op} x{length}", program(*args), load)
        calls[name] = {
            length: functools.partial(_run, program, args) for length, program in by_length.items()
        }
    return timing.slopes(calls, settings.limits)


def compile_chains(
    op: str,
    name: str,
    ops: Operations,
    load: workload.Workload,
    mesh: Mesh,
    args: tuple[jax.Array, ...],
    lengths: tuple[int, int],
) -> dict[int, jax.stages.Compiled]:
    """Compiles a system's short and long chain and checks their HLO.

    Raises:
        AssertionError: the chains do not hold the calls they should.
    """
    compiled = {length: chains.compile_chain(op, ops, mesh, args, length) for length in lengths}
    texts = {length: program.as_text() for length, program in compiled.items()}
    _, parts = chains.CHAINS[op]
    hlo.check_calls(f"{name} {op}", texts, SYSTEMS[name].calls_of(parts))
    if not SYSTEMS[name].copies_rows:
        hlo.check_copies(f"{name} {op}", texts, load.sizes.T * load.sizes.H)
    return compiled


def check_result(name: str, result: jax.Array, load: workload.Workload) -> None:
    """Checks that a chain returned x.

    Raises:
        AssertionError: it did not.
    """
    x = np.asarray(load.inputs.x, np.float32)
    tolerance = np.abs(x).max() * TOLERANCES[load.case.dtype]
    error = np.abs(np.asarray(result, np.float32) - x).max(initial=0)
    if not error <= tolerance:
        raise AssertionError(f"{name}: the result is wrong by {error}, more than {tolerance}")


def _run(program: jax.stages.Compiled, args: tuple[jax.Array, ...]) -> None:
    jax.block_until_ready(program(*args))


def _record(op: str, name: str, load: workload.Workload, slope: timing.Slope) -> dict[str, Any]:
    sizes = load.sizes
    return {
        "op": op,
        "system": name,
        **{axis: getattr(sizes, axis) for axis in "THKER"},
        "dtype": load.case.dtype,
        **{field: _rounded(number) for field, number in dataclasses.asdict(slope).items()},
        "capacity": sizes.capacity,
    }


def _rounded(number: float) -> float:
    return number if isinstance(number, int) else round(number, 1)
