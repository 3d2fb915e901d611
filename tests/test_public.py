"""Every public name exists, says what it is, and is listed."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import pytest
import torch

import graphattn as ga

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(ga._MODULE_OF))
def test_every_name(name: str) -> None:
    if name in ("GraphAttentionConv", "from_pyg_conv"):
        pytest.importorskip("torch_geometric")
    value = getattr(ga, name)
    assert name in dir(ga)
    if callable(value):
        assert inspect.getdoc(value), f"{name} has no docstring"


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'casual'"):
        _ = ga.casual  # noqa: B018


def test_the_readme_example_runs_and_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = README.split("```python\n")[1].split("```")[0]
    torch.manual_seed(0)
    printed: list[str] = []
    exec(compile(code, "README.md", "exec"), {"print": lambda x: printed.append(str(x))})  # noqa: S102
    said = [line.split("# ", 1)[1] for line in code.splitlines() if line.startswith("print(")]
    assert printed[0] == said[0] and printed[2] == said[2]
    assert printed[1].splitlines()[1].split()[0] == "reference"


def test_the_readme_names_only_what_exists() -> None:
    for row in README.split("| patterns |")[1].splitlines()[:1]:
        for name in row.replace("`", " ").split():
            if name.replace("_", "").isalpha() and name.islower() and "_" in name:
                assert hasattr(ga, name), name


def test_the_test_extra_has_the_tested_pins() -> None:
    with open(Path(__file__).resolve().parents[1] / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    assert set(extras["tested"]) < set(extras["test"])
    assert all("==" in pin for pin in extras["test"])
    free = {d.split(">")[0].lower() for d in project["dependencies"]}
    assert free == {d.split("==")[0].lower() for d in extras["tested"]}
