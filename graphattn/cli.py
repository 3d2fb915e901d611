"""The command line: `graphattn train | sample | draw | audit | bench | nodes`.

Nothing heavy is imported before a command needs it.  What goes wrong is one line on stderr and an exit code that is
not 0: 2 for the command line itself, 1 for the rest, 130 or 143 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphattn.graph import Graph

USAGE = """\
usage: graphattn COMMAND [options]

An attention mask is a graph, and the graph is an input.

commands:
  train    train a character GPT on any graph, or go on with a run
  sample   continue a prompt with a trained model
  draw     draw a graph, or what a trained run attends to
  audit    say what a graph lets through: degrees, receptive fields, leak or not
  bench    time attention over a graph, against what else is installed
  nodes    train a node classifier on graph data (karate needs no files)

`graphattn COMMAND --help` lists the options.  Graphs are written as expressions:

  causal & band(16)                       who comes before, at most 16 back
  window(16) | causal & band(64) - band(48)
  prefix(16)    full    self_loops    @edges.npz

`~` binds tightest, then `-`, `&`, `^`, `|`; a pattern never takes the number of targets.
"""


class UsageError(ValueError):
    """A command line that can't be understood."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # UTF-8 whatever the locale
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if argv[0] in ("-V", "--version"):
        from graphattn import __version__

        print(f"graphattn {__version__}")
        return 0
    command = COMMANDS.get(argv[0])
    if command is None:
        from graphattn.nearest import nearest

        return _fail(
            f"there is no command {argv[0]!r}{nearest(argv[0], COMMANDS)}: use one of {', '.join(COMMANDS)}", 2
        )
    try:
        return command(argv[1:])
    except UsageError as error:
        return _fail(error, 2)
    except (ValueError, TypeError, ArithmeticError, OSError, MemoryError, RuntimeError) as error:
        if type(error).__name__ == "Elsewhere":  # another process says why
            return 1
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("stopped by Ctrl-C", 130)


def _fail(error: object, code: int) -> int:
    """One line; on a terminal an expression is shown with a caret under the character."""
    text = str(error) or type(error).__name__
    if hasattr(error, "line") and not sys.stderr.isatty():
        text = error.line
    if not hasattr(error, "line"):
        text = " ".join(text.split())
    print(f"graphattn: {text}", file=sys.stderr)
    return code


def _parser(command: str, text: str) -> Any:
    import argparse

    from jsonargparse import ArgumentParser

    class Formatter(argparse.HelpFormatter):
        """Defaults where there is one to tell; nothing about types, which the names and errors say."""

        def _get_help_string(self, action: argparse.Action) -> str:
            about, default = action.help or "", action.default
            silent = default is None or default is False or default in ("", argparse.SUPPRESS)
            told = silent or action.required or "default" in about
            return about if told else f"{about} (default: {str(default).replace('%', '%%')})"

    return ArgumentParser(prog=f"graphattn {command}", description=text, exit_on_error=False, formatter_class=Formatter)


def _parse(parser: Any, argv: Sequence[str]) -> dict[str, Any]:
    """What was given, by option; a mistake becomes a `UsageError`."""
    import argparse
    import re

    try:
        return parser.parse_args(list(argv)).as_dict()
    except argparse.ArgumentError as error:
        text = " ".join(str(error).split())
        wrong = re.search(r'key "(\w+)": Expected a <class \'(\w+)\'>\. Got value: (.*)', text)
        if wrong:
            kind = {"int": "an integer", "float": "a finite number"}.get(wrong[2], wrong[2])
            text = f"--{wrong[1].replace('_', '-')} must be {kind}, got {wrong[3]}"
        raise UsageError(f"{text} (see {parser.prog} --help)") from None


def _graphs(expressions: Sequence[str], size: int | tuple[int, int]) -> list[Graph]:
    from graphattn.parse import parse

    return [parse(e, size) for e in expressions]


# ---------------------------------------------------------------------- train


