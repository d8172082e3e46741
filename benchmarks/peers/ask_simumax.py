"""Answers requests of `simumax.py` with the SimuMax of a checkout: JSON lines in, JSON lines out.

python ask_simumax.py CHECKOUT
"""

import contextlib
import io
import json
import sys
import warnings
from pathlib import Path

checkout = Path(sys.argv[1])
sys.path.insert(0, str(checkout))
warnings.filterwarnings("ignore")

from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig  # noqa: E402
from simumax.core.perf_llm import PerfLLM  # noqa: E402

UNITS = {"B": 1, "KB": 1024, "MB": 1024**2, "GB": 1024**3, "TB": 1024**4}


def priced(asked):
    """Seconds and bytes; what it says goes nowhere."""
    system = str(checkout / "configs" / "system" / asked["system"])
    with contextlib.redirect_stdout(io.StringIO()):
        model = PerfLLM()
        model.configure(
            strategy_config=StrategyConfig.init_from_dict(asked["strategy"]),
            model_config=ModelConfig.init_from_dict(asked["model"]),
            system_config=SystemConfig.init_from_config_file(system),
        )
        model.run_estimate()
        cost, memory = model.analysis_cost().data, model.analysis_mem().data
    per_second = cost["throughput_per_accelerator"] * asked["strategy"]["world_size"]
    stages = memory.values() if "first_stage" in memory else [memory]
    sizes = [stage["peak_mem"].split() for stage in stages]
    peak = max(float(number) * UNITS[unit] for number, unit in sizes)
    return {"seconds": cost["all_tokens_per_iter"] / per_second, "bytes": peak}


for line in sys.stdin:
    try:
        answer = priced(json.loads(line))
    except Exception as error:
        answer = {"refused": f"{type(error).__name__}: {error}"[:200]}
    print(json.dumps(answer), flush=True)
