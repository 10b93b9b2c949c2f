"""The table of what is measured: each system's dispatch and combine, and the calls they make."""

import collections
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jax_ep

from . import argsort, exchange, gathered, low_latency, padded, ragged
from .workload import AXIS, Sizes, Workload

OPS = ("dispatch", "combine", "roundtrip", "fwd_bwd")
# And what some systems have besides.
ALL_OPS = (*OPS, "notify")

# On GPUs. jax_ep's own default there, 300 s, would be most of a benchmark's time.
TIMEOUT_S = 20.0


def _tokens(sent) -> jax.Array:
    return sent.tokens


@dataclasses.dataclass(frozen=True)
class Operations:
    """What a system does on one rank, inside ``jax.shard_map``.

    Attributes:
        dispatch: ``(x, topk_idx, topk_weights) -> sent``, a pytree with ``tokens [capacity, H]``
            and ``group_sizes``, differentiable in x and topk_weights.
        combine: ``(y, sent) -> [T, H]``, differentiable in y and in the weights in sent.
        rows: ``sent -> [capacity, H]``, the expert-major rows.
        topk_idx: of systems that are custom calls and nothing else, into which XLA cannot look:
            ``sent -> [T, K]``, a result of dispatch that equals topk_idx. ``linked`` chains them
            by it.
        notify: of systems that exchange the counts of a dispatch ahead of it: ``topk_idx ->
            [T, K]``, a result of the exchange that equals topk_idx.
        dispatch_in_turn: of systems whose dispatch is not over when its topk_idx is there: ``(x,
            topk_idx, topk_weights, token) -> sent``, a dispatch that comes after ``token``; what
            the next one must be given is ``sent.token``.
        combine_in_turn: of systems whose operations have an order token: ``(y, sent) -> (out,
            sent)``, a combine and what the next one must be given to come after it.
    """

    dispatch: Callable[..., Any]
    combine: Callable[..., jax.Array]
    rows: Callable[[Any], jax.Array] = _tokens
    topk_idx: Callable[[Any], jax.Array] | None = None
    notify: Callable[[jax.Array], jax.Array] | None = None
    dispatch_in_turn: Callable[..., Any] | None = None
    combine_in_turn: Callable[[jax.Array, Any], tuple[jax.Array, Any]] | None = None

    @property
    def opaque(self) -> bool:
        """Whether the system is custom calls and nothing else."""
        return self.topk_idx is not None


@dataclasses.dataclass(frozen=True)
class System:
    """One way to do the work.

    Attributes:
        name: as in the results' "system".
        open: context manager of the Operations, for a workload, a mesh and num_sms (or None).
        calls: how many of which calls, as ``hlo.count_calls`` names them, one "dispatch", one
            "combine", one "backward" (of both together) and one "notify" make. None if that is not
            known.
        copies_rows: whether XLA may copy arrays of rows between its steps.
        opaque: as in Operations.
        in_turn: whether its Operations have combine_in_turn.
        ops: which operations are its own.
        wire_rows: rows that a dispatch, or a combine, sends over the busiest direction of any
            rank's link; None where it is not known.
        expanded: whether dispatch writes a row for each (token, expert).
        off: how far an element that dispatch brings may be from x's, relative to itself.
        differentiable: whether its operations are.
    """

    name: str
    open: Callable[[Workload, Mesh, int | None], contextlib.AbstractContextManager[Operations]]
    calls: Mapping[str, Mapping[str, int]] | None
    copies_rows: bool = False
    opaque: bool = False
    in_turn: bool = False
    ops: tuple[str, ...] = OPS
    wire_rows: Callable[[Sizes], int] | None = None
    expanded: bool = True
    off: float = 0.0
    differentiable: bool = True

    def calls_of(self, parts: tuple[str, ...]) -> collections.Counter:
        """Calls of all parts together."""
        return sum((collections.Counter(self.calls[part]) for part in parts), collections.Counter())


def _config(workload: Workload, mesh: Mesh, num_sms: int | None) -> jax_ep.EpConfig:
    sizes = workload.sizes
    return jax_ep.EpConfig(
        num_experts=sizes.E,
        num_experts_per_tok=sizes.K,
        hidden=sizes.H,
        max_tokens_per_rank=sizes.T,
        dtype=jnp.dtype(workload.case.dtype),
        num_sms=num_sms,
        timeout_s=None if mesh.devices.flat[0].platform == "cpu" else TIMEOUT_S,
    )