def train(argv: Sequence[str]) -> int:
    from dataclasses import fields
    from pathlib import Path

    from graphattn.config import PRESETS, TrainConfig, flag

    parser = _parser("train", "Train a character GPT.  Precedence: preset, then configuration file, then options.")
    parser.add_argument("--preset", choices=list(PRESETS), default="cpu", help="where the options start from")
    parser.add_argument("--config", type=str, help="YAML or JSON file of options, such as a run's config.json")
    parser.add_argument("--out", type=str, help="run folder to make (default: runs/1, runs/2, ...)")
    parser.add_argument("--resume", type=str, metavar="RUN", help="go on with this run; only --steps may go with it")
    parser.add_argument("--until", type=int, metavar="STEP", help="save and stop after this step, to go on later")
    parser.add_argument(
        "--quiet", action="store_true", help="no progress bar and no lines about the run, only its result"
    )
    names = []
    defaults = TrainConfig().as_dict()
    for f in fields(TrainConfig):
        names.append(f.name)
        shown = _shown(defaults[f.name])
        about = f.metadata["help"] + (f" (default: {shown})" if shown else "")
        if isinstance(defaults[f.name], bool):
            from jsonargparse import ActionYesNo

            parser.add_argument(f"--{flag(f.name)}", action=ActionYesNo(no_prefix="no-"), default=None, help=about)
        elif isinstance(defaults[f.name], list):
            parser.add_argument(f"--{flag(f.name)}", action="append", default=None, help=about, metavar="TEXT")
        else:
            kind = type(defaults[f.name])
            parser.add_argument(f"--{flag(f.name)}", type=kind, default=None, help=about)
    given = _parse(parser, argv)
    chosen = {n: given[n] for n in names if given[n] is not None}
    if given["resume"] is not None:
        from graphattn.checkpoint import Run

        other = sorted(set(chosen) - {"steps"}) + [n for n in ("config", "out") if given[n] is not None]
        if other:
            raise UsageError(
                f"--{flag(other[0])} can't be changed by --resume: a run goes on as it was, only --steps may"
            )
        Run.open(given["resume"])  # damage is found before torch is imported
    values = dict(PRESETS[given["preset"]])
    if given["config"] is not None:
        values |= _read_config(Path(given["config"]), names)
    config = TrainConfig.from_dict(values | chosen)

    import os

    # threads that spin while they wait fight over cores that others use
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from graphattn.checkpoint import Run
    from graphattn.train import resume as resume_run
    from graphattn.train import train as start_run

    loud = not given["quiet"]
    options = {"until": given["until"], "progress": loud, "say": _say if loud else None}
    if given["resume"] is not None:
        result = resume_run(given["resume"], steps=chosen.get("steps"), **options)
    else:
        result = start_run(given["out"] or _free_folder(), config, **options)
    if int(os.environ.get("RANK", 0)):
        return 0 if not result.stopped_by else 128 + result.stopped_by
    if not result.finished:
        print(f"stopped after step {result.step}; go on with: graphattn train --resume {result.folder}")
        return 128 + result.stopped_by if result.stopped_by else 0
    if result.val_loss is not None:
        print(f"held-out loss {result.val_loss:.4f} nats per character over all windows")
        best = Run.open(result.folder).read_json("summary.json").get("best")
        if best and best["step"] != result.step:
            print(f"of the best weights, after step {best['step']}, {best['all_windows']:.4f}")
    sample = Path(result.folder, "sample.txt")
    if loud and sample.exists():
        print(f"\n{sample.read_text(encoding='utf-8')}\n")
    print(f"run folder: {result.folder}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return "; ".join(value) if isinstance(value, list) else str(value)


def _free_folder() -> str:
    import os
    from pathlib import Path

    n = 1
    while Path("runs", str(n)).exists():
        n += 1
    # every process of torchrun must name the same folder, which the first one makes
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UsageError("with several processes --out must name the run folder")
    return f"runs/{n}"


def _read_config(path: Any, names: Sequence[str]) -> dict[str, Any]:
    import yaml

    if not path.is_file():
        raise UsageError(f"--config: {path} does not exist")
    if path.stat().st_size > 2**20:
        raise UsageError(f"--config: {path} is larger than a configuration, 1 MiB")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--config: {path} is no YAML or JSON: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"--config: {path} holds no options, such as `steps: 100`")
    values = {str(k).replace("-", "_"): v for k, v in values.items()}
    # YAML 1.1 reads 1e-3 as text
    for name, value in values.items():
        if isinstance(value, str) and name in names:
            values[name] = _number_if_wanted(name, value)
    return values


