"""Real engines that share ranks, and the command that serves a fleet file."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from serve_samples import config_of, save_model

from triptych.plan.plan import Plan
from triptych.serve.core.check import broken_invariants
from triptych.serve.core.order import Policy
from triptych.serve.core.turns import Claim
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.hosts import Hosted, Hosts
from triptych.serve.engine.sampling import Sampling
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.source import ModelSource
from triptych.serve.engine.text import TextStream
from triptych.serve.engine.values import Ask

SETTINGS = EngineSettings(max_running=8, token_budget=32, block_size=4)
NAMES = ("ant", "bee", "cat")
PROMPTS = [[7, 9, 11], [30] * 40, [5, 6], [100, 3, 50, 60]]
LENGTHS = [12, 6, 20, 9]
Texts = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(NAMES):
        (root / name).mkdir()
        save_model(root / name, config_of(num_hidden_layers=2 + seed), seed)
    return {name: root / name for name in NAMES}


def asks(first: int = 0) -> list[Ask]:
    greedy = Sampling(ignores_end=True)
    return [
        Ask(id=first + number, prompt=prompt, max_tokens=size, sampling=greedy)
        for number, (prompt, size) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> Texts:
    """What each model says on an engine of its own."""
    found: Texts = {}
    for name, folder in folders.items():
        with Engine.open(folder, None, SETTINGS) as engine:
            for output in engine.stream(asks()):
                found.setdefault((name, output.request_id), []).append(output.token or 0)
    return found


def hosted(name: str, folders: dict[str, Path], plan: Plan | None) -> Hosted:
    return Hosted(name, folders[name], plan, SETTINGS, Policy(), Claim(1.0, 0.2))


def answered(hosts: Hosts) -> Texts:
    """All prompts to all models at once."""
    found: Texts = {}
    for engine in hosts.engines.values():
        for ask in asks():
            assert engine.add_request(ask).refusal is None
    while any(engine.is_busy for engine in hosts.engines.values()):
        for name, engine in hosts.engines.items():
            for output in engine.step(0.01):
                found.setdefault((name, output.request_id), []).append(output.token or 0)
        for engine in hosts.engines.values():
            engine.plan()
    for engine in hosts.engines.values():
        assert broken_invariants(engine.scheduler) == []
    return found


@pytest.mark.parametrize("degrees", [{}, {"pp": 2}])
def test_models_that_share_ranks_say_what_they_say_alone_and_come_and_go(
    folders: dict[str, Path], alone: Texts, degrees: dict[str, int]
) -> None:
    """The memory is too small for what all want at once: they wait for each other's."""
    plans: dict[str, Plan | None] = dict.fromkeys(NAMES)
    if degrees:
        for name, folder in folders.items():
            plans[name] = Plan.uniform(ModelSource.open(folder).model().num_layers, **degrees)
    world, cache_bytes = degrees.get("pp", 1), 200_000
    with Hosts(world, cache_bytes) as hosts:
        hosts.start([hosted(name, folders, plans[name]) for name in NAMES[:2]])
        assert answered(hosts) == {k: v for k, v in alone.items() if k[0] != "cat"}
        hosts.load(hosted("cat", folders, plans["cat"]), cache_bytes)
        assert select.select([hosts], [], [], 60)[0]
        assert list(hosts.loaded()) == [("cat", None)]
        assert answered(hosts) == alone
        hosts.drop("ant", cache_bytes)
        assert answered(hosts) == {k: v for k, v in alone.items() if k[0] != "ant"}


# ---- the command ----------------------------------------------------------------------------


FILE = """
[devices]
count = 3
memory_gib = 1.0

{models}

[[groups]]
models = ["ant", "bee"]
cores = [{core}]

[[groups]]
models = [{second}]
"""


