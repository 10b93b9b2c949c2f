"""Two buffers in one program, with no order between them, many runs in flight."""

import cases
import jax
import numpy as np
import oracle
import programs

FIRST = cases.Case(name="first", T=11, H=32, K=3, E=8, R=4, chunk=4)
SECOND = cases.Case(name="second", T=5, H=16, K=2, E=16, R=4, dtype="float32")


def test_independent_buffers_in_one_program(backend, rng):
    prepared = []
    for case in (FIRST, SECOND):
        inputs, matrices = cases.make_inputs(case, rng), programs.random_matrices(rng, case)
        arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights, matrices)
        prepared.append((arguments, oracle.dense_moe(*arguments, np.zeros_like(inputs.x)).out))

    with (
        programs.make_buffer(FIRST, backend) as first,
        programs.make_buffer(SECOND, backend) as second,
    ):

        def program(first_arguments, second_arguments):
            out_a = programs.linear_moe(first, FIRST)(*first_arguments)
            out_b = programs.linear_moe(second, SECOND)(*second_arguments)
            return out_a, out_b

        run = jax.jit(programs.sharded(first, program))
        queued = [run(prepared[0][0], prepared[1][0]) for _ in range(30)]
        for outs in jax.block_until_ready(queued):
            for out, (_, expected) in zip(outs, prepared, strict=True):
                np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
        assert first.check() is None
        assert second.check() is None


def test_alternating_buffers_and_sizes(rng):
    """Programs of different T take turns on two buffers; each sees its own results."""
    runs = []
    with (
        programs.make_buffer(FIRST, "native") as first,
        programs.make_buffer(SECOND, "native") as second,
    ):
        for buffer, case in ((first, FIRST), (second, SECOND)):
            layer = jax.jit(programs.sharded(buffer, programs.linear_moe(buffer, case)))
            runs += [(layer, case, T) for T in (case.T, 2)]
        for turn in rng.permutation(np.tile(np.arange(4), 5)):
            layer, case, num_tokens = runs[turn]
            smaller = cases.Case(name="turn", T=num_tokens, H=case.H, K=case.K, E=case.E, R=case.R)
            inputs, matrices = cases.make_inputs(smaller, rng), programs.random_matrices(rng, case)
            arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights, matrices)
            expected = oracle.dense_moe(*arguments, np.zeros_like(inputs.x)).out
            np.testing.assert_allclose(layer(*arguments), expected, rtol=0, atol=1e-5)
