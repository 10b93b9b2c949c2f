"""How soon the host sees the counts of ``notify_dispatch``, on GPUs and on CPU devices.

    python benchmarks/bench_notice.py                       # all GPUs, else 2 virtual CPU devices
    python benchmarks/bench_notice.py --tokens 4096 1024 --experts 256 --topk 8

Prints medians and 90th percentiles in microseconds. "after the handlers": on GPUs, from the return
of the last rank's handler (all kernels are queued then) until the host has all ranks' counts.
"after the call": from the return of the jitted operation. "in all": from the call of
``notify_dispatch`` to the answer of ``num_recv_tokens``, Python's part included. The devices are
idle when it is called.
"""

import argparse
import os
import time

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax_ep

WAIT_S = 10.0


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 1024, 128])
    parser.add_argument("--experts", type=int, default=256, help="experts in all")
    parser.add_argument("--topk", type=int, default=8, help="experts per token")
    parser.add_argument("--repeats", type=int, default=300)
    return parser.parse_args()


def measure_one(buffer, topk_idx, expected):
    """Microseconds of one notice; the first is None where the handlers' return is not known."""
    module = buffer.native_module
    jax.block_until_ready(topk_idx)
    called = time.monotonic_ns()
    notice = jax_ep.notify_dispatch(buffer, topk_idx)
    returned = time.monotonic_ns()
    found = module.read_notice(buffer.id, notice._ticket, WAIT_S)
    seen = time.monotonic_ns()
    received = notice.num_recv_tokens()
    answered = time.monotonic_ns()
    assert found["state"] == "ready"
    np.testing.assert_array_equal(received, expected)
    jax.block_until_ready(notice.routing)
    handlers = buffer.stats().get("notify_returned_ns")
    after_handlers = None if handlers is None else (seen - handlers) / 1e3
    return after_handlers, (seen - returned) / 1e3, (answered - called) / 1e3


def main():
    arguments = parse_arguments()
    num_ranks = len(jax.devices())
    mesh = jax.make_mesh((num_ranks,), ("expert",))
    rng = np.random.default_rng()
    print(f"{num_ranks} x {jax.devices()[0].device_kind}, us: median (90th percentile)")
    for tokens in arguments.tokens:
        config = jax_ep.EpConfig(
            num_experts=arguments.experts,
            num_experts_per_tok=arguments.topk,
            hidden=64,
            max_tokens_per_rank=tokens,
        )
        scores = rng.random((num_ranks * tokens, arguments.experts))
        host_idx = np.argsort(scores, axis=1)[:, : arguments.topk].astype(np.int32)
        per_expert = np.bincount(host_idx.reshape(-1), minlength=arguments.experts)
        expected = per_expert.reshape(num_ranks, -1).sum(axis=1)
        spec = NamedSharding(mesh, PartitionSpec("expert"))
        with jax_ep.Buffer(mesh, "expert", config, backend="native") as buffer:
            topk_idx = jax.device_put(host_idx, spec)
            for _ in range(20):
                measure_one(buffer, topk_idx, expected)
            found = [measure_one(buffer, topk_idx, expected) for _ in range(arguments.repeats)]
        texts = []
        for name, times in zip(
            ("after the handlers", "after the call", "in all"),
            zip(*found, strict=True),
            strict=True,
        ):
            if None in times:
                texts.append(f"{name} not known")
            else:
                median, high = np.percentile(times, [50, 90])
                texts.append(f"{name} {median:.1f} ({high:.1f})")
        print(
            f"T={tokens} K={arguments.topk} E={arguments.experts}: {', '.join(texts)}", flush=True
        )


if __name__ == "__main__":
    main()
