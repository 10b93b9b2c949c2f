"""Orders of XLA's threads: independent operations, long queues, buffers closed under way."""

import subprocess
import sys
import time

import cases
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from fault_programs import (
    GRACE_S,
    TIMEOUT_S,
    assert_same_bits,
    bits,
    compiled,
    failure,
    fault_case,
    hooks,
    make_setup,
    sleeper,
)

import jax_ep

NUM_QUEUED = 30


def inputs_of(rng, case):
    inputs = cases.make_inputs(case, rng)
    return [jnp.asarray(a) for a in (inputs.x, inputs.topk_idx, inputs.topk_weights)]


def layer(buffer, x, topk_idx, topk_weights, expand=True):
    """Dispatch, something for the experts to do, combine."""
    routed = jax_ep.dispatch(buffer, x, topk_idx, topk_weights, expand=expand)
    return jax_ep.combine(buffer, jnp.tanh(programs.expert_rows(routed)), routed)


def gradients(buffer, expand=True):
    """Value and gradients of a layer: all three native operations, two of them on one channel."""

    def loss(x, topk_weights, topk_idx):
        return jnp.sum(layer(buffer, x, topk_idx, topk_weights, expand) ** 2)

    def program(x, topk_idx, topk_weights):
        value, pulled = jax.value_and_grad(loss, argnums=(0, 1))(x, topk_weights, topk_idx)
        return value[None], pulled

    return compiled(buffer, program)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_two_buffers_in_one_program_in_both_orders(rng, num_ranks):
    case = fault_case(num_ranks)
    with (
        programs.make_buffer(case, "native", timeout_s=TIMEOUT_S) as a,
        programs.make_buffer(case, "native", timeout_s=TIMEOUT_S) as b,
    ):
        mine, other = inputs_of(rng, case), inputs_of(rng, case)
        expected = [compiled(a, lambda *s: layer(a, *s))(*mine)]
        expected.append(compiled(b, lambda *s: layer(b, *s))(*other))

        def first_a(of_a, of_b):
            return layer(a, *of_a), layer(b, *of_b)

        def first_b(of_a, of_b):
            out = layer(b, *of_b)
            return layer(a, *of_a), out

        orders = [compiled(a, first_a), compiled(a, first_b)]
        for _ in range(5):
            for run in (*orders, *reversed(orders)):
                hooks(a).set_fault(a.id, "late", int(rng.integers(num_ranks)), microseconds=2000)
                assert_same_bits(list(run(mine, other)), expected)
        queued = [orders[i % 2](mine, other) for i in range(16)]
        for results in queued:
            assert_same_bits(list(results), expected)
        assert a.check() is None
        assert b.check() is None


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_two_independent_dispatches_of_one_buffer(rng, num_ranks):
    """Nothing in the program orders them; the runtime must, in the same way on all ranks."""
    case = fault_case(num_ranks)
    with programs.make_buffer(case, "native", timeout_s=TIMEOUT_S) as buffer:
        batches = [inputs_of(rng, case) for _ in range(4)]
        alone = compiled(buffer, lambda *shards: layer(buffer, *shards))
        expected = [alone(*batch) for batch in batches]
        together = compiled(buffer, lambda batches: [layer(buffer, *batch) for batch in batches])
        for _ in range(10):
            hooks(buffer).set_fault(
                buffer.id, "late", int(rng.integers(num_ranks)), microseconds=2000
            )
            assert_same_bits(together(batches), expected)
        for results in [together(batches) for _ in range(16)]:
            assert_same_bits(results, expected)
        assert buffer.check() is None


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_thirty_executions_queued_without_blocking(rng, num_ranks):
    case = fault_case(num_ranks)
    with programs.make_buffer(case, "native", timeout_s=TIMEOUT_S) as buffer:
        run = gradients(buffer)
        batches = [inputs_of(rng, case) for _ in range(NUM_QUEUED)]
        expected = [jax.block_until_ready(run(*batch)) for batch in batches]
        queued = [run(*batch) for batch in batches]
        for seen, right in zip(queued, expected, strict=True):
            assert_same_bits(seen, right)
        assert buffer.check() is None


QUEUE_MANY = """
import sys
sys.path[:0] = {paths!r}
import conftest, fault_programs, test_order
test_order.queue_too_many(int(sys.argv[1]), int(sys.argv[2]))
"""


