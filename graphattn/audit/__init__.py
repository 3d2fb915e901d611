"""What can flow where through a stack of graphs, whether a label leaks, how masks differ, and a page about it all."""

from __future__ import annotations

from .compare import Difference, compare
from .dynamic import assert_no_leak
from .flow import Hop, Leak, coverage, find_leak, layers_to_cover, receptive_field
from .page import audit_page, audit_picture

__all__ = [
    "Difference",
    "Hop",
    "Leak",
    "assert_no_leak",
    "audit_page",
    "audit_picture",
    "compare",
    "coverage",
    "find_leak",
    "layers_to_cover",
    "receptive_field",
]
