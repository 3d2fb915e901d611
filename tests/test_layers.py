"""Imports point down only, and importing the package stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "graphattn"

# from the bottom up: a module imports modules of lower rows only
LAYERS = [
    "graph nearest",
    "scores blocks",
    "patterns convert audit order",
    "parse",
    "backends.numerics",
    "backends.call",
    "backends.cost backends.gpu",
    "backends.reference backends.dense backends.sdpa backends.edges backends.csr backends.tiles backends.native "
    "backends.flex backends.triton backends.compiled",
    "backends.terms",
    "backends",
    "head",
    "gpt features",
    "seq2seq nodes",
    "graph_models pyg",
    "draw data config checkpoint distributed results graph_data node_data",
    "node_pictures bench",
    "load generate",
    "report",
    "train node_train graph_train",
    "cli",
    "__main__",
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}
# rows whose members may use each other, without a circle: converters, audits and orders of one graph; sources of data
TOGETHER = {"patterns", "convert", "audit", "order", "config", "data", "checkpoint", "distributed", "results"}
HEAVY = {"torch_geometric", "networkx", "matplotlib", "triton", "scipy", "jsonargparse", "pooch", "jinja2", "tqdm"}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__")


def layer_of(module: str) -> str:
    """The longest known prefix: files of a package inside a layer belong to it."""
    while module and module not in RANK:
        module = module.rpartition(".")[0]
    return module


def imports(path: Path) -> set[str]:
    """graphattn modules that a file imports, relative to the package."""
    here = list(path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                base = here[: len(here) - node.level + 1] + base
            elif base[:1] == ["graphattn"]:
                base = base[1:]
            else:
                continue
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                is_module = (PACKAGE / Path(*whole.split("."))).with_suffix(".py").exists() or (
                    PACKAGE / Path(*whole.split("."))
                ).is_dir()
                found.add(whole if is_module else ".".join(base))
        elif isinstance(node, ast.Import):
            found |= {a.name.partition(".")[2] for a in node.names if a.name.split(".")[0] == "graphattn"}
    return found - {""}


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if name_of(p)]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    own = layer_of(name_of(path))
    assert own, f"{name_of(path)} is in no layer: add it to LAYERS"
    for module in imports(path):
        other = layer_of(module)
        assert other, f"{name_of(path)} imports {module}, which is in no layer"
        if other == own or (own in TOGETHER and other in TOGETHER and RANK[own] == RANK[other]):
            continue
        assert RANK[other] < RANK[own], (
            f"{name_of(path)} (layer {own}) imports {module} (layer {other}): imports point down"
        )


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    for path in FILES:
        # kernels are decorated by triton and imported at a launch; a PyG layer derives from PyG's
        if name_of(path).startswith("backends.triton.") or name_of(path) == "pyg":
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom) and not node.level
                else []
            )
            for name in names:
                assert name.split(".")[0] not in HEAVY, (
                    f"{name_of(path)} imports {name} at its top: import it inside the function"
                )


def test_import_is_light() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import graphattn; graphattn.causal(4); graphattn.attend; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not HEAVY & set(loaded)


def test_only_the_reference_and_backends_normalise_scores() -> None:
    """Models are configurations of Head: none has an attention softmax of its own."""
    for name in ("head", "gpt", "nodes", "pyg", "graph_models", "generate"):
        path = PACKAGE / f"{name}.py"
        if not path.exists():
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in (
                "softmax",
                "segment_reduce",
                "scaled_dot_product_attention",
            ):
                assert name == "generate", f"{name}.py calls {node.attr}: attention belongs to backends"