@contextlib.contextmanager
def _jax_ep(
    backend: str, workload: Workload, mesh: Mesh, num_sms: int | None, **options: Any
) -> Iterator[Operations]:
    sizes = workload.sizes
    config = _config(workload, mesh, num_sms)
    expanded = options.get("expand", True)
    with jax_ep.Buffer(mesh, AXIS, config, backend=backend) as buffer:
        yield Operations(
            dispatch=functools.partial(
                jax_ep.dispatch, buffer, capacity=sizes.capacity, zero_tail=False, **options
            ),
            combine=functools.partial(jax_ep.combine, buffer),
            rows=_tokens if expanded else _mapped_tokens,
            topk_idx=_sanitised_idx if backend == "native" else None,
        )
        buffer.check()


@contextlib.contextmanager
def _notified(workload: Workload, mesh: Mesh, num_sms: int | None) -> Iterator[Operations]:
    """Dispatch as two operations: counts first, then rows along the routing."""
    sizes = workload.sizes
    config = _config(workload, mesh, num_sms)
    with jax_ep.Buffer(mesh, AXIS, config, backend="native") as buffer:

        def dispatch(x, topk_idx, topk_weights):
            routing = jax_ep.route(buffer, topk_idx)
            return jax_ep.dispatch(
                buffer,
                x,
                topk_weights=topk_weights,
                routing=routing,
                capacity=sizes.capacity,
                zero_tail=False,
            )

        def linked_idx(sent):
            # The routing's own depends on the exchange alone. What this costs is one small kernel.
            return jnp.minimum(sent.handle.topk_idx, sizes.E - 1 + sent.num_dropped)

        yield Operations(
            dispatch=dispatch,
            combine=functools.partial(jax_ep.combine, buffer),
            topk_idx=linked_idx,
            notify=lambda topk_idx: jax_ep.route(buffer, topk_idx).topk_idx,
        )
        buffer.check()


def _sanitised_idx(sent: jax_ep.Routed) -> jax.Array:
    return sent.handle.topk_idx


def _mapped_tokens(sent: jax_ep.Routed) -> jax.Array:
    """One copy for each (token, rank), gathered into expert-major rows."""
    return sent.tokens.at[sent.row_map].get(mode="fill", fill_value=0)


@contextlib.contextmanager
def _collectives(transport, workload: Workload, mesh: Mesh, num_sms) -> Iterator[Operations]:
    yield Operations(
        dispatch=functools.partial(exchange.dispatch, transport, workload.sizes),
        combine=functools.partial(exchange.combine, transport, workload.sizes),
    )


@contextlib.contextmanager
def _argsort(workload: Workload, mesh: Mesh, num_sms) -> Iterator[Operations]:
    if workload.sizes.R != 1:
        raise ValueError(f"argsort is for one rank, not for R={workload.sizes.R}; pass --ranks 1")
    yield Operations(
        dispatch=functools.partial(argsort.dispatch, workload.sizes),
        combine=functools.partial(argsort.combine, workload.sizes),
    )


_NATIVE_CALLS = {
    "dispatch": {"jax_ep_dispatch": 1},
    "combine": {"jax_ep_combine": 1},
    "backward": {"jax_ep_combine_grad": 1, "jax_ep_combine": 1},
}


_LOW_LATENCY_CALLS = {
    "dispatch": {"jax_ep_ll_dispatch": 1},
    "combine": {"jax_ep_ll_combine": 1},
    "backward": {"jax_ep_ll_combine_grad": 1, "jax_ep_ll_combine": 1},
}


