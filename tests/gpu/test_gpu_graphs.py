"""Programs that XLA captures as graphs: replayed a thousand times, every replay checked."""

import cases
import gpu_world
import jax
import jax.numpy as jnp
import numpy as np
import programs

CASE = cases.Case(name="graph", T=96, H=256, K=4, E=16, R=2, chunk=40)
NUM_LAYERS = 3  # more operations than XLA asks for before it captures
NUM_CALLS = 1000


def fresh_inputs(case, call, x, first_expert, topk_weights):
    """Inputs of one call: other rows and other experts than those of the calls before."""
    spread = case.E // case.K
    experts = first_expert[:, None] + 5 * call + spread * jnp.arange(case.K)
    scale = 1 + (call % 13).astype(x.dtype)
    return x * scale, (experts % case.E).astype(jnp.int32), topk_weights


def make_step(buffer, case):
    """Layers on fresh inputs; carries the worst error so far and a sum over all outputs."""

    def step(call, worst, total, x, first_expert, topk_weights):
        x, topk_idx, topk_weights = fresh_inputs(case, call, x, first_expert, topk_weights)
        expected = x
        for layer in range(NUM_LAYERS):
            idx = (topk_idx + layer) % case.E
            x = gpu_world.leaky_layer(buffer, case, x, idx, topk_weights)
            expected = gpu_world.dense_leaky_layer(expected, idx, topk_weights)
        return jnp.maximum(worst, gpu_world.worst_error(x, expected)[None]), total + x

    return jax.jit(
        programs.sharded(
            buffer,
            step,
            in_specs=(jax.P(), *[jax.P("expert")] * 5),
            out_specs=jax.P("expert"),
        )
    )


def test_a_thousand_replays(num_gpus, rng):
    case = gpu_world.on_ranks(CASE, num_gpus)
    inputs = cases.make_inputs(case, rng)
    weights = inputs.topk_weights / inputs.topk_weights.sum(1, keepdims=True)
    first_expert = rng.integers(case.E, size=len(inputs.x)).astype(np.int32)
    totals = {}
    for platform in ("cuda", "cpu"):
        with gpu_world.make_buffer(case, platform) as buffer:
            step = make_step(buffer, case)
            worst, total, *constants = gpu_world.put(
                buffer,
                np.zeros(case.R, np.float32),
                np.zeros_like(inputs.x),
                inputs.x,
                first_expert,
                weights,
            )
            for call in range(NUM_CALLS):
                worst, total = step(np.int32(call), worst, total, *constants)
                if call % 16 == 0:
                    total.block_until_ready()
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
