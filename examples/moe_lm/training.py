"""The training loop: state, one step, validation, and the run from first step to last."""

import functools
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_ep
from jax_ep.nn import parameter_shardings

from .checkpoint import Checkpoints
from .data import Corpus, training_batch, validation_batches
from .model import MoeLM, next_byte_loss
from .records import History, StepReport
from .settings import Settings

AXIS = "expert"

# Steps started before the host waits for one of them. XLA's CPU runtime deadlocks with more than 32
# multi-device programs in flight, and a GPU gains nothing beyond a few.
STEPS_IN_FLIGHT = 5


def expert_mesh(num_ranks: int) -> Mesh:
    """The first `num_ranks` devices as one axis, which shards both the experts and the batch."""
    return jax.make_mesh(
        (num_ranks,), (AXIS,), devices=jax.devices()[:num_ranks], axis_types=(AxisType.Auto,)
    )


def open_buffer(settings: Settings, mesh: Mesh, backend: str) -> jax_ep.Buffer:
    """The buffer that all layers share: they run one after another."""
    config = jax_ep.EpConfig(
        num_experts=settings.num_experts,
        num_experts_per_tok=settings.num_experts_per_tok,
        hidden=settings.hidden,
        max_tokens_per_rank=settings.tokens_per_step // mesh.size,
        dtype=jnp.float32,
    )
    return jax_ep.Buffer(mesh, AXIS, config, backend=backend)


class Trainer:
    """Model, optimiser and their compiled steps, on the mesh of one `jax_ep.Buffer`.

    `state` is the pair (parameters, optimiser state): all that changes, and all that a checkpoint
    holds.
    """

    def __init__(self, settings: Settings, buffer: jax_ep.Buffer):
        self.settings = settings
        self.batch_sharding = NamedSharding(buffer.mesh, PartitionSpec(AXIS))
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=settings.learning_rate,
            warmup_steps=settings.warmup_steps,
            decay_steps=max(settings.steps, settings.warmup_steps + 1),
            end_value=0.05 * settings.learning_rate,
        )
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(schedule, b2=0.98, weight_decay=settings.weight_decay),
        )
        model = MoeLM(settings, buffer, rngs=nnx.Rngs(settings.seed))
        graph, parameters = nnx.split(model)
        state = (parameters, optimizer.init(parameters))
        self.state = jax.device_put(state, parameter_shardings(state, buffer.mesh, AXIS))
        self.num_parameters = sum(leaf.size for leaf in jax.tree.leaves(parameters))
        self._train_step = jax.jit(
            functools.partial(_train_step, graph, optimizer, settings.aux_loss_weight),
            donate_argnums=0,
        )
        self._evaluate = jax.jit(
            lambda parameters, windows: next_byte_loss(nnx.merge(graph, parameters), windows)[0]
        )

    def start_step(self, windows: np.ndarray) -> dict[str, jax.Array]:
        """Starts one step on int32 ``[batch, seq_len + 1]``; its metrics are not ready yet."""
        self.state, metrics = self._train_step(
            self.state, jax.device_put(windows, self.batch_sharding)
        )
        return metrics

    def validate(self, text: np.ndarray) -> float:
        """Mean loss, in nats per byte, over windows of `text`: the same windows each time."""
        settings = self.settings
        batches = validation_batches(
            text,
            settings.validation_batches,
            batch_size=settings.batch_size,
            seq_len=settings.seq_len,
        )
        losses = [
            float(self._evaluate(self.state[0], jax.device_put(windows, self.batch_sharding)))
            for windows in batches
        ]
        return float(np.mean(losses))


def _train_step(graph, optimizer, aux_loss_weight, state, windows):
    parameters, optimizer_state = state

    def total_loss(parameters):
        loss, stats = next_byte_loss(nnx.merge(graph, parameters), windows)
        return loss + aux_loss_weight * stats.aux_loss.mean(), (loss, stats)

    gradients, (loss, stats) = jax.grad(total_loss, has_aux=True)(parameters)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
    parameters = optax.apply_updates(parameters, updates)
    metrics = {
        "loss": loss,
        "expert_share": stats.expert_share,
        "num_dropped": stats.num_dropped.sum(),
    }
    return (parameters, optimizer_state), metrics


def train_steps(trainer: Trainer, corpus: Corpus, first: int, last: int) -> Iterator[StepReport]:
    """Runs steps ``first .. last - 1`` and yields a report of each, a few steps at a time."""
    settings = trainer.settings
    routed_pairs = settings.tokens_per_step * settings.num_experts_per_tok * settings.num_layers
    for group_first in range(first, last, STEPS_IN_FLIGHT):
        group = range(group_first, min(group_first + STEPS_IN_FLIGHT, last))
        started = time.perf_counter()
        metrics = [
            trainer.start_step(
                training_batch(
                    corpus.train,
                    step,
                    batch_size=settings.batch_size,
                    seq_len=settings.seq_len,
                    seed=settings.seed,
                )
            )
            for step in group
        ]
        metrics = jax.device_get(metrics)
        seconds = (time.perf_counter() - started) / len(group)
        for step, values in zip(group, metrics, strict=True):
            relative_share = values["expert_share"] * settings.num_experts
            yield StepReport(
                step=step,
                loss=float(values["loss"]),
                smallest_share=float(relative_share.min()),
                largest_share=float(relative_share.max()),
                dropped_share=float(values["num_dropped"] / routed_pairs),
                tokens_per_second=settings.tokens_per_step / seconds,
            )


def run(
    trainer: Trainer,
    corpus: Corpus,
    *,
    checkpoints: Checkpoints | None = None,
    on_step: Callable[[StepReport], None] = lambda report: None,
    on_validation: Callable[[int, float], None] = lambda step, loss: None,
) -> History:
    """Trains to ``settings.steps``, from the newest of `checkpoints` where it holds any.

    Validates and saves every ``settings.validate_every`` steps, and at the end.
    """
    settings = trainer.settings
    history, step = History(), 0
    if checkpoints is not None and checkpoints.latest_step is not None:
        trainer.state, history, step = checkpoints.restore(trainer.state)
    while step < settings.steps:
        stop = min(settings.steps, step + settings.validate_every - step % settings.validate_every)
        for report in train_steps(trainer, corpus, step, stop):
            history.train[report.step] = report.loss
            on_step(report)
        step = stop
        history.validation[step] = trainer.validate(corpus.validation)
        on_validation(step, history.validation[step])
        if checkpoints is not None:
            checkpoints.save(step, trainer.state, history)
    return history
