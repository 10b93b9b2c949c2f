"""The text: what is read, how it is split, and what a batch is."""

import math

import numpy as np
import pytest
from moe_lm import data


def write_library(root, num_files=64):
    for index in range(num_files):
        (root / f"m{index:03}.py").write_bytes(b"%03d" % index * 10_000)
    for folder in ("test", "site-packages", "encodings"):
        (root / "package" / folder).mkdir(parents=True)
        (root / "package" / folder / "skipped.py").write_bytes(b"SKIPPED")
    (root / "notes.txt").write_bytes(b"SKIPPED")


def test_each_file_is_on_one_side_and_stays_there(tmp_path):
    write_library(tmp_path)
    corpus = data.load_corpus(tmp_path)
    assert corpus.num_files == 64
    train, validation = corpus.train.tobytes(), corpus.validation.tobytes()
    assert b"SKIPPED" not in train + validation
    sides = {index: b"%03d" % index * 10_000 in train for index in range(64)}
    for index, is_train in sides.items():
        assert (b"%03d" % index * 10_000 in validation) == (not is_train)
    assert 0 < sum(not is_train for is_train in sides.values()) < 16

    again = data.load_corpus(tmp_path)
    assert again.train.tobytes() == train
    assert again.validation.tobytes() == validation
    (tmp_path / "a_new_one.py").write_bytes(b"x" * 1000)
    assert {
        i: b"%03d" % i * 10_000 in data.load_corpus(tmp_path).train.tobytes() for i in sides
    } == sides


def test_too_little_text_is_named(tmp_path):
    (tmp_path / "tiny.py").write_bytes(b"pass\n")
    with pytest.raises(FileNotFoundError, match=r"root=.*5 bytes.*pass the folder"):
        data.load_corpus(tmp_path)


def test_a_batch_is_a_function_of_seed_and_step(corpus):
    sizes = {"batch_size": 4, "seq_len": 32}
    batch = data.training_batch(corpus.train, 7, seed=3, **sizes)
    assert batch.shape == (4, 33)
    assert batch.dtype == np.int32
    text = corpus.train.tobytes()
    assert all(row.astype(np.uint8).tobytes() in text for row in batch)
    np.testing.assert_array_equal(batch, data.training_batch(corpus.train, 7, seed=3, **sizes))
    for step, seed in ((8, 3), (7, 4)):
        other = data.training_batch(corpus.train, step, seed=seed, **sizes)
        assert not np.array_equal(batch, other)


def test_validation_covers_the_text_once():
    text = np.arange(101, dtype=np.uint8)
    batches = list(data.validation_batches(text, 5, batch_size=2, seq_len=9))
    assert len(batches) == 5
    starts = np.concatenate(batches)[:, 0]
    assert starts[0] == 0
    assert np.concatenate(batches)[-1, -1] == 100
    assert (np.diff(starts) >= 9).all()


def test_unigram_entropy_of_a_text_one_can_count():
    train = np.frombuffer(b"aaab" * 1000, np.uint8)
    corpus = data.Corpus(train, np.frombuffer(b"abz", np.uint8), 2)
    counts = {"a": 3001, "b": 1001, "z": 1}
    expected = -sum(math.log(count / 4256) for count in counts.values()) / 3
    assert data.unigram_entropy(corpus) == pytest.approx(expected, rel=1e-12)
