"""GPUs, equal meshes of GPUs and of CPUs, and layers that have the same bits on both."""

import dataclasses
import importlib.util
import os

import cases
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ep

REQUIRE_VARIABLE = "JAX_EP_REQUIRE_GPU"

# The Shardy partitioner of jax 0.11.2 ends the process when it compiles arrays of no elements for
# several GPUs. test_gpu_no_tokens.py runs what needs them in a process that partitions otherwise.
EMPTY_ARRAYS = not jax.config.jax_use_shardy_partitioner


def gpus() -> list[jax.Device]:
    """The GPUs of this process; none where JAX has no CUDA backend."""
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return []


def require_cuda(count: int) -> None:
    """Skips the test where there are fewer GPUs or no module for them; with JAX_EP_REQUIRE_GPU set
    to anything but 0, fails it."""
    found = len(gpus())
    if found < count:
        _missing(f"needs {count} or more GPUs, JAX sees {found}")
    if importlib.util.find_spec("jax_ep._ffi_cuda") is None:
        _missing("needs the module jax_ep._ffi_cuda; build with JAX_EP_CUDA=ON")


def require_nvshmem() -> None:
    """The same for what needs two GPUs, a process each, and the module for NVSHMEM."""
    require_cuda(2)
    if importlib.util.find_spec("jax_ep._ffi_nvshmem") is None:
        _missing("needs the module jax_ep._ffi_nvshmem; build with JAX_EP_NVSHMEM=ON")


def _missing(reason: str) -> None:
    if os.environ.get(REQUIRE_VARIABLE, "0") not in ("", "0"):
        pytest.fail(f"{reason} ({REQUIRE_VARIABLE} is set)")
    pytest.skip(reason)


def mesh(platform: str = "cuda", **sizes: int) -> Mesh:
    """A mesh of the first devices of a platform, for example ``mesh(data=2, expert=1)``."""
    count = int(np.prod(list(sizes.values())))
    if platform == "cuda":
        require_cuda(count)
    devices = jax.local_devices(backend=platform)[:count]
    return Mesh(np.array(devices).reshape(*sizes.values()), tuple(sizes))


def on_ranks(case: cases.Case, num_ranks: int) -> cases.Case:
    """The case for another number of ranks, with as many experts on each.

    Capacities are multiples of the mean load of a rank, so that they fit as well.
    """
    num_experts = case.experts_per_rank * num_ranks
    return dataclasses.replace(case, R=num_ranks, E=num_experts, K=min(case.K, num_experts))


def make_buffer(case: cases.Case, platform: str = "cuda", **changes) -> jax_ep.Buffer:
    """A native buffer over one axis, "expert", of the case's R devices. A hang is short."""
    config = programs.make_config(case, **{"timeout_s": 10.0, **changes})
    return jax_ep.Buffer(mesh(platform, expert=case.R), "expert", config, backend="native")


def put(buffer: jax_ep.Buffer, *arrays) -> list[jax.Array]:
    """Arrays on the buffer's devices, first axes split over all of them."""
    sharding = NamedSharding(buffer.mesh, PartitionSpec(buffer.mesh.axis_names))
    return [jax.device_put(np.asarray(array), sharding) for array in arrays]


def leaky(rows: jax.Array) -> jax.Array:
    """An expert without parameters. Its products are exact: no platform rounds them otherwise."""
    return jnp.where(rows > 0, rows, 0.5 * rows)


def leaky_layer(buffer: jax_ep.Buffer, case: cases.Case, x, topk_idx, topk_weights):
    """Dispatch, leaky experts, combine."""
    routed = programs.dispatch(buffer, case, x, topk_idx, topk_weights)
    return jax_ep.combine(buffer, leaky(routed.tokens), routed)


def dense_leaky_layer(x, topk_idx, topk_weights):
    """The same without ranks: valid where topk_idx has neither faults nor dropped rows."""
    weight = jnp.where(topk_idx >= 0, topk_weights, 0).sum(-1)
    return leaky(x) * weight[:, None]


def worst_error(seen: jax.Array, expected: jax.Array) -> jax.Array:
    """The largest error relative to the element's own size, where a zero must be one.

    Fits sums of terms of one sign, as those of the layers here. NaN where either is NaN.
    """
    error = jnp.abs(seen.astype(jnp.float32) - expected)
    return jnp.max(error / (jnp.abs(expected) + 1e-30), initial=0.0)


# For sums of terms of one sign. float32 adds in another order; the others round, by half a unit in
# the last place each time, on the way, at the end and (or not: XLA may leave it out) in the inputs.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-6, "float16": 2**-9}


def assert_same_bits(seen: dict, expected: dict, where: str = "") -> None:
    """Arrays of one name have the same bits, NaNs and zeros' signs included."""
    assert seen.keys() == expected.keys()
    for name, array in seen.items():
        left, right = np.asarray(array), np.asarray(expected[name])
        assert left.dtype == right.dtype, name
        as_int = np.dtype(f"u{left.dtype.itemsize}")
        wrong = np.argwhere(left.view(as_int) != right.view(as_int))
        assert wrong.size == 0, (
            f"{where} {name}: {len(wrong)} of {left.size} differ, the first at {wrong[0]}: "
            f"{left[tuple(wrong[0])]} on GPUs, {right[tuple(wrong[0])]} on CPUs"
        )
