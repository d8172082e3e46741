"""The beginning and the end of a server: signals, lost ranks, addresses."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from http_samples import NAME, GroupThread
from scripted import Scripted, engine_of, tokenizer_folder
from serve_samples import config_of, save_model

from triptych.errors import InputError, RunError
from triptych.serve.core.limits import Limits
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.hosts import Hosts
from triptych.serve.engine.source import ModelSource
from triptych.serve.http.exposure import Exposure
from triptych.serve.http.hosting import Hosting, ServedModel, single
from triptych.serve.http.server import ServerSettings, Watcher, serve

LIMITS = Limits(num_blocks=64, block_size=4, model_context=200, max_running=8, token_budget=48)
LONG = {"prompt": "x", "max_tokens": 60, "stream": True}


def group_of(name: str, open_engine: Callable[[], Engine]) -> GroupThread:
    """In place of the process of a group."""

    def opened() -> Hosts:
        engine, hosts = open_engine(), Hosts()
        hosts.engines[name] = engine
        return hosts

    return GroupThread(opened)


def hosting_of(folder: Path) -> Hosting:
    return single(NAME, ServedModel(source=ModelSource.open(folder)))


def run(
    folder: Path, script: Callable[..., int], client: Callable[[str], None], **settings: Any
) -> str:
    """Serves in this thread, where signals come, while a client does what it does in another."""
    failures: list[BaseException] = []

    def acting(url: str) -> None:
        try:
            client(url)
        except BaseException as error:
            failures.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    threads: list[threading.Thread] = []

    def when_ready(url: str, _: object) -> None:
        threads.append(threading.Thread(target=acting, args=(url,)))
        threads[0].start()

    group: Any = group_of(NAME, lambda: engine_of(Scripted(script), LIMITS, 0.01))
    made = ServerSettings(port=0, exposure=Exposure(), **settings)
    try:
        return serve(hosting_of(folder), [group], made, Watcher(when_ready))
    finally:
        threads[0].join()
        if failures:
            raise failures[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


def open_ai(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


def test_a_signal_lets_requests_end_and_takes_no_new_ones(folder: Path) -> None:
    def client(url: str) -> None:
        stream = open_ai(url).completions.create(model=NAME, **LONG)  # type: ignore[call-overload]
        text = next(stream).choices[0].text
        os.kill(os.getpid(), signal.SIGTERM)
        chunks = list(stream)
        assert text + "".join(c.choices[0].text for c in chunks) == "%" * 60
        assert chunks[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.APIConnectionError):
            open_ai(url).models.list()

    assert run(folder, lambda *_: 5, client) == "SIGTERM"


@pytest.mark.parametrize("by", ["time", "second signal"])
def test_what_does_not_end_in_time_gets_an_error(folder: Path, by: str) -> None:
    def client(url: str) -> None:
        body = {**LONG, "max_tokens": 190}
        stream = open_ai(url).completions.create(model=NAME, **body)  # type: ignore[call-overload]
        next(stream)
        os.kill(os.getpid(), signal.SIGINT)
        if by == "second signal":
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises((openai.APIError, httpx2.RemoteProtocolError)):
            list(stream)

    drain_s = 0.1 if by == "time" else 60.0
    assert run(folder, lambda *_: 5, client, drain_s=drain_s) == "SIGINT"


def test_a_lost_rank_ends_the_server_with_the_cause(folder: Path) -> None:
    def script(_: int, __: int, place: int) -> int:
        if place == 5:
            raise RunError("rank 1 ended with exit code -9")
        return 5

    def client(url: str) -> None:
        with pytest.raises(openai.APIError, match="rank 1 ended"):
            list(open_ai(url).completions.create(model=NAME, **LONG))  # type: ignore[call-overload]

    with pytest.raises(RunError, match="rank 1 ended with exit code -9"):
        run(folder, script, client)


def test_an_address_that_is_taken_is_told_before_anything_loads(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = ServerSettings(port=port, exposure=Exposure())
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve(hosting_of(folder), [], settings, Watcher(lambda *_: None))


def test_what_kept_an_engine_from_opening_ends_the_command(folder: Path) -> None:
    def opened() -> Engine:
        raise InputError("context = 0")

    settings = ServerSettings(port=0, exposure=Exposure())
    group: Any = group_of(NAME, opened)
    with pytest.raises(InputError, match="context = 0"):
        serve(hosting_of(folder), [group], settings, Watcher(lambda *_: None))


def test_the_command_with_ranks_ends_with_the_cause_when_one_is_killed(tmp_path: Path) -> None:
    """All processes are gone then."""
    save_model(tmp_path, config_of(max_position_embeddings=4096))
    command = [sys.executable, "-m", "triptych", "serve", str(tmp_path), "--port", "0", "--json"]
    command += ["--plan", "tp=2", "--name", NAME]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and process.stdout is not None
    url = None
    while url is None:
        line = process.stderr.readline()
        assert line, "it ended"
        url = re.search(r"at (http\S+),", line)
    stream = open_ai(url[1]).completions.create(
        model=NAME, prompt="x", max_tokens=4000, stream=True
    )
    next(stream)
    below = psutil.Process(process.pid).children(recursive=True)
    ranks = [p for p in below if "forkserver" in " ".join(p.cmdline()) and not p.children()]
    ranks[-1].kill()
    with pytest.raises(openai.APIError, match=r"the server has ended: .*rank"):
        list(stream)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "rank 1 ended with exit code -9" in err
    assert json.loads(out)["error"]["kind"] == "RunError"
    assert psutil.wait_procs(below, timeout=10)[1] == []
