"""Builds the native engine with whatever C++17 compiler is there; without one the package installs all the same.

`pip install .` compiles; `python setup.py build_native` compiles next to the sources, for a checkout not installed.
The library has a C ABI and is loaded with ctypes: nothing of torch or Python is compiled in.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.build_py import build_py

SOURCES = Path(__file__).resolve().parent / "graphattn" / "backends" / "_native"
LIBRARY = "libgraphattn.so"
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"),
]
# namespace -> flags: the same source once for each instruction set, chosen when the library is loaded
VARIANTS = {"base": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    # the baseline is there for the rare machine without AVX2: half the time to compile
    VARIANTS = {"base": ["-O2"], "v3": ["-march=x86-64-v3"], "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"]}


def compile_library(into: Path) -> Path:
    """Compile the library into a directory and return its path.

    Raises:
        FileNotFoundError: no compiler.  subprocess.CalledProcessError: it failed on the baseline.
    """
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    found = [name for name in names if shutil.which(name.split()[0])]
    if not found:
        raise FileNotFoundError(f"no C++ compiler: looked for {', '.join(names)}")
    compiler = found[0].split()
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:

        def build(job: tuple[str, str, list[str]]) -> str:
            source, name, extra = job
            target = str(Path(scratch) / f"{name}.o")
            subprocess.run([*compiler, *FLAGS, *extra, "-c", str(SOURCES / source), "-o", target], check=True)
            return target

        jobs = [("kernels.cpp", name, [*extra, f"-DGA_NS={name}"]) for name, extra in VARIANTS.items()]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            built = list(pool.map(_quiet(build), jobs))
        usable = {name for (_, name, _), target in zip(jobs, built, strict=True) if target}
        if "base" not in usable:
            build(jobs[0])  # once more, to raise what it says
        defines = [f"-DGA_{name.upper()}" for name in sorted(usable - {"base"})]
        objects = [target for target in built if target] + [build(("main.cpp", "main", defines))]
        half_done = into / f"{LIBRARY}.{os.getpid()}"
        subprocess.run([*compiler, "-shared", "-pthread", *objects, "-o", str(half_done)], check=True)
        os.replace(half_done, into / LIBRARY)
    return into / LIBRARY


def _quiet(build):
    def attempt(job):
        try:
            return build(job)
        except subprocess.CalledProcessError:
            return None

    return attempt


def try_compile(into: Path) -> None:
    try:
        path = compile_library(into)
        print(f"graphattn: built {path.name} for {', '.join(VARIANTS)}", file=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"graphattn: installing without the native engine: {error}", file=sys.stderr)


class BuildPy(build_py):
    """Copies the package, then compiles into the copy (or in place for an editable install)."""

    def run(self) -> None:
        super().run()
        try_compile(SOURCES if self.editable_mode else Path(self.build_lib) / "graphattn" / "backends" / "_native")


class BuildNative(Command):
    """Compiles the library next to its sources."""

    description = "compile the native engine in place"
    user_options: list[tuple[str, str | None, str]] = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        compile_library(SOURCES)


class BinaryDistribution(Distribution):
    """The wheel holds machine code where a compiler was found, so it is for one platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildPy, "build_native": BuildNative}, distclass=BinaryDistribution)
