"""The other ways to dispatch: low latency, whole and in halves, and along routings.

Every function that runs a program is called by one process alone, too, for the truth.
"""

import dataclasses
import zlib

import case_check
import cases
import jax
import ll_check
import numpy as np
import programs
from jax.sharding import Mesh
from scenarios import World, compiled, expert_mesh, results_of, shards, spread, two_axis_mesh

import jax_ep

TABLE = {case.name: case for case in cases.CASES}
# By number of ranks; cases that drop do so in the compact layout only.
LOW_LATENCY: dict[int | str, list[tuple[cases.Case, str]]] = {
    2: [
        (TABLE["two_ranks"], "padded"),
        (TABLE["out_of_range"], "compact"),
        (TABLE["capacity_one"], "compact"),
    ],
    4: [
        (ll_check.TINY, "padded"),
        (TABLE["four_ranks_bf16"], "compact"),
        (TABLE["some_nobody"], "compact"),
    ],
}
# On GPUs also rows in several parts, blocks with several tokens, parts that end between warps.
LOW_LATENCY["gpus"] = [
    *LOW_LATENCY[2],
    (cases.Case(name="parts", T=9, H=7168, K=8, E=32, R=2, dtype="bfloat16"), "padded"),
    (cases.Case(name="tokens", T=300, H=1024, K=4, E=16, R=2, dtype="float16"), "compact"),
    (cases.Case(name="odd", T=33, H=1288, K=6, E=60, R=2, dtype="bfloat16"), "compact"),
]
NOTICED = cases.Case(name="noticed", T=13, H=16, K=3, E=8, R=4, chunk=4)
NUM_NOTICES = 3


def low_latency_everything(buffer: jax_ep.Buffer, case: cases.Case, layout: str):
    """As ``ll_check.everything`` and ``in_halves`` in one program, all in a fixed order."""

    def program(x, topk_idx, topk_weights, d_tokens, d_weights, y, row_weights, g):
        def send(x, topk_weights):
            routed = ll_check.dispatch(buffer, case, layout, x, topk_idx, topk_weights)
            return (routed.tokens, routed.weights), routed

        (tokens, weights), pull, routed = jax.vjp(send, x, topk_weights, has_aux=True)
        d_x, d_topk_weights = pull(
            (d_tokens.reshape(tokens.shape), d_weights.reshape(weights.shape))
        )
        y = y.reshape(tokens.shape)

        def bring_back(y, row_weights):
            edited = dataclasses.replace(routed, weights=row_weights)
            return jax_ep.low_latency_combine(buffer, y, edited, after=d_x)

        out, pull = jax.vjp(bring_back, y, row_weights.reshape(weights.shape))
        d_y, d_row_weights = pull(g)

        capacity = case.capacity if layout == "compact" else None
        options = {"layout": layout, "capacity": capacity, "after": d_row_weights}
        pending = jax_ep.low_latency_dispatch_start(buffer, x, topk_idx, topk_weights, **options)
        halved = jax_ep.low_latency_dispatch_done(buffer, pending)
        edited = dataclasses.replace(halved, weights=row_weights.reshape(weights.shape))
        pending = jax_ep.low_latency_combine_start(buffer, y, edited, after=out)
        halved_out = jax_ep.low_latency_combine_done(buffer, pending)
        results = ll_check.visible(routed) | {"out": out, "d_x": d_x}
        results |= {"d_topk_weights": d_topk_weights}
        results |= {"d_y": d_y.reshape(-1, d_y.shape[-1]), "d_row_weights": d_row_weights.ravel()}
        halves = ll_check.visible(halved) | {"out": halved_out}
        return results | {f"halves {name}": array for name, array in halves.items()}

    return compiled(buffer, program)


def low_latency_problem(case: cases.Case, layout: str, seed: int) -> case_check.Problem:
    """The same in every process."""
    rng = np.random.default_rng((seed, zlib.crc32(f"{case.name} {layout}".encode())))
    return ll_check.make_problem(case, layout, rng)


def low_latency_results(
    case: cases.Case, layout: str, mesh: Mesh, seed: int
) -> dict[str, jax.Array]:
    """All results of a case, by ranks of ``mesh``; run twice, for epochs of either parity."""
    problem = low_latency_problem(case, layout, seed)
    config = programs.make_config(case, mode="low_latency", timeout_s=20)
    with jax_ep.Buffer(mesh, "expert", config, backend="native") as buffer:
        return results_of(buffer, low_latency_everything(buffer, case, layout), problem)


