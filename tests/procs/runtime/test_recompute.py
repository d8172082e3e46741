"""Recomputation changes no bit of any gradient, and keeps the bytes that are priced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_samples import family_config
from layouts import batch_of, make_engine, split, strictly, tiny_config
from ranks import run_ranks
from saved import saved_bytes

from triptych.cluster.text import parse_cluster
from triptych.cost.pricer import Pricer
from triptych.cost.setting import Setting
from triptych.model.hf import from_config
from triptych.plan.plan import Plan, Precision
from triptych.plan.rules import verify
from triptych.plan.workload import Workload

MODES: tuple[dict[str, Any], ...] = (
    {"recompute": "selective"},
    {"recompute": "full"},
    {"recompute": "full", "recompute_every": 2},
    {"recompute": "selective", "recompute_every": 3},
    {"recompute": "full", "offload": "activations"},
)
DIVIDED: tuple[dict[str, Any], ...] = (
    {"recompute": "full", "shard_activations": True},
    {"recompute": "full", "shard_activations": True, "offload": "activations"},
)


def _gradients(
    plan: Plan, config: dict[str, Any], step: int = 0
) -> tuple[float, list[torch.Tensor]]:
    engine = make_engine(plan, config)
    strictly(step)
    rows = batch_of(0, 8, 24, config["vocab_size"])
    loss, _ = engine.gradients(split(rows, plan, engine.mesh.coordinates))
    return float(loss), [piece.gradient.clone() for piece in engine.optimizer.pieces]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("settings", "family"),
    [
        ({"tp": 2, "pp": 2, "sequence_parallel": True}, "llama"),
        ({"tp": 2, "pp": 2, "schedule": "zb-h1"}, "cohere norms"),
        ({"cp": 2, "pp": 2, "schedule": "zb-v", "chunks": 2}, "llama"),
        ({"dp": 2, "tp": 2, "zero": 3}, "gemma2"),
        ({"dp": 2, "zero": 3, "prefetch": 0}, "gpt2"),
    ],
    ids=str,
)
def test_recomputation_changes_no_bit(settings: dict[str, Any], family: str) -> None:
    def body(plain: Plan, config: dict[str, Any]) -> None:
        loss, gradients = _gradients(plain, config)
        divided = DIVIDED if plain.tp > 1 and not plain.sequence_parallel else ()
        for place, mode in enumerate((*MODES, *divided)):
            again, others = _gradients(plain.with_(**mode), config, place)
            assert again == loss, mode
            assert all(map(torch.equal, gradients, others)), mode

    plan = Plan.uniform(4, microbatch=2, **settings)
    run_ranks(plan.world_size, body, plan, family_config(family))


# ---- bytes ------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "every 2nd": {"recompute": "full", "recompute_every": 2},
}


def _kept_bytes(plan: Plan, config: dict[str, Any], length: int) -> int:
    """Bytes that the layers keep for a backward, parameters left out."""
    engine = make_engine(plan, config)
    values = [bucket.values for bucket in engine.buckets.buckets]
    ids = torch.zeros(1, length, dtype=torch.int64)

    def forward() -> torch.Tensor:
        output = engine.stages[0](ids)
        assert output.requires_grad
        return output

    return saved_bytes(forward, values)


def _counted(config: dict[str, Any], dtype: str, length: int) -> dict[str, int]:
    """What two more layers keep under each mode."""

    def body() -> dict[str, int]:
        counted = {}
        for name, settings in SETTINGS.items():
            plans = [
                Plan.uniform(n, precision=Precision(parameter=dtype), **settings) for n in (2, 4)
            ]
            few, many = (
                _kept_bytes(p, {**config, "num_hidden_layers": p.num_layers}, length) for p in plans
            )
            counted[name] = many - few
        return counted

    return run_ranks(1, body)[0]


def _priced(config: dict[str, Any], dtype: str, length: int) -> dict[str, float]:
    work = Workload(sequence_length=length, global_batch=1)
    pricer = Pricer(from_config(config, "tiny"), parse_cluster("1x1xcpu"), work)
    priced = {}
    for name, settings in SETTINGS.items():
        setting = Setting.of(Plan.uniform(4, precision=Precision(parameter=dtype), **settings))
        layers = pricer.layers(pricer.counts(2, 4, setting.recompute_every), setting)
        priced[name] = sum(pricer.piece(kind, own).saved_bytes * n for kind, own, n in layers)
    return priced


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(tiny_config(), "fp32"), (tiny_config(), "bf16"), (family_config("gemma2 untied"), "fp32")],
    ids=["fp32", "bf16", "caps"],
)
def test_layers_keep_the_bytes_that_are_priced(config: dict[str, Any], dtype: str) -> None:
    counted, priced = _counted(config, dtype, 64), _priced(config, dtype, 64)
    assert counted == pytest.approx(priced, rel=0.01)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_selective_recomputation_keeps_no_scores(dtype: str) -> None:
    """Scores whose weights are dropped are written out; the causal mask is small beside them."""
    config = tiny_config(attention_dropout=0.1)
    counted, priced = _counted(config, dtype, 256), _priced(config, dtype, 256)
    saved = counted["none"] - counted["selective"]
    assert saved == pytest.approx(priced["none"] - priced["selective"], rel=0.05)
    assert saved > counted["none"] / 3


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_context_ranks_that_drop_weights_keep_the_bytes_that_are_priced(method: str) -> None:
    config, length = tiny_config(attention_dropout=0.1), 64
    degrees = {"cp": 2, "context_method": method}
    plans = {n: Plan.uniform(n, **degrees) for n in (2, 4)}  # layers

    def body() -> int:
        kept = {
            n: _kept_bytes(plan, {**config, "num_hidden_layers": n}, length // 2)
            for n, plan in plans.items()
        }
        return kept[4] - kept[2]

    work = Workload(sequence_length=length, global_batch=1)
    pricer = Pricer(from_config(config, "tiny"), parse_cluster("1x2xcpu"), work)
    priced = 2 * pricer.piece(0, Setting.of(plans[4])).saved_bytes
    assert run_ranks(2, body) == pytest.approx([priced] * 2, rel=0.05)


def test_every_second_layer_is_recomputed_whatever_the_stages() -> None:
    config = tiny_config()

    def body(plan: Plan) -> list[int]:
        engine = make_engine(plan, config)
        trunk = engine.stages[0].causal_lm.get_submodule("model.layers")
        return [i for i, layer in enumerate(trunk) if getattr(layer, "gradient_checkpointing", 0)]

    plans = [Plan.uniform(4, pp=n, recompute="full", recompute_every=2) for n in (1, 2)]
    assert run_ranks(1, body, plans[0]) == [[0, 2]]
    assert run_ranks(2, body, plans[1]) == [[0], [2]]


@pytest.mark.parametrize(
    ("settings", "parts"),
    [({}, 1), ({"shard_activations": True}, 3), ({"offload": "activations"}, 1)],
    ids=str,
)
def test_inputs_are_kept_in_parts_or_in_host_memory(settings: dict[str, Any], parts: int) -> None:
    """ZeRO-R: 2sbh / t bytes a layer, none on the device if they are in host memory."""
    config = tiny_config(num_key_value_heads=4)

    def body(plan: Plan) -> tuple[int, int]:
        engine = make_engine(plan, config)
        kept = 0
        inputs = engine.stages[0].layer_inputs
        keep = inputs._keep

        def note(tensor: torch.Tensor) -> Any:
            nonlocal kept
            found = keep(tensor)
            kept += found.tensor.nbytes
            return found

        inputs._keep = note  # type: ignore[method-assign]
        rows = batch_of(0, 2, 10, config["vocab_size"])  # 640 elements do not divide by three
        sent = engine.step(split(rows, plan, engine.mesh.coordinates), 1e-3).bytes_sent
        return kept, sent.get("host", 0)

    plan = Plan.uniform(4, tp=3, recompute="full", **settings)
    one = -(-10 * 64 // parts) * 4
    for kept, host in run_ranks(3, body, plan):
        assert kept == (4 * 2 * one if settings else 0)
        assert host == (4 * 2 * one if "offload" in settings else 0)


def test_kept_inputs_are_priced() -> None:
    config = tiny_config()
    plans = {
        1.0: {},
        0.5: {"shard_activations": True},
        0.0: {"offload": "activations"},
    }
    pricer = Pricer(
        from_config(config, "tiny"),
        parse_cluster("1x2xcpu"),
        Workload(sequence_length=8, global_batch=1),
    )
    for share, settings in plans.items():
        setting = Setting.of(Plan.uniform(4, tp=2, recompute="full", **settings))
        assert pricer.piece(0, setting).saved_bytes == share * 8 * 64 * 4


@pytest.mark.parametrize(
    "settings",
    [
        {"shard_activations": True, "tp": 2},
        {"shard_activations": True, "recompute": "full"},
        {"shard_activations": True, "recompute": "full", "tp": 2, "sequence_parallel": True},
        {"offload": "activations", "recompute": "selective"},
    ],
    ids=str,
)
def test_inputs_that_are_not_kept_cannot_be_divided_or_moved(settings: dict[str, Any]) -> None:
    (problem,) = verify(Plan.uniform(4, **settings), from_config(tiny_config(), "tiny"))
    assert "recompute=full" in problem.works
