"""One rank of a training run, from an empty process to the last checkpoint.

The run folder holds all that it needs: it never plans and never predicts.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from triptych.checkpoint.weights import load_weights
from triptych.model.count import training_flops_per_token
from triptych.model.hf import from_config
from triptych.model.model import Model
from triptych.plan.plan import Plan
from triptych.plan.ranks import coordinates
from triptych.plan.share import Share
from triptych.plan.toml import read_plan
from triptych.runtime.engine import Engine
from triptych.runtime.mesh import Mesh
from triptych.tokenizer.load import load_tokenizer
from triptych.train import environment
from triptych.train.checkpoints import Checkpoints, Stream
from triptych.train.environment import Place
from triptych.train.failure import first_cause, headline, is_lost_peer, rank_ends, write_error
from triptych.train.folder import RunFolder, predicted_peak_bytes, write_json
from triptych.train.fork_server import threads_per_rank
from triptych.train.job import Job
from triptych.train.job_file import read_job
from triptych.train.job_parts import (
    evaluation_data,
    learning_rate,
    optimizer_settings,
    router_settings,
    training_data,
)
from triptych.train.loop import Lengths, Loop, NonFinite
from triptych.train.meeting import meet
from triptych.train.memory import PeakMemory
from triptych.train.metrics import Metrics
from triptych.train.peak import Peak
from triptych.train.preflight import memory_lines, probe_all, speed_lines
from triptych.train.progress import Reporter, make_reporter
from triptych.train.result import Position, Summary
from triptych.train.sampling import Sampler
from triptych.train.settings import Collector, choose_environment, near_cores, settings_line
from triptych.train.source import carried_files, model_folder
from triptych.train.startup import built, show_startup
from triptych.train.status import Phase, StatusFile
from triptych.train.stop import StopRequest
from triptych.train.text import read_data
from triptych.train.trace import Trace
from triptych.train.trackers import open_trackers

# ---- entries -----------------------------------------------------------------------------------


def run_rank(folder: str) -> Summary:
    """Entry of a rank that `launch.py` started: trains, or writes its error file and exits."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is for the launcher to explain
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    _end_with_launcher()
    place = environment.place()
    assert place is not None
    run = RunFolder(Path(folder))
    status = _begin(run, place)
    try:
        with _listening(run, place.rank) as stop:
            return train_rank(run, place, status, meet(place), stop)
    except BaseException as error:
        write_error(run, place.rank, status.now, error)
        sys.stderr.flush()
        os._exit(1)  # a broken process group may hang in a normal exit


def run_as_rank(run: RunFolder, place: Place, store: Store) -> Summary:
    """Entry of a rank that `torchrun` or Slurm started, once rank 0 has prepared the run."""
    status = _begin(run, place)
    try:
        with _listening(run, place.rank) as stop:
            return train_rank(run, place, status, store, stop)
    except Exception as error:
        write_error(run, place.rank, status.now, error)
        if is_lost_peer(error):  # the rank to look at is another one
            logging.getLogger(__name__).error("rank %d lost its peers", place.rank)
            os._exit(1)
        raise


def _begin(run: RunFolder, place: Place) -> StatusFile:
    """This rank's status; that of an attempt before it is kept apart."""
    if place.attempt > 0:
        run.keep_attempt(place.rank, place.attempt - 1)
    return StatusFile(run.status(place.rank))


@contextmanager
def _listening(run: RunFolder, rank: int) -> Iterator[StopRequest]:
    """Inside, SIGTERM and SIGUSR1 are noted, and SIGTERM leaves the stack of all threads."""
    stop = StopRequest()
    run.stack(rank).parent.mkdir(parents=True, exist_ok=True)
    with run.stack(rank).open("w") as stack, stop.listening():
        faulthandler.register(signal.SIGTERM, file=stack, chain=True)
        try:
            yield stop
        finally:
            faulthandler.unregister(signal.SIGTERM)