def low_latency(world: World) -> dict:
    """Runs all cases for as many ranks as there are devices, or those of another table; saves the
    shards of their results."""
    num_ranks, saved = len(jax.devices()), {}
    for case, layout in LOW_LATENCY[world.settings.get("table", num_ranks)]:
        results = low_latency_results(case, layout, expert_mesh(num_ranks), world.settings["seed"])
        for key, array in results.items():
            saved |= shards(f"{case.name}/{key}", array)
    world.save(saved)
    return {}


def noticed_inputs(mesh: Mesh, seed: int) -> list[cases.Inputs]:
    """Inputs of the notices, of all groups one after another; the same in every process."""
    found = []
    for number in range(NUM_NOTICES):
        rng = np.random.default_rng((seed, number))
        num_groups = mesh.size // mesh.shape["expert"]
        parts = [cases.make_inputs(noticed_case(mesh), rng) for _ in range(num_groups)]
        arrays = [(part.x, part.topk_idx, part.topk_weights) for part in parts]
        found.append(cases.Inputs(*map(np.concatenate, zip(*arrays, strict=True))))
    return found


def noticed_case(mesh: Mesh) -> cases.Case:
    return dataclasses.replace(NOTICED, R=mesh.shape["expert"])


def noticed_step(buffer: jax_ep.Buffer, capacity: int):
    """A dispatch along a routing, one along a route made inside, and a plain one, in this order."""

    def program(x, topk_idx, routing, topk_weights):
        def sized(**options):
            return jax_ep.dispatch(
                buffer, x, topk_weights=topk_weights, capacity=capacity, **options
            )

        along = sized(routing=routing)
        inside = sized(routing=jax_ep.route(buffer, topk_idx, after=along))
        plain = sized(topk_idx=topk_idx, after=inside)
        out = jax_ep.combine(buffer, plain.tokens, plain)
        results = {"out": out}
        for name, routed in {"along": along, "inside": inside, "plain": plain}.items():
            results |= {
                f"{name} tokens": routed.tokens,
                f"{name} weights": routed.weights,
                f"{name} sizes": routed.group_sizes,
                f"{name} dropped": routed.num_dropped[None],
            }
        return results

    return compiled(buffer, program)


def notice_results(mesh: Mesh, backend: str, seed: int) -> tuple[dict, dict[str, jax.Array]]:
    """What the hosts of several notices in flight read, and what dispatches along them give."""
    config = programs.make_config(noticed_case(mesh))
    told, arrays, notices, steps, last = {}, {}, [], {}, None
    with jax_ep.Buffer(mesh, "expert", config, backend=backend) as buffer:
        for inputs in noticed_inputs(mesh, seed):
            topk_idx = spread(mesh, inputs.topk_idx)
            notices.append((inputs, jax_ep.notify_dispatch(buffer, topk_idx, after=last)))
            last = notices[-1][1].routing
        for number, (inputs, notice) in enumerate(notices):
            told[f"{number}"] = {
                "per expert": notice.recv_tokens_per_expert().tolist(),
                "rows": notice.num_recv_tokens().tolist(),
                "capacity": notice.capacity(multiple_of=4),
            }
            capacity = notice.capacity(multiple_of=64)
            step = steps.setdefault(capacity, noticed_step(buffer, capacity))
            x, topk_idx, topk_weights = (
                spread(mesh, a) for a in (inputs.x, inputs.topk_idx, inputs.topk_weights)
            )
            results = jax.block_until_ready(step(x, topk_idx, notice.routing, topk_weights))
            arrays |= {f"{number} {name}": array for name, array in results.items()}
            for name in ("topk_idx", "row_index", "counts"):
                arrays[f"{number} routing {name}"] = getattr(notice.routing, name)
    return told, arrays


def notices(world: World) -> dict:
    mesh = two_axis_mesh() if world.settings["two_axes"] else expert_mesh(len(jax.devices()))
    told, arrays = notice_results(mesh, world.settings["backend"], world.settings["seed"])
    saved = {}
    for key, array in arrays.items():
        saved |= shards(key, array)
    world.save(saved)
    return told
