"""Answers requests of `calculon.py` with the Calculon of a checkout: JSON lines in, JSON lines out.

python ask_calculon.py CHECKOUT
"""

import json
import logging
import sys
from pathlib import Path

checkout = Path(sys.argv[1])
sys.path.insert(0, str(checkout))

from calculon import System  # noqa: E402
from calculon.llm import Llm  # noqa: E402

for line in sys.stdin:
    asked = json.loads(line)
    try:
        system = json.loads((checkout / "systems" / asked["system"]).read_text())
        system["networks"][1]["bandwidth"] = asked["network"]
        system["mem1"]["GiB"] = 100_000  # what ran is priced, whatever it would need
        model = Llm(Llm.Application(asked["application"]), logging.getLogger("calculon"))
        machine, execution = System(system), Llm.Execution.from_json(asked["execution"])
        model.compile(machine, execution)
        model.run(machine)
        answer = {"seconds": model.get_total_time(), "bytes": model.get_mem_tier1_cap_req()}
    except (AssertionError, Llm.Error) as error:
        answer = {"refused": str(error) or "an assertion"}
    print(json.dumps(answer), flush=True)
