"""How soon the host sees the counts of ``notify_dispatch``, on GPUs and on CPU devices.

    python benchmarks/bench_notice.py                       # all GPUs, else 2 virtual CPU devices
    python benchmarks/bench_notice.py --tokens 4096 1024 --experts 256 --topk 8

Prints medians and 90th percentiles in microseconds. "after the handlers": on GPUs, from the return
of the last rank's handler (all kernels are queued then) until a thread that polls has all ranks'
counts; the thread that called ``notify_dispatch`` may be on its way back from it. "after the call":
from the return of ``notify_dispatch`` until its caller, who then begins to look, has them. "in
all": from the call to the answer of ``num_recv_tokens``. The devices are idle when it is called.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import time

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import numpy as np
from ep_bench import environment
from jax.sharding import NamedSharding, PartitionSpec

import jax_ep

WAIT_S = 10.0
WARM_UP = 20


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 1024, 128])
    parser.add_argument("--experts", type=int, default=256, help="experts in all")
    parser.add_argument("--topk", type=int, default=8, help="experts per token")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--commit", help="what to record instead of what git says")
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        metavar="DIR",
        help="where to write <device>-x<ranks>-notice.json",
    )
    return parser.parse_args()


def seen_by_caller(buffer, topk_idx, expected):
    """Microseconds until the caller has the counts: after the call's return, and in all."""
    called = time.monotonic_ns()
    notice = jax_ep.notify_dispatch(buffer, topk_idx)
    returned = time.monotonic_ns()
    found = buffer.native_module.read_notice(buffer.id, notice._ticket, WAIT_S)
    received = notice.num_recv_tokens()
    answered = time.monotonic_ns()
    assert found["state"] == "ready"
    np.testing.assert_array_equal(received, expected)
    jax.block_until_ready(notice.routing)
    return (found["read_at_ns"] - returned) / 1e3, (answered - called) / 1e3


def seen_by_thread(buffer, topk_idx, poller):
    """Microseconds from the last handler's return until a polling thread has the counts."""
    module = buffer.native_module
    ticket = module.next_ticket(buffer.id) + 1  # of the next notice
    reading = poller.submit(module.read_notice, buffer.id, ticket, WAIT_S, WAIT_S)
    time.sleep(0.0005)  # it polls by now
    notice = jax_ep.notify_dispatch(buffer, topk_idx)
    found = reading.result()
    assert notice._ticket == ticket
    assert found["state"] == "ready"
    jax.block_until_ready(notice.routing)
    return (found["read_at_ns"] - buffer.stats()["notify_returned_ns"]) / 1e3


def summary(times):
    median, high = np.percentile(times, [50, 90])
    return {"us": round(median, 1), "us_p90": round(high, 1), "repeats": len(times)}


def measure(buffer, topk_idx, expected, repeats):
    """Summaries by what was measured."""
    for _ in range(WARM_UP):
        seen_by_caller(buffer, topk_idx, expected)
    found = [seen_by_caller(buffer, topk_idx, expected) for _ in range(repeats)]
    after_call, in_all = zip(*found, strict=True)
    summaries = {"after the call": summary(after_call), "in all": summary(in_all)}
    if "notify_returned_ns" in buffer.stats():
        with concurrent.futures.ThreadPoolExecutor(1) as poller:
            times = [seen_by_thread(buffer, topk_idx, poller) for _ in range(repeats)]
        summaries["after the handlers"] = summary(times)
    return summaries


def main():
    arguments = parse_arguments()
    num_ranks = len(jax.devices())
    mesh = jax.make_mesh((num_ranks,), ("expert",))
    seed = int.from_bytes(os.urandom(4), "little")
    rng = np.random.default_rng(seed)
    records = []
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
            topk_idx = jax.block_until_ready(jax.device_put(host_idx, spec))
            summaries = measure(buffer, topk_idx, expected, arguments.repeats)
        shape = {"T": tokens, "K": arguments.topk, "E": arguments.experts, "R": num_ranks}
        records += [{"op": "notify", "system": name, **shape, **s} for name, s in summaries.items()]
        texts = [f"{name} {s['us']} ({s['us_p90']})" for name, s in summaries.items()]
        print(
            f"T={tokens} K={arguments.topk} E={arguments.experts}: {', '.join(texts)}", flush=True
        )
    if arguments.json is not None:
        facts = environment.describe(num_ranks, seed, arguments.commit)
        arguments.json.mkdir(parents=True, exist_ok=True)
        path = arguments.json / f"{environment.file_stem(facts['device'])}-notice.json"
        path.write_text(json.dumps({"environment": facts, "records": records}, indent=1) + "\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
