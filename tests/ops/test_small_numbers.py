"""Float16 rows below 2^-14: subnormal there, ordinary in float32, and not to be lost on the way."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import programs

import jax_ep

CASE = cases.Case(name="small_numbers", T=6, H=64, K=1, E=4, R=4, dtype="float16")


def test_float16_subnormals_survive(backend, rng):
    """With weights of 1 and one expert per token, a round trip and its gradient are exact."""
    inputs = cases.make_inputs(CASE, rng)
    tiny, g = (
        (rng.integers(-1023, 1024, inputs.x.shape) * 2.0**-24).astype(np.float16) for _ in range(2)
    )
    with programs.make_buffer(CASE, backend) as buffer:

        def program(x, topk_idx, g):
            def round_trip(x, scale):
                ones = jnp.ones_like(x, shape=(x.shape[0], 1), dtype=jnp.float32)
                routed = programs.dispatch(buffer, CASE, x, topk_idx, ones)
                edited = dataclasses.replace(routed, weights=routed.weights * scale)
                return jax_ep.combine(buffer, routed.tokens, edited)

            one = jnp.ones_like(x, shape=(), dtype=jnp.float32)
            out, pull = jax.vjp(round_trip, x, one)
            d_x, d_scale = pull(g)
            return out, d_x, d_scale[None]

        run = jax.jit(programs.sharded(buffer, program))
        out, d_x, d_scale = jax.block_until_ready(run(tiny, inputs.topk_idx, g))
    np.testing.assert_array_equal(out, tiny)
    np.testing.assert_array_equal(d_x, g)
    # The weight's gradient is <y, g>, here of numbers that all are subnormal in float16.
    expected = np.sum(tiny.astype(np.float64) * g)
    np.testing.assert_allclose(np.sum(np.asarray(d_scale, np.float64)), expected, rtol=1e-4)