def _number_if_wanted(name: str, value: str) -> Any:
    from graphattn.config import TrainConfig

    if isinstance(getattr(TrainConfig(), name), float):
        try:
            return float(value)
        except ValueError:
            return value
    return value


# ---------------------------------------------------------------------- sample


def sample(argv: Sequence[str]) -> int:
    parser = _parser("sample", "Continue a prompt with a trained model.")
    parser.add_argument("run", type=str, help="folder that `graphattn train` wrote")
    parser.add_argument("--prompt", type=str, default="", help="text to continue (default: a line break)")
    parser.add_argument("--length", type=int, default=500, help="new characters")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely character")
    parser.add_argument("--top-k", type=int, help="draw from the k most likely")
    parser.add_argument("--top-p", type=float, help="draw from the fewest whose probability reaches p")
    parser.add_argument("--seed", type=int, help="of the draws (default: another one each time)")
    parser.add_argument("--stop", action="append", help="end before this text appears; may be repeated")
    parser.add_argument("--weights", choices=["best", "last"], default="best", help="which checkpoint")
    parser.add_argument("--graph", action="append", help="another graph than the run's; may be repeated, see train")
    parser.add_argument("--block", type=int, help="a shorter context than the run's")
    parser.add_argument("--device", type=str, default="cpu", help="cpu, cuda or auto")
    parser.add_argument("--no-cache", action="store_true", help="compute every character from its whole context")
    given = _parse(parser, argv)
    if given["length"] < 0:
        raise UsageError(f"--length must be at least 0, got {given['length']}")
    if given["seed"] is not None and not 0 <= given["seed"] < 2**63:
        raise UsageError(f"--seed must be in [0, 2**63), got {given['seed']}")

    from graphattn.checkpoint import Run

    Run.open(given["run"])  # damage is found before torch is imported

    import secrets

    from graphattn.distributed import choose_device
    from graphattn.generate import check_sampling, generate
    from graphattn.load import load
    from graphattn.report import first_prompt

    check_sampling(given["temperature"], given["top_k"], given["top_p"])
    device = choose_device(given["device"])
    loaded = load(given["run"], which=given["weights"], block=given["block"], device=str(device))
    vocabulary, graphs = loaded.vocabulary, loaded.graphs
    if given["graph"]:
        graphs = _graphs(given["graph"], loaded.model.config.block)
    try:
        prompt = vocabulary.encode(given["prompt"] or first_prompt(vocabulary))
    except ValueError as error:
        raise ValueError(f"--prompt: {error}") from None
    # a text to stop at that the model can't write never appears
    known = set(vocabulary.characters)
    stops = [s for s in given["stop"] or [] if s and set(s) <= known]
    printer = _Printer(vocabulary.decode, given["prompt"], stops)
    generate(
        loaded.model,
        graphs,
        prompt,
        given["length"],
        temperature=given["temperature"],
        top_k=given["top_k"],
        top_p=given["top_p"],
        seed=secrets.randbits(62) if given["seed"] is None else given["seed"],
        stop=[vocabulary.encode(s) for s in stops],
        cache=not given["no_cache"],
        say=lambda line: print(f"graphattn: {line}", file=sys.stderr),
        on_token=printer.take,
    )
    printer.end()
    return 0


