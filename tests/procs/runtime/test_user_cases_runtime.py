"""Faults that users of other tools met (user_cases.md), in the runtime's area."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import DOUBLE, assert_equal_runs, make_engine, merge, strictly, tiny_config, train
from ranks import run_ranks

from triptych.plan.plan import Plan
from triptych.runtime.engine import Engine, MicroBatch
from triptych.runtime.replicas import differing_replicas

LENGTHS_015 = (3, 11, 101, 5, 64, 7, 1, 40)


def _padded(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> MicroBatch:
    """Right-padded sequences; padding has no label."""
    length = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), -100)
    for row, (tokens, targets) in enumerate(rows):
        ids[row, : len(tokens)] = tokens
        labels[row, : len(targets)] = targets
    return MicroBatch(ids, labels)


def _sequences(lengths: tuple[int, ...], seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(512, (n,), generator=generator) for _ in "xy")  # type: ignore[misc]
        for n in lengths
    ]


def _gradients(engine: Engine, microbatches: list[MicroBatch]) -> Any:
    part, tokens = engine.gradients(microbatches)
    loss = float(engine.mesh.world.all_reduce(part.clone()))
    grads = [(s.name, s.box, s.shape, s.gradient.clone().numpy()) for s in engine.buckets.slots]
    return loss, tokens, grads


def _assert_same_gradients(ours: list[Any], reference: Any, tolerance: float) -> None:
    loss, tokens, expected = reference
    whole = {name: torch.from_numpy(values) for name, _, _, values in expected}
    for mine, count, grads in ours:
        assert count == tokens
        assert abs(mine - loss) <= tolerance
        for name, box, _, values in grads:
            theirs = whole[name][tuple(slice(a, b) for a, b in box)]
            torch.testing.assert_close(
                torch.from_numpy(values), theirs, rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("case", ["4x2", "DP2", "DP2 x 2", "PP2 x 4"])
def test_pub_015_the_cut_of_a_batch_does_not_weigh_tokens(case: str) -> None:
    sequences = _sequences(LENGTHS_015, seed=3)
    plans = {
        "4x2": (Plan.uniform(4), 4),
        "DP2": (Plan.uniform(4, dp=2), 1),
        "DP2 x 2": (Plan.uniform(4, dp=2), 2),
        "PP2 x 4": (Plan.uniform(4, pp=2), 4),
    }
    plan, count = plans[case]

    def body(plan: Plan, count: int) -> Any:
        engine = make_engine(plan, tiny_config())
        share = len(sequences) // plan.dp
        mine = sequences[engine.mesh.coordinates.dp * share :][:share]
        size = share // count
        parts = [_padded(mine[i : i + size]) for i in range(0, share, size)]
        return _gradients(engine, parts)

    reference = run_ranks(1, body, Plan.uniform(4), 1)[0]
    assert reference[1] == sum(LENGTHS_015)
    _assert_same_gradients(run_ranks(plan.world_size, body, plan, count), reference, 1e-6)


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("lengths", [(5, 64, 17, 33, 8, 50), (20,) * 6])
def test_pub_035_labels_travel_with_their_micro_batch(pp: int, lengths: tuple[int, ...]) -> None:
    def body(plan: Plan) -> Any:
        engine = make_engine(plan, tiny_config())
        found = []
        for step in range(2):
            strictly(step)
            order = lengths if step == 0 else lengths[::-1]
            parts = [_padded([row]) for row in _sequences(order, seed=step)]
            engine.buckets.begin_step()
            losses = engine._interpreter.run(engine._actions(len(parts)), parts, 1.0)
            engine.buckets.finish()
            found.append(None if losses is None else losses.tolist())
        return found

    expected = run_ranks(1, body, Plan.uniform(4))[0]
    ours = run_ranks(pp, body, Plan.uniform(4, pp=pp))[-1]
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 6, 7])
def test_pub_034_any_number_of_micro_batches_runs_on_four_stages(
    microbatches: int, schedule: str
) -> None:
    config = tiny_config()

    def body(plan: Plan) -> Any:
        return train(plan, config, sequences=microbatches, eps=1e-2)

    plan = Plan.uniform(4, pp=4, schedule=schedule)
    ours = merge(run_ranks(4, body, plan, timeout_s=30))
    assert_equal_runs(ours, merge(run_ranks(1, body, Plan.uniform(4))), 1e-5)


@pytest.mark.parametrize(
    ("layers", "pp"), [(10, 3), (10, 4), (7, 2)], ids=["10 on 3", "10 on 4", "7 on 2"]
)
def test_pub_033_no_layer_is_dropped(layers: int, pp: int) -> None:
    config = tiny_config(num_hidden_layers=layers)

    def body(plan: Plan) -> Any:
        return train(plan, config, eps=1e-2)

    plan = Plan.uniform(layers, pp=pp)
    ours = merge(run_ranks(pp, body, plan))
    found = {name.split(".")[2] for kind, name in ours.tensors if ".layers." in name}
    assert found == set(map(str, range(layers)))
    assert_equal_runs(ours, merge(run_ranks(1, body, Plan.uniform(layers))), 1e-5)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_pub_027_a_vocabulary_that_does_not_divide_loses_nothing(tp: int, tied: bool) -> None:
    config = tiny_config(
        vocab_size=503, num_key_value_heads=4, tie_word_embeddings=tied, initializer_range=0.02
    )

    def body(plan: Plan) -> Any:
        return train(plan, config, steps=20, gradients=False, learning_rate=1e-3, eps=1e-2)

    ours = merge(run_ranks(tp, body, Plan.uniform(4, tp=tp, microbatch=4)))
    assert ours.tensors["weight", "model.embed_tokens.weight"].shape[0] == 503
    reference = merge(run_ranks(1, body, Plan.uniform(4, microbatch=4)))
    assert_equal_runs(ours, reference, 1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(8, 2, 4), (8, 2, 8), (12, 4, 3), (9, 3, 2)])
def test_pub_028_kv_heads_are_copied_or_split_unevenly(heads: int, kv_heads: int, tp: int) -> None:
    config = tiny_config(
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8, hidden_size=72
    )

    def body(plan: Plan) -> Any:
        return train(plan, config, steps=10, eps=1e-2)

    ours = merge(run_ranks(tp, body, Plan.uniform(4, tp=tp, microbatch=4)))
    shape = ours.tensors["weight", "model.layers.0.self_attn.k_proj.weight"].shape
    assert shape == (kv_heads * 8, 72)
    assert_equal_runs(ours, merge(run_ranks(1, body, Plan.uniform(4, microbatch=4))), 1e-5)


def _train_and_perturb(plan: Plan, config: dict[str, Any]) -> list[str]:
    """Replicas that differ once a rank has another value; before, none does after any step."""
    engine = make_engine(plan, config)
    rows = [_padded(_sequences((24, 24), seed=0))]
    for step in range(10):
        strictly(step)
        engine.step(rows, 1e-2)
        assert differing_replicas(engine.shards()) == []
    if engine.mesh.rank == 1:
        with torch.no_grad():
            next(s for s in engine.buckets.slots if s.name == "model.norm.weight").value[0] += 1e-6
    return differing_replicas(engine.shards())


@pytest.mark.parametrize(
    "settings",
    [{"tp": 2, "sequence_parallel": True}, {"tp": 4, "sequence_parallel": True}],
    ids=["TP2+SP", "TP4+SP"],
)
def test_pub_029_replicated_parameters_stay_bitwise_equal(settings: dict[str, Any]) -> None:
    config = tiny_config(attention_bias=True, mlp_bias=True)
    plan = Plan.uniform(4, **settings)
    reports = run_ranks(plan.world_size, _train_and_perturb, plan, config)
    assert all(len(r) == 1 and r[0].startswith("model.norm.weight: ranks") for r in reports)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("settings", [{"tp": 2}, {"tp": 4}, {"pp": 2}, {"dp": 2, "zero": 1}])
def test_pub_031_the_gradient_norm_counts_each_parameter_once(
    settings: dict[str, Any], tied: bool
) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    settings = {"sequence_parallel": "tp" in settings, **settings}

    def body(plan: Plan) -> list[float]:
        engine = make_engine(plan, config, clip_norm=0.5)
        share = 4 // plan.dp
        rows = _sequences((24,) * 4, seed=0)[engine.mesh.coordinates.dp * share :][:share]
        norms = []
        for step in range(2):
            strictly(step)
            norms.append(engine.step([_padded([row]) for row in rows], 0.0).grad_norm)
        return norms

    plan = Plan.uniform(4, **settings)
    expected = run_ranks(1, body, Plan.uniform(4))[0][0]
    for norms in run_ranks(plan.world_size, body, plan):
        assert norms == pytest.approx([expected] * 2, rel=1e-6)
        assert expected > 0.5, "clipping must bite"


@pytest.mark.parametrize("zero", [0, 1])
def test_pub_037_a_tied_embedding_on_two_stages_is_one_parameter(zero: int) -> None:
    config = tiny_config(tie_word_embeddings=True)

    def body(plan: Plan) -> Any:
        return train(plan, config, steps=10, eps=1e-2, clip_norm=0.0)

    plan = Plan.uniform(4, pp=2, dp=2, zero=zero, precision=DOUBLE)
    ours = merge(run_ranks(4, body, plan))  # merge checks that all holders agree
    reference = merge(run_ranks(1, body, Plan.uniform(4, precision=DOUBLE)))
    assert_equal_runs(ours, reference, 1e-10)
