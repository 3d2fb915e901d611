"""A run folder that can't be half written, silently altered, or made to execute anything.

A checkpoint is new files under new names, flushed, then one atomic replacement of `manifest.json`, which lists every
file with its size and sha256; only then are the old files removed.  Whatever moment a process dies at, the manifest
names a complete checkpoint.  Tensors are safetensors; nothing is ever unpickled.  Checksums find damage, not forgery:
what a forged file could ask for (paths, sizes, shapes) is checked as well before anything is read or allocated.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from graphattn.config import TrainConfig

if TYPE_CHECKING:
    from torch import Tensor

    from graphattn.data import Vocabulary
    from graphattn.graph import Graph

T = TypeVar("T")
FORMAT = "graphattn run 1"
MANIFEST = "manifest.json"
# largest file of each kind that is read, in bytes; what has no entry here holds tensors or pictures
_MAX_BYTES = {MANIFEST: 2**20, "config.json": 2**20, "vocab.json": 2**24, "text.json": 2**20, "summary.json": 2**20}
_MAX_TENSORS = 2**36
_MAX_HEADER = 2**24
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z")
# names this module writes: what a dead process may have left behind
_OURS = re.compile(
    r"((weights|optimizer)-\d+\.safetensors|graphs\.safetensors|(config|vocab|text|summary|manifest)\.json"
    r"|metrics\.jsonl|text\.txt|sample\.txt|loss\.png|graph(-\d+)?\.png)(\.tmp)?\Z"
)
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class RunError(ValueError):
    """A run folder that is missing, damaged, in use or can't be written; the message names the file."""