class _Printer:
    """Characters as they come, holding back what may turn out to be the text to stop at."""

    def __init__(self, decode: Callable[[Any], str], prompt: str, stops: Sequence[str]):
        self.decode, self.stops = decode, stops
        self.keep = max((len(s) for s in stops), default=1) - 1
        self.text = ""
        print(prompt, end="", flush=True)

    def take(self, token: Any) -> None:
        self.text += self.decode(token)
        ready = len(self.text) - self.keep
        if ready > 0 and not any(s in self.text for s in self.stops):
            print(self.text[:ready], end="", flush=True)
            self.text = self.text[ready:]

    def end(self) -> None:
        cut = min((self.text.find(s) for s in self.stops if s in self.text), default=len(self.text))
        print(self.text[:cut])


# ---------------------------------------------------------------------- draw and audit


def draw(argv: Sequence[str]) -> int:
    from pathlib import Path

    parser = _parser("draw", "Draw a graph, from an expression or a run; or what a trained run attends to.")
    parser.add_argument("run", nargs="?", type=str, help="run folder whose graphs are drawn instead of --graph")
    parser.add_argument("--run", dest="run_option", type=str, help="the same as an option")
    parser.add_argument("--prompt", type=str, help="with a run: draw what each layer and head attends to in this text")
    parser.add_argument("--graph", action="append", help="expression; several give a picture each, NAME-0, NAME-1, ...")
    parser.add_argument("--size", type=int, help="number of targets, and of sources")
    parser.add_argument("--sources", type=int, help="number of sources, if it is another")
    parser.add_argument("--layout", type=str, default="auto", help="auto, matrix, circle, line or columns")
    parser.add_argument("-o", "--out", type=str, required=True, help=f"file to write: {', '.join(_ENDINGS)}")
    given = _parse(parser, argv)
    if given["run"] is not None and given["run_option"] is not None:
        raise UsageError("the run is given twice: leave out --run")
    given["run"] = given["run"] or given["run_option"]
    out = Path(given["out"])
    kind = _check_ending(given["out"], _ENDINGS)
    if given["prompt"] is not None:
        return _draw_attention(given, out, kind)
    graphs, names = _sized_graphs(given)

    from graphattn.checkpoint import write_atomic

    for n, (graph, name) in enumerate(zip(graphs, names, strict=True)):
        path = out if len(graphs) == 1 else out.with_stem(f"{out.stem}-{n}")
        if kind in ("png", "svg", "pdf"):
            import io

            from graphattn.draw import draw as draw_graph

            raw = io.BytesIO()
            figure: Any = draw_graph(graph, layout=given["layout"], title=f"{name}\n{graph!r}").figure
            figure.savefig(raw, format=kind, dpi=150)
            write_atomic(path, raw.getvalue())
        else:
            from graphattn.draw import export

            export(path, graph, title=name)
        print(f"{path}: {graph!r}")
    return 0


_ENDINGS = ("png", "svg", "pdf", "html", "graphml", "dot")


def _check_ending(out: str, endings: Sequence[str]) -> str:
    kind = out.rpartition(".")[2].lower()
    if kind not in endings:
        raise UsageError(f"--out must end in .{', .'.join(endings)}; got {out}")
    return kind


def _draw_attention(given: dict[str, Any], out: Any, kind: str) -> int:
    """What every layer and head of a run attends to in a prompt, as panels or as an interactive page."""
    if given["run"] is None or given["graph"]:
        raise UsageError("--prompt needs a run: graphattn draw RUN --prompt TEXT -o FILE")
    if kind not in ("png", "svg", "pdf", "html"):
        raise UsageError(f"attention weights are drawn as .png, .svg, .pdf or .html; got {out}")
    from graphattn.checkpoint import Run

    Run.open(given["run"])  # damage is found before torch is imported

    import torch

    from graphattn.draw import attention_of, draw_attention, save, to_html
    from graphattn.load import load

    loaded = load(given["run"])
    try:
        ids = loaded.vocabulary.encode(given["prompt"])
    except ValueError as error:
        raise ValueError(f"--prompt: {error}") from None
    block = loaded.model.config.block
    if not 1 <= len(ids) <= block:
        raise ValueError(f"--prompt has {len(ids)} characters, but the run reads 1 to {block} at a time")
    t = len(ids)
    tokens = torch.as_tensor(ids).view(1, t)
    graphs, weights = attention_of(loaded.model, tokens, [g[:t, :t] for g in loaded.graphs])
    if kind == "html":
        out.write_text(to_html(graphs, weights, list(given["prompt"]), title=given["prompt"]), encoding="utf-8")
    else:
        layout = "matrix" if given["layout"] == "auto" else given["layout"]
        save(draw_attention(list(given["prompt"]), graphs, weights, layout=layout), out)
    print(f"{out}: {len(graphs)} layers of {loaded.model.config.heads} heads over {t} characters")
    return 0


