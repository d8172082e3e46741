"""python megatron_core.py ARGUMENTS...: the arguments as Megatron Core's own configurations.

The parser of Megatron-LM is not in the wheel, its configurations are: they have a field for each
argument, under the same name, and check it. What is no field of theirs is printed.
"""

import dataclasses
import json
import sys

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

RENAMED = {
    "group_query_attention": None,
    "swiglu": "gated_linear_unit",
    "disable_bias_linear": None,
    "ddp_bucket_size": "bucket_size",
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "num_experts": "num_moe_experts",
    "attention_backend": None,
    "recompute_modules": None,
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
}


def arguments(words: list[str]) -> dict[str, object]:
    read: dict[str, object] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            read[name] = True
        else:
            read[name] = int(word) if word.isdigit() else float(word) if word == "0.0" else word
    return read


values = arguments(sys.argv[1:])
kinds = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
given: dict[type, dict[str, object]] = {kind: {} for kind in kinds}
unknown = []
for argument, value in values.items():
    field = RENAMED.get(argument, argument)
    homes = [kind for kind in kinds if field in {f.name for f in dataclasses.fields(kind)}]
    for home in homes:
        given[home][str(field)] = value
    if not homes and field is not None:
        unknown.append(argument)
shape = given[TransformerConfig]
shape["pipeline_dtype"] = shape["params_dtype"] = torch.bfloat16
shape.setdefault("add_bias_linear", "disable_bias_linear" not in values)
text = str(shape.get("pipeline_model_parallel_layout", ""))
stages = PipelineParallelLayerLayout.parse_str_to_list(text) if text else []
layers = [sum(part.name == "decoder" for part in stage) for stage in stages]
read = TransformerConfig(**shape)
DistributedDataParallelConfig(**given[DistributedDataParallelConfig])
OptimizerConfig(**given[OptimizerConfig])
names = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "sequence_parallel", "num_layers", "num_query_groups",
    "recompute_granularity", "recompute_num_layers", "virtual_pipeline_model_parallel_size",
)  # fmt: skip
document = {name: getattr(read, name) for name in names}
print(json.dumps({**document, "layers": layers, "unknown": unknown}))