def _table() -> Iterator[System]:
    yield System(
        name="native",
        open=functools.partial(_jax_ep, "native"),
        calls=_NATIVE_CALLS,
        opaque=True,
        wire_rows=lambda sizes: sizes.wire_rows,
    )
    if "expand" in inspect.signature(jax_ep.dispatch).parameters:
        yield System(
            name="native_unexpanded",
            open=functools.partial(_jax_ep, "native", expand=False),
            calls=_NATIVE_CALLS,
            opaque=True,
            ops=("dispatch",),
            wire_rows=lambda sizes: sizes.wire_rows,
            expanded=False,
        )
    yield System(
        name="native_notified",
        open=_notified,
        calls={
            "notify": {"jax_ep_notify": 1},
            "dispatch": {"jax_ep_notify": 1, "jax_ep_dispatch_routed": 1},
        },
        opaque=True,
        ops=("dispatch", "notify"),
        wire_rows=lambda sizes: sizes.wire_rows,
    )
    for layout, ops in (("compact", OPS), ("padded", ("dispatch",))):
        yield System(
            name=f"low_latency_{layout}",
            open=functools.partial(low_latency.open_buffer, layout, Operations, TIMEOUT_S),
            calls=_LOW_LATENCY_CALLS,
            opaque=True,
            in_turn=True,
            ops=ops,
            wire_rows=lambda sizes: sizes.wire_rows,
        )
    yield System(
        name="low_latency_float8",
        open=functools.partial(
            low_latency.open_buffer, "padded", Operations, TIMEOUT_S, quantize="float8_e4m3fn"
        ),
        calls={"dispatch": {"jax_ep_ll_dispatch_float8": 1}},
        opaque=True,
        in_turn=True,
        ops=("dispatch",),
        off=1 / 16,
    )
    for name, ops, options in (
        ("compact", ("dispatch", "combine"), {}),
        ("padded", ("dispatch",), {}),
        ("float8", ("dispatch",), {"quantize": "float8_e4m3fn"}),
    ):
        kind = "_float8" if options else ""
        yield System(
            name=f"low_latency_{name}_halves",
            open=functools.partial(
                low_latency.open_buffer,
                "compact" if name == "compact" else "padded",
                Operations,
                TIMEOUT_S,
                halves=True,
                **options,
            ),
            calls={
                "dispatch": {f"jax_ep_ll_dispatch{kind}_{half}": 1 for half in ("start", "done")},
                "combine": {f"jax_ep_ll_combine_{half}": 1 for half in ("start", "done")},
            },
            opaque=True,
            in_turn=True,
            ops=ops,
            wire_rows=None if options else lambda sizes: sizes.wire_rows,
            off=1 / 16 if options else 0.0,
            differentiable=False,
        )
    yield System(
        name="padded_all_to_all",
        open=functools.partial(_collectives, padded),
        calls={
            "dispatch": {"all-to-all": 2},
            "combine": {"all-to-all": 1},
            "backward": {"all-to-all": 3},
        },
        wire_rows=lambda sizes: (sizes.R - 1) * sizes.slots,
    )
    yield System(
        name="all_gather",
        open=functools.partial(_collectives, gathered),
        calls={
            "dispatch": {"all-gather": 2},
            "combine": {"reduce-scatter": 1},
            "backward": {"all-gather": 1, "reduce-scatter": 2},
        },
        wire_rows=lambda sizes: (sizes.R - 1) * sizes.T,
    )
    yield System(
        name="ragged_all_to_all",
        open=functools.partial(_collectives, ragged),
        calls={
            "dispatch": {"all-gather": 1, "ragged-all-to-all": 2},
            "combine": {"ragged-all-to-all": 1},
            "backward": {"ragged-all-to-all": 3},
        },
        wire_rows=lambda sizes: sizes.wire_rows,
    )
    yield System(
        name="reference",
        open=functools.partial(_jax_ep, "reference"),
        calls={
            "dispatch": {"all-gather": 3},
            "combine": {"all-to-all": 1},
            "backward": {"all-to-all": 1, "reduce-scatter": 2},
        },
        copies_rows=True,
    )
    yield System(
        name="argsort",
        open=_argsort,
        calls={"dispatch": {}, "combine": {}, "backward": {}},
        copies_rows=True,
        wire_rows=lambda sizes: 0,
    )


SYSTEMS = {system.name: system for system in _table()}

# XLA:CPU has no ragged_all_to_all.
GPU_ONLY = ("ragged_all_to_all",)


def default_systems(num_ranks: int) -> tuple[str, ...]:
    """What is compared where no table of points says it."""
    if num_ranks == 1:
        return ("native", "argsort")
    return ("native", "padded_all_to_all", "all_gather")
