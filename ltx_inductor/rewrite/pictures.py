"""The dumps of one pass over one graph: taken before and after, as a whole and around every rewrite."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from torch.fx import Graph, Node

from ltx_inductor.rewrite import dump

_numbers = itertools.count()


class Pictures:
    """Collects renderings; `finish` writes them to `folder` (None: nowhere) and to the listeners of dump.emit."""

    def __init__(self, graph: Graph, folder: str | None) -> None:
        self._graph, self._folder = graph, folder
        self._whole = dump.render(graph)
        self._sites: list[tuple[str, str]] = []

    def before(
        self, order: Mapping[Node, float], inputs: Iterable[Node], results: Iterable[Node]
    ) -> tuple[Node, Node, str] | None:
        """(first and last node of an excerpt that both survive the rewrite, the excerpt); None without a folder.

        inputs, results: the values between which the region lies; order: the program order of the graph.
        """
        if self._folder is None:
            return None
        first = min(inputs, key=order.__getitem__)
        while first.op == "placeholder" and first.next.op == "placeholder":
            first = first.next
        readers = [u for r in results for u in r.users if u in order]
        if not readers or first not in order:
            return None
        last = max(readers, key=order.__getitem__)
        return first, last, dump.excerpt(first, last)

    def after(self, before: tuple[Node, Node, str], name: str) -> None:
        first, last, text = before
        self._sites.append((name, dump.unified(text, dump.excerpt(first, last), name)))

    def finish(self) -> list[str]:
        """Notes for the report: a folder that cannot be written must not stop the compile."""
        after = dump.render(self._graph)
        if dump.wanted():
            dump.emit(f"graph_{next(_numbers)}", self._whole, after)
        if self._folder is None:
            return []
        try:
            target = dump.write(self._folder, None, self._whole, after, self._sites)
        except OSError as e:
            return [f"the dump could not be written to {self._folder}: {e}"]
        return [f"dump: {target}"]
