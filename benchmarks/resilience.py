"""Can a training run be lost or abused?  Kills, damage, full disks, nonsense, counted; exits with 1 if one got through.

python benchmarks/resilience.py [--only kills damage disk expressions processes]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TEXT = "to be, or not to be: that is the question. " * 200
MODEL = "--layers 2 --heads 2 --width 32 --block 16 --batch 4 --eval-every 20 --save-every 10 --dropout 0.2 --sample 50"


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "graphattn.cli", *args]


def environment() -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return os.environ | own


def contents(run: Path) -> dict[str, bytes]:
    """Everything that must not depend on interruptions: not the seconds it took, nor their checksum."""
    return {p.name: p.read_bytes() for p in run.iterdir() if p.name not in ("summary.json", "manifest.json")}


def kills(folder: Path, sigkills: int = 20, sigterms: int = 10, steps: int = 400) -> list[str]:
    """One run per signal, at a random moment after its folder exists, then `--resume` to the end."""
    from graphattn.checkpoint import MANIFEST, Run

    text = folder / "text.txt"
    text.write_text(TEXT)
    start = ["train", "--text", str(text), *MODEL.split(), "--steps", str(steps), "--quiet"]
    whole = folder / "whole"
    subprocess.run(command(*start, "--out", str(whole)), env=environment(), check=True, stdout=subprocess.DEVNULL)
    seconds = Run.open(whole).read_json("summary.json")["seconds"]
    rng, bad, died_at = random.Random(0), [], []
    for n in range(sigkills + sigterms):
        number = signal.SIGKILL if n < sigkills else signal.SIGTERM
        out = folder / f"run-{n}"
        process = subprocess.Popen(command(*start, "--out", str(out)), env=environment(), stdout=subprocess.DEVNULL)
        while not (out / MANIFEST).exists() and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.random() * seconds)
        process.send_signal(number)
        code = process.wait()
        name = f"{number.name} {n}"
        if code not in (-number, 128 + number, 0):
            bad.append(f"{name}: exit code {code}")
        try:
            died_at.append(Run.open(out).step)
        except ValueError as error:
            bad.append(f"{name}: {error}")
        done = subprocess.run(command("train", "--resume", str(out), "--quiet"), env=environment(), capture_output=True)
        if done.returncode:
            bad.append(f"{name}: resume says {done.stderr.decode().strip()}")
            continue
        logged = [m["step"] for m in Run.open(out).metrics()]
        if logged != list(range(1, steps + 1)):
            bad.append(f"{name}: steps are logged {len(logged)} times")
        if contents(out) != contents(whole):
            bad.append(f"{name}: differs from the run never stopped")
        stray = {p.name for p in out.iterdir()} - set(Run.open(out).files) - {MANIFEST}
        if stray:
            bad.append(f"{name}: leaves {stray}")
        shutil.rmtree(out)
    print(f"  {sigkills} SIGKILL and {sigterms} SIGTERM, last checkpoints at steps {sorted(died_at)}")
    return bad


def damage(folder: Path, flips: int = 300, cuts: int = 100) -> list[str]:
    """Flipped bits and truncations in any file of a run: refused by name, in one line, within two seconds."""
    from tests.test_checkpoint import check_damage

    out = folder / "run"
    text = folder / "text.txt"
    text.write_text(TEXT)
    train = ["train", "--text", str(text), *MODEL.split(), "--steps", "40", "--out", str(out), "--quiet"]
    subprocess.run(command(*train), env=environment(), check=True, stdout=subprocess.DEVNULL)
    try:
        check_damage(out, flips, cuts)
    except AssertionError as error:
        return [f"not refused as it should be: {error}"]
    print(f"  {flips} flipped bits, {cuts} truncations refused by name")
    # the same through the command line: wall-clock of the whole process
    path = sorted(out.glob("weights-*"))[-1]
    raw = path.read_bytes()
    path.write_bytes(raw[:100] + bytes([raw[100] ^ 1]) + raw[101:])
    began = time.perf_counter()
    done = subprocess.run(command("sample", str(out)), env=environment(), capture_output=True, text=True)
    seconds = time.perf_counter() - began
    print(f"  graphattn sample refuses after {seconds:.2f} s: {done.stderr.strip()}")
    right = done.returncode and path.name in done.stderr and done.stderr.count("\n") == 1 and seconds < 2
    return [] if right else ["graphattn sample did not refuse in one line within 2 s"]


def disk(folder: Path) -> list[str]:
    """Train on ever larger tiny disks, so that it fills up at every write in turn."""
    from graphattn import cli
    from graphattn.checkpoint import MANIFEST, Run
    from graphattn.load import load

    text = folder / "text.txt"
    text.write_text(TEXT)
    place = folder / "disk"
    place.mkdir()
    bad, failed_at, sizes, finished = [], set(), 0, False
    size = 16
    while not finished and size < 4096:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(place)], capture_output=True
        )
        if mounted.returncode:
            print("  skipped: mounting a tmpfs needs privileges this process does not have")
            return []
        try:
            out, err = place / "run", io.StringIO()
            with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
                args = [*MODEL.split(), "--steps", "60", "--out", str(out), "--quiet"]
                code = cli.main(["train", "--text", str(text), *args])
            sizes += 1
            line = err.getvalue()
            finished = code == 0
            if not finished:
                failed_at.add(line.split(" can't be ")[0].rsplit("/", 1)[-1])
                if "No space left" not in line or line.count("\n") != 1:
                    bad.append(f"{size} KiB: says {line!r}")
            if (out / MANIFEST).exists():
                load(out, which="last")
                load(out)
                stray = {p.name for p in out.iterdir()} - set(Run.open(out).files) - {MANIFEST}
                if stray:
                    bad.append(f"{size} KiB: leaves {stray}")
            elif out.exists():
                bad.append(f"{size} KiB: leaves a folder without a run")
        except Exception as error:
            bad.append(f"{size} KiB: {type(error).__name__}: {error}")
        finally:
            subprocess.run(["umount", str(place)], check=True)
        size += 8
    print(
        f"  {sizes} disks, full while writing {', '.join(sorted(failed_at))}; then one that is large enough: {finished}"
    )
    return bad if finished else [*bad, "no disk was large enough"]


def expressions(folder: Path, count: int = 100_000) -> list[str]:
    """Random texts give a graph or the parser's own error."""
    from tests.test_parse import check_random_texts

    try:
        graphs, refused = check_random_texts(count, seed=1)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    print(f"  {count:,} expressions: {graphs:,} graphs, {refused:,} refused")
    return []


