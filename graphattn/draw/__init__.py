"""Pictures of attention graphs: arrows, matrices, stacks of layers, heads side by side, pages and exchange formats.

An arrow runs from a source to the target that reads it; a matrix has a row per target, the first on top.

    draw(graph, weights)                one graph, one Axes; arrows, matrix, or the density of a large one
    draw_grid(graphs, weights)          small multiples on one scale: graphs, or the leading axes and heads of one
    draw_attention(tokens, graphs, w)   a trained model: a row of panels per layer, a column per head
    attention_of(model, *inputs)        what it takes: the graph and the weights of every head a model calls
    draw_stack(graphs, target)          layers unrolled, with all that can reach the target lit up
    save(picture, path)                 PNG, SVG or PDF of any of them
    export(path, graph, weights)        one graph in the format the path ends in, .html, .graphml and .dot among them

matplotlib, networkx and jinja2 are imported when something is drawn; pyplot never.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from graphattn.draw.formats import export, networkx_of, to_dot, to_graphml, to_svg
from graphattn.draw.grid import draw_attention, draw_grid
from graphattn.draw.page import to_html
from graphattn.draw.palette import save
from graphattn.draw.picture import draw
from graphattn.draw.stack import draw_stack
from graphattn.draw.watch import attention_of

__all__ = [
    "attention_of",
    "draw",
    "draw_attention",
    "draw_grid",
    "draw_stack",
    "export",
    "networkx_of",
    "save",
    "to_dot",
    "to_graphml",
    "to_html",
    "to_svg",
]


class _CallableModule(types.ModuleType):
    """`import graphattn.draw` puts this module where `graphattn.draw` was a function: it must go on being one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return draw(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
for _name in __all__:
    setattr(draw, _name, globals()[_name])
