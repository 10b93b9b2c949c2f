"""Bytes of the Python standard library: real text that every machine with Python has."""

import dataclasses
import pathlib
import sysconfig
import zlib

import numpy as np

VOCABULARY_SIZE = 256

# Installed packages and test suites differ between machines; `encodings` and `pydoc_data` are
# generated.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}
)
_VALIDATION_ONE_IN = 16
_SMALLEST_USEFUL_BYTES = 1_000_000


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and validation text, each a flat uint8 array. No file contributes to both."""

    train: np.ndarray
    validation: np.ndarray
    num_files: int


def load_corpus(root: pathlib.Path | None = None) -> Corpus:
    """Reads every ``*.py`` file below `root`, by default the standard library's own folder.

    Files are taken in the order of their relative names, and the checksum of the name decides which
    side a file is on, so a file keeps its side when others come and go.

    Raises:
        FileNotFoundError: there is too little source text below `root`.
    """
    root = root or pathlib.Path(sysconfig.get_path("stdlib"))
    sides: dict[bool, list[bytes]] = {False: [], True: []}
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if _SKIPPED_FOLDERS.isdisjoint(name.split("/")[:-1]):
            is_validation = zlib.crc32(name.encode()) % _VALIDATION_ONE_IN == 0
            sides[is_validation].append((root / name).read_bytes())
    train, validation = (np.frombuffer(b"\n".join(sides[side]), np.uint8) for side in (False, True))
    if min(train.size, validation.size * _VALIDATION_ONE_IN) < _SMALLEST_USEFUL_BYTES:
        raise FileNotFoundError(
            f"root={str(root)!r} holds {train.size + validation.size} bytes of Python source, too "
            "little to train on; pass the folder of a complete standard library"
        )
    return Corpus(train, validation, len(sides[False]) + len(sides[True]))


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """The `length` bytes of `text` from each of `starts`: int32 ``[len(starts), length]``."""
    return text[starts[:, None] + np.arange(length)].astype(np.int32)


def training_batch(
    text: np.ndarray, step: int, *, batch_size: int, seq_len: int, seed: int
) -> np.ndarray:
    """Random windows, int32 ``[batch_size, seq_len + 1]``; a function of `seed` and `step` alone.

    With no state to save, a resumed run sees the very batches that the interrupted one would have
    seen.
    """
    starts = np.random.default_rng((seed, step)).integers(0, text.size - seq_len, batch_size)
    return windows(text, starts, seq_len + 1)


def validation_batches(text: np.ndarray, num_batches: int, *, batch_size: int, seq_len: int):
    """Yields `num_batches` arrays ``[batch_size, seq_len + 1]``, spread evenly over `text`."""
    starts = np.linspace(0, text.size - seq_len - 1, num_batches * batch_size).astype(np.int64)
    for batch_starts in starts.reshape(num_batches, batch_size):
        yield windows(text, batch_starts, seq_len + 1)


def unigram_entropy(corpus: Corpus) -> float:
    """Nats per byte of the validation text under the byte frequencies of the training text.

    It is what a model reaches that knows how often each byte occurs and nothing about its context.
    Counts are smoothed by one, so that a byte unseen in training costs a finite amount.
    """
    counts = np.bincount(corpus.train, minlength=VOCABULARY_SIZE) + 1.0
    log_probability = np.log(counts / counts.sum())
    return float(-log_probability[corpus.validation].mean())
