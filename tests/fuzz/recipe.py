"""Legal models, put together at random from the pieces of tests/models: every one of them must be rewritten."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..models import pieces as p
from ..models.spellings import TAKES
from ..models.tables import LAYOUTS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUNDINGS = ("bf16-chain", "fp32-rope", "fp32-result", "fp32-all", "fp32-all-result")
NORMS = ("rms", "rms_eps_none", "rms_torch", "rms_no_weight", "rms_per_head", "rms_weight_slice")
ENTERS = (
    "reshape_swapaxes",
    "unflatten_transpose",
    "einops_in",
    "view_permute",
    "view_movedim",
    "permute_contiguous",
    "permute_then_view",
)
LEAVES = (
    "swapaxes_reshape",
    "transpose_flatten",
    "einops_out",
    "permute_contiguous_view",
    "keep_bhsd",
    "keep_bhsd_contiguous",
    "keep_bshd",
    "keep_bshd_contiguous",
    "attend",
)
FLAT_LEAVES = LEAVES[:4]  # back to [B, S, H*D]
STRUCTURES = ("one", "twice", "pair", "own-tables", "same-x", "same-everything", "k-from-q", "layers")
SIDES = {
    "one": 1,
    "twice": 1,
    "pair": 2,
    "own-tables": 2,
    "same-x": 2,
    "same-everything": 2,
    "k-from-q": 2,
    "layers": 4,
}
WRITES = ("", "x before", "x after", "table before", "table after")


@dataclass(frozen=True)
class Side:
    """How one side is spelled: names of functions in tests/models/pieces.py, and of TAKES ("": x as it is)."""

    norm: str = "rms"
    enter: str = "reshape_swapaxes"
    rotate: str = "inplace_addcmul"
    leave: str = "swapaxes_reshape"
    take: str = ""


@dataclass(frozen=True)
class Recipe:
    """One legal model. layout: of cos and sin, out of LAYOUTS. dynamic: axes marked, out of "seq" and "batch"."""

    q: Side = Side()
    k: Side = Side()
    structure: str = "one"
    rounding: str = "bf16-chain"
    fused: bool = True
    dtype: str = "bf16"
    narrow_tables: bool = False  # 16-bit cos and sin where the contract takes fp32 ones too
    layout: str = "bhsr"
    writes: str = ""
    dynamic: tuple[str, ...] = ()
    B: int = 2
    S: int = 21
    heads: int = 3
    head_dim: int = 8

    @property
    def contract(self) -> str:
        return self.rounding if self.fused or self.rounding == "bf16-chain" else self.rounding + "-muladd"

    @property
    def sites(self) -> int:
        return SIDES[self.structure]

    @property
    def special(self) -> bool:
        """May inf and NaN be drawn? Attention and the next layer spread them over everything."""
        return self.structure not in ("k-from-q", "layers") and "attend" not in (self.q.leave, self.k.leave)

    def build(self) -> nn.Module:
        return Model(self)

    def inputs(self, more: int = 0) -> tuple[Tensor, ...]:
        """What the model is called with; `more`: so many tokens, and batch entries, where these are dynamic."""
        S = self.S + more * ("seq" in self.dynamic)
        B = self.B + more * ("batch" in self.dynamic)
        dtype, lay, N = DTYPES[self.dtype], LAYOUTS[self.layout], self.heads * self.head_dim
        table = dtype if self.rounding == "bf16-chain" or self.narrow_tables else torch.float32

        def x(side: Side, tokens: int) -> Tensor:
            shape = TAKES[side.take][1](B, tokens, N) if side.take else (B, tokens, N)
            return torch.randn(shape).to(dtype)

        def tables(tokens: int) -> list[Tensor]:
            return [lay.make(B, self.heads, tokens, self.head_dim // 2, table) for _ in "cs"]

        if self.structure == "own-tables":
            return (x(self.q, S), x(self.k, S + 5), *tables(S), *tables(S + 5))
        sides = (self.q, self.k) if self.structure == "pair" else (self.q,)
        return (*(x(s, S) for s in sides), *tables(S))

    def axes(self, which: str) -> dict[int, int]:
        """{index of input: its token or batch axis}"""
        lay, xs, sets = LAYOUTS[self.layout], [self.q], 1
        if self.structure in ("pair", "own-tables"):
            xs, sets = [self.q, self.k], 1 + (self.structure == "own-tables")
        seq = which == "seq"
        of_x = [(TAKES[s.take][2] if s.take else (1, 0))[0 if seq else 1] for s in xs]
        of_table = lay.seq if seq else lay.batch
        return {i: a for i, a in enumerate([*of_x, *[of_table] * (2 * sets)]) if a is not None}

    def dynamic_axes(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for which in self.dynamic:
            for i, axis in self.axes(which).items():
                found.setdefault(i, []).append(axis)
        return found

    def __str__(self) -> str:
        return text_of(self)


def text_of(data: Any) -> str:
    """Python code: what differs from the defaults."""
    kind, default = type(data), type(data)()
    parts = []
    for f in dataclasses.fields(data):
        value = getattr(data, f.name)
        if value != getattr(default, f.name):
            parts.append(f"{f.name}={text_of(value) if isinstance(value, Side) else repr(value)}")
    return f"{kind.__name__}({', '.join(parts)})"


class Model(nn.Module):
    """The recipe, cooked. The names of the parameters of `forward` tell tests/draws.py what to draw."""

    def __new__(cls, recipe: Recipe) -> Model:
        two = {"pair": PairModel, "own-tables": OwnTablesModel}.get(recipe.structure, OneModel)
        return super().__new__(two)

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe, dtype, n = recipe, DTYPES[recipe.dtype], recipe.heads * recipe.head_dim

        def weight(side: Side) -> nn.Parameter:
            size = {"rms_per_head": recipe.head_dim, "rms_weight_slice": 2 * n}.get(side.norm, n)
            return nn.Parameter(torch.randn(size).to(dtype))

        self.wq, self.wk = weight(recipe.q), weight(recipe.k)

    def side(self, s: Side, w: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        r = self.recipe
        x = TAKES[s.take][0](x, r.heads) if s.take else x
        lay = LAYOUTS[r.layout]
        if lay.graph:
            cos, sin = lay.graph(cos, r.heads, x), lay.graph(sin, r.heads, x)
        wide = r.rounding.startswith("fp32-all")
        n = getattr(p, s.norm)(x.float() if wide else x, w.float() if wide else w)
        rotate = getattr(p, s.rotate)
        if r.rounding == "fp32-rope":
            rotate = (p.tables_in_fp32 if r.narrow_tables else p.in_fp32)(rotate)
        elif r.rounding == "fp32-all":
            rotate = p.narrow_to(DTYPES[r.dtype])(rotate)
        return getattr(p, s.leave)(rotate(getattr(p, s.enter)(n, r.heads), cos, sin)), n

    def before(self, x: Tensor, cos: Tensor) -> None:
        if self.recipe.writes == "x before":
            x.mul_(2)
        if self.recipe.writes == "table before":
            cos.neg_()

    def after(self, x: Tensor, cos: Tensor, out: Any) -> Any:
        """`out`, read once more, and x or the table written to: what came before still has to see the old values."""
        if self.recipe.writes == "x after":
            x.add_(1)
        if self.recipe.writes == "table after":
            cos.mul_(2)
        return tuple(t + 1 for t in out) if self.recipe.writes.endswith("after") else out


class OneModel(Model):
    def forward(self, x, cos, sin):
        r = self.recipe
        self.before(x, cos)
        if r.structure == "twice":
            out = self.side(r.q, self.wq, x, cos, sin)
        elif r.structure in ("same-x", "same-everything"):
            wk, k = (self.wk, r.k) if r.structure == "same-x" else (self.wq, r.q)
            out = self.side(r.q, self.wq, x, cos, sin)[0], self.side(k, wk, x, cos, sin)[0]
        elif r.structure == "k-from-q":
            q = self.side(r.q, self.wq, x, cos, sin)[0]
            out = q, self.side(r.k, self.wk, q * 2, cos, sin)[0]
        elif r.structure == "layers":
            y = x
            for i in range(2):
                y = y + self.side(r.q, self.wq, y + i, cos, sin)[0] * self.side(r.k, self.wk, y * 2, cos, sin)[0]
            out = (y,)
        else:
            out = (self.side(r.q, self.wq, x, cos, sin)[0],)
        return self.after(x, cos, out)


class PairModel(Model):
    def forward(self, q, k, cos, sin):
        self.before(q, cos)
        out = self.side(self.recipe.q, self.wq, q, cos, sin)[0], self.side(self.recipe.k, self.wk, k, cos, sin)[0]
        return self.after(q, cos, out)


class OwnTablesModel(Model):
    def forward(self, q, k, cos_q, sin_q, cos_k, sin_k):
        r = self.recipe
        self.before(q, cos_q)
        out = self.side(r.q, self.wq, q, cos_q, sin_q)[0], self.side(r.k, self.wk, k, cos_k, sin_k)[0]
        return self.after(q, cos_q, out)


def draw_recipe(seed: int) -> Recipe:
    """The recipe of that seed."""
    rng = random.Random(seed)
    rounding = rng.choice(ROUNDINGS)
    fused = rounding == "bf16-chain" or rng.random() < 0.6
    structure = rng.choice(STRUCTURES if not rounding.endswith("result") else STRUCTURES[:-2])
    layout = rng.choice(list(LAYOUTS))
    chained = structure in ("k-from-q", "layers")

    writes = rng.choice([*[""] * 6, *WRITES[1:]])
    if layout == "expanded" and writes.startswith("table"):
        writes = ""  # torch does not write to elements that share memory

    def side() -> Side:
        rotate = rng.choice(p.FMA if fused else p.MULADD).__name__
        leave = rng.choice(FLAT_LEAVES if chained else LEAVES)
        take = "" if chained or structure.startswith("same") else rng.choice(["", "", *TAKES])
        return Side(rng.choice(NORMS), rng.choice(ENTERS), rotate, leave, take)

    B, S = rng.choice([1, 2, 2, 3]), rng.choice([18, 21, 27, rng.randrange(1, 18)])
    return Recipe(
        q=side(),
        k=side() if SIDES[structure] > 1 and structure != "same-everything" else Side(),
        structure=structure,
        rounding=rounding,
        fused=fused,
        dtype=rng.choice(["bf16", "fp16"]),
        narrow_tables=rounding in ("fp32-rope", "fp32-all", "fp32-all-result") and rng.random() < 0.3,
        layout=layout,
        writes=writes,
        dynamic=tuple(w for w, size in (("seq", S), ("batch", B)) if size > 1 and rng.random() < 0.25),
        B=B,
        S=S,
        heads=rng.choice([1, 2, 3, 4]),
        head_dim=rng.choice([4, 6, 8, 8, 10, 16]),
    )


def neighbours(recipe: Recipe) -> list[Recipe]:
    """Recipes that are simpler in one place: what a failing one is minimised over."""
    simpler = []
    for f in dataclasses.fields(recipe):
        value, default = getattr(recipe, f.name), getattr(Recipe(), f.name)
        if isinstance(value, Side):
            for g in dataclasses.fields(value):
                changed = dataclasses.replace(value, **{g.name: getattr(Side(), g.name)})
                simpler.append(dataclasses.replace(recipe, **{f.name: changed}))
        else:
            simpler.append(dataclasses.replace(recipe, **{f.name: default}))
        if isinstance(value, tuple) and len(value) > 1:
            simpler += [dataclasses.replace(recipe, **{f.name: (v,)}) for v in value]
    return [r for r in simpler if r != recipe]
