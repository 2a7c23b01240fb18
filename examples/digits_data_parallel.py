"""Data-parallel training on the UCI handwritten digits: the main job.

Each rank computes the gradients of its part of every batch; the gradients are summed through a mailbox;
every rank applies the same update. All arithmetic and all communication are peertile kernels.

    peertile run examples/digits_data_parallel.py --ranks 4
"""

import time

import numpy as np

import peertile as pt
import peertile.language as T

FEATURES, HIDDEN, CLASSES = 64, 128, 16  # ten digits, padded to a power of two
BATCH, ROWS = 256, 64
TRAIN, EPOCHS, RATE, MOMENTUM = 1437, 40, 0.5, 0.9
CHECK = {"epochs": 1, "images": 128, "least": 0.0}
SIZES = {"w1": FEATURES * HIDDEN, "b1": HIDDEN, "w2": HIDDEN * CLASSES, "b2": CLASSES}
SHAPES = {"w1": (FEATURES, HIDDEN), "b1": (1, HIDDEN), "w2": (HIDDEN, CLASSES), "b2": (1, CLASSES)}
TOTAL = sum(SIZES.values())
TILE = 1024  # of the flat weights: one program sums and updates one tile


def scores(x, w1, b1, w2, b2):
    """Hidden activations [ROWS, HIDDEN] and class scores [ROWS, CLASSES]; the padded classes are shut out."""
    hidden = T.maximum(T.mma(x, w1, T.zeros((ROWS, HIDDEN), T.f32)) + b1, 0.0)
    logits = T.mma(hidden, w2, T.zeros((ROWS, CLASSES), T.f32)) + b2
    return hidden, T.where(T.iota(CLASSES) < 10, logits, -1e30)


@pt.kernel
def gradients(
    g1: T.Exclusive, gb1: T.Exclusive, g2: T.Exclusive, gb2: T.Exclusive, loss: T.Exclusive,
    images: T.Shared, labels: T.Shared, w1: T.Shared, b1: T.Shared, w2: T.Shared, b2: T.Shared, scale: T.f32,
):  # fmt: skip
    """Loss and gradients of all rows of `images`, summed and scaled: one program, blocks of ROWS rows."""
    weights1, weights2 = w1.load((0, 0), (FEATURES, HIDDEN)), w2.load((0, 0), (HIDDEN, CLASSES))
    bias1, bias2 = b1.load((0, 0), (1, HIDDEN)), b2.load((0, 0), (1, CLASSES))
    d1, d2 = T.zeros((FEATURES, HIDDEN), T.f32), T.zeros((HIDDEN, CLASSES), T.f32)
    db1, db2 = T.zeros((1, HIDDEN), T.f32), T.zeros((1, CLASSES), T.f32)
    total = T.f32(0)
    for block in T.range(images.num_tiles((ROWS, FEATURES))[0]):
        x = images.load((block, 0), (ROWS, FEATURES))
        y = labels.load((block, 0), (ROWS, CLASSES))  # one-hot; a padded row is all zero, and adds nothing
        hidden, logits = scores(x, weights1, bias1, weights2, bias2)
        shifted = logits - T.max(logits, axis=1, keepdims=True)
        weight = T.exp(shifted)
        norm = T.sum(weight, axis=1, keepdims=True)
        is_row = T.sum(y, axis=1, keepdims=True)
        total += T.sum(T.sum(y * (T.log(norm) - shifted), axis=1), axis=0)
        error = (weight / norm - y) * is_row
        d2 = T.mma(T.transpose(hidden), error, d2)
        db2 += T.sum(error, axis=0, keepdims=True)
        back = T.mma(error, T.transpose(weights2), T.zeros((ROWS, HIDDEN), T.f32))
        back = T.where(hidden > 0.0, back, 0.0)
        d1 = T.mma(T.transpose(x), back, d1)
        db1 += T.sum(back, axis=0, keepdims=True)
    g1.store(d1 * scale)
    g2.store(d2 * scale)
    gb1.store(db1 * scale)
    gb2.store(db2 * scale)
    loss.store(T.full((1,), total * scale, T.f32))


@pt.kernel
def sum_and_update(
    weights: T.Exclusive, velocity: T.Exclusive, grads: T.Shared, box: T.Mailbox, rate: T.f32, momentum: T.f32
):
    """Sums the gradients of all ranks and applies one step of momentum descent to this program's tile."""
    box.post(grads.load_like(weights))
    total = T.zeros(weights.tile_shape, T.f32)
    for part in box.collect():  # rank order: every rank adds in the same order, so all get the same bits
        total += part
    step = momentum * velocity.load() + total
    velocity.store(step)
    weights.store(weights.load() - rate * step)


@pt.kernel
def predict(best: T.Exclusive, images: T.Shared, w1: T.Shared, b1: T.Shared, w2: T.Shared, b2: T.Shared):
    """Scores of every class, one block of rows per program."""
    row, _ = best.index
    x = images.load((row, 0), (ROWS, FEATURES))
    _, logits = scores(
        x, w1.load((0, 0), (FEATURES, HIDDEN)), b1.load((0, 0), (1, HIDDEN)),
        w2.load((0, 0), (HIDDEN, CLASSES)), b2.load((0, 0), (1, CLASSES)),
    )  # fmt: skip
    best.store(logits)