def queue_too_many(seed: int, count: int) -> None:
    """Queues executions, XLA's own collective beside ours; each is right or says why not."""
    rng = np.random.default_rng(seed)
    case = fault_case(8)
    buffer = programs.make_buffer(case, "native", timeout_s=TIMEOUT_S)

    def program(*shards):
        out = layer(buffer, *shards)
        return out + 0 * jax.lax.psum(out, "expert")

    run = compiled(buffer, program)
    place = jax.sharding.NamedSharding(buffer.mesh, jax.sharding.PartitionSpec("expert"))
    batch = [jax.device_put(a, place) for a in inputs_of(rng, case)]
    expected = jax.block_until_ready(run(*batch))
    hooks(buffer).set_fault(buffer.id, "late", 1, microseconds=500_000)
    errors = []
    for results in [run(*batch) for _ in range(count)]:
        try:
            assert_same_bits(results, expected)
        except jax.errors.JaxRuntimeError as error:
            errors.append(str(error))
    for error in errors:
        assert "EpTimeoutError" in error or "already failed" in error, error
    if errors:
        assert any("block_until_ready at least every 32 steps" in error for error in errors), errors
    buffer.reset()
    for _ in range(3):
        assert_same_bits(run(*batch), expected)
    assert buffer.check() is None
    print(f"{len(errors)} of {count} failed")


def test_a_hundred_executions_queued_end_in_an_error_and_not_in_a_hang():
    """jax 0.10 blocks itself with more than 32 in flight; our deadline turns that into words.

    jax 0.12 carries them all, and then all must be right. A hang fails in either.
    """
    paths = [str(programs.__file__.rsplit("/", 1)[0]), str(__file__.rsplit("/", 1)[0])]
    program = QUEUE_MANY.format(paths=paths)
    outputs = []
    for count in (100, 200, 400):
        seed = cases.fresh_seed()
        command = [sys.executable, "-c", program, str(seed), str(count)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr[-4000:]}"
        outputs.append(done.stdout)
        if not done.stdout.startswith("0 "):
            break
    print(outputs)
    if jax.__version_info__ < (0, 11):
        assert not outputs[-1].startswith("0 "), "XLA carried all: the error was not tried"


@pytest.mark.parametrize("expand", [True, False])
def test_bits_do_not_depend_on_the_interleaving(rng, expand):
    case = cases.Case(name="interleaved", T=21, H=40, K=4, E=16, R=8, chunk=5, dtype="bfloat16")
    with programs.make_buffer(case, "native", timeout_s=TIMEOUT_S) as buffer:
        run, batch = gradients(buffer, expand), inputs_of(rng, case)
        calm = bits(run(*batch))
        assert bits(run(*batch)) == calm
        for longest in (200, 2000):
            for rank in range(case.R):
                hooks(buffer).set_fault(buffer.id, "jitter", rank, microseconds=longest)
            for _ in range(4):
                assert bits(run(*batch)) == calm
        for rank in range(case.R):
            hooks(buffer).set_fault(buffer.id, "late", rank, microseconds=5000 * rank)
            assert bits(run(*batch)) == calm
        assert buffer.check() is None


def test_close_lets_what_is_in_flight_finish(rng):
    setup = make_setup(4, rng)
    setup.set_fault("late", 3, 0.5)
    epoch, began = setup.next_epoch("dispatch"), time.monotonic()
    flying = setup.run["dispatch"]()
    while setup.next_epoch("dispatch") == epoch:
        assert time.monotonic() - began < TIMEOUT_S, "the operation never started"
    setup.buffer.close()
    assert time.monotonic() - began > 0.45
    assert_same_bits(flying, setup.healthy["dispatch"])
    for start in setup.run.values():
        text, seconds = failure(start)
        assert "EpUsageError" in text
        assert f"buffer {setup.buffer.id} is closed" in text
        assert seconds < GRACE_S


@pytest.mark.parametrize("interrupted", [False, True])
def test_close_gives_up_on_what_cannot_finish(rng, interrupted):
    """One device never presents: the others' calls fail, other buffers work.

    close() waits for the live result, an interrupted block for the buffer's own deadline at most.
    """
    case = fault_case(4)
    nap = TIMEOUT_S + 3
    through, armed = sleeper(1, nap)
    buffer = programs.make_buffer(case, "native", timeout_s=TIMEOUT_S)
    batch = inputs_of(rng, case)

    def program(x, topk_idx, topk_weights):
        return layer(buffer, through("expert", x), topk_idx, topk_weights)

    run = compiled(buffer, program, check_vma=False)
    jax.block_until_ready(run(*batch))
    armed["on"] = True
    began = time.monotonic()
    doomed = run(*batch)
    if interrupted:
        with pytest.raises(KeyboardInterrupt), buffer:
            raise KeyboardInterrupt
    else:
        buffer.close()
    longest = TIMEOUT_S if interrupted else nap
    assert time.monotonic() - began < longest + GRACE_S
    assert buffer.closed
    text, _ = failure(lambda: doomed)
    assert "EpUsageError" in text or "EpTimeoutError" in text
    setup = make_setup(4, rng)
    setup.assert_healthy()
    setup.buffer.close()