def processes(folder: Path) -> list[str]:
    """torchrun with two processes on loopback against one, 50 steps of the same global batch."""
    from graphattn.checkpoint import Run

    text = folder / "text.txt"
    text.write_text(TEXT)
    args = ["train", "--text", str(text), *MODEL.replace("--dropout 0.2", "").split(), "--steps", "50", "--quiet"]
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    two = [*runner, "-m", "graphattn.cli", *args, "--out", str(folder / "two")]
    subprocess.run(two, env=environment() | {"GLOO_SOCKET_IFNAME": "lo"}, check=True, capture_output=True)
    subprocess.run(command(*args, "--out", str(folder / "one")), env=environment(), check=True, capture_output=True)
    one, both = (Run.open(folder / n).metrics() for n in ("one", "two"))
    worst = max(abs(a["loss"] - b["loss"]) for a, b in zip(one, both, strict=True))
    print(f"  two processes against one, {len(both)} steps: losses differ by at most {worst:.1e}")
    return [] if worst < 1e-5 else [f"losses differ by {worst}"]


CHECKS: dict[str, Callable[[Path], list[str]]] = {
    "kills": kills,
    "damage": damage,
    "disk": disk,
    "expressions": expressions,
    "processes": processes,
}


def main(only: list[str] | None = None) -> int:
    wrong = 0
    for name in only or list(CHECKS):
        began = time.perf_counter()
        print(f"{name}: {(CHECKS[name].__doc__ or '').splitlines()[0]}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            problems = CHECKS[name](Path(folder))
        for problem in problems:
            print(f"  WRONG: {problem}")
        wrong += len(problems)
        print(
            f"  {'ok' if not problems else f'{len(problems)} wrong'}, {time.perf_counter() - began:.0f} s", flush=True
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(CHECKS))
    sys.exit(main(parser.parse_args().only))