def file_text(second: str, names: tuple[str, ...]) -> str:
    models = "\n".join(
        f'[[models]]\nname = "{n}"\nfolder = "{n}"\nslo_s = 60.0\ncontext = 96\n' for n in names
    )
    core = min(os.sched_getaffinity(0))
    return FILE.format(models=models, second=second, core=core)


@contextmanager
def command(file: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    args = [sys.executable, "-m", "triptych", "serve", str(file), "--port", "0", *options]
    log = file.with_suffix(".log")
    with log.open("w") as said:
        process = subprocess.Popen(args, stderr=said, stdout=said, text=True)
    try:
        while (url := re.search(r"at (http\S+)/v1,", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield url[1], process
    finally:
        process.kill()
        process.wait()


def _is_group(process: psutil.Process) -> bool:
    return "group_process" in " ".join(process.cmdline())


def text_of(folder: Path, prompt: list[int], tokens: list[int]) -> str:
    stream = TextStream(ModelSource.open(folder).tokenizer(), prompt)
    return "".join(map(stream.add, tokens)) + stream.finish()


def test_the_command_serves_a_file_through_a_kill_and_a_change(
    folders: dict[str, Path], alone: Texts
) -> None:
    """No wrong text, the group comes back, a model comes by SIGHUP; all processes end."""
    file = folders["ant"].parent / "fleet.toml"
    file.write_text(file_text('"bee"', ("ant", "bee")))
    with command(file) as (url, process), httpx2.Client(base_url=url, timeout=120) as client:

        def say(model: str, number: int) -> Any:
            body = {"model": model, "prompt": PROMPTS[number], "max_tokens": LENGTHS[number],
                    "temperature": 0, "ignore_eos": True}  # fmt: skip
            return client.post("/v1/completions", json=body)

        def all_said(*models: str) -> None:
            for model in models:
                for number in range(len(PROMPTS)):
                    text = say(model, number).json()["choices"][0]["text"]
                    tokens = alone[model, number]
                    assert text == text_of(folders[model], PROMPTS[number], tokens)

        all_said("ant", "bee")
        below = psutil.Process(process.pid).children()
        first, _ = sorted((p for p in below if _is_group(p)), key=lambda p: p.pid)
        assert first.cpu_affinity() == [min(os.sched_getaffinity(0))]
        first.kill()
        all_said("bee")
        while client.get("/health").json()["status"] != "ok":
            time.sleep(0.1)
        all_said("ant")
        file.write_text(file_text('"cat", "bee"', NAMES))
        process.send_signal(signal.SIGHUP)
        while "cat" not in client.get("/v1/models").text:
            time.sleep(0.1)
        all_said(*NAMES)
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert psutil.wait_procs(below, timeout=10)[1] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--num-blocks", "9"], "--num-blocks"), (["--plan", "tp=2"], "--plan"), ([], "third")],
)
def test_what_a_file_does_not_take_ends_the_command_before_torch_loads(
    folders: dict[str, Path], options: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from triptych.cli.main import run

    file = folders["ant"].parent / "wrong.toml"
    second = '"bee"' if options else '"third"'
    file.write_text(file_text(second, ("ant", "bee")))
    assert run(["serve", str(file), *options]) == 2
    said = capfd.readouterr().err
    assert words in said and "loading torch" not in said


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_groups_start_on_the_nodes_of_a_ray_cluster(folders: dict[str, Path], alone: Texts) -> None:
    file = folders["ant"].parent / "on_ray.toml"
    file.write_text(file_text('"bee"', ("ant", "bee")))
    with command(file, "--ray", "local") as (url, process):
        for model in ("ant", "bee"):
            body = {"model": model, "prompt": PROMPTS[0], "max_tokens": LENGTHS[0],
                    "temperature": 0, "ignore_eos": True}  # fmt: skip
            said = httpx2.post(url + "/v1/completions", json=body, timeout=120).json()
            tokens = alone[model, 0]
            assert said["choices"][0]["text"] == text_of(folders[model], PROMPTS[0], tokens)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
