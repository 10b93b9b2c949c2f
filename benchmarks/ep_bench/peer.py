"""Takes another library into the comparison: a Python file that says how to call it.

The file defines

``NAME``: what results call it; and either

``dispatch(sizes, x, topk_idx, topk_weights) -> sent`` and ``combine(sizes, y, sent) -> out``, or,
where something must be set up,

``open(workload, mesh, num_sms)``: a context manager of such a pair, without ``sizes``. ``num_sms``
is an int, or None for the library's own choice.

All run inside ``jax.shard_map`` over the axis ``workload.AXIS``, on one rank's shard: ``x [T, H]``,
``topk_idx`` int32 ``[T, K]`` with distinct experts for each token, ``topk_weights`` float32 ``[T,
K]``. ``sent`` is a pytree with ``tokens [capacity, H]``: one row for each (token, expert), by
expert, then source rank, then token, rows past the last group unspecified; ``group_sizes`` int32
``[E_l]``; and whatever combine needs. ``out [T, H]`` is the sum of a token's rows of ``y`` times
their weights. ``sizes`` is a ``workload.Sizes``, static, and ``workload`` a ``workload.Workload``.

``OPS``, optional, names the operations to time, of dispatch, combine, roundtrip and fwd_bwd; leave
out fwd_bwd where there are no gradients. Results are checked as everybody's are. What crosses the
link is not known, so ``wire_gbps`` is null.
"""

import contextlib
import functools
import importlib.util
import pathlib
from types import ModuleType

from .systems import OPS, Operations, System


def load(path: pathlib.Path) -> System:
    """Makes a system of a file.

    Raises:
        ValueError: the file is not Python, or lacks what it must define.
    """
    spec = importlib.util.spec_from_file_location(f"ep_bench_peer_{path.stem}", path)
    if spec is None or not path.is_file():
        raise ValueError(f"--peer {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    name = getattr(module, "NAME", None)
    has_pair = callable(getattr(module, "dispatch", None)) and callable(
        getattr(module, "combine", None)
    )
    if not isinstance(name, str) or not (has_pair or callable(getattr(module, "open", None))):
        raise ValueError(
            f"--peer {path} must define NAME, and dispatch and combine or open; "
            "benchmarks/ep_bench/peer.py says how"
        )
    return System(
        name=name,
        open=functools.partial(_open, module),
        calls=None,
        ops=tuple(getattr(module, "OPS", OPS)),
    )


@contextlib.contextmanager
def _open(module: ModuleType, workload, mesh, num_sms):
    if hasattr(module, "open"):
        with module.open(workload, mesh, num_sms) as (dispatch, combine):
            yield Operations(dispatch=dispatch, combine=combine)
    else:
        yield Operations(
            dispatch=functools.partial(module.dispatch, workload.sizes),
            combine=functools.partial(module.combine, workload.sizes),
        )
