"""Reads the sentences that a package can say out of its sources; nothing is imported or run.

A definition (a function, a method or a constant at the top of a module) uses those that it names, and what a rule can
say is said in the definitions that are reached from its own modules: no list of them has to be kept.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

HOLE = "…"  # stands for what is put in while the program runs
Key = tuple[str, str]  # ("rewrite.rope", "Reader.read"); ("rewrite.rope", "") is the module itself
Bound = tuple[tuple[str, tuple[str, ...]], ...]  # what the arguments of a function may read, by name
_MOST = 64  # ways that one sentence may read


@dataclass(frozen=True)
class Place:
    """Where an expression stands: the module, and the function or method around it."""

    module: str
    name: str = ""
    bound: Bound = ()


class Sources:
    """The modules of the package in `folder`; their names are here without the package's."""

    def __init__(self, folder: Path) -> None:
        trees = {
            ".".join(path.relative_to(folder).with_suffix("").parts): ast.parse(path.read_text())
            for path in sorted(folder.rglob("*.py"))
        }
        self._trees = trees
        self._defined = {module: dict(_definitions(tree)) for module, tree in trees.items()}
        self._imported = {module: dict(_imports(tree, folder.name)) for module, tree in trees.items()}
        self._registered = self._registrations()

    def of(self, modules: Iterable[str]) -> set[Key]:
        """All definitions of these modules."""
        return {(module, name) for module in modules for name in self._defined[module]}

    def reached(self, start: Iterable[Key], closed: Iterable[str] = ()) -> set[Key]:
        """These definitions, and all that they use, directly or not, outside of the modules `closed`."""
        shut, found = set(closed), set(start)
        todo = list(found)
        while todo:
            new = {k for k in self._used(todo.pop()) if k[0] not in shut} - found
            found |= new
            todo += new
        return found

    def said(self, keys: Iterable[Key], calls: Mapping[str, int]) -> set[tuple[str, str, str]]:
        """(sentence, expected, hint) of calls in these definitions. calls: {name: which argument is the sentence}."""
        found = set()
        for key in keys:
            place = Place(*key)
            for node in ast.walk(self._defined[key[0]][key[1]]):
                at = calls.get(_called(node), len(node.args)) if isinstance(node, ast.Call) else None
                if at is None or at >= len(node.args):
                    continue
                rest = {k.arg: " or ".join(self._texts(k.value, place)) for k in node.keywords}
                for text in _telling(self._texts(node.args[at], place)):
                    found.add((text, rest.get("expected", ""), rest.get("hint", "")))
        return found

    def returned(self, module: str, name: str) -> list[str]:
        """The sentences a function may return: its own, and those of the functions whose results it passes on."""
        return _telling(self._returned((module, name), (), ()))

    def _returned(self, key: Key, bound: Bound, callers: tuple[Key, ...]) -> list[str]:
        place = Place(*key, bound)
        found = (n.value for n in ast.walk(self._defined[key[0]][key[1]]) if isinstance(n, ast.Return) and n.value)
        return [text for value in found for text in self._texts(value, place, (*callers, key))]

    def _texts(self, node: ast.expr, place: Place, callers: tuple[Key, ...] = ()) -> list[str]:
        """The ways in which an expression may read. callers: the functions whose results are being passed on."""
        if isinstance(node, ast.Constant):
            return [] if node.value is None else [node.value] if isinstance(node.value, str) else [HOLE]
        if isinstance(node, ast.JoinedStr):
            return _products(self._texts(v, place) for v in node.values)
        if isinstance(node, ast.FormattedValue):
            return self._texts(node.value, place) if isinstance(node.value, (ast.Name, ast.IfExp)) else [HOLE]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return _products(self._texts(v, place, callers) for v in (node.left, node.right))
        if isinstance(node, ast.IfExp):
            return self._any((node.body, node.orelse), place, callers)
        if isinstance(node, ast.BoolOp):
            return self._any(node.values, place, callers)
        if isinstance(node, ast.Name):
            return self._named(node, place, callers)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return self._entry(str(node.slice.value), place, callers)
        if isinstance(node, ast.Call):
            return self._passed_on(node, place, callers)
        return [HOLE]

    def _any(self, nodes: Iterable[ast.expr], place: Place, callers: tuple[Key, ...]) -> list[str]:
        return [text for node in nodes for text in self._texts(node, place, callers)]

    def _named(self, node: ast.Name, place: Place, callers: tuple[Key, ...]) -> list[str]:
        """An argument, a variable of the function (whatever is assigned to it), or a constant of the package."""
        bound = dict(place.bound)
        if node.id in bound:
            return list(bound[node.id])
        function = self._defined[place.module].get(place.name)
        if isinstance(function, ast.FunctionDef):
            values = [
                s.value
                for s in ast.walk(function)
                if isinstance(s, (ast.Assign, ast.AnnAssign))
                and s.value
                and any(isinstance(t, ast.Name) and t.id == node.id for t in _targets(s))
            ]
            if values:
                return self._any([v for v in values if node.id not in _names(v)], place, callers)
        key = self._find(node, place)
        constant = self._defined[key[0]].get(key[1]) if key else None
        if key and isinstance(constant, (ast.Assign, ast.AnnAssign)) and constant.value:
            number = getattr(constant.value, "value", None)
            return [str(number)] if type(number) is int else self._texts(constant.value, Place(key[0]))
        return [HOLE]

    def _entry(self, name: str, place: Place, callers: tuple[Key, ...]) -> list[str]:
        """`record["name"]`: what the functions of the module write there."""
        found = []
        for function, node in self._defined[place.module].items():
            for s in ast.walk(node):
                for t in _targets(s) if isinstance(s, ast.Assign) else ():
                    if isinstance(t, ast.Subscript) and getattr(t.slice, "value", None) == name:
                        assert isinstance(s, ast.Assign)
                        found += self._texts(s.value, Place(place.module, function), callers)
        return found or [HOLE]

    def _passed_on(self, call: ast.Call, place: Place, callers: tuple[Key, ...]) -> list[str]:
        key = self._find(call.func, place)
        function = self._defined[key[0]].get(key[1]) if key else None
        if not callers or key is None or key in callers or not isinstance(function, ast.FunctionDef):
            return [HOLE]
        names = [a.arg for a in function.args.args]
        given = {**dict(zip(names, call.args, strict=False)), **{k.arg: k.value for k in call.keywords if k.arg}}
        bound = tuple((n, tuple(self._texts(v, place))) for n, v in given.items() if isinstance(v, ast.Constant))
        return self._returned(key, bound, callers)

    def _find(self, node: ast.expr, place: Place) -> Key | None:
        """The definition that `name`, `module.name` or `self.name` stands for."""
        if isinstance(node, ast.Name):
            if node.id in self._defined[place.module]:
                return place.module, node.id
            module, name = self._imported[place.module].get(node.id, ("", ""))
            if f"{module}.{name}".strip(".") in self._trees:
                return f"{module}.{name}".strip("."), ""
            return (module, name) if name in self._defined.get(module, ()) else None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "self":
                key = (place.module, f"{place.name.partition('.')[0]}.{node.attr}")
            else:
                key = ((self._find(node.value, place) or ("", "x"))[0], node.attr)
            return key if key[1] in self._defined.get(key[0], ()) else None
        return None

    def _used(self, key: Key) -> set[Key]:
        """What a definition names: of a class its methods too, of a table what was registered in it.

        Asking whether something is in a table does not count: that calls nothing.
        """
        module, name = key
        node = self._defined[module][name]
        asked = {id(c) for n in ast.walk(node) if isinstance(n, ast.Compare) for c in n.comparators}
        found = {(module, d) for d in self._defined[module] if d.startswith(f"{name}.")}
        for n in ast.walk(node):
            used = self._find(n, Place(module, name)) if isinstance(n, (ast.Name, ast.Attribute)) else None
            if used and used[1] and id(n) not in asked:
                found |= {used, *self._registered.get(used, ())}
        return found

    def _registrations(self) -> dict[Key, set[Key]]:
        """{a table: the functions that a decorator puts into it}: who reads the table calls them."""
        self._registered = {}
        found: dict[Key, set[Key]] = {}
        for module, name in self.of(self._trees):
            for d in getattr(self._defined[module][name], "decorator_list", ()):
                decorator = self._find(d.func if isinstance(d, ast.Call) else d, Place(module))
                for table in self._used(decorator) if decorator else ():
                    if isinstance(self._defined[table[0]][table[1]], (ast.Assign, ast.AnnAssign)):
                        found.setdefault(table, set()).add((module, name))
        return found


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """(name, statement) of functions, constants and classes; methods are "Class.name", and not part of the class."""
    for s in tree.body:
        if isinstance(s, ast.ClassDef):
            methods = [m for m in s.body if isinstance(m, ast.FunctionDef)]
            yield from ((f"{s.name}.{m.name}", m) for m in methods)
            rest = [m for m in s.body if m not in methods]
            yield s.name, ast.ClassDef(s.name, s.bases, s.keywords, rest, s.decorator_list)
        elif isinstance(s, ast.FunctionDef):
            yield s.name, s
        elif isinstance(s, (ast.Assign, ast.AnnAssign)):
            yield from ((name, s) for t in _targets(s) for name in _names(t))


def _imports(tree: ast.Module, package: str) -> Iterator[tuple[str, Key]]:
    """(name, what of the package it stands for) of the imports anywhere in a module."""
    for s in ast.walk(tree):
        if isinstance(s, ast.ImportFrom) and (s.module or "").split(".")[0] == package:
            inside = (s.module or "").removeprefix(package).removeprefix(".")
            yield from ((a.asname or a.name, (inside, a.name)) for a in s.names)


def _targets(s: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return s.targets if isinstance(s, ast.Assign) else [s.target]


def _names(node: ast.AST) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]


def _called(call: ast.Call) -> str:
    return str(getattr(call.func, "id", getattr(call.func, "attr", "")))


def _products(parts: Iterable[list[str]]) -> list[str]:
    found = ["".join(p) for p in itertools.islice(itertools.product(*(p or [""] for p in parts)), _MOST)]
    return [re.sub(f"{HOLE}+", HOLE, text) for text in found]


def _telling(texts: Iterable[str]) -> list[str]:
    """Each once, without those that say nothing."""
    return [text for text in dict.fromkeys(texts) if re.search(r"\w", text)]
