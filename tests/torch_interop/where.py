"""Where the tensors of these tests lie: what torch makes in `place()` without naming a device. No pytest here."""

import torch

import peertile as pt


def place():
    """The device of the calling thread, as torch names it."""
    device = pt.current_device()
    return (
        torch.device("cuda", device.driver.ordinal) if device.driver.kind is pt.DriverKind.CUDA else torch.device("cpu")
    )
