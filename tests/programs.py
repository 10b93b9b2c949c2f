"""Short ways to make buffers and sharded programs, shared by the tests."""

import contextlib
import functools
from collections.abc import Iterator

import cases
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jax_ep
from jax_ep import _native


def make_mesh(**sizes: int) -> Mesh:
    """A mesh of the first CPU devices, for example ``make_mesh(data=2, expert=4)``."""
    count = int(np.prod(list(sizes.values())))
    return Mesh(np.array(jax.devices("cpu")[:count]).reshape(*sizes.values()), tuple(sizes))


def make_config(case: cases.Case, **changes) -> jax_ep.EpConfig:
    """The case's EpConfig."""
    settings = {
        "num_experts": case.E,
        "num_experts_per_tok": case.K,
        "hidden": case.H,
        "max_tokens_per_rank": case.max_tokens,
        "dtype": jnp.dtype(case.dtype),
        "chunk_tokens": case.chunk,
    }
    return jax_ep.EpConfig(**(settings | changes))


def make_buffer(case: cases.Case, backend: str, **changes) -> jax_ep.Buffer:
    """A buffer over one axis, "expert", of the case's R devices.

    Backend "window" is the native one with rows carried by the windows, as between processes, and
    not read out of the peers' operands, as it does in one.
    """
    mesh, config = make_mesh(expert=case.R), make_config(case, **changes)
    if backend != "window":
        return jax_ep.Buffer(mesh, "expert", config, backend=backend)
    with rows_carried_by_windows() as native:
        buffer = jax_ep.Buffer(mesh, "expert", config, backend="native")
    assert native.payload(buffer.id) == "window"
    return buffer


@contextlib.contextmanager
def rows_carried_by_windows() -> Iterator:
    """Buffers made within use the windows for all they send; gives the native module."""
    native = _native.load("cpu")
    create = native.create_buffer
    native.create_buffer = functools.partial(create, payload="window")
    try:
        yield native
    finally:
        native.create_buffer = create


def sharded(buffer: jax_ep.Buffer, function, **options):
    """``function`` over all axes of the buffer's mesh, first axes split over all of them."""
    everywhere = PartitionSpec(buffer.mesh.axis_names)
    options = {"in_specs": everywhere, "out_specs": everywhere} | options
    return jax.shard_map(function, mesh=buffer.mesh, **options)


def dispatch(
    buffer: jax_ep.Buffer, case: cases.Case, x, topk_idx, topk_weights, **options
) -> jax_ep.Routed:
    """Dispatch with the case's options, and others."""
    return jax_ep.dispatch(
        buffer,
        x,
        topk_idx,
        topk_weights,
        capacity=case.capacity,
        expert_alignment=case.alignment,
        zero_tail=case.zero_tail,
        expand=case.expand,
        **options,
    )


def expert_rows(routed: jax_ep.Routed) -> jax.Array:
    """The expert-major rows ``[capacity, H]`` of a Routed, gathered if it is not expanded."""
    if routed.row_map is None:
        return routed.tokens
    return routed.tokens.at[routed.row_map].get(mode="fill", fill_value=0)


def linear_moe(buffer: jax_ep.Buffer, case: cases.Case):
    """``f(x, topk_idx, topk_weights, matrices)``, linear experts of matrices ``[E_l, H, H]``."""

    def layer(x, topk_idx, topk_weights, matrices):
        routed = dispatch(buffer, case, x, topk_idx, topk_weights)
        y = jax.lax.ragged_dot(expert_rows(routed), matrices, routed.group_sizes)
        return jax_ep.combine(buffer, y.astype(x.dtype), routed)

    return layer


def random_matrices(rng: np.random.Generator, case: cases.Case) -> np.ndarray:
    """Float32 ``[E, H, H]`` that keep the size of rows."""
    shape = (case.E, case.H, case.H)
    return (rng.normal(size=shape) / np.sqrt(case.H)).astype(np.float32)
