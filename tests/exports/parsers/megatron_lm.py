"""python megatron_lm.py CHECKOUT RANKS ARGUMENTS...: Megatron-LM's own parser and its checks."""

import json
import os
import sys
import typing
import warnings

warnings.simplefilter("ignore")
checkout, ranks = sys.argv[1:3]
del sys.argv[1:3]
sys.path.insert(0, checkout)
os.environ |= {"WORLD_SIZE": ranks, "RANK": "0", "LOCAL_RANK": "0"}
if not hasattr(typing, "override"):  # Python 3.11
    typing.override = lambda method: method

import torch


class Device:
    """The one question about the machine: is it older than Blackwell?"""

    major, minor = 9, 0


torch.cuda.get_device_properties = lambda *_: Device
torch.cuda.get_device_capability = lambda *_: (9, 0)

from megatron.training.arguments import parse_args, validate_args

read = parse_args()
validate_args(read)
names = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "data_parallel_size", "micro_batch_size", "global_batch_size",
    "virtual_pipeline_model_parallel_size", "use_distributed_optimizer", "sequence_parallel",
    "recompute_granularity",
)  # fmt: skip
print(json.dumps({name: getattr(read, name) for name in names}))
