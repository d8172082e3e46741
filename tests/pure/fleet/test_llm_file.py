"""Fleet files of LLMs: read, refused with every fault and its bytes, placed, simulated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from triptych.cli.llm_fleet import priced
from triptych.cli.main import run
from triptych.errors import InputError
from triptych.fleet.llm import LlmGroup
from triptych.fleet.llm_curves import busy_shares, over_load
from triptych.fleet.llm_file import is_of_llms, read_llm_fleet
from triptych.fleet.models import Shape
from triptych.fleet.place_llm import Recent, moved, replanned
from triptych.fleet.room import Room, room
from triptych.fleet.terms import Terms
from triptych.model.count import parameters
from triptych.model.hf import from_config
from triptych.serve.core.limits import Limits
from triptych.serve.core.price import StepPrice
from triptych.simulate.arrivals import Window, draw
from triptych.simulate.trace import make, uniform_lengths

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"], "dtype": "float32",
}  # fmt: skip
TEXT = """
[devices]
count = 2
memory_gib = 0.002
cluster = "1x2xH100-SXM"

[[models]]
name = "chat"
folder = "chat"
slo_ttft_s = 0.5
weight = 2.0
context = 128

[[models]]
name = "code"
folder = "code"
slo_s = 2.0
guarantee = 0.4
context = 128

[[groups]]                # a comment that stays
shape = "1x1"
models = ["chat", "code"]
cores = [0]

