"""Converters, in pairs: `from_x(to_x(g)) == g` for every graph the format can express, else a ValueError.

Masks and CSR have a row per target; `edge_index` is (source, target); networkx and scipy entry (i, j) is edge i -> j.
"""

from __future__ import annotations

from .edges import (
    edge_ids,
    from_csr,
    from_cu_seqlens,
    from_edge_index,
    from_scipy,
    to_csr,
    to_cu_seqlens,
    to_edge_index,
    to_scipy,
)
from .files import from_npz, to_npz
from .flex import from_block_mask, from_predicate, to_block_mask, to_predicate
from .masks import (
    from_additive,
    from_hf,
    from_key_padding,
    from_mask,
    to_additive,
    to_hf,
    to_key_padding,
    to_mask,
)
from .objects import from_networkx, from_pyg, to_networkx, to_pyg

__all__ = [
    "edge_ids",
    "from_additive",
    "from_block_mask",
    "from_csr",
    "from_cu_seqlens",
    "from_edge_index",
    "from_hf",
    "from_key_padding",
    "from_mask",
    "from_networkx",
    "from_npz",
    "from_predicate",
    "from_pyg",
    "from_scipy",
    "to_additive",
    "to_block_mask",
    "to_csr",
    "to_cu_seqlens",
    "to_edge_index",
    "to_hf",
    "to_key_padding",
    "to_mask",
    "to_networkx",
    "to_npz",
    "to_predicate",
    "to_pyg",
    "to_scipy",
]
