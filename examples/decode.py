"""A decode loop of several mixture-of-experts layers, with two micro-batches that hide the wire.

While one micro-batch's rows are on their way, the other's experts compute. Three ways to run the
same step are timed: with the fused operations, interleaved in halves, and the experts alone on rows
that lie there already, which no communication can beat.

Run it with ``python examples/decode.py``; ``--help`` lists the sizes.
"""

import argparse
import os
import statistics
import time

# Eight CPU devices stand in for eight GPUs. Where there are GPUs, it is those that are used.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=None, help="devices (default: all)")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a rank in a step")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=64, help="width of an expert")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", default="auto", choices=["auto", "native", "reference"])
    arguments = parser.parse_args()
    if arguments.tokens < 2 or arguments.tokens % 2:
        parser.error(f"--tokens {arguments.tokens} must be even: a step is two micro-batches")
    for name in ("layers", "steps"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)} must be at least 1")
    return arguments


def experts(tokens, layer):
    """Every expert on its block of rows: ``[E_l, rows, H]`` to the same shape."""
    w_in, w_out = layer["w_in"], layer["w_out"]
    return jnp.einsum("erf,efh->erh", jax.nn.gelu(jnp.einsum("erh,ehf->erf", tokens, w_in)), w_out)


def route(x, layer, topk):
    """Experts and weights of every token: the router's best, by softmax."""
    scores = jax.nn.softmax((x @ layer["router"]).astype(jnp.float32))
    topk_weights, topk_idx = jax.lax.top_k(scores, topk)
    return topk_idx.astype(jnp.int32), topk_weights


def normalised(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def fused_step(buffer, topk):
    """Both micro-batches, one operation after another."""

    def step(halves, layers):
        last = None
        for layer in layers:
            outs = []
            for x in halves:
                h = normalised(x)
                routed = jax_ep.low_latency_dispatch(buffer, h, *route(h, layer, topk), after=last)
                y = experts(routed.tokens, layer)
                last = jax_ep.low_latency_combine(buffer, y, routed)
                outs.append(x + last)
            halves = outs
        return halves

    return step


def interleaved_step(buffer, topk):
    """The same: each start is followed by the other micro-batch's experts, then by its done."""

    def begin(x, layer, after=None):
        h = normalised(x)
        return jax_ep.low_latency_dispatch_start(buffer, h, *route(h, layer, topk), after=after)

    def step(halves, layers):
        a, b = halves
        sent_a = begin(a, layers[0])
        back_b = None  # the combine of micro-batch b that is still on its way
        for index, layer in enumerate(layers):
            if back_b is not None:
                b = b + jax_ep.low_latency_combine_done(buffer, back_b, after=sent_a)
            sent_b = begin(b, layer, after=sent_a)
            rows_a = jax_ep.low_latency_dispatch_done(buffer, sent_a, after=sent_b)
            y_a = experts(rows_a.tokens, layer)  # hides the way of b's tokens
            back_a = jax_ep.low_latency_combine_start(buffer, y_a, rows_a, after=back_b)
            rows_b = jax_ep.low_latency_dispatch_done(buffer, sent_b, after=back_a)
            y_b = experts(rows_b.tokens, layer)  # hides the way back of a's rows
            back_b = jax_ep.low_latency_combine_start(buffer, y_b, rows_b, after=back_a)
            a = a + jax_ep.low_latency_combine_done(buffer, back_a, after=back_b)
            if index + 1 < len(layers):
                sent_a = begin(a, layers[index + 1])
        return a, b + jax_ep.low_latency_combine_done(buffer, back_b, after=a)

    return step


def experts_step(halves, layers):
    """As many rows, ``[E_l, R * T, H]`` each, through the experts, and nothing sent."""
    for layer in layers:
        halves = [experts(rows, layer) for rows in halves]
    return halves


def compiled(buffer, step):
    """``step`` on global arrays: tokens and experts sharded, routers on every rank."""

    def on_rank(halves, layers):
        return tuple(step(halves, layers))

    weights = {"router": P(), "w_in": P("expert"), "w_out": P("expert")}

    @jax.jit
    def run(halves, layers):
        mapped = jax.shard_map(
            on_rank,
            mesh=buffer.mesh,
            in_specs=((P("expert"),) * 2, [weights] * len(layers)),
            out_specs=(P("expert"),) * 2,
        )
        return mapped(halves, layers)

    return run


def make_layers(key, arguments, mesh):
    """Random weights, already on their devices."""
    E, H, F = arguments.experts, arguments.hidden, arguments.width

    def make(key):
        keys = jax.random.split(key, 3)
        return {
            "router": jax.random.normal(keys[0], (H, E)) / H**0.5,
            "w_in": jax.random.normal(keys[1], (E, H, F)) / H**0.5,
            "w_out": jax.random.normal(keys[2], (E, F, H)) / F**0.5,
        }

    specs = {"router": P(), "w_in": P("expert"), "w_out": P("expert")}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    keys = jax.random.split(key, arguments.layers)
    return [jax.device_put(make(each), shardings) for each in keys]


def seconds_per_step(runs, layers, steps):
    """Median time of a step of every run, taken in turns; a step goes on from the last one's."""
    states = {name: run(inputs, layers) for name, (run, inputs) in runs.items()}
    jax.block_until_ready(states)
    times = {name: [] for name in runs}
    for _ in range(steps):
        for name, (run, _) in runs.items():
            begin = time.perf_counter()
            states[name] = jax.block_until_ready(run(states[name], layers))
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each) for name, each in times.items()}


