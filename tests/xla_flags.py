"""XLA's flags for the tests. Imports nothing that reads them."""

import importlib.metadata


def quick_to_compile() -> str:
    """A flag with which XLA:CPU compiles our programs in about half the time; empty without one.

    Compiling is most of what the tests do. XLA's newer emitters of fused loops are slow at it;
    jaxlib 0.10 can do without them, and later ones, which the tests run on as well, end the process
    at a flag that they do not know.
    """
    old = importlib.metadata.version("jaxlib").split(".")[:2] == ["0", "10"]
    return "--xla_cpu_use_fusion_emitters=false" if old else ""