class Run:
    """One run folder: made by `create`, reached by `open`; `files` maps each name to its size and sha256."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder = folder
        self.manifest = manifest
        self._lock: int | None = None
        self._metrics: Any = None
        self._metrics_hash = hashlib.sha256()
        self._metrics_bytes = 0

    # ------------------------------------------------------------------ facts

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        return self.manifest["files"]

    @property
    def step(self) -> int:
        """Optimiser steps taken by the last checkpoint."""
        return self.manifest["step"]

    @property
    def finished(self) -> bool:
        return self.manifest["finished"]

    @property
    def best(self) -> dict[str, Any] | None:
        """`{"step", "val_loss"}` of the best evaluation so far."""
        return self.manifest["best"]

    # ------------------------------------------------------------------ making and opening

    @classmethod
    def create(cls, folder: str | Path, steps: int | None = None) -> Run:
        """An empty run of `steps` steps in a new or empty folder, locked for this process.

        It exists once `commit` was called.
        """
        folder = Path(folder)
        if (folder / MANIFEST).exists():
            raise RunError(f"{folder} holds a run already: go on with --resume {folder}, or choose another --out")
        if folder.exists():
            if not folder.is_dir():
                raise RunError(f"{folder} exists and is no folder: choose another --out")
            foreign = sorted(p.name for p in folder.iterdir() if not _OURS.match(p.name))
            if foreign:
                raise RunError(f"{folder} holds other files ({foreign[0]}): choose another --out")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{folder} can't be made: {error.strerror or error}") from None
        empty = {"format": FORMAT, "step": 0, "steps": steps, "finished": False, "best": None, "roles": {}, "files": {}}
        run = cls(folder, empty)
        run.lock()
        run._sweep()
        run._start_metrics()
        return run

    @classmethod
    def open(cls, folder: str | Path, *, write: bool = False) -> Run:
        """A run that is there, every file of it checked against the manifest.

        `write=True` also locks it, removes what a dead process left and cuts the log back to the checkpoint.

        Raises:
            RunError: missing, damaged, or in use by another process; the message names the file.
        """
        if not write:
            return cls.reading(folder, lambda run: run)
        run = cls(_present(folder), {})
        run.lock()
        try:
            run.manifest = _read_manifest(run.folder)
            run._check_files()
            run._sweep()
            run._start_metrics()
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def reading(cls, folder: str | Path, use: Callable[[Run], T]) -> T:
        """`use` of a run that another process may be writing: begun anew if its next checkpoint came in between."""
        folder = _present(folder)
        while True:
            run = cls(folder, _read_manifest(folder))
            try:
                run._check_files()
                return use(run)
            except RunError:
                if _read_manifest(folder) == run.manifest:
                    raise

    def lock(self) -> None:
        """Keep other writers out for as long as this process lives; a lock on the folder itself leaves no file."""
        try:
            import fcntl
        except ImportError:  # a platform without it
            return
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise RunError(f"{self.folder} is in use by another process") from None

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------ reading

    def _check_files(self) -> None:
        """Sizes of all, then headers of tensors, then checksums: the cheap refusals first."""
        for name, entry in self.files.items():
            path = self.folder / name
            try:
                info = path.lstat()
            except OSError as error:
                raise RunError(f"{path} is missing ({error.strerror}), but {MANIFEST} lists it") from None
            if not stat.S_ISREG(info.st_mode):
                raise RunError(f"{path} is no plain file, as {MANIFEST} says it is")
            open_log = name == "metrics.jsonl" and not self.finished
            if info.st_size != entry["bytes"] and not (open_log and info.st_size > entry["bytes"]):
                raise RunError(f"{path} is damaged: it has {info.st_size:,} bytes, {MANIFEST} says {entry['bytes']:,}")
            most = _MAX_BYTES.get(name, _MAX_TENSORS)
            if entry["bytes"] > most:
                raise RunError(f"{path} has {entry['bytes']:,} bytes, at most {most:,} are read")
        for name in self.files:
            if name.endswith(".safetensors"):
                read_header(self.folder / name)
        for name, entry in self.files.items():
            path = self.folder / name
            digest, left = hashlib.sha256(), entry["bytes"]
            with _named(path, "read"), path.open("rb") as stream:
                while left and (piece := stream.read(min(left, 2**22))):
                    digest.update(piece)
                    left -= len(piece)
            if left or digest.hexdigest() != entry["sha256"]:
                raise RunError(f"{path} is damaged: its sha256 is not the one in {MANIFEST}")

    def read(self, name: str) -> bytes:
        """The bytes of one file, exactly those the manifest vouches for."""
        entry, path = self.files.get(name), self.folder / name
        if entry is None:
            raise RunError(f"{path} is not part of the run: {MANIFEST} does not list it")
        with _named(path, "read"), path.open("rb") as stream:
            raw = stream.read(entry["bytes"])
        if len(raw) != entry["bytes"] or hashlib.sha256(raw).hexdigest() != entry["sha256"]:
            raise RunError(f"{path} is damaged: its sha256 is not the one in {MANIFEST}")
        return raw

    def read_json(self, name: str) -> Any:
        try:
            return json.loads(self.read(name))
        except (ValueError, RecursionError) as error:
            if isinstance(error, RunError):
                raise
            raise RunError(f"{self.folder / name} is no JSON: {error}") from None

    def config(self) -> TrainConfig:
        """As the run began, but for the number of steps if it was changed on the way."""
        values = self.read_json("config.json")
        try:
            if not isinstance(values, dict):
                raise ValueError("it is no mapping")
            config = TrainConfig.from_dict(values)
            return config if self.manifest["steps"] is None else config.replace(steps=self.manifest["steps"]).check()
        except (ValueError, TypeError) as error:
            raise RunError(f"{self.folder / 'config.json'} is no configuration: {error}") from None

    def vocabulary(self) -> Vocabulary:
        from graphattn.data import Vocabulary

        values = self.read_json("vocab.json")
        try:
            return Vocabulary(values["characters"])
        except (ValueError, TypeError, KeyError, UnicodeError) as error:
            raise RunError(f"{self.folder / 'vocab.json'} is no vocabulary: {error}") from None

    def graphs(self) -> list[Graph]:
        """The graphs the run was trained on, from their runs."""
        from graphattn.graph import Graph

        name = "graphs.safetensors"
        tensors = self.tensors_of(name)
        path = self.folder / name
        try:
            count = len(tensors) // 4
            out = []
            for i in range(count):
                indptr, start, stop, shape = (
                    tensors.pop(f"{i}.{part}") for part in ("indptr", "start", "stop", "shape")
                )
                out.append(Graph.from_runs(indptr, start, stop, shape.tolist()))
            if tensors or not out:
                raise ValueError("it does not hold indptr, start, stop and shape of each graph")
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(f"{path} holds no graphs: {error}") from None
        return out

    def tensors(self, role: str) -> dict[str, Tensor]:
        """The tensors of `weights`, `optimizer` or `best` in the last checkpoint."""
        name = self.manifest["roles"].get(role)
        if name is None:
            raise RunError(f"{self.folder} has no {role}")
        return self.tensors_of(name)

    def tensors_of(self, name: str) -> dict[str, Tensor]:
        from safetensors.torch import load

        path = self.folder / name
        read_header(path)
        raw = self.read(name)
        try:
            return load(raw)
        except Exception as error:  # safetensors has its own class of errors
            raise RunError(f"{path} is no safetensors file: {error}") from None

    def metrics(self) -> list[dict[str, Any]]:
        """One mapping per step of the last checkpoint."""
        return [json.loads(line) for line in self.read("metrics.jsonl").splitlines()]

    # ------------------------------------------------------------------ writing

    def put(self, name: str, raw: bytes) -> None:
        """Write one file aside and put it in place; it joins the run at the next `commit`."""
        write_atomic(self.folder / name, raw)
        self.files[name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}

    def put_json(self, name: str, value: Any) -> None:
        self.put(name, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())

    def put_graphs(self, graphs: Sequence[Graph]) -> None:
        import torch
        from safetensors.torch import save

        tensors: dict[str, torch.Tensor] = {}
        for i, g in enumerate(graphs):
            tensors |= {f"{i}.indptr": g.indptr, f"{i}.start": g.start, f"{i}.stop": g.stop}
            tensors[f"{i}.shape"] = torch.tensor(g.shape)
        self.put("graphs.safetensors", save({k: x.cpu().clone() for k, x in tensors.items()}))

    def log(self, record: dict[str, Any]) -> None:
        """Append one step to `metrics.jsonl`; lines past the last checkpoint are dropped on resuming."""
        line = (json.dumps(record) + "\n").encode()
        path = self.folder / "metrics.jsonl"
        with _named(path):
            left = memoryview(line)
            while left:  # a full disk takes a part first, and says why at the rest
                left = left[self._metrics.write(left) :]
        self._metrics_hash.update(line)
        self._metrics_bytes += len(line)

    def save(
        self, step: int, weights: dict[str, Tensor], optimizer: dict[str, Tensor], best: dict[str, Any] | None = None
    ) -> None:
        """A checkpoint, in whole or not at all.  `best` is `{"step", "val_loss"}` if these weights are the best so far.

        Raises:
            RunError: the disk is full or can't be written; the previous checkpoint is untouched.
        """
        from safetensors.torch import save

        before = json.loads(json.dumps(self.manifest))
        try:
            roles = dict(self.manifest["roles"])
            for role, tensors in (("weights", weights), ("optimizer", optimizer)):
                roles[role] = f"{role}-{step}.safetensors"
                self.put(roles[role], save(tensors))
            if best is not None:  # older best weights keep their file until then
                self.manifest["best"] = best
                roles["best"] = roles["weights"]
            self.manifest |= {"roles": roles, "step": step}
            self.commit()
        except BaseException:
            self._undo(before)
            raise

    def commit(self, finished: bool = False) -> None:
        """Make the manifest name exactly the current files, atomically; then remove what it no longer names."""
        with _named(self.folder / "metrics.jsonl"):
            os.fsync(self._metrics.fileno())
        kept = set(self.manifest["roles"].values())
        for name in [n for n in self.files if re.match(r"(weights|optimizer)-", n) and n not in kept]:
            del self.files[name]
        self.files["metrics.jsonl"] = {"bytes": self._metrics_bytes, "sha256": self._metrics_hash.hexdigest()}
        self.manifest["finished"] = finished
        write_atomic(self.folder / MANIFEST, _dump_manifest(self.manifest))
        self._sweep()

    def reopen(self) -> None:
        """Take back what belongs to a finished run: the next `commit` is that of a run going on."""
        for name in [n for n in self.files if re.match(r"summary\.json|sample\.txt|.*\.png", n)]:
            del self.files[name]

    def discard(self) -> None:
        """Remove a run that could not be begun, and its folder if nothing else is in it."""
        self.close()
        self.manifest["files"] = {}
        with contextlib.suppress(OSError):
            self._sweep()
            for name in (MANIFEST, "metrics.jsonl"):
                (self.folder / name).unlink(missing_ok=True)
            self.folder.rmdir()

    def _undo(self, manifest: dict[str, Any]) -> None:
        self.manifest = manifest
        with contextlib.suppress(OSError):
            self._sweep()

    def _sweep(self) -> None:
        """Remove files of ours that the manifest does not name; the log and files of others stay."""
        for path in self.folder.iterdir():
            if _OURS.match(path.name) and path.name not in self.files and path.name not in (MANIFEST, "metrics.jsonl"):
                path.unlink(missing_ok=True)

    def _start_metrics(self) -> None:
        path = self.folder / "metrics.jsonl"
        size = self.files.get("metrics.jsonl", {"bytes": 0})["bytes"]
        raw = self.read("metrics.jsonl") if "metrics.jsonl" in self.files else b""
        with _named(path):
            # unbuffered: a line is whole in the file, or the write says so
            self._metrics = path.open("ab", buffering=0)
            self._metrics.truncate(size)
        self._metrics_hash.update(raw)
        self._metrics_bytes = size


# ---------------------------------------------------------------------- bytes on disk


def _present(folder: str | Path) -> Path:
    folder = Path(folder)
    if not folder.exists():
        raise RunError(f"{folder} does not exist: a run is a folder that `graphattn train` wrote")
    if not folder.is_dir():
        raise RunError(f"{folder} is no folder: a run is a folder that `graphattn train` wrote")
    return folder


@contextlib.contextmanager
def _named(path: Path, done: str = "written") -> Iterator[None]:
    """Failures of the disk as one line that names the file."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} can't be {done}: {error.strerror or error}") from None


