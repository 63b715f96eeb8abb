"""Called by `import torch` (entry points torch.backends): LTX_INDUCTOR_REGISTER=1 registers the pass, without code.

For programs that compile with backend="inductor" and whose code is not to be touched: an engine, a node, a script. A
module of its own and next to empty, since every `import torch` of the environment runs it: the package, and torch's
compiler, are imported only once something is compiled by Inductor.
"""

import importlib.abc
import importlib.util
import os
import sys

_TRIGGER = "torch._inductor.compile_fx"
_TRUE, _FALSE = ("1", "true", "yes", "y", "on"), ("0", "false", "no", "n", "off", "")  # those of ltx_inductor.config


def autoload() -> None:
    """Never raises: torch would take that for a broken installation."""
    value = os.environ.get("LTX_INDUCTOR_REGISTER", "").strip().lower()
    if value not in _TRUE + _FALSE:
        accepted = ", ".join(_TRUE + _FALSE[:-1])
        told = f"ltx_inductor: LTX_INDUCTOR_REGISTER={value!r} had no effect: expected one of {accepted}"
        print(told, file=sys.stderr)
    if value in _TRUE:
        if _TRIGGER in sys.modules:
            _register()
        else:
            sys.meta_path.insert(0, _Finder())


def _register() -> None:
    try:
        import ltx_inductor

        ltx_inductor.register()
    except Exception as error:  # the program goes on without us
        print(f"ltx_inductor: LTX_INDUCTOR_REGISTER had no effect: {type(error).__name__}: {error}", file=sys.stderr)


class _Finder(importlib.abc.MetaPathFinder):
    """Registers right after Inductor's front end was imported, once."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != _TRIGGER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                load(module)
                _register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
