"""Receive buffers of the right size: worst-case capacity beside one the host picks for every step.

A dispatch must reserve rows before it knows how many come. The worst case is ``min(K, E_l)`` rows
for every token of every rank, of which a balanced router fills one in ``num_ranks``. Here the host
asks first: ``notify_dispatch`` exchanges the counts, the host reads them while the devices go on,
and the step runs with the capacity that fits, rounded up to a bucket. Run it with
``python examples/right_sized.py``.
"""

import argparse
import functools
import os
import statistics
import time

# Eight CPU devices stand in for eight GPUs. Where there are GPUs, it is those that are used.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_ep


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256, help="tokens per rank")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size")
    parser.add_argument("--experts", type=int, default=64, help="experts in all")
    parser.add_argument("--topk", type=int, default=8, help="experts per token")
    parser.add_argument("--bucket", type=int, default=256, help="capacity is a multiple of it")
    parser.add_argument(
        "--steps", type=int, default=10, help="timed steps, each with a new routing"
    )
    parser.add_argument("--backend", default="auto", help="of the Buffer")
    return parser.parse_args()


def make_step(buffer):
    """``step(x, routing, topk_weights, capacity)``: a layer whose experts cost next to nothing, so
    that time and memory are those of the rows."""

    def layer(x, routing, topk_weights, *, capacity):  # one rank's shard
        routed = jax_ep.dispatch(
            buffer, x, topk_weights=topk_weights, routing=routing, capacity=capacity
        )
        y = jax.nn.gelu(routed.tokens)
        return jax_ep.combine(buffer, y, routed), routed.num_dropped[None]

    @functools.partial(jax.jit, static_argnames="capacity")
    def step(x, routing, topk_weights, capacity):
        shard = functools.partial(layer, capacity=capacity)
        spec = P("expert")
        return jax.shard_map(shard, mesh=buffer.mesh, in_specs=spec, out_specs=spec)(
            x, routing, topk_weights
        )

    return step


def random_routing(rng, rows, arguments):
    """int32 ``[rows, K]``, K distinct experts for each token."""
    scores = rng.random((rows, arguments.experts))
    return np.argsort(scores, axis=1)[:, : arguments.topk].astype(np.int32)


def megabytes_of_rows(step, x, notice, weights, capacity):
    """What the program takes on one device beyond its arguments, as XLA plans it."""
    compiled = step.lower(x, notice.routing, weights, capacity=capacity).compile()
    memory = compiled.memory_analysis()
    return (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 2**20


def run_steps(buffer, step, all_idx, x, weights, capacity_of):
    """Runs a step for each routing; returns the results, the capacities and median milliseconds."""
    results, capacities, times = [], [], []
    for topk_idx in all_idx:
        began = time.perf_counter()
        notice = jax_ep.notify_dispatch(buffer, topk_idx)
        capacity = capacity_of(notice)
        out, dropped = jax.block_until_ready(step(x, notice.routing, weights, capacity=capacity))
        times.append(1e3 * (time.perf_counter() - began))
        assert not np.asarray(dropped).any()
        results.append(np.asarray(out))
        capacities.append(capacity)
    return results, capacities, statistics.median(times)


def main():
    arguments = parse_arguments()
    num_ranks = len(jax.devices())
    mesh = jax.make_mesh((num_ranks,), ("expert",))
    config = jax_ep.EpConfig(
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.topk,
        hidden=arguments.hidden,
        max_tokens_per_rank=arguments.tokens,
        dtype=jnp.float32,
    )
    rng = np.random.default_rng()
    rows = num_ranks * arguments.tokens
    sharding = jax.NamedSharding(mesh, P("expert"))
    put = functools.partial(jax.device_put, device=sharding)
    x = put(rng.normal(size=(rows, arguments.hidden)).astype(np.float32))
    weights = put(rng.uniform(size=(rows, arguments.topk)).astype(np.float32))
    all_idx = [put(random_routing(rng, rows, arguments)) for _ in range(arguments.steps)]

    with jax_ep.Buffer(mesh, "expert", config, backend=arguments.backend) as buffer:
        step = make_step(buffer)
        choices = {
            "right-sized": lambda notice: notice.capacity(multiple_of=arguments.bucket),
            "worst case": lambda notice: None,
        }
        print(
            f"{num_ranks} ranks, {arguments.tokens} tokens of {arguments.hidden} float32 on each, "
            f"{arguments.topk} of {arguments.experts} experts, backend {buffer.backend}"
        )
        found = {}
        for name, capacity_of in choices.items():
            run_steps(buffer, step, all_idx, x, weights, capacity_of)  # compiles every bucket
            found[name], capacities, median_ms = run_steps(
                buffer, step, all_idx, x, weights, capacity_of
            )
            notice = jax_ep.notify_dispatch(buffer, all_idx[-1])
            megabytes = megabytes_of_rows(step, x, notice, weights, capacities[-1])
            received = notice.num_recv_tokens().max()
            print(
                f"{name}: {median_ms:.1f} ms a step, {megabytes:.0f} MiB on a device; "
                f"capacity {capacities[-1] or 'None'} for {received} rows, "
                f"{len(set(capacities))} compiled programs for {len(capacities)} routings"
            )
    for right, worst in zip(*found.values(), strict=True):
        np.testing.assert_array_equal(right, worst)


if __name__ == "__main__":
    main()
