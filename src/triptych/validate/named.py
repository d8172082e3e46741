"""The model that a row names: the catalogue's entry of the same sizes and the nearest name.

Names are written in every way (`LLaMA v2 70B`, `meta-llama/Llama-3.1-8B-Instruct`, `llama2-70b`);
sizes in columns are not. Where only the name is known, all words of an entry have to be in it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from triptych.model.catalogue import catalogue
from triptych.model.count import parameters
from triptych.model.model import Attention, Block, Mlp, Model
from triptych.validate.table import Row, Skip

_IGNORED = {"instruct", "chat", "fp8", "fp4", "nvfp4", "per", "doc", "hf", "v", "kv", "v0"}

WIDEST = 6.0
"""Hidden sizes that the width of an MLP is at most; wider ones are experts."""

USUAL_VOCAB = 50_304


def named_model(row: Row) -> Model:
    """The model of a serving row. Raises Skip if its sizes or its experts are not known."""
    known = _nearest(row)
    if known is None:
        known = _guessed(row)
    if _has_experts(row) and not known.experts:
        raise Skip("experts not known")
    if known.experts and re.search(r"moe_ep=(?:[2-9]|\d\d)", row.text("notes")):
        raise Skip("expert parallelism is not priced in serving")
    return known


def _nearest(row: Row) -> Model | None:
    """The catalogue's entry; None if nothing of these sizes is in it."""
    said = _words(row.text("model_name"))
    sizes = _sizes(row)
    scored = []
    for name, model in _entries().items():
        words = _words(name)
        is_meant = bool(words & said) and sizes.fit(model) if sizes else _plain(words) <= said
        if not is_meant:
            continue
        scored.append((len(words & said) - 0.5 * len(words - said), name, model))
    return max(scored, key=lambda one: one[:2])[2] if scored else None


@lru_cache(maxsize=1)
def _entries() -> dict[str, Model]:
    return catalogue()


class _Sizes(NamedTuple):
    layers: int
    hidden: int
    heads: int
    kv_heads: int | None  # None: not stated

    def fit(self, model: Model) -> bool:
        """True for a model of these sizes."""
        found = (model.num_layers, model.hidden, model.query_heads)
        return found == self[:3] and self.kv_heads in (None, model.kv_heads)


def _sizes(row: Row) -> _Sizes | None:
    layers, hidden, heads = row.count("n_layers"), row.count("hidden"), row.count("n_heads")
    if not (layers and hidden and heads):
        return None
    return _Sizes(layers, hidden, heads, row.count("n_kv_heads"))


def _words(name: str) -> set[str]:
    """`LLaMA v2 70B (Llama2-70b per doc)` -> llama, 2, 70b; versions stand alone."""
    text = name.lower().rpartition("/")[2] if "(" not in name else name.lower()
    text = re.sub(r"\bv(?=\d)", "", text)
    text = re.sub(r"(?<=[a-z])(?=\d)", " ", text)
    words = re.findall(r"[a-z]+|\d+(?:\.\d+)?(?:x\d+)?[bm]?(?![a-z])", text)
    return {_version(word) for word in words} - _IGNORED


def _plain(words: set[str]) -> set[str]:
    """Without versions: the row may not say one."""
    return {word for word in words if not re.fullmatch(r"[\d.]+", word)}


def _version(word: str) -> str:
    """Llama 3.3 has the sizes and the vocabulary of 3.1."""
    return {"3.3": "3.1"}.get(word, word)


def _has_experts(row: Row) -> bool:
    name = row.text("model_name").lower()
    is_routed = re.search(r"\d+x\d+|\ba\d+b|moe|mixtral", name) is not None
    if re.search(r"b?x\d+e", row.text("params_b").lower()):  # 17Bx16E
        return True
    return is_routed or re.search(r"moe_ep=(?:[2-9]|\d\d)", row.text("notes")) is not None


def _guessed(row: Row) -> Model:
    """A dense model of the row's sizes, as wide as its number of parameters says."""
    sizes = _sizes(row)
    if _has_experts(row):
        raise Skip("experts not known")
    billions = row.number("params_b")
    if sizes is None or not billions:
        raise Skip("architecture incomplete")
    layers, hidden, heads, kv_heads = sizes
    attention = Attention(query_heads=heads, kv_heads=kv_heads or heads, head_dim=hidden // heads)
    vocab = row.count("vocab") or USUAL_VOCAB

    def built(width: int) -> Model:
        block = Block(attention=attention, mlp=Mlp(width=width, gated=False))
        return Model(
            name=row.text("model_name"),
            family="gpt2",
            hidden=hidden,
            blocks=(block,) * layers,
            vocab=vocab,
            tied=False,
            max_position=2048,
        )

    narrow = parameters(built(hidden))
    width = hidden + (billions * 1e9 - narrow) / (2.0 * hidden * layers)
    if not 1.0 <= width / hidden <= WIDEST:
        raise Skip("experts not known" if width > hidden else "sizes and parameters disagree")
    return replace(built(_rounded(width, hidden)), name=row.text("model_name"))


def _rounded(width: float, hidden: int) -> int:
    """The usual width of four hidden sizes where the parameters come near it."""
    usual = 4 * hidden
    return usual if abs(width / usual - 1.0) < 0.1 else max(64, round(width / 64) * 64)
