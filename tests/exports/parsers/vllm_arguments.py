"""python vllm_arguments.py FILE: what vLLM's own parser makes of a command."""

import json
import shlex
import sys
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

lines = [line for line in Path(sys.argv[1]).read_text().splitlines() if line[:1] != "#"]
words = shlex.split("\n".join(lines).replace("\\\n", " "))
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
read = AsyncEngineArgs.from_cli_args(parser.parse_args(words[words.index("serve") + 2 :]))
names = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
    "prefill_context_parallel_size", "enable_expert_parallel", "dtype", "max_model_len",
    "quantization",
)  # fmt: skip
print(json.dumps({name: getattr(read, name) for name in names}))