def _end_with_launcher() -> None:
    """Ends this process if the launcher dies, however it does: no rank is left behind."""
    launcher = parent_process()
    if launcher is None:
        return

    def watch() -> None:
        connection.wait([launcher.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()


# ---- a rank's life -----------------------------------------------------------------------------


def train_rank(
    run: RunFolder, place: Place, status: StatusFile, store: Store, stop: StopRequest
) -> Summary:
    """Trains the run in a folder as one of its ranks; collective over all of them."""
    _log_from(place.rank)
    job = read_job(run.job)
    plan = read_plan(run.plan)
    config = json.loads(run.config.read_text("utf-8"))
    if torch.cuda.is_available():
        os.environ.update(choose_environment(job.parallel.timeout_s))
    with process_group(place, store, job.parallel.timeout_s):
        return _Rank(run, job, plan, config, place, status, stop).train()


@contextmanager
def process_group(place: Place, store: Store, timeout_s: float) -> Iterator[None]:
    """`torch.distributed` is initialised inside, on this rank's GPU if there is one."""
    torch.set_num_threads(threads_per_rank(place.local_world_size))
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if place.world_size == 1:
        yield
        return
    dist.init_process_group(
        "gloo" if device is None else "cpu:gloo,cuda:nccl",
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device,
    )
    yield
    dist.destroy_process_group()  # not after an error: it could wait for ranks that are gone


def _log_from(rank: int) -> None:
    """Log lines name the rank; rank 0 speaks unless something is wrong."""
    logging.basicConfig(format=f"rank {rank}: %(levelname)s: %(message)s", level=logging.WARNING)
    logging.getLogger("triptych").setLevel(logging.WARNING if rank else logging.INFO)


class _Rank:
    """What one rank puts together for a run."""

    def __init__(
        self,
        run: RunFolder,
        job: Job,
        plan: Plan,
        config: Mapping[str, Any],
        place: Place,
        status: StatusFile,
        stop: StopRequest,
    ) -> None:
        self._run, self._job, self._plan, self._config = run, job, plan, config
        self._rank, self._place, self._status, self._stop = place.rank, place, status, stop
        self._model: Model = from_config(config, run.path.name)
        self._data, self._tokenizer_folder = read_data(run)

    def train(self) -> Summary:
        """Builds, resumes or starts, trains, and leaves the timeline."""
        mesh = Mesh.create(
            self._plan,
            kv_heads=self._model.kv_heads,
            timeout_s=self._job.parallel.timeout_s,
            strict=environment.wants_strict_comm(),
        )
        memory = PeakMemory(mesh.device)
        engine = Engine.build(
            self._plan,
            self._config,
            mesh,
            seed=self._job.train.seed,
            optimizer=optimizer_settings(self._job, self._model),
            router=router_settings(self._job),
            freeze=self._job.train.freeze,
        )
        reporter = make_reporter(self._rank, self._job.train.steps, self._job.train.log_every)
        try:
            return self._train(engine, memory, reporter)
        finally:
            reporter.close()

    def _train(self, engine: Engine, memory: PeakMemory, reporter: Reporter) -> Summary:
        for line in show_startup(self._plan, self._model, built(engine)):
            reporter.say(line)
        checkpoints = Checkpoints(engine, self._job, self._stream(), self._files(), reporter.say)
        for line in self._before_flight(engine.mesh.device, checkpoints):
            reporter.say(line)
        self._status.set(0, Phase.LOAD)
        start = checkpoints.resume() if self._job.checkpoint.resume != "never" else None
        if start is None and self._job.model.init == "weights":
            load_weights(Path(self._job.model.path or ""), engine.shards())
            engine.after_load(0)
        start = start or Position()
        metrics = self._metrics(start) if start.step < self._job.train.steps else None
        with Collector() as collector:
            loop = self._loop(engine, checkpoints, memory, reporter, metrics, collector)
            try:
                summary = self._run_loop(loop, start, reporter)
            except Exception:
                checkpoints.let_finish()
                raise
            finally:
                if metrics is not None:
                    metrics.close()
        self._status.set(summary.step, Phase.DONE)
        return summary

    def _before_flight(self, device: torch.device, checkpoints: Checkpoints) -> list[str]:
        """What the pre-flight check says; collective. Raises CheckpointError if none can be saved.

        Ranks that see different disks agree, as they do in a save.
        """
        self._status.set(0, Phase.PREFLIGHT)
        probes = probe_all(device)
        cores = near_cores(device)
        if device.type == "cuda" and cores:
            os.sched_setaffinity(0, cores)
        lines = [
            settings_line(device, self._job.parallel.timeout_s, cores, torch.get_num_threads())
        ]
        if self._place.attempt > 0:
            lines.append(self._last_attempt())
        lines += speed_lines(probes, device.type)
        lines += memory_lines(probes, predicted_peak_bytes(self._run), shared=device.type == "cpu")
        return lines + checkpoints.room()

    def _last_attempt(self) -> str:
        """Why the ranks were started again."""
        number = self._place.attempt
        codes = [None] * self._place.world_size
        cause = first_cause(rank_ends(self._run.attempt(number - 1), codes))
        why = headline(cause) if cause else "it left no word"
        return f"restart {number}: the attempt before it failed: {why}"

    def _run_loop(self, loop: Loop, start: Position, reporter: Reporter) -> Summary:
        if start.step >= self._job.train.steps:
            reporter.say(
                f"step {start.step} of {self._job.train.steps} is done already; "
                "more [train] steps make it go on"
            )
            return Summary(start.step, None, None, None)
        summary = loop.run(start)
        if self._rank == 0 and loop.timeline is not None:
            write_json(self._run.timeline, loop.timeline.to_json())
        return summary

    def _metrics(self, start: Position) -> Metrics | None:
        """Where rank 0 writes; later lines of an earlier launch are dropped."""
        if self._rank > 0:
            return None
        Metrics(self._run.metrics).start_after(start.step)
        names = self._job.run.trackers
        trackers = open_trackers(names, self._run.path, self._job.model_dump(mode="json"))
        return Metrics(self._run.metrics, self._plan.short(), trackers)

    def _sampler(self, engine: Engine, reporter: Reporter) -> Sampler | None:
        prompts = self._job.train.sample_prompts
        if not prompts:
            return None
        return Sampler(
            engine,
            load_tokenizer(self._tokenizer_folder),
            prompts,
            self._job.train.sample_tokens,
            reporter=reporter,
            path=self._run.samples if self._rank == 0 else None,
        )

    def _trace(self) -> Trace | None:
        if self._rank > 0 or not self._job.run.trace_steps:
            return None
        places = [coordinates(self._plan, rank) for rank in range(self._plan.world_size)]
        words = (" ".join(f"{axis}={i}" for axis, i in p._asdict().items()) for p in places)
        return Trace(self._run.trace, [f"rank {rank}: {w}" for rank, w in enumerate(words)])

    def _least_step_time_s(self) -> float | None:
        """What a step takes at the devices' peak."""
        peak = Peak.from_json(json.loads(self._run.peak.read_text("utf-8")))
        length, batch = self._job.data.sequence_length, self._job.train.global_batch
        flops = training_flops_per_token(self._model, length) * length * batch
        return None if peak.flops_per_s is None else flops / peak.flops_per_s

    def _loop(
        self,
        engine: Engine,
        checkpoints: Checkpoints,
        memory: PeakMemory,
        reporter: Reporter,
        metrics: Metrics | None,
        collector: Collector,
    ) -> Loop:
        job, share = self._job, Share.of(self._plan, engine.mesh.coordinates)
        return Loop(
            engine,
            lengths=Lengths(
                steps=job.train.steps,
                global_batch=job.train.global_batch,
                eval_every=job.train.eval_every,
                save_every=job.checkpoint.every,
                check_every=job.train.check_replicas_every,
                trace_steps=frozenset(job.run.trace_steps),
                least_step_time_s=self._least_step_time_s(),
            ),
            rate=learning_rate(job),
            training=training_data(
                job, self._data, share, self._tokenizer_folder, ahead=self._rank == 0
            ),
            evaluation=evaluation_data(job, self._data, share),
            saver=checkpoints,
            memory=memory,
            status=self._status,
            reporter=reporter,
            metrics=metrics,
            lag=int(engine.mesh.device.type == "cuda" or engine.validates_late),
            sampler=self._sampler(engine, reporter),
            trace=self._trace(),
            non_finite=NonFinite(policy=job.train.non_finite, limit=job.train.max_skipped),
            stop=self._stop,
            between=collector.between,
        )

    def _stream(self) -> Stream:
        return Stream(
            text=self._data.digest,
            sequence_length=self._job.data.sequence_length,
            seed=self._job.train.seed,
        )

    def _files(self) -> dict[str, bytes]:
        if self._rank > 0:
            return {}
        return carried_files(
            self._run.config.read_bytes(), self._tokenizer_folder, model_folder(self._job)
        )
