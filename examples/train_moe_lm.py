"""Trains a small byte-level mixture-of-experts language model on the Python standard library.

    python examples/train_moe_lm.py                              # 8 virtual CPU devices, minutes
    python examples/train_moe_lm.py --backend reference          # the same on jax.lax collectives
    python examples/train_moe_lm.py --checkpoint-dir runs/saved  # and later the same with --resume

Experts and batch are sharded over one mesh axis; every token travels to its experts and back
through `jax_ep.dispatch` and `jax_ep.combine`. On a machine with GPUs it uses those. `multihost/`
has scripts that start it in several processes.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import time

from moe_lm.settings import Settings

DEFAULTS = Settings()
# A rank needs an equal part of the experts and of the batch.
RANKS_MUST_DIVIDE = math.gcd(DEFAULTS.num_experts, DEFAULTS.batch_size)
DEFAULT_CPU_RANKS = 8


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, help="devices to use (as many as possible; on CPU 8 virtual ones)")
    add("--backend", choices=("auto", "native", "reference"), default="auto")
    add("--steps", type=int, default=DEFAULTS.steps, help="training steps (%(default)s)")
    add("--seed", type=int, default=DEFAULTS.seed, help="of parameters and batches (%(default)s)")
    add(
        "--out",
        type=pathlib.Path,
        default="runs/moe_lm",
        help="folder of the results (%(default)s)",
    )
    add("--checkpoint-dir", type=pathlib.Path, help="folder to save the run to as it goes")
    add("--resume", action="store_true", help="go on with the run saved in --checkpoint-dir")
    add(
        "--distributed",
        nargs="*",
        metavar="COORDINATOR NUM_PROCESSES PROCESS",
        help="be one of several processes; without values, as Slurm or Open MPI say",
    )
    arguments = parser.parse_args()
    if arguments.distributed and len(arguments.distributed) != 3:
        parser.error("--distributed takes COORDINATOR NUM_PROCESSES PROCESS, or nothing")
    if arguments.resume and arguments.checkpoint_dir is None:
        parser.error("--resume needs --checkpoint-dir")
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps} must be at least 1")
    if arguments.ranks is not None and (arguments.ranks < 1 or RANKS_MUST_DIVIDE % arguments.ranks):
        parser.error(
            f"--ranks {arguments.ranks} must divide the {DEFAULTS.num_experts} experts and the "
            f"{DEFAULTS.batch_size} sequences of a batch"
        )
    return arguments


def request_virtual_devices(num_ranks: int) -> None:
    """Asks XLA for that many CPU devices; works before JAX starts, and does not touch GPUs."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={num_ranks}"


def join_processes(place: list[str]) -> None:
    """Connects this process with the others; ``place`` as the arguments of --distributed."""
    import jax

    if place:
        jax.distributed.initialize(place[0], int(place[1]), int(place[2]))
    else:
        jax.distributed.initialize()


def choose_ranks(requested: int | None, num_devices: int) -> int:
    if requested is None:
        return max(n for n in range(1, num_devices + 1) if RANKS_MUST_DIVIDE % n == 0)
    if requested > num_devices:
        raise SystemExit(
            f"--ranks {requested} is more than the {num_devices} devices; on CPU, unset XLA_FLAGS "
            f"or set XLA_FLAGS=--xla_force_host_platform_device_count={requested}"
        )
    return requested


def open_checkpoints(arguments: argparse.Namespace, settings: Settings):
    """A context manager that gives the run's `Checkpoints`, or None without --checkpoint-dir."""
    from moe_lm.checkpoint import Checkpoints

    if arguments.checkpoint_dir is None:
        return contextlib.nullcontext()
    checkpoints = Checkpoints(arguments.checkpoint_dir, settings)
    if checkpoints.latest_step is not None and not arguments.resume:
        raise SystemExit(
            f"--checkpoint-dir {arguments.checkpoint_dir} holds a run already: pass --resume to go "
            "on with it, or choose another folder"
        )
    if checkpoints.latest_step is None and arguments.resume:
        raise SystemExit(
            f"--checkpoint-dir {arguments.checkpoint_dir} holds no checkpoint: leave out --resume"
        )
    return checkpoints


def main() -> None:
    started = time.perf_counter()
    arguments = parse_arguments()
    if arguments.distributed is None:
        request_virtual_devices(arguments.ranks or DEFAULT_CPU_RANKS)
    else:
        join_processes(arguments.distributed)

    import jax
    from moe_lm import data, report, training

    settings = Settings(steps=arguments.steps, seed=arguments.seed)
    corpus = data.load_corpus()
    mesh = training.expert_mesh(choose_ranks(arguments.ranks, len(jax.devices())))
    with (
        open_checkpoints(arguments, settings) as checkpoints,
        training.open_buffer(settings, mesh, arguments.backend) as buffer,
    ):
        trainer = training.Trainer(settings, buffer)
        tell = print if jax.process_index() == 0 else lambda _: None
        tell(
            f"{trainer.num_parameters:,} parameters, {settings.num_experts} experts on {mesh.size} "
            f"{jax.default_backend()} devices, backend {buffer.backend}\n"
            f"{corpus.num_files} files of the standard library: {corpus.train.size / 1e6:.1f} MB "
            f"to train on, {corpus.validation.size / 1e6:.1f} MB to validate on"
        )
        with report.ProgressBar(settings.steps, quiet=jax.process_index() != 0) as bar:
            history = training.run(
                trainer,
                corpus,
                checkpoints=checkpoints,
                on_step=bar.on_step,
                on_validation=bar.on_validation,
            )
        buffer.check()

    if jax.process_index() != 0:
        return
    entropy = data.unigram_entropy(corpus)
    title = f"{settings.num_experts} experts on {mesh.size} ranks, {buffer.backend} backend"
    report.draw_losses(history, entropy, title, arguments.out / "loss.png")
    (arguments.out / "losses.json").write_text(json.dumps(history.to_json()))
    print(
        f"validation loss  {history.validation[max(history.validation)]:.3f} nats/byte\n"
        f"unigram entropy  {entropy:.3f} nats/byte, the loss of knowing byte frequencies alone\n"
        f"time             {time.perf_counter() - started:.0f} s\n"
        f"loss curve       {arguments.out / 'loss.png'}"
    )


if __name__ == "__main__":
    main()
