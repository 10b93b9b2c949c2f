"""Programs that XLA captures as graphs: replayed a thousand times, every replay checked."""

import cases
import gpu_world
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import NamedSharding

CASE = cases.Case(name="graph", T=96, H=256, K=4, E=16, R=2, chunk=40)
NUM_LAYERS = 3  # more operations than XLA asks for before it captures
NUM_CALLS = 1000


def fresh_inputs(case, call, x, first_expert, topk_weights):
    """Inputs of one call: other rows and other experts than those of the calls before."""
    spread = case.E // case.K
    experts = first_expert[:, None] + 5 * call + spread * jnp.arange(case.K)
    scale = 1 + (call % 13).astype(x.dtype)
    return x * scale, (experts % case.E).astype(jnp.int32), topk_weights


def make_run(buffer, case, how):
    """A program that takes state, and constants, through the next call or calls.

    State: the number of the call, the worst error so far of each rank, a sum over all outputs.
    ``how``: "calls" makes one call an execution, and donates the state, so that the arrays stay
    where they are; "scan" makes all ``NUM_CALLS`` in one execution.
    """

    def step(state, x, first_expert, topk_weights):
        call, worst, total = state
        x, topk_idx, topk_weights = fresh_inputs(case, call, x, first_expert, topk_weights)
        expected = x
        for layer in range(NUM_LAYERS):
            idx = (topk_idx + layer) % case.E
            x = gpu_world.leaky_layer(buffer, case, x, idx, topk_weights)
            expected = gpu_world.dense_leaky_layer(expected, idx, topk_weights)
        return call + 1, jnp.maximum(worst, gpu_world.worst_error(x, expected)[None]), total + x

    def scan(state, *constants):
        return jax.lax.scan(
            lambda state, _: (step(state, *constants), None), state, length=NUM_CALLS
        )[0]

    specs = (jax.P(), jax.P("expert"), jax.P("expert"))
    sharded = programs.sharded(
        buffer,
        scan if how == "scan" else step,
        in_specs=(specs, *[jax.P("expert")] * 3),
        out_specs=specs,
    )
    return jax.jit(sharded, donate_argnums=0)


@pytest.mark.parametrize("how", ["calls", "scan"])
def test_a_thousand_replays(how, num_gpus, rng):
    case = gpu_world.on_ranks(CASE, num_gpus)
    inputs = cases.make_inputs(case, rng)
    weights = inputs.topk_weights / inputs.topk_weights.sum(1, keepdims=True)
    first_expert = rng.integers(case.E, size=len(inputs.x)).astype(np.int32)
    totals = {}
    for platform, way in (("cuda", how), ("cpu", "scan")):
        with gpu_world.make_buffer(case, platform) as buffer:
            run = make_run(buffer, case, way)
            constants = gpu_world.put(buffer, inputs.x, first_expert, weights)
            state = (
                jax.device_put(np.int32(0), NamedSharding(buffer.mesh, jax.P())),
                *gpu_world.put(buffer, np.zeros(case.R, np.float32), np.zeros_like(inputs.x)),
            )
            for call in range(NUM_CALLS if way == "calls" else 1):
                state = run(state, *constants)
                if call % 16 == 0:
                    jax.block_until_ready(state)
            call, worst, total = state
            assert int(call) == NUM_CALLS
            assert np.max(np.asarray(worst)) < NUM_LAYERS * gpu_world.TOLERANCE[case.dtype]
            assert buffer.check() is None
            totals[platform] = {"total": np.asarray(total)}
            if platform == "cuda":
                check_captured(buffer.stats(), case)
    gpu_world.assert_same_bits(totals["cuda"], totals["cpu"])


def check_captured(stats, case):
    """Every operation ran, and most of them without a call of their handler."""
    epochs_per_op = -(-case.T // case.chunk)
    ops = NUM_CALLS * NUM_LAYERS
    assert stats["dispatch_epochs"] == stats["combine_epochs"] == ops * epochs_per_op
    executed = 2 * ops * case.R
    print(
        f"{executed} operations ran, {stats['launches']} handler calls, of which "
        f"{stats['captured_launches']} were captured"
    )
    assert stats["captured_launches"] > 0, "XLA captured no graph"
    assert stats["launches"] < executed / 2, "XLA recorded its graphs anew for most calls"
