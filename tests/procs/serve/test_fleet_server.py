"""Several models on several groups behind one server: what users see when all is well and when not.

Engines run scripts here, in threads of this process; `test_fleet_life.py` has real ones.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import openai
import pytest
from http_samples import GroupThread, Server, running
from scripted import Scripted, engine_of, tokenizer_folder
from serve_samples import byte_tokenizer

from triptych.cli.main import run
from triptych.errors import InputError, RunError, TriptychError
from triptych.fleet.llm_file import HostGroup
from triptych.fleet.models import Shape
from triptych.fleet.shared import policy_of
from triptych.fleet.terms import Terms
from triptych.serve.core.limits import Limits
from triptych.serve.core.turns import Claim
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.hosts import Hosted, Hosts
from triptych.serve.engine.source import ModelSource
from triptych.serve.http.group_process import run_group
from triptych.serve.http.groups import Started
from triptych.serve.http.hosting import Hosting, ServedModel
from triptych.serve.http.messages import Start
from triptych.serve.http.replace import recent_of

LIMITS = Limits(num_blocks=64, block_size=4, model_context=200, max_running=8, token_budget=48)
STEP_S = 0.004
TOKENIZER = byte_tokenizer()
LETTERS = {name: TOKENIZER.encode(name[0]).ids[0] for name in ("ant", "bee", "cat")}


class ScriptedHosts(Hosts):
    """Each model says its first letter."""

    broken: ClassVar[set[str]] = set()  # models whose next step fails
    may_start: ClassVar[threading.Event] = threading.Event()
    may_go_on: ClassVar[threading.Event] = threading.Event()  # behind first tokens

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._step_s = step_s

    def _rank(self, hosted: Hosted) -> Any:
        if hosted.name in self.broken:
            raise InputError(f"{hosted.name} has no weights")
        return hosted.name

    def _admit(self, hosted: Hosted, rank: Any) -> None:
        def script(_: int, __: int, place: int) -> int:
            if rank in self.broken:
                raise RunError(f"{rank} is out of memory")
            assert place == 0 or self.may_go_on.wait(240)
            return LETTERS[rank]

        self.engines[rank] = engine_of(Scripted(script), LIMITS, self._step_s)


class ScriptedGroup(GroupThread):
    """In place of the process of a group; it can be killed."""

    def __init__(self, step_s: float = STEP_S) -> None:
        self.pipe, self._its = Pipe()
        self._step_s = step_s
        self._socket = socket.socket(fileno=self._its.fileno())
        self._started: Start | None = None

    def open(self, start: Start) -> None:  # type: ignore[override]
        def opened() -> Hosts:
            ScriptedHosts.may_start.wait(240)
            hosts = ScriptedHosts(self._step_s)
            hosts.start(start.models)
            return hosts

        self._thread = threading.Thread(target=run_group, args=(self._its, opened), daemon=True)
        self._thread.start()

    def kill(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)

    def end(self, *, is_waited_for: bool = True) -> None:
        super().end()
        self._socket.detach()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return ModelSource.open(tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


def hosting_of(
    source: ModelSource, groups: list[tuple[str, ...]], terms: Terms | None = None
) -> Hosting:
    terms = terms or Terms()
    names = sorted({name for group in groups for name in group})
    model = ServedModel(source=source, policy=policy_of("default", terms), terms=terms)
    specs = tuple(HostGroup(Shape(1), group) for group in groups)
    return Hosting(models=dict.fromkeys(names, model), groups=specs)


@contextmanager
def fleet(hosting: Hosting, step_s: float = STEP_S) -> Iterator[tuple[Server, list[ScriptedGroup]]]:
    """A server and its groups, those that start later included."""
    groups: list[ScriptedGroup] = []
    ScriptedHosts.broken = set()
    ScriptedHosts.may_start.set()
    ScriptedHosts.may_go_on.set()

    def start(_: HostGroup) -> ScriptedGroup:
        groups.append(ScriptedGroup(step_s))
        return groups[-1]

    started = []
    for spec in hosting.groups:
        group = start(spec)
        group.open(hosting.start(spec))
        started.append(Started(group, group.opened(len(spec.models))))  # type: ignore[arg-type]
    with running(hosting, started, start) as server:
        yield server, groups


def ask(server: Server, model: str, max_tokens: int = 8, **body: Any) -> httpx2.Response:
    body = {"model": model, "prompt": "x", "max_tokens": max_tokens, **body}
    return httpx2.post(server.url + "/v1/completions", json=body, timeout=240)


def text(response: httpx2.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(0.01)


def states(server: Server) -> dict[str, Any]:
    found = httpx2.get(server.url + "/health").json()
    return {**found, "states": [group["status"] for group in found["groups"]]}


def test_all_models_are_listed_and_answer_and_others_are_404_with_near_names(
    source: ModelSource,
) -> None:
    """pub_100."""
    terms = Terms(claim=Claim(2.0, 0.3))
    with fleet(hosting_of(source, [("ant", "bee"), ("bee", "cat")], terms)) as (server, _):
        listed = {m.id: m for m in server.client().models.list()}
        assert sorted(listed) == ["ant", "bee", "cat"]
        extra = listed["ant"].model_extra or {}
        assert (extra["max_model_len"], extra["weight"], extra["guarantee"]) == (200, 2.0, 0.3)
        assert [text(ask(server, name)) for name in listed] == ["a" * 8, "b" * 8, "c" * 8]
        unknown = ask(server, "bees")
        assert unknown.status_code == 404 and "there is 'bee'" in unknown.json()["error"]["message"]
        nobody = httpx2.post(server.url + "/v1/completions", json={"prompt": "x"})
        assert nobody.status_code == 400 and "no model is named" in nobody.text
        assert states(server)["status"] == "ok" and len(states(server)["groups"]) == 2
        figures = httpx2.get(server.url + "/metrics").text
        for name in listed:
            assert f'triptych_output_tokens_total{{model="{name}"}} 8.0' in figures
            assert f'triptych_requests_in_time_total{{model="{name}"}} 1.0' in figures
        assert len(re.findall(r'triptych_kv_blocks{group="[01]",model="bee"} 64', figures)) == 2


def test_a_lost_group_is_started_again_and_what_had_not_begun_goes_elsewhere(
    source: ModelSource,
) -> None:
    """Eight answers run at once on a group, at most two requests of four; the others wait."""
    with fleet(hosting_of(source, [("bee",), ("bee",)])) as (server, groups):
        ScriptedHosts.may_go_on.clear()
        stream = server.client().completions.create(
            model="bee", prompt="x", max_tokens=100, stream=True
        )
        assert next(stream).choices[0].text == "b"
        answers: list[httpx2.Response] = []
        threads = [
            threading.Thread(target=lambda: answers.append(ask(server, "bee", 3, n=4)))
            for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        own = server.service.fleet
        wait_for(lambda: own.num_living == 13 and all(h.load.num_waiting for h in own.loads()))
        groups[0].kill()
        ScriptedHosts.may_go_on.set()
        with pytest.raises(openai.APIError, match="group 0 was lost within the answer"):
            list(stream)
        for thread in threads:
            thread.join()
        lost = [each for each in answers if each.status_code != 200]
        assert len(lost) <= 2
        assert all(text(each) == "bbb" for each in answers if each not in lost)
        for each in lost:
            assert each.status_code == 503 and "lost within the answer" in each.text
            assert int(each.headers["retry-after"]) >= 1
        wait_for(lambda: states(server)["states"] == ["serving", "serving"])
        assert len(groups) == 3 and text(ask(server, "bee", 4)) == "bbbb"
        assert own.num_living == 0


def test_while_no_group_serves_a_model_its_users_are_told_and_others_are_served(
    source: ModelSource,
) -> None:
    with fleet(hosting_of(source, [("ant",), ("bee",)])) as (server, groups):
        ScriptedHosts.may_start.clear()
        groups[0].kill()
        wait_for(lambda: states(server)["status"] == "degraded")
        assert states(server)["states"] == ["starting", "serving"]
        refused = ask(server, "ant")
        assert refused.status_code == 503 and "no group that holds 'ant'" in refused.text
        assert text(ask(server, "bee")) == "b" * 8
        ScriptedHosts.may_start.set()
        wait_for(lambda: states(server)["status"] == "ok")
        assert text(ask(server, "ant")) == "a" * 8


def test_pub_100_a_model_that_fails_leaves_the_other_on_its_group_serving(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.serve.http.groups._PATIENCE_S", (0.05,))
    with fleet(hosting_of(source, [("ant", "bee")]), 0.02) as (server, groups):
        stream = server.client().completions.create(
            model="bee", prompt="x", max_tokens=40, stream=True
        )
        assert next(stream).choices[0].text == "b"
        ScriptedHosts.broken = {"ant"}
        lost = ask(server, "ant")
        assert lost.status_code == 503 and "out of memory" in lost.text
        assert "".join(chunk.choices[0].text for chunk in stream) == "b" * 39
        ScriptedHosts.broken = set()
        wait_for(lambda: ask(server, "ant").status_code == 200)
        assert len(groups) == 1


def test_models_come_and_go_under_load_and_no_request_is_dropped(source: ModelSource) -> None:
    before = hosting_of(source, [("ant", "bee"), ("bee",)])
    after = hosting_of(source, [("bee",), ("ant", "bee"), ("cat", "bee")])
    with fleet(before, 0.002) as (server, groups):
        found: list[tuple[str, httpx2.Response]] = []
        is_over = threading.Event()

        def user(name: str) -> None:
            while not is_over.is_set():
                found.append((name, ask(server, name, 12)))

        threads = [threading.Thread(target=user, args=(name,)) for name in ("ant", "bee") * 2]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(found) > 20)
        from triptych.serve.http.app import Offer

        offers = server.service.offers
        new = {"cat": Offer.of(source)}
        server.do(server.service.fleet.become(after, lambda: offers.update(new)))
        count = len(found)
        wait_for(lambda: len(found) > count + 20)
        assert text(ask(server, "cat")) == "c" * 8 and len(groups) == 3
        server.do(server.service.fleet.become(before))
        del offers["cat"]
        is_over.set()
        for thread in threads:
            thread.join()
        assert {(name, text(each)) for name, each in found} == {
            ("ant", "a" * 12),
            ("bee", "b" * 12),
        }
        assert ask(server, "cat").status_code == 404
        held = [sorted(group["models"]) for group in states(server)["groups"]]
        assert held == [["ant", "bee"], ["bee"]] or held == [["bee"], ["ant", "bee"]]


def test_what_does_not_load_changes_nothing(source: ModelSource) -> None:
    with fleet(hosting_of(source, [("ant",), ("bee",)])) as (server, groups):
        ScriptedHosts.broken = {"cat"}
        wanted = hosting_of(source, [("ant", "bee"), ("bee", "cat")])
        with pytest.raises(TriptychError, match="cat has no weights"):
            server.do(server.service.fleet.become(wanted))
        assert [sorted(g["models"]) for g in states(server)["groups"]] == [["ant"], ["bee"]]
        assert text(ask(server, "ant")) == "a" * 8 and len(groups) == 2


def test_what_would_be_late_is_refused_on_arrival_and_the_others_are_in_time(
    source: ModelSource,
) -> None:
    """pub_101: an objective for whole answers, which the router learns to foresee."""
    hosting = hosting_of(source, [("ant",)], Terms(answer_s=0.5))
    with fleet(hosting, 0.02) as (server, _):
        server.service.fleet.clock = lambda: 0.0  # it never lets one in to learn from
        assert text(ask(server, "ant", 5)) == "a" * 5  # now it knows how long steps are
        late = ask(server, "ant", 100)
        assert late.status_code == 429 and int(late.headers["retry-after"]) >= 1
        message = late.json()["error"]["message"]
        assert "the answer would take" in message and "the objective is 0.5 s" in message
        figures = httpx2.get(server.url + "/metrics").text
        assert 'triptych_requests_missed_total{model="ant"} 1.0' in figures


def test_bench_serve_sends_each_request_of_a_trace_to_its_model(
    source: ModelSource, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{('ant', 'bee')[n % 2]},{n / 50},{5 + n},{3 + n % 2}" for n in range(10)]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["model,arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    with fleet(hosting_of(source, [("ant", "bee")])) as (server, _):
        options = ["--trace", str(trace), "--token-ids", "1", "200", "--json"]
        assert run(["bench-serve", f"{server.url}/v1", *options]) == 0
        assert json.loads(capfd.readouterr().out)["attainment"] == 1.0
        figures = httpx2.get(server.url + "/metrics").text
    for name, tokens in (("ant", 15.0), ("bee", 20.0)):
        assert f'triptych_output_tokens_total{{model="{name}"}} {tokens}' in figures


def test_what_was_asked_of_late_is_what_a_new_placement_is_made_for(source: ModelSource) -> None:
    with fleet(hosting_of(source, [("ant",), ("bee",)], Terms(answer_s=9.0))) as (server, _):
        for _ in range(5):
            ask(server, "ant", 7)
        fleet_ = server.service.fleet
        recent = recent_of(fleet_, list(fleet_.arrivals))
        assert recent is not None and recent.models == ((0,), (1,))
        assert recent.trace.output_tokens.tolist() == [7] * 5
        assert recent.prices[0][0].fixed_s > 0 and recent.attainment(recent.models) == 1.0


def test_engines_say_what_their_steps_were(source: ModelSource) -> None:
    engine: Engine = engine_of(Scripted(lambda *_: 5), LIMITS, STEP_S)
    from triptych.serve.engine.values import Ask

    with engine:
        list(engine.stream([Ask(id=1, prompt=[3] * 9, max_tokens=4)]))
        steps = engine.took()
    assert [(s.num_decodes, s.prompt_tokens) for s in steps] == [(0, 9), (1, 0), (1, 0), (1, 0)]
    assert json.dumps([list(s) for s in steps]) and not engine.took()