def write_atomic(path: Path, raw: bytes) -> None:
    """Replace `path` by `raw`, flushed to the disk, or leave it as it was."""
    aside = path.with_name(path.name + ".tmp")
    with _named(path):
        try:
            with aside.open("wb") as stream:
                stream.write(raw)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(aside, path)
            _flush_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _dump_manifest(manifest: dict[str, Any]) -> bytes:
    body = {k: v for k, v in manifest.items() if k != "self"}
    own = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps(body | {"self": own}, indent=1, sort_keys=True) + "\n").encode()


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, its own checksum and every field checked; nothing else of the folder is touched."""
    path = folder / MANIFEST
    if not path.exists() and not path.is_symlink():
        raise RunError(f"{folder} holds no run: it has no {MANIFEST}")
    if path.is_symlink() or not path.is_file():
        raise RunError(f"{path} is no plain file")
    size = path.stat().st_size
    if size > _MAX_BYTES[MANIFEST]:
        raise RunError(f"{path} has {size:,} bytes, at most {_MAX_BYTES[MANIFEST]:,} are read")
    raw = path.read_bytes()
    try:
        manifest = json.loads(raw)
    except (ValueError, RecursionError):
        raise RunError(f"{path} is damaged: it is no JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise RunError(f"{path} is damaged or of another version: it does not say {FORMAT!r}")
    try:
        sound = _dump_manifest(manifest) == raw
    except (ValueError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise RunError(f"{path} is damaged: its own checksum does not match")
    problem = _manifest_problem(manifest)
    if problem:
        raise RunError(f"{path} is refused: {problem}")
    return manifest


def _manifest_problem(manifest: dict[str, Any]) -> str | None:
    if set(manifest) != {"format", "step", "steps", "finished", "best", "roles", "files", "self"}:
        return "it does not have the fields of a manifest"
    if not _whole(manifest["step"]) or not (manifest["steps"] is None or _whole(manifest["steps"])):
        return "its step or steps is no whole number"
    if type(manifest["finished"]) is not bool:
        return "finished is neither true nor false"
    best = manifest["best"]
    if best is not None and not (
        isinstance(best, dict)
        and set(best) == {"step", "val_loss"}
        and _whole(best["step"])
        and isinstance(best["val_loss"], (int, float))
        and math.isfinite(best["val_loss"])
    ):
        return "its best is no step and finite loss"
    files, roles = manifest["files"], manifest["roles"]
    if not isinstance(files, dict) or not isinstance(roles, dict):
        return "files and roles must be mappings"
    for name, entry in files.items():
        if not _NAME.match(name) or name == MANIFEST:
            return f"the file name {name[:80]!r} leads outside the run"
        if not isinstance(entry, dict) or set(entry) != {"bytes", "sha256"} or not _whole(entry["bytes"]):
            return f"{name} has no size and sha256"
        if not isinstance(entry["sha256"], str) or not re.match(r"[0-9a-f]{64}\Z", entry["sha256"]):
            return f"{name} has no sha256"
    for role, name in roles.items():
        if role not in ("weights", "optimizer", "best") or name not in files or not str(name).endswith(".safetensors"):
            return f"its role {role[:80]!r} names no file of tensors"
    for name in ("config.json", "vocab.json", "graphs.safetensors", "metrics.jsonl"):
        if name not in files:
            return f"it does not list {name}"
    return None


def _whole(x: Any) -> bool:
    return type(x) is int and 0 <= x < 2**62


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor in a safetensors file, from its header alone.

    Raises:
        RunError: no such file, or one whose header asks for other bytes than the file has.
    """

    def refuse(why: str) -> RunError:
        return RunError(f"{path} is no safetensors file: {why}")

    with _named(path, "read"), path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise refuse(f"its header would have {length:,} bytes")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise refuse("its header is no JSON") from None
    if not isinstance(header, dict):
        raise refuse("its header is no mapping")
    header.pop("__metadata__", None)
    out, spans = {}, []
    for name, entry in header.items():
        try:
            dtype, shape, (low, high) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            fits = all(map(_whole, (*shape, low, high))) and high - low == math.prod(shape) * _ITEM_BYTES[dtype]
        except (TypeError, KeyError, ValueError):
            fits = False
        if not fits or len(shape) > 8:
            raise refuse(f"tensor {name[:80]!r} does not have the bytes of its shape")
        out[name] = (dtype, shape)
        spans.append((low, high))
    at = 0
    for low, high in sorted(spans):
        if low != at:
            raise refuse("its tensors overlap or leave gaps")
        at = high
    if at != size - 8 - length:
        raise refuse(f"its tensors need {at:,} bytes, it has {size - 8 - length:,}")
    return out