def _sized_graphs(given: dict[str, Any]) -> tuple[list[Graph], list[str]]:
    """The graphs that `--graph` with `--size`, or `--run`, name; and how to call them."""
    if given["run"] is not None:
        if given["graph"] or given["size"] is not None:
            raise UsageError("--run has its own graphs: leave out --graph and --size")
        from graphattn.checkpoint import Run

        run = Run.open(given["run"])
        return run.graphs(), run.config().graph
    if not given["graph"] or given["size"] is None:
        raise UsageError("give --graph EXPRESSION with --size N, or --run RUN")
    sources = given.get("sources")
    for name, n in (("size", given["size"]), ("sources", sources)):
        if n is not None and not 0 <= n <= 2**24:
            raise UsageError(f"--{name} must be in [0, 2**24], got {n}")
    size = given["size"] if sources is None else (given["size"], sources)
    return _graphs(given["graph"], size), given["graph"]


def audit(argv: Sequence[str]) -> int:
    parser = _parser("audit", "Say whether a position can read what it has to predict; the exit code is 1 if one can.")
    parser.add_argument("--graph", action="append", help="expression; repeat it for one per layer, cycled")
    parser.add_argument("--run", type=str, help="audit the graphs of this run instead")
    parser.add_argument("--size", type=int, help="number of positions")
    parser.add_argument("--layers", type=int, help="number of layers (default: as many as graphs, or the run's)")
    parser.add_argument(
        "--loss-from", type=int, help="first position whose prediction counts (default 0, or the run's)"
    )
    parser.add_argument("--offset", type=int, default=1, help="position i predicts position i + offset")
    parser.add_argument("-o", "--out", type=str, help="also save the page as a picture: .png, .svg or .pdf")
    given = _parse(parser, argv)
    if given["out"] is not None:
        _check_ending(given["out"], ("png", "svg", "pdf"))
    graphs, names = _sized_graphs(given)
    layers, loss_from = given["layers"], given["loss_from"]
    if given["run"] is not None:
        from graphattn.checkpoint import Run

        config = Run.open(given["run"]).config()
        layers = config.layers if layers is None else layers
        loss_from = config.loss_from if loss_from is None else loss_from
    layers, loss_from = len(graphs) if layers is None else layers, loss_from or 0
    if loss_from < 0:
        raise UsageError(f"--loss-from must be at least 0, got {loss_from}")
    if abs(given["offset"]) > 2**40:
        raise UsageError(f"--offset must be within 2**40, got {given['offset']}")
    if not 1 <= layers <= 4096:
        raise UsageError(f"--layers must be in [1, 4096], got {layers}")

    import torch

    from graphattn.audit import audit_page, audit_picture, find_leak
    from graphattn.gpt import cycle

    stack, named = cycle(graphs, layers), [names[i % len(names)] for i in range(layers)]
    options = {"offset": given["offset"], "targets": torch.arange(graphs[0].t) >= loss_from}
    found = find_leak(stack, **options)
    print(audit_page(stack, names=named, found=found))
    if given["out"] is not None:
        audit_picture(stack, given["out"], names=named, found=found)
        print(f"\n{given['out']}: the same as a picture")
    return 0 if found is None else 1


