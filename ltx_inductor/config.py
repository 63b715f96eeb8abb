"""What a compile was asked to do: one frozen dataclass, filled from options and the environment.

Options travel in `torch.compile(..., options={...})` under the prefix `ltx_inductor.`; every other key belongs to
Inductor. The rewrite reads nothing else: no environment variable, no device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

PREFIX = "ltx_inductor."
RULES = ("rmsnorm_axial_rope", "rmsnorm_split_rope", "neighborhood_attention")
VERIFY = ("first", "always", "off")
PROFIT = ("measured", "any")
_TRUE, _FALSE = ("1", "true", "yes", "y", "on"), ("0", "false", "no", "n", "off", "")


@dataclass(frozen=True)
class Config:
    """Options of one compile; `with_options` is the way to make one from user input.

    rules:   names of the rules to run; they run in the order of RULES.
    cpu:     rewrite CPU graphs too. The op then runs its reference, which is slower than Inductor's C++.
    strict:  a lost or refused site is an error (LostFusionError) instead of a line in the report.
    dump:    folder for before/after/diff files of every graph and every rewrite, or None.
    exact:   only rewrites that are proved to have the bits of what they replace, whatever `verify` says; neighborhood
             attention then needs the kernel that has NATTEN's, and is refused where there is none.
    trust_block_mask: take the BlockMask of a FlexAttention for what create_block_mask makes of its mask_mod, where
             the graph does not show that it is, because it comes in as an input.
    verify:  when a kernel is compared with eager: "first", before its first use on a device and torch version;
             "always", at every call too, where a difference turns it off (to debug: eager runs beside it); or "off",
             where `exact` is not asked for.
    profit:  what is left alone although it is legal, because it would be slower: "measured", where the measurements
             that the package carries say so; "any", nothing; or the path of a table of your own (benchmarks/profit.py).
    """

    rules: tuple[str, ...] = RULES
    cpu: bool = False
    strict: bool = False
    dump: str | None = None
    exact: bool = False
    trust_block_mask: bool = False
    verify: str = "first"
    profit: str = "measured"

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _checked(f.name, getattr(self, f.name)))
        unknown = [r for r in self.rules if r not in RULES]
        if unknown:
            raise ValueError(
                f"rules={list(self.rules)!r}: {unknown[0]!r} is not a rule; the rules are: {', '.join(RULES)}"
            )
        twice = [r for i, r in enumerate(self.rules) if r in self.rules[:i]]
        if twice:
            raise ValueError(
                f"rules={list(self.rules)!r}: {twice[0]!r} is there twice; expected each rule at most once"
            )
        if self.verify not in VERIFY:
            raise ValueError(f"verify={self.verify!r}: expected one of {', '.join(VERIFY)}")
        if self.profit not in PROFIT and not os.path.isfile(self.profit):
            raise ValueError(
                f"profit={self.profit!r}: expected one of {', '.join(PROFIT)}, or a file of benchmarks/profit.py"
            )

    @property
    def prove(self) -> bool:
        """Is a kernel compared with eager before its first use?"""
        return self.exact or self.verify != "off"

    def with_options(self, options: Mapping[str, Any]) -> Config:
        """A copy with the `ltx_inductor.*` keys of `options` applied; other keys are ignored.

        Raises ValueError for an unknown key (listing the known ones) and TypeError for a value of the wrong type.
        """
        check_mapping(options)
        known = {f.name for f in fields(self)}
        new: dict[str, Any] = {}
        for key, value in options.items():
            if not key.startswith(PREFIX):
                continue
            name = key[len(PREFIX) :]
            if name not in known:
                listed = ", ".join(PREFIX + k for k in sorted(known))
                raise ValueError(f"unknown option {key!r}; the options are: {listed}")
            new[name] = _checked(name, value)
        return replace(self, **new)


def check_mapping(options: Any) -> None:
    """Raises TypeError unless `options` is a mapping with names for keys."""
    if not isinstance(options, Mapping):
        raise TypeError(f"options={options!r}: expected a mapping, such as {{'{PREFIX}strict': True}}, or None")
    for key in options:
        if not isinstance(key, str):
            raise TypeError(f"options={options!r}: the key {key!r} is no string; expected names of options")


def _checked(name: str, value: Any) -> Any:
    key = PREFIX + name
    if name == "rules":
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise TypeError(f"option {key}={value!r}: expected a list of rule names out of {list(RULES)}")
        return tuple(value)
    if name == "dump":
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise TypeError(f"option {key}={value!r}: expected a folder path or None")
        return None if value is None else os.fspath(value)
    if name == "verify":
        if not isinstance(value, str):
            raise TypeError(f"option {key}={value!r}: expected one of {', '.join(VERIFY)}")
        return value
    if name == "profit":
        if not isinstance(value, (str, os.PathLike)):
            raise TypeError(f"option {key}={value!r}: expected one of {', '.join(PROFIT)}, or the path of a table")
        return os.fspath(value)
    if not isinstance(value, bool):
        raise TypeError(f"option {key}={value!r}: expected True or False")
    return value


def from_environment(environ: Mapping[str, str] | None = None) -> Config:
    """The defaults as LTX_INDUCTOR_RULES (with commas), _CPU, _STRICT, _EXACT, _TRUST_BLOCK_MASK (0/1), _DUMP (a
    folder), _VERIFY and _PROFIT set them.

    Raises ValueError for a value that is none, naming the variable and what is accepted.
    """
    env = os.environ if environ is None else environ
    return Config(
        rules=_rules(env.get("LTX_INDUCTOR_RULES", "")),
        cpu=flag(env, "LTX_INDUCTOR_CPU"),
        strict=flag(env, "LTX_INDUCTOR_STRICT"),
        exact=flag(env, "LTX_INDUCTOR_EXACT"),
        trust_block_mask=flag(env, "LTX_INDUCTOR_TRUST_BLOCK_MASK"),
        dump=env.get("LTX_INDUCTOR_DUMP") or None,
        verify=env.get("LTX_INDUCTOR_VERIFY", "").strip().lower() or "first",
        profit=env.get("LTX_INDUCTOR_PROFIT", "").strip() or "measured",
    )


def _rules(text: str) -> tuple[str, ...]:
    """The rules named in `text`, all of them where it names none."""
    names = tuple(name for part in text.split(",") if (name := part.strip()))
    if any(name not in RULES for name in names):
        raise ValueError(f"LTX_INDUCTOR_RULES={text!r}: expected names out of {', '.join(RULES)}, with commas between")
    return names or RULES


def flag(env: Mapping[str, str], name: str) -> bool:
    """A yes/no variable, False where it is not set. Raises ValueError for anything else."""
    value = env.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"{name}={value!r}: expected one of {', '.join(_TRUE + _FALSE[:-1])}")
