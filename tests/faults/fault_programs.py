"""Buffers with a short deadline, a program per native operation, and ways to see them fail."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import cases
import jax
import jax.numpy as jnp
import numpy as np
import programs

import jax_ep

TIMEOUT_S = 2.0
# Beyond the deadline: a waiter looks at the clock every 20 ms, the watcher every 50; the rest is
# for a machine that is busy with other things.
GRACE_S = 2.0
# What "at once" means for a call that would otherwise wait for the deadline.
AT_ONCE_S = TIMEOUT_S / 4

OPERATIONS = ("dispatch", "combine", "combine_grad")
CHANNEL = {"dispatch": "dispatch", "combine": "combine", "combine_grad": "dispatch"}


def fault_case(num_ranks: int) -> cases.Case:
    """Four chunks, so that an operation spans epochs and needs credits."""
    return cases.Case(name=f"faults{num_ranks}", T=13, H=16, K=3, E=24, R=num_ranks, chunk=4)


def hooks(buffer: jax_ep.Buffer):
    """The native module of a build in which tests may inject faults."""
    module = buffer._native
    assert module.has_test_hooks, (
        "this build takes no faults: build with -C cmake.define.JAX_EP_TEST_HOOKS=ON"
    )
    return module


def sharded_routed(buffer: jax_ep.Buffer, case: cases.Case, x, topk_idx, topk_weights):
    """Dispatch whose result may leave shard_map: num_dropped as ``[1]``."""
    routed = programs.dispatch(buffer, case, x, topk_idx, topk_weights)
    return dataclasses.replace(routed, num_dropped=routed.num_dropped[None])


@dataclasses.dataclass
class Setup:
    """An open buffer and, per native operation, a compiled program with its arguments bound.

    Attributes:
        run: by operation; each call is one execution, not waited for.
        healthy: by operation, the results of an undisturbed run.
    """

    case: cases.Case
    buffer: jax_ep.Buffer
    run: dict[str, Callable[[], object]]
    healthy: dict[str, object]

    def set_fault(self, kind: str, rank: int, seconds: float = 0.0) -> None:
        microseconds = round(seconds * 1e6)
        hooks(self.buffer).set_fault(self.buffer.id, kind, rank, microseconds=microseconds)

    def records(self, count: int) -> list[dict]:
        """Error records, once ``count`` ranks have filed theirs: JAX raises as soon as one has."""
        end = time.monotonic() + GRACE_S
        while True:
            found = hooks(self.buffer).error_records(self.buffer.id)
            if len(found) >= count or time.monotonic() > end:
                return found
            time.sleep(0.01)

    def next_epoch(self, operation: str) -> int:
        return self.buffer.stats()[f"{CHANNEL[operation]}_epochs"] + 1

    def assert_healthy(self) -> None:
        """Every operation gives the same bits as the undisturbed run."""
        assert self.buffer.check() is None
        for operation, run in self.run.items():
            assert_same_bits(run(), self.healthy[operation])
        assert self.buffer.check() is None


def make_setup(
    num_ranks: int, rng: np.random.Generator, payload: str = "native", **config
) -> Setup:
    """Compiles and runs each operation once; ``payload`` as in ``conftest.py``."""
    case = fault_case(num_ranks)
    buffer = programs.make_buffer(case, payload, **{"timeout_s": TIMEOUT_S, **config})
    inputs = cases.make_inputs(case, rng)
    arguments = [jnp.asarray(a) for a in (inputs.x, inputs.topk_idx, inputs.topk_weights)]

    def gradient(y, routed, g):
        def bring_back(y, weights):
            return jax_ep.combine(buffer, y, dataclasses.replace(routed, weights=weights))

        return jax.vjp(bring_back, y, routed.weights)[1](g)

    dispatch = compiled(buffer, lambda *shards: sharded_routed(buffer, case, *shards))
    combine = compiled(buffer, lambda y, routed: jax_ep.combine(buffer, y, routed))
    combine_grad = compiled(buffer, gradient)
    routed = jax.block_until_ready(dispatch(*arguments))
    y = jnp.asarray(cases.random_rows(rng, routed.tokens.shape, case.dtype))
    g = jnp.asarray(cases.random_rows(rng, inputs.x.shape, case.dtype))
    run = {
        "dispatch": lambda: dispatch(*arguments),
        "combine": lambda: combine(y, routed),
        "combine_grad": lambda: combine_grad(y, routed, g),
    }
    healthy = {operation: jax.block_until_ready(start()) for operation, start in run.items()}
    return Setup(case, buffer, run, healthy)


@contextlib.contextmanager
def open_setup(num_ranks: int, payload: str) -> Iterator[Setup]:
    """``make_setup`` of a fresh seed, which it prints; closes the buffer at the end."""
    seed = cases.fresh_seed()
    print(f"{cases.SEED_VARIABLE}={seed}")
    setup = make_setup(num_ranks, np.random.default_rng(seed), payload)
    yield setup
    setup.buffer.close()


def compiled(buffer: jax_ep.Buffer, function, **options):
    return jax.jit(programs.sharded(buffer, function, **options))


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def assert_same_bits(seen, expected) -> None:
    assert bits(seen) == bits(expected)


def failure(start: Callable[[], object]) -> tuple[str, float]:
    """Runs to the end what must fail; returns the error's text and the seconds it took."""
    began = time.monotonic()
    try:
        jax.block_until_ready(start())
    except jax.errors.JaxRuntimeError as error:
        return str(error), time.monotonic() - began
    raise AssertionError("nothing failed")


def sleeper(rank: int, seconds: float):
    """A host callback in which ``rank`` sleeps and the others pass, and the switch that arms it."""
    armed = {"on": False}

    def pause(here, value):
        if armed["on"] and int(here) == rank:
            time.sleep(seconds)
        return np.asarray(value)

    def through(axis_name: str, value: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(value.shape, value.dtype)
        return jax.pure_callback(pause, shape, jax.lax.axis_index(axis_name), value)

    return through, armed
