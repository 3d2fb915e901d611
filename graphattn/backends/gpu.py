"""What work costs on a GPU: the rates of an H200, from which every backend makes its estimate for CUDA tensors.

`auto` compares estimates, so only ratios count, and those are nearly the same on other GPUs that have bfloat16 (compute
capability 8.0 and later); `calibrate(device="cuda")` measures what is left.  No figure here was measured by this
project.  They are published ones:

* NVIDIA's H200 data sheet: 4.8 TB/s; dense, bfloat16 and float16 989 TFLOP/s, TF32 494, float32 67.
* FlashAttention-3 (Shah et al. 2024, abstract): FlashAttention-2, which is what PyTorch ships, reaches 35 % of an H100.
* FlashAttention-2 (Dao 2023, section 4.1): two to three times xFormers' memory-efficient kernels (the only fused ones
  PyTorch has for a mask or for float32), 1.3 to 2.5 times attention written in Triton; backward 63 % of the peak where
  forward is 73 %.
* FlexAttention (Guessous et al. 2024, pytorch.org/blog/flexattention): 90 % of FlashAttention-2 forward, 85 % backward.
* Chips and Cheese 2023, "Nvidia's H100: Funny L2, and Tons of Bandwidth": about 5.5 TB/s from the L2.

What is guessed says so beside its constant.
"""

from __future__ import annotations

import functools

import torch

from .call import Call

COPY = 4.3e12  # bytes per second: 90 % of the data sheet, what a copy usually reaches
GATHER, GATHER_BACK = 0.75, 0.65  # of it, for rows gathered at random: aimed at, and a guess until measured
L2, L2_RATE = 50e6, 5.5e12  # bytes, bytes per second
LAUNCH = 6e-6  # seconds from one operation of torch to the next, where the host is slower than the GPU: a guess
CALL, TRITON_CALL, FLEX_CALL = 15e-6, 60e-6, 150e-6  # seconds of the host for a call, by what it goes through: guesses
HALF, TF32, FLOAT32, FLOAT64 = 989e12, 494e12, 67e12, 67e12  # operations per second

FLASH = 0.35  # of the peak
# in float32 a product takes six times as long, and what lies between two of them weighs less: a guess
EFFICIENT, EFFICIENT_FLOAT32 = 0.5 * FLASH, FLASH
FLEX, FLEX_BACK = 0.9 * FLASH, 0.85 * FLASH
TILES, TILES_BACK = FLASH / 1.3, FLASH / 2  # those of the triton backend, by what others reach in Triton
BACK = 63 / 73  # backward over forward, where nothing better is known
BACK_WORK = 2.5  # five products backward for two forward
NARROWEST = 32  # width that fused kernels pad to


def fused(call: Call, pairs: float, peak: float, forward: float, backward: float) -> float:
    """Seconds of a kernel that keeps scores on chip: `pairs` of target and source at shares of `peak`."""
    width = max(call.q.shape[-1], NARROWEST) + max(call.v.shape[-1], NARROWEST)
    work = pairs * 2 * width / peak
    return work / forward + (BACK_WORK * work / backward if call.needs_grad else 0.0)


def gathered(call: Call, rows: float, width: int, size: int) -> float:
    """Seconds to gather `rows` rows of `width` numbers of `size` bytes: once forward, twice more backward."""
    own = call.batch * call.kv_heads * call.graph.s * width * size
    rate = L2_RATE if own < L2 / 2 else COPY
    once = rows * width * size / rate
    return once / GATHER + (2 * once / GATHER_BACK if call.needs_grad else 0.0)


def passes(numbers: float, forward: float, backward: float, call: Call) -> float:
    """Seconds of so many passes over intermediate results of `numbers` in the dtype of the arithmetic."""
    size = 8 if call.wide == torch.float64 else 4
    return numbers * size * (forward + (backward if call.needs_grad else 0.0)) / COPY


def launches(call: Call, forward: float, backward: float) -> float:
    """Seconds of so many operations started one after another."""
    return LAUNCH * (forward + (backward if call.needs_grad else 0.0))


def plain_peak(call: Call) -> float:
    """Operations per second of torch's matrix product in the dtype of the arithmetic, TF32 left off."""
    return FLOAT64 if call.wide == torch.float64 else FLOAT32


def is_half(call: Call) -> bool:
    return call.q.dtype in (torch.bfloat16, torch.float16)


@functools.cache
def memory(device: torch.device) -> int:
    """Bytes the device has in all."""
    return torch.cuda.get_device_properties(device).total_memory
