"""The table of what is measured: each system's dispatch and combine, and the calls they make."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jax_ep

from . import exchange, gathered, padded
from .workload import AXIS, Workload


@dataclasses.dataclass(frozen=True)
class Operations:
    """What a system does on one rank, inside ``jax.shard_map``.

    Attributes:
        dispatch: ``(x, topk_idx, topk_weights) -> sent``, a pytree with ``tokens [capacity, H]``
            and ``group_sizes``, differentiable in x and topk_weights.
        combine: ``(y, sent) -> [T, H]``, differentiable in y and in the weights in sent.
    """

    dispatch: Callable[..., Any]
    combine: Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class System:
    """One way to do the work.

    Attributes:
        name: as in the results' "system".
        open: context manager of the Operations for a workload on a mesh.
        calls: how many of which calls, as ``hlo.count_calls`` names them, one "dispatch", one
            "combine" and one "backward" (of both together) make.
        copies_rows: whether XLA may copy arrays of rows between its steps.
    """

    name: str
    open: Callable[[Workload, Mesh], contextlib.AbstractContextManager[Operations]]
    calls: dict[str, dict[str, int]]
    copies_rows: bool = False

    def calls_of(self, parts: tuple[str, ...]) -> collections.Counter:
        """Calls of all parts together."""
        return sum((collections.Counter(self.calls[part]) for part in parts), collections.Counter())


@contextlib.contextmanager
def _jax_ep(backend: str, workload: Workload, mesh: Mesh) -> Iterator[Operations]:
    sizes = workload.sizes
    config = jax_ep.EpConfig(
        num_experts=sizes.E,
        num_experts_per_tok=sizes.K,
        hidden=sizes.H,
        max_tokens_per_rank=sizes.T,
        dtype=jnp.dtype(workload.case.dtype),
    )
    with jax_ep.Buffer(mesh, AXIS, config, backend=backend) as buffer:
        yield Operations(
            dispatch=functools.partial(
                jax_ep.dispatch, buffer, capacity=sizes.capacity, zero_tail=False
            ),
            combine=functools.partial(jax_ep.combine, buffer),
        )
        buffer.check()


@contextlib.contextmanager
def _collectives(transport, workload: Workload, mesh: Mesh) -> Iterator[Operations]:
    yield Operations(
        dispatch=functools.partial(exchange.dispatch, transport, workload.sizes),
        combine=functools.partial(exchange.combine, transport, workload.sizes),
    )


SYSTEMS = {
    system.name: system
    for system in (
        System(
            name="native",
            open=functools.partial(_jax_ep, "native"),
            calls={
                "dispatch": {"jax_ep_dispatch": 1},
                "combine": {"jax_ep_combine": 1},
                "backward": {"jax_ep_combine_grad": 1, "jax_ep_combine": 1},
            },
        ),
        System(
            name="padded_all_to_all",
            open=functools.partial(_collectives, padded),
            calls={
                "dispatch": {"all-to-all": 2},
                "combine": {"all-to-all": 1},
                "backward": {"all-to-all": 3},
            },
        ),
        System(
            name="all_gather",
            open=functools.partial(_collectives, gathered),
            calls={
                "dispatch": {"all-gather": 2},
                "combine": {"reduce-scatter": 1},
                "backward": {"all-gather": 1, "reduce-scatter": 2},
            },
        ),
        System(
            name="reference",
            open=functools.partial(_jax_ep, "reference"),
            calls={
                "dispatch": {"all-gather": 3},
                "combine": {"all-to-all": 1},
                "backward": {"all-to-all": 1, "reduce-scatter": 2},
            },
            copies_rows=True,
        ),
    )
}

DEFAULT_SYSTEMS = ("native", "padded_all_to_all", "all_gather")
