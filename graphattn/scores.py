"""How one edge is scored, before the softmax over each target's edges."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Dot:
    """Scaled dot product, `scale * <q_i, k_j>`, by default with scale 1 / sqrt(head size).

    Vaswani et al. 2017, section 3.2.1.
    """

    name = "dot"


@dataclass(frozen=True, eq=False, slots=True)
class Additive:
    """GAT's score, `leaky_relu(q_i + k_j, slope)`, on queries and keys of width 1 (each node's two half-scores).

    Velickovic et al. 2018, equation 3: q_i = a_left . W h_i and k_j = a_right . W h_j.
    """

    slope: float = 0.2
    name = "additive"


@dataclass(frozen=True, eq=False, slots=True)
class GATv2:
    """GATv2's score, `<vector_h, leaky_relu(q_i + k_j, slope)>`.

    Brody, Alon, Yahav 2022, equation 7.

    Args:
        vector: `(H, D)`, or `(D,)` for all heads; differentiable.
        slope: of the leaky ReLU below zero.
    """

    vector: Tensor
    slope: float = 0.2
    name = "gatv2"


Score = Dot | Additive | GATv2


@dataclass(frozen=True, eq=False, slots=True)
class Alibi:
    """See `alibi`."""

    slopes: Tensor
    offset: int = 0
    name = "alibi"


@dataclass(frozen=True, eq=False, slots=True)
class Relative:
    """See `relative`."""

    table: Tensor
    offset: int = 0
    name = "relative"


Position = Alibi | Relative


def alibi(slopes: Tensor, offset: int = 0) -> Alibi:
    """A bias that falls with distance, `-slope_h * |i + offset - j|` (Press et al. 2022, causal; symmetric otherwise).

    Args:
        slopes: `(H,)`, or `()` for all heads; differentiable.
        offset: added to the target's position, for graphs whose rows begin later than their columns.
    """
    return Alibi(slopes, operator.index(offset))


def relative(table: Tensor, offset: int = 0) -> Relative:
    """A learned bias per distance, `table[h, clamp(j - i - offset, -R, R) + R]` (Shaw et al. 2018; Raffel et al. 2020).

    Args:
        table: `(H, 2R + 1)`, or `(2R + 1,)` for all heads; differentiable; middle entry is distance 0.
        offset: added to the target's position.
    """
    return Relative(table, operator.index(offset))
