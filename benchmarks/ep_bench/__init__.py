"""Parts of ``benchmarks/bench_ep.py``: workloads, systems, chained programs, timing and reports.

Order of dependence: ``workload``, ``rows``, ``padded`` and ``gathered``, ``exchange``, ``systems``,
``chains``, ``hlo``, ``timing``, ``measure``, ``report``.
"""