def main():
    arguments = parse_arguments()
    devices = jax.devices()[: arguments.ranks]
    mesh = jax.sharding.Mesh(np.array(devices), ("expert",))
    num_ranks, half = len(devices), arguments.tokens // 2
    config = jax_ep.EpConfig(
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.topk,
        hidden=arguments.hidden,
        max_tokens_per_rank=half,
        dtype=jnp.float32,
        mode="low_latency",
    )
    keys = jax.random.split(jax.random.key(0), 3)
    layers = make_layers(keys[0], arguments, mesh)
    rows = NamedSharding(mesh, P("expert"))
    halves = tuple(
        jax.device_put(jax.random.normal(key, (num_ranks * half, arguments.hidden)), rows)
        for key in keys[1:]
    )
    with jax_ep.Buffer(mesh, "expert", config, backend=arguments.backend) as buffer:
        fused = compiled(buffer, fused_step(buffer, arguments.topk))
        interleaved = compiled(buffer, interleaved_step(buffer, arguments.topk))
        for one, other in zip(fused(halves, layers), interleaved(halves, layers), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
        blocks = jnp.ones((arguments.experts, num_ranks * half, arguments.hidden))
        blocks = (jax.device_put(blocks, rows),) * 2
        runs = {
            "fused, one after another": (fused, halves),
            "in halves, interleaved": (interleaved, halves),
            "experts alone": (compiled(buffer, experts_step), blocks),
        }
        times = seconds_per_step(runs, layers, arguments.steps)
        buffer.check()
        print(
            f"{arguments.layers} layers, {arguments.experts} experts on {num_ranks} "
            f"{devices[0].platform} devices, backend {buffer.backend}, "
            f"{arguments.tokens} tokens a rank in two micro-batches"
        )
    report(times, num_ranks * arguments.tokens)


def report(times, num_tokens):
    for name, seconds in times.items():
        print(f"{name}: {1e3 * seconds:.3f} ms a step, {num_tokens / seconds:,.0f} tokens/s")
    fused, interleaved, alone = times.values()
    exposed = fused - alone
    if exposed <= 0:
        print("communication hidden: none to hide, the experts alone take as long")
        return
    print(
        f"communication {1e3 * exposed:.3f} ms a step, hidden by overlap: "
        f"{100 * (fused - interleaved) / exposed:.0f} %"
    )


if __name__ == "__main__":
    main()
