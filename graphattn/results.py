"""Figures of many runs in one JSON file, so that a long series resumes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def read_runs(
    file: Path, recipe: dict[str, Any], defaults: dict[str, Any] | None = None, data: list[int] | None = None
) -> dict[str, dict[str, Any]]:
    """The runs kept in a JSON file, none if it is not there; ValueError if they are of another recipe or other data.

    An option newer than the file had its default then.  data: sizes that tell one set from another.
    """
    if not file.exists():
        return {}
    kept = json.loads(file.read_text())
    was = (defaults or {}) | kept["recipe"]
    if was != recipe:
        differ = sorted(k for k in recipe | was if was.get(k) != recipe.get(k))
        told = ", ".join(f"{k} ({was.get(k)} there, {recipe.get(k)} here)" for k in differ)
        raise ValueError(f"{file} holds runs of a recipe with another {told}: use another folder (--out)")
    if data is not None and kept.get("data", data) != data:
        raise ValueError(
            f"{file} holds runs on other data, of sizes {kept['data']} not {data}: use another folder (--out)"
        )
    return kept["runs"]


def write_runs(file: Path, content: dict[str, Any]) -> None:
    """Whole or not at all: written aside, then renamed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(f".{os.getpid()}.part")
    with aside.open("w") as f:
        json.dump(content, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    os.replace(aside, file)