def bench(argv: Sequence[str]) -> int:
    parser = _parser("bench", "Time attention over graphs, each contender first checked against float64.")
    parser.add_argument("--graph", action="append", help="expression; may be repeated")
    parser.add_argument("--run", type=str, help="time the graphs of this run instead")
    parser.add_argument("--size", type=int, help="number of targets, and of sources")
    parser.add_argument("--sources", type=int, help="number of sources, if it is another")
    parser.add_argument("--batch", type=int, default=1, help="samples that share the graph")
    parser.add_argument("--heads", type=int, default=4, help="heads of the queries")
    parser.add_argument(
        "--kv-heads", type=int, help="heads of keys and values, a divisor of --heads (default: as many)"
    )
    parser.add_argument("--head-dim", type=int, default=64, help="width of a query, key or value in one head")
    parser.add_argument("--dtype", type=str, default="float32", help="float16, bfloat16, float32 or float64")
    parser.add_argument("--backend", action="append", help="one of ours, or all; may be repeated (default: auto)")
    parser.add_argument("--peer", action="append", help="one to compare with; may be repeated (default: all installed)")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds per graph and phase")
    parser.add_argument("--json", type=str, help="file to write the results to")
    given = _parse(parser, argv)
    for name in ("batch", "heads", "head_dim"):
        if given[name] < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {given[name]}")
    kv = given["kv_heads"] or given["heads"]
    if kv < 1 or given["heads"] % kv:
        raise UsageError(f"--kv-heads must divide --heads, {given['heads']}, got {given['kv_heads']}")
    if given["dtype"] not in ("float16", "bfloat16", "float32", "float64"):
        raise UsageError(f"--dtype must be float16, bfloat16, float32 or float64, got {given['dtype']}")
    graphs, names = _sized_graphs(given)

    from graphattn.backends import BACKENDS
    from graphattn.bench import run_bench

    for name in given["backend"] or []:
        if name not in (*BACKENDS, "auto", "all"):
            raise UsageError(f"--backend must be auto, all or one of {', '.join(BACKENDS)}; got {name}")

    options = {k: given[k] for k in ("batch", "heads", "kv_heads", "head_dim", "dtype", "budget")}
    for name, graph in zip(names, graphs, strict=True):
        run_bench(graph, name=name, ours=given["backend"], peers=given["peer"], json_path=given["json"], **options)
    return 0


# ---------------------------------------------------------------------- graph data


def nodes(argv: Sequence[str]) -> int:
    parser = _parser("nodes", "Train a node classifier with several seeds; results are kept, so a long run resumes.")
    parser.add_argument(
        "--dataset", type=str, default="karate", help="cora, citeseer, pubmed, minesweeper, tolokers, karate"
    )
    parser.add_argument("--path", type=str, help="its .npz, a folder that holds it, or the folder to download into")
    parser.add_argument("--recipe", type=str, default="published", help="published or best")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of the seeds, which are consecutive")
    parser.add_argument("--splits", type=int, default=1, help="how many of the dataset's splits")
    parser.add_argument("--epochs", type=int, help="at most this many, instead of the recipe's")
    parser.add_argument("--out", type=str, default="runs/nodes", help="folder of results and pictures")
    parser.add_argument("--backend", type=str, default="auto", help="attention backend")
    parser.add_argument("--dense", action="store_true", help="keep features dense")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no table, only the result")
    given = _parse(parser, argv)
    if given["epochs"] is not None and given["epochs"] < 1:
        raise UsageError(f"--epochs must be at least 1, got {given['epochs']}")

    import os

    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from graphattn.node_train import nodes as train_nodes

    fields = (
        "dataset",
        "path",
        "recipe",
        "seeds",
        "first_seed",
        "splits",
        "out",
        "epochs",
        "dense",
        "backend",
        "quiet",
    )
    summary = train_nodes(**{k: given[k] for k in fields})
    if given["quiet"]:
        print(summary)
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "sample": sample,
    "draw": draw,
    "audit": audit,
    "bench": bench,
    "nodes": nodes,
}

if __name__ == "__main__":
    sys.exit(main())
