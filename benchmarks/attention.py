"""Attention over graphs against every peer that is installed: `python benchmarks/attention.py --rows 1,3`.

Rows are the presets of `graphattn.bench.presets`.  Each contender is first equal to float64, then timed, interleaved.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from graphattn import bench  # noqa: E402


def main(argv: list[str] | None = None) -> bench.Report:
    """Parse arguments, run, write; the report is returned for tests."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--rows", default="1,3,4,5,7", help="comma-separated numbers, or 'all'")
    p.add_argument("--ours", default="", help="comma-separated backends beside or instead of auto, or 'all'")
    p.add_argument("--peers", default=None, help=f"comma-separated, of: {', '.join(bench.PEERS)}; '' for none")
    p.add_argument("--budget", type=float, default=10.0, help="seconds of timing per case and phase")
    p.add_argument("--threads", type=int, default=0, help="torch threads (default: torch's)")
    p.add_argument("--data", default=str(Path(__file__).resolve().parents[2] / "shared" / "data"))
    p.add_argument("--json", default=None)
    p.add_argument("--md", default=None)
    p.add_argument(
        "--plots", default=None, help="folder for two plots: where dense and sparse cross, time and memory against T"
    )
    a = p.parse_args(argv)
    if a.threads:
        torch.set_num_threads(a.threads)
    rows = list(bench._ROWS) if a.rows == "all" else [int(r) for r in a.rows.split(",") if r]
    peers = None if a.peers is None else [x.strip() for x in a.peers.split(",") if x.strip()]
    ours = [x.strip() for x in a.ours.split(",") if x.strip()] or None
    report = bench.run_bench(
        rows=rows, peers=peers, ours=ours, budget=a.budget, data=a.data, json_path=a.json, markdown_path=a.md
    )
    if a.plots:
        folder = Path(a.plots)
        folder.mkdir(parents=True, exist_ok=True)
        bench.plot_crossover(folder / "crossover.png")
        bench.plot_scaling(folder / "scaling.png")
    return report


if __name__ == "__main__":
    main()
