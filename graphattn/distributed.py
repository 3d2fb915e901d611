"""The processes of one run: one, or as many as torchrun started."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, distributed, nn


class World:
    """Who else trains this run, and how to agree with them; with one process everything is immediate."""

    def __init__(self, rank: int, size: int, device: torch.device):
        self.rank, self.size, self.device = rank, size, device

    @property
    def first(self) -> bool:
        """This process owns the run folder and speaks."""
        return self.rank == 0

    @classmethod
    @contextlib.contextmanager
    def join(cls, device: str) -> Iterator[World]:
        """The group torchrun describes in the environment, left again at the end.

        Raises:
            ValueError: a device that is not there.
        """
        size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        own = choose_device(device, int(os.environ.get("LOCAL_RANK", 0)))
        if own.type == "cuda":
            torch.cuda.set_device(own)
        if size == 1:
            yield cls(0, 1, own)
            return
        if torch.device(device if device != "auto" else "cpu").index is not None:
            raise ValueError(f"--device {device} is one GPU for {size} processes: give cuda, and each takes its own")
        # what gloo's threads let go of may need the interpreter: they must end before it does, but a group that
        # anything still refers to never ends them.  DistributedDataParallel imports dynamo, and that keeps whatever
        # group there is by then; a model with its reducer does so until it is collected
        importlib.import_module("torch._dynamo")
        distributed.init_process_group("nccl" if own.type == "cuda" else "gloo")
        try:
            yield cls(rank, size, own)
        finally:
            gc.collect()
            distributed.destroy_process_group()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Average gradients over the processes."""
        if self.size == 1:
            return model
        return nn.parallel.DistributedDataParallel(model)

    def sum(self, x: Tensor) -> Tensor:
        if self.size > 1:
            distributed.all_reduce(x)
        return x

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self.size

    def agree(self, number: int) -> int:
        """The largest number any process has, so that all stop after the same step."""
        if self.size == 1:
            return number
        x = torch.tensor([number], device=self.device)
        distributed.all_reduce(x, distributed.ReduceOp.MAX)
        return int(x)

    def on_first(self, action: Callable[[], None] | None) -> None:
        """Run `action` on the first process; all wait for it, and all fail if it fails."""
        if self.size == 1:
            assert action is not None
            action()
            return
        error: BaseException | None = None
        if self.first and action is not None:
            try:
                action()
            except Exception as e:
                error = e
        failed = self.agree(int(error is not None))
        if error is not None:
            raise error
        if failed:
            raise Elsewhere("the first process could not go on")


def memory_of(device: torch.device) -> int:
    """Bytes the device has in all; 0 if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


class Elsewhere(RuntimeError):
    """Another process has failed and says why."""


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` is the first GPU (or this process's) if there is one."""
    if name == "auto":
        name = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = local_rank if device.index is None else device.index
        if count == 0:
            why = "torch is a build without CUDA" if torch.version.cuda is None else "torch finds none"
            raise ValueError(f"--device {name}: no CUDA device, {why}: give --device cpu to do without")
        if index >= count:
            raise ValueError(f"--device {name}: this machine has {count} CUDA devices")
        device = torch.device("cuda", index)
    return device
