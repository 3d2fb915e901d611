"""Text as characters: where it comes from, its vocabulary, its windows.  UTF-8 always, whatever the locale."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from graphattn.nearest import nearest

# name -> (address, sha256, length in bytes)
DATASETS = {
    "shakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        1_115_394,
    )
}
# bytes of text that are read into memory
MAX_TEXT = 2**30


def read_text(paths: Sequence[str] = (), dataset: str = "") -> tuple[str, str]:
    """`(text, where it is from)`: files and folders, a named data set, or by default Python's own help topics.

    Raises:
        ValueError: missing, empty, not UTF-8, or binary; the message names the file and the byte.
    """
    if paths:
        files = [file for path in paths for file in _files(Path(path))]
        return "".join(_read(file) for file in files), ", ".join(str(p) for p in paths)
    if dataset:
        return _read(fetch(dataset)), dataset
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n", "pydoc_data.topics"


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(p for p in path.rglob("*.txt") if p.is_file())
        if not files:
            raise ValueError(f"{path} has no .txt file in it")
        return files
    if not path.exists():
        raise ValueError(f"{path} does not exist: --text needs a UTF-8 file or a folder of .txt files")
    return [path]


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_TEXT:
            raise ValueError(f"{path} has {size:,} bytes, at most {MAX_TEXT:,} are read")
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror or error}") from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {error.start}") from None
    zero = text.find("\0")
    if zero >= 0:
        raise ValueError(f"{path} looks binary: a NUL character at offset {zero}")
    if not text:
        raise ValueError(f"{path} is empty")
    return text.removeprefix("\ufeff")


def fetch(dataset: str) -> Path:
    """The file of a named data set, downloaded once into the user's cache and checked against its sha256.

    Raises:
        ValueError: unknown, not downloadable (says which file to put where), or another content.
    """
    if dataset not in DATASETS:
        near = nearest(dataset, DATASETS)
        raise ValueError(f"there is no dataset {dataset!r}{near}; known are {', '.join(DATASETS)}")
    import pooch

    url, sha256, size = DATASETS[dataset]
    folder = Path(pooch.os_cache("graphattn"))
    file = folder / f"{dataset}.txt"
    if file.exists():
        if _sha256(file) == sha256:
            return file
        raise ValueError(f"{file} is not the {dataset} text (its sha256 is another): delete it or replace it by {url}")
    log = pooch.get_logger()
    level = log.level
    log.setLevel("ERROR")
    try:
        download = pooch.HTTPDownloader(timeout=20)
        pooch.retrieve(url, known_hash=f"sha256:{sha256}", fname=file.name, path=folder, downloader=download)
    except Exception as error:  # requests, urllib3 and pooch raise their own kinds
        reason = "another content arrived" if "hash" in str(error) else f"{type(error).__name__}"
        raise ValueError(
            f"{dataset} could not be downloaded ({reason}): put {url} ({size:,} bytes, sha256 {sha256[:12]}...) "
            f"at {file}, or give a text of your own with --text"
        ) from None
    finally:
        log.setLevel(level)
    return file


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ---------------------------------------------------------------------- characters


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


class Vocabulary:
    """The characters a model knows, sorted by code point; a character's id is its place."""

    def __init__(self, characters: str):
        if not characters or list(characters) != sorted(set(characters)):
            raise ValueError("a vocabulary is at least one character, sorted and without repeats")
        self.characters = characters
        self._sorted = _codes(characters)

    @classmethod
    def of(cls, text: str) -> Vocabulary:
        if not text:
            raise ValueError("the text is empty")
        return cls(np.unique(_codes(text)).astype("<u4").tobytes().decode("utf-32-le"))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """`(len(text),)` int64 ids, or a ValueError naming the first character that has none."""
        if not text:
            return torch.empty(0, dtype=torch.int64)
        try:
            codes = _codes(text)
        except UnicodeEncodeError as error:
            raise ValueError(f"character {error.start + 1} of the text is a lone surrogate, not text") from None
        ids = np.searchsorted(self._sorted, codes).clip(max=len(self) - 1)
        strange = self._sorted[ids] != codes
        if strange.any():
            at = int(strange.argmax())
            raise ValueError(
                f"character {text[at]!r} (at {at + 1}) is not one of the {len(self)} the model knows: "
                f"{shown(self.characters)}"
            )
        return torch.from_numpy(ids.astype(np.int64))

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        ids = torch.as_tensor(ids, dtype=torch.int64).reshape(-1)
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= len(self)):
            raise ValueError(f"ids must be in [0, {len(self)}), got {int(ids.min())}..{int(ids.max())}")
        return self._sorted[ids.cpu().numpy()].astype("<u4").tobytes().decode("utf-32-le")


def shown(characters: str, most: int = 100) -> str:
    """Characters as they can stand on one line."""
    text = "".join(characters[:most])
    return repr(text) + ("..." if len(characters) > most else "")


# ---------------------------------------------------------------------- windows


@dataclass(frozen=True)
class Windows:
    """Training and held-out tokens, cut into windows of `block` inputs and their next characters."""

    train: Tensor
    held_out: Tensor
    block: int

    @classmethod
    def split(cls, tokens: Tensor, block: int, holdout: float) -> Windows:
        """The last `holdout` of the tokens is held out; both parts must have a window, `block + 1` tokens."""
        n = len(tokens) if holdout == 0 else int(len(tokens) * (1 - holdout))
        if n < block + 1:
            whole = f" of the text's {len(tokens)}" if n != len(tokens) else ""
            raise ValueError(
                f"the text to train on has {n} characters{whole}, a window of block {block} needs {block + 1}: "
                "give a longer text or a smaller --block"
            )
        if holdout and len(tokens) - n < block + 1:
            raise ValueError(
                f"the held-out part has {len(tokens) - n} of the text's {len(tokens)} characters, a window of block "
                f"{block} needs {block + 1}: give a longer text, a smaller --block, or --holdout 0"
            )
        return cls(tokens[:n], tokens[n:], block)

    def starts(self, seed: int, step: int, batch: int) -> Tensor:
        """`(batch,)` first positions of a step's windows, from (seed, step) alone, so resuming repeats nothing."""
        generator = torch.Generator().manual_seed(mix(seed, "batch", step))
        return torch.randint(len(self.train) - self.block, (batch,), generator=generator)

    def batch(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """`(inputs, targets)`, each `(len(starts), block)` int64; target i is the character after input i."""
        both = self.train[starts[:, None] + torch.arange(self.block + 1)].long()
        return both[:, :-1], both[:, 1:]

    def evaluation(self, most: int = 0) -> tuple[Tensor, Tensor]:
        """`(inputs, targets)` of the non-overlapping held-out windows: all, or `most` of them evenly spread."""
        n = max(0, (len(self.held_out) - 1) // self.block)
        first = torch.arange(n)
        if most and n > most:
            first = torch.arange(most) * n // most
        both = self.held_out[first[:, None] * self.block + torch.arange(self.block + 1)].long()
        return both[:, :-1], both[:, 1:]


def mix(seed: int, *words: object) -> int:
    """63 bits from a seed and what they are for: independent streams, the same on every platform."""
    text = ":".join(str(w) for w in (seed, *words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
