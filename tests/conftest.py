"""Shared set-up: quiet threads, fixed seeds, and where real data may lie."""

from __future__ import annotations

import os
from pathlib import Path

# two OpenMP threads that spin on a busy two-core machine can be ninety times slower than one
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MPLBACKEND", "Agg")
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers are the parallelism
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("ci", deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
settings.load_profile("ci")

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1234)


@pytest.fixture
def data() -> Path:
    """The folder with real data; tests that need it skip where it is absent."""
    if not DATA.is_dir():
        pytest.skip("needs the real data in ../shared/data, which is not here")
    return DATA