[requests]
rate_per_s = 5.0
duration_s = 20.0
prompt_tokens = 30
output_tokens = 10
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for name in ("chat", "code", "third"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "fleet.toml"
    path.write_text(TEXT)
    return path


def test_read(file: Path) -> None:
    found = read_llm_fleet(file)
    assert is_of_llms(file) and found.names == ("chat", "code")
    chat, code = (model.terms for model in found.models)
    assert (chat.ttft_s, chat.claim) == (0.5, (2.0, 0.0)) and code.claim == (1.0, 0.4)
    assert found.groups[0].cores == (0,) and found.groups[0].shape == Shape(1)
    trace = found.draw()
    assert set(trace.model.tolist()) == {0, 1} and 20 < trace.prompt_tokens.mean() < 45
    assert (found.draw().arrival_s == trace.arrival_s).all()


def test_every_fault_at_once(file: Path) -> None:
    wrong = TEXT.replace("count = 2", "count = 1").replace('folder = "chat"', 'folder = "cha"')
    wrong = wrong.replace("guarantee = 0.4", "guarantee = 1.4").replace("weight", "wait")
    wrong = wrong.replace('models = ["chat", "code"]', 'models = ["chatt", "code", "code"]')
    file.write_text(wrong + '[[groups]]\nshape = "two"\nmodels = ["chat"]\ncores = [0, -1]\n')
    with pytest.raises(InputError) as error:
        read_llm_fleet(file)
    parts = ["/cha'", "'wait'", "guarantee = 1.4", "'chatt'", "chat", "'two'", "cores = [0, -1]",
             "'code' twice", "groups of 2 devices"]  # fmt: skip
    assert [part for part in parts if part not in str(error.value)] == []


def test_cores_and_guarantees_are_given_once(file: Path) -> None:
    text = TEXT.replace("weight = 2.0", "guarantee = 0.7")
    file.write_text(text + '[[groups]]\nmodels = ["chat"]\ncores = [1, 0]\n')
    with pytest.raises(InputError, match=r"core 0 is in two(.|\n)*guarantees of 1.1"):
        read_llm_fleet(file)


def test_pub_100_a_third_model_that_does_not_fit_is_refused_with_the_bytes(file: Path) -> None:
    third = '[[models]]\nname = "third"\nfolder = "third"\ncontext = 128\n\n[[groups]]'
    text = TEXT.replace("[[groups]]", third).replace('"chat", "code"]', '"chat", "code", "third"]')
    file.write_text(text)
    own = room(file.parent / "third", Shape(1), 128)
    with pytest.raises(InputError) as error:
        read_llm_fleet(file)
    memory = int(0.002 * 2**30)
    assert f"{3 * sum(own)} bytes" in str(error.value) and f"{memory} bytes" in str(error.value)
    assert 2 * sum(own) <= memory < 3 * sum(own)


def test_what_a_model_takes_is_its_parameters_and_its_keys_and_values(file: Path) -> None:
    model, folder = from_config(CONFIG, name="chat"), file.parent / "chat"
    whole = room(folder, Shape(1), 128)
    assert whole.weights_bytes == pytest.approx(4 * parameters(model), rel=0.01)
    assert whole.context_bytes == 2 * 4 * 2 * 16 * 128 * 4  # K and V, layers, heads, dim, tokens
    halves = room(folder, Shape(2), 128)
    assert halves.context_bytes == whole.context_bytes / 2
    assert whole.weights_bytes / 2 <= halves.weights_bytes < whole.weights_bytes


def test_place_then_simulate(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = file.with_name("placed.toml")
    assert run(["place", str(file), "--out", str(out), "--json"]) == 0
    placed = json.loads(capfd.readouterr().out)
    assert sum(group["devices"] for group in placed["groups"]) <= 2
    assert {name for group in placed["groups"] for name in group["models"]} == {"chat", "code"}
    assert run(["simulate", str(out), "--json"]) == 0
    seen = json.loads(capfd.readouterr().out)
    assert seen["attainment"] == placed["attainment"]["this placement"]
    assert seen["models"]["chat"]["ttft_p50_s"] > 0
    assert run(["simulate", str(out)]) == 0
    assert "within their objectives" in capfd.readouterr().out


def test_pages_show_groups_over_time_models_and_other_loads(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, page = file.with_name("placed.toml"), file.with_name("page.html")
    assert run(["place", str(file), "--out", str(out), "--report", str(page)]) == 0
    assert f"wrote {page}" in capfd.readouterr().out
    text = page.read_text()
    assert all(by in text for by in ("by requests a second", "by CV of arrivals", "by devices"))
    assert run(["simulate", str(out), "--report", str(page)]) == 0
    text = page.read_text()
    assert "by objectives" in text and "by devices" not in text and ">chat<" in text


def test_curves_and_time_are_those_of_the_simulation_itself(file: Path) -> None:
    """The curve at factor 1 is the attainment; busy shares add up to the seconds of all steps."""
    given = read_llm_fleet(file)
    fleet, trace = priced(given), given.draw()
    groups = [LlmGroup(Shape(1), (0, 1)), LlmGroup(Shape(1), (1,))]
    curves = over_load(given, fleet, trace, {"this": groups})
    whole = float(fleet.served(groups, trace).mean())
    for across, x in (("requests a second", trace.rate_per_s), ("CV of arrivals", 1.0),
                      ("objectives, in those of the file", 1.0)):  # fmt: skip
        assert dict(curves[across]["this"])[x] == whole
    easier = [y for _, y in curves["objectives, in those of the file"]["this"]]
    assert easier == sorted(easier)
    simulated = fleet.simulated(groups)
    simulated.run(trace)
    duration_s = max(end for *_, end in simulated.steps)
    shares = busy_shares(simulated, 2, duration_s, 50)
    for group, busy in enumerate(shares):
        seconds = sum(end - begin for g, begin, end in simulated.steps if g == group)
        assert sum(busy) * duration_s / 50 == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("old", "new", "verb", "words"),
    [
        ('cluster = "1x2xH100-SXM"', "", "simulate", "priced on a cluster"),
        ('"1x2xH100-SXM"', '"1x4xH100-SXM"', "place", "as many devices as the cluster"),
        ("[requests]", "[queries]", "simulate", "unknown key 'queries'"),
    ],
)
def test_what_cannot_be_priced(
    file: Path, old: str, new: str, verb: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file.write_text(TEXT.replace(old, new))
    assert run([verb, str(file)]) == 2
    assert words in capfd.readouterr().err


def test_a_replica_goes_where_the_load_is() -> None:
    """Two models, one on each of two groups; all requests are for the first."""
    rng = np.random.default_rng(0)
    arrival_s = draw([Window(20.0, 12.0, 2.0)], rng)
    zeros = np.zeros(len(arrival_s), np.int64)
    trace = make(arrival_s, uniform_lengths((5, 60), (10, 40)), rng, zeros, ("a", "b"))
    limits = Limits(num_blocks=500, model_context=512, max_running=16, token_budget=64)
    price = StepPrice(0.01, 0.002, 0.0002)
    recent = Recent(
        trace=trace,
        terms=(Terms(answer_s=0.8),) * 2,
        limits=(limits,) * 2,
        prices=((price,) * 2,) * 2,
        sizes=((Room(10, 1),) * 2,) * 2,
        memory_bytes=22,
        models=((0,), (1,)),
    )
    assert moved(recent) == ((0,), (0, 1))
    assert recent.attainment(((0,), (0, 1))) > recent.attainment(((0,), (1,))) + 0.05


def test_where_memory_is_short_models_are_exchanged_and_none_loses_its_last_replica() -> None:
    wanted = ((0, 1), (0, 2))

    def attainment(models: tuple[tuple[int, ...], ...]) -> float:
        return sum(m in group for group, held in zip(wanted, models, strict=True)
                   for m in held for group in [group]) / 4  # fmt: skip

    found = replanned(((0, 1), (1, 2)), attainment, lambda _, models: len(models) <= 2)
    assert found == wanted
    alone = replanned(((0,), (1,)), lambda models: float((0,) in models[1:]), lambda *_: False)
    assert alone == ((0,), (1,))
