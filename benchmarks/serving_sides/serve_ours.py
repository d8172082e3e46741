"""Serves prompts with Triptych's engine: jobs on stdin, answers on stdout, a JSON line each."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from serve_jobs import answer_jobs
from triptych.plan.plan import Plan, Precision
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.sampling import Sampling
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.source import ModelSource
from triptych.serve.engine.values import Ask


def main(folder: Path) -> None:
    layers = ModelSource.open(folder).model().num_layers
    plan = Plan.uniform(layers, precision=Precision(parameter="fp32", master="fp32"))
    with Engine.open(folder, plan, EngineSettings(prefix_reuse=False)) as engine:
        sampling = Sampling(ignores_end=True)

        def run(prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[float]]:
            asks = [
                Ask(id=number, prompt=prompt, max_tokens=count, sampling=sampling)
                for number, prompt in enumerate(prompts)
            ]
            answers: list[list[int]] = [[] for _ in prompts]
            first_s = [0.0] * len(prompts)
            for output in engine.stream(asks):
                if not answers[output.request_id]:
                    first_s[output.request_id] = time.perf_counter()
                if output.token is not None:
                    answers[output.request_id].append(output.token)
            return answers, first_s

        answer_jobs(run)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
