"""An asyncio server that answers many clients over one device: handwritten digits in, their names out.

Clients connect to a socket of this machine, send images and read answers. Each request is one lazy operation,
awaited: while it runs, the loop serves others. Every rank runs its own server and its own clients.
"""

import asyncio

import numpy as np

import peertile as pt
import peertile.language as T

FEATURES, CLASSES, TRAIN = 64, 16, 1437
CLIENTS, REQUESTS = 12, 30
CHECK = {"clients": 3, "requests": 3}


@pt.kernel
def nearest(scores: T.Exclusive, images: T.Shared, centres: T.Shared, norms: T.Shared):
    """The score of each class for 16 images: how near its centre is."""
    row, _ = scores.index
    x = images.load((row, 0), (16, FEATURES))
    near = T.mma(x, T.transpose(centres.load((0, 0), (CLASSES, FEATURES))), T.zeros((16, CLASSES), T.f32))
    scores.store(2.0 * near - norms.load((0, 0), (1, CLASSES)))


def load_digits():
    """1797 images of 8 x 8 pixels in [0, 1], and what they show."""
    from sklearn.datasets import load_digits as load

    data = load()
    order = np.random.default_rng(7).permutation(len(data.target))
    return (data.data[order] / 16.0).astype(np.float32), data.target[order]


class Model:
    """The mean image of each digit: enough to read most of them."""

    def __init__(self, images, answers):
        centres = np.zeros((CLASSES, FEATURES), np.float32)
        centres[:10] = [images[answers == digit].mean(axis=0) for digit in range(10)]
        norms = (centres**2).sum(axis=1)
        norms[10:] = 1e9  # classes that pad to a power of two
        self.centres, self.norms = pt.asarray(centres), pt.asarray(norms.reshape(1, CLASSES))

    def classify(self, images):
        """A lazy operation: a host array of images to a host array of digits."""
        scores = pt.empty((len(images), CLASSES), pt.f32)
        return (
            pt.op.copy(images)
            .then(lambda x: nearest(scores.partition((16, CLASSES)), x, self.centres, self.norms))
            .map(lambda scores, *_: scores.unpartition())
        )


async def serve(model, reader, writer):
    """One client: a count, then images; the answer is one byte for each."""
    try:
        while head := await reader.read(1):
            images = np.frombuffer(await reader.readexactly(head[0] * FEATURES * 4), np.float32)
            scores = await model.classify(images.reshape(-1, FEATURES))
            writer.write(scores.numpy().argmax(axis=1).astype(np.uint8).tobytes())
            await writer.drain()
    finally:
        writer.close()


async def client(port, number, requests, images, answers):
    """Asks about some images at a time; the number of right answers and of images."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    rng = np.random.default_rng(number)
    right = asked = 0
    for _ in range(requests):
        chosen = rng.integers(0, len(images), rng.integers(1, 20))
        writer.write(bytes([len(chosen)]) + images[chosen].tobytes())
        got = np.frombuffer(await reader.readexactly(len(chosen)), np.uint8)
        right += int((got == answers[chosen]).sum())
        asked += len(chosen)
    writer.close()
    await writer.wait_closed()
    return right, asked


async def run(clients, requests, images, answers):
    model = Model(images[:TRAIN], answers[:TRAIN])
    handlers = set()

    async def handle(reader, writer):
        handlers.add(asyncio.current_task())
        await serve(model, reader, writer)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        asked = images[TRAIN:], answers[TRAIN:]
        results = await asyncio.gather(*(client(port, k, requests, *asked) for k in range(clients)))
        await asyncio.gather(*handlers)
    return np.sum(results, axis=0)


@pt.program
def main(group, clients=CLIENTS, requests=REQUESTS):
    right, asked = asyncio.run(run(clients, requests, *load_digits()))
    accuracy = right / asked
    assert accuracy > 0.85, f"only {accuracy:.3f} of the answers are right"
    if group.rank == 0:
        print(f"{asked} images from {clients} clients, {accuracy:.3f} of the answers are right")
        print("serve_digits: every client was answered")


if __name__ == "__main__":
    pt.run(main)
