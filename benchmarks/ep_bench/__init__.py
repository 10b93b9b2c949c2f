"""Parts of ``benchmarks/bench_ep.py``: workloads, systems, chained programs, timing and reports.

Order of dependence: ``workload``; ``floor``; ``rows``; ``padded``, ``gathered``, ``ragged`` and
``argsort``; ``exchange``; ``systems``; ``peer``, ``points`` and ``linked``; ``chains``; ``hlo`` and
``timing``; ``checks``; ``measure``; ``plan``. Apart from them: ``platforms``, ``environment``,
``report``, ``picture``.
"""