class Model:
    """Weights, velocity and gradients of one rank: flat vectors with a matrix view of each part."""

    def __init__(self):
        rng = np.random.default_rng(0)  # the same start on every rank
        parts = {
            name: (rng.standard_normal(shape) * (2.0 / shape[0]) ** 0.5 if name.startswith("w") else np.zeros(shape))
            for name, shape in SHAPES.items()
        }
        self.weights = pt.asarray(np.concatenate([p.ravel() for p in parts.values()]), pt.f32)
        self.velocity = pt.zeros((TOTAL,), pt.f32)
        self.grads = pt.zeros((TOTAL,), pt.f32)
        self.loss = pt.zeros((1,), pt.f32)
        self.w, self.g = self.views(self.weights), self.views(self.grads)

    @staticmethod
    def views(flat):
        start, views = 0, {}
        for name, size in SIZES.items():
            views[name] = flat[start : start + size].reshape(SHAPES[name])
            start += size
        return views

    def compute(self, images, labels, rows):
        """Gradients of one batch part, scaled by the rows of the whole batch."""
        g, w = self.g, self.w
        outputs = (g["w1"], g["b1"], g["w2"], g["b2"])
        gradients(
            *(t.partition(t.shape) for t in outputs), self.loss.partition(1),
            images, labels, w["w1"], w["b1"], w["w2"], w["b2"], 1.0 / rows,
        ).sync()  # fmt: skip

    def communicate(self, box):
        """Sum the gradients over the ranks and update the weights."""
        sum_and_update(
            self.weights.partition(TILE), self.velocity.partition(TILE), self.grads, box, RATE, MOMENTUM
        ).sync()

    def accuracy(self, images, answers):
        scores = pt.empty((len(answers), CLASSES), pt.f32)
        w = self.w
        predict(scores.partition((ROWS, CLASSES)), images, w["w1"], w["b1"], w["w2"], w["b2"]).sync()
        return float((scores.numpy().argmax(axis=1) == answers).mean())


def load_digits():
    """1797 images of 8x8 pixels in [0, 1] and their one-hot answers, shuffled: 1437 to train, 360 to test."""
    from sklearn.datasets import load_digits as load

    data = load()
    order = np.random.default_rng(7).permutation(len(data.target))
    images = (data.data[order] / 16.0).astype(np.float32)
    answers = data.target[order]
    onehot = np.eye(CLASSES, dtype=np.float32)[answers]
    return images[:TRAIN], onehot[:TRAIN], images[TRAIN:], answers[TRAIN:]


def train(group, box, epochs, count, progress):
    """Train on this rank's part of every batch. Returns the model and seconds of (compute, communication)."""
    images, labels, _, _ = load_digits()
    images, labels = images[:count], labels[:count]
    model = Model()
    spent = np.zeros(2)
    losses = []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(images))
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            mine = batch[group.rank :: group.size]
            x, y = pt.asarray(images[mine]), pt.asarray(labels[mine])
            begin = time.perf_counter()
            model.compute(x, y, len(batch))
            middle = time.perf_counter()
            model.communicate(box)
            if epoch > 0:  # the first epoch compiles
                spent += (middle - begin, time.perf_counter() - middle)
        losses.append(float(model.loss.numpy()[0]) * group.size)
        progress(epoch, losses[-1])
    return model, spent


@pt.program
def main(group, epochs=EPOCHS, images=TRAIN, least=0.95):
    steps = -(-images // BATCH) * epochs
    tiles = -(-TOTAL // TILE)
    if group.rank == 0:
        print(f"training on {group.size} ranks: {steps} steps, {TOTAL} weights, batches of {BATCH} images")
    with pt.SymmetricHeap(group, size_bytes=4 << 20) as heap, pt.progress(group, "training", epochs) as bar:
        box = heap.mailbox(tile=TILE, dtype=pt.f32, programs=tiles, depth=2)
        model, (compute, communicate) = train(
            group, box, epochs, images, lambda epoch, loss: bar(epoch + 1, f"loss {loss:.4f}")
        )

    _, _, unseen, answers = load_digits()
    accuracy = model.accuracy(pt.asarray(unseen), answers)
    weights = model.weights.numpy()
    same = len(set(group.exchange(weights.tobytes(), "compare weights"))) == 1

    # The same training by one rank alone: the sum over ranks must not change the result but by rounding.
    alone = group.subgroup((0,))
    if alone is not None:
        with pt.SymmetricHeap(alone, size_bytes=1 << 20) as heap:
            box = heap.mailbox(tile=TILE, dtype=pt.f32, programs=tiles, depth=2)
            single, _ = train(alone, box, epochs, images, lambda epoch, loss: None)
        difference = float(np.abs(single.weights.numpy() - weights).max() / np.abs(weights).max())
        single_accuracy = single.accuracy(pt.asarray(unseen), answers)
        timed = max(steps - steps // epochs, 1)
        pt.report(
            "UCI digits, data parallel",
            {
                "test accuracy": f"{accuracy:.4f}",
                "weights equal on all ranks": "to the bit" if same else "NO",
                "one rank alone": f"accuracy {single_accuracy:.4f}, weights differ by {difference:.1e} of the largest",
                "time per step": f"{(compute + communicate) / timed * 1e6:.0f} µs",
                "  compute": f"{compute / timed * 1e6:.0f} µs",
                "  communication and update": f"{communicate / timed * 1e6:.0f} µs",
                "bytes sent per rank and step": f"{(group.size - 1) * tiles * TILE * 4}",
            },
        )
        assert accuracy >= least, f"accuracy {accuracy} is below {least}"
        assert difference < 1e-2, f"one rank alone gives other weights: {difference}"
    assert same, "ranks disagree about the weights"
    group.barrier("the report is out")


if __name__ == "__main__":
    pt.run(main)
