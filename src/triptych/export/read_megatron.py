"""The plan behind a Megatron-LM command line, in a launch script or alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from triptych.errors import Problem
from triptych.export.imported import Asked, Draft, Imported
from triptych.export.megatron import ATTENTION, CONTEXT, SHARDING
from triptych.export.megatron_model import differences
from triptych.export.shell import commands
from triptych.plan.plan import even_split
from triptych.plan.workload import Workload
from triptych.units import DTYPE_BYTES

_MARKS = ("--tensor-model-parallel-size", "--num-layers", "--micro-batch-size", "--hidden-size")
_SHAPE = (
    "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups",
    "kv-channels", "vocab-size", "num-experts", "moe-router-topk", "moe-ffn-hidden-size",
    "moe-shared-expert-intermediate-size",
)  # fmt: skip

# Arguments that change neither time nor memory of a step as we price them: data, learning rate,
# logging, checkpoints, initial values, fused kernels that are taken for granted.
_NO_BEARING = re.compile(
    r"(no-)?(lr|min-lr|decoupled|adam|sgd|weight-decay|start-weight|end-weight|clip-grad|init-method"
    r"|embedding-init|seed|save|load|eval|start-eval|log|timing|tensorboard|wandb|data|train|valid"
    r"|test-data|split|tokenizer|tiktoken|null-tokenizer|vocab-|merge-file|exit|distributed-timeout"
    r"|distributed-backend|ckpt|dist-ckpt|use-dist-ckpt|async-save|non-persistent|finetune"
    r"|pretrained|use-checkpoint|override-|profile|use-pytorch-profiler|record-memory"
    r"|num-workers|mock-data|create-attention-mask|mmap|num-dataset|rerun|one-logger|loss-scale"
    r"|initial-loss|min-loss|hysteresis|check-for|manual-gc|rotary|rope-|use-rope|use-rotary"
    r"|norm-epsilon|apply-layernorm|moe-aux|moe-router|moe-z|moe-grouped|moe-token-disp|moe-permute"
    r"|moe-layer-freq|moe-shared-expert-gate|masked-softmax|bias-|persist-layer|gradient-acc"
    r"|attention-softmax|hidden-dropout|attention-dropout|max-position|position-emb"
    r"|make-vocab|padded-vocab|untie|swiglu|normalization|disable-bias|add-qkv|qk-|q-lora|kv-lora"
    r"|v-head|multi-latent|group-query|window-size|use-mcore|transformer-impl|spec|use-flash-attn"
    r"|sequence-parallel-|cross-entropy|calculate-per-token|empty-unused|disable-jit|nccl|local-rank"
    r"|use-cpu-init|optimizer$|fp8-(amax|margin|interval|recipe)|eod|reset-|apply-query"
    r"|squared-relu|openai-gelu|quick-geglu|bert|lazy|enable-msc|disable-msc|align-|seqlen)"
)
_LAUNCHERS = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}


@dataclass(slots=True)
class _Line:
    """One command line: arguments by name, in the order in which they are asked for."""

    values: dict[str, list[str]]
    problems: list[Problem]
    seen: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        self.seen.add(name)
        return name in self.values

    def text(self, name: str) -> str | None:
        self.seen.add(name)
        values = self.values.get(name)
        return " ".join(values) if values else None

    def number(self, name: str) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if re.fullmatch(r"\d+", text) and int(text) > 0:
            return int(text)
        has_variable = "$" in text
        works = f"{text} set in the file" if has_variable else f"--{name} 1"
        rule = "its value is in the file" if has_variable else "it is a whole number from 1"
        self.problems.append(Problem(f"--{name} {text}", rule, works))
        return None

    def rest(self) -> list[str]:
        """Arguments that nobody asked for and that have a bearing on the plan."""
        names = [name for name in self.values if name not in self.seen]
        return [
            " ".join([f"--{name}", *self.values[name]])
            for name in names
            if not _NO_BEARING.match(name)
        ]


def is_megatron(text: str) -> bool:
    """True if a text has a command with Megatron-LM's arguments."""
    return _command(text) is not None


def read_megatron(text: str, asked: Asked, usual_sequence: int) -> tuple[Imported, list[Problem]]:
    """The plan in a script, and everything in it that contradicts itself."""
    words = _command(text) or []
    draft = Draft(asked)
    line = _Line(_arguments(words), draft.problems)
    draft.world = _world(words, text)
    shape = {f"--{name}": int(text) for name in _SHAPE if (text := line.text(name) or "").isdigit()}
    for read in _READERS:
        read(line, draft)
    draft.pin()
    draft.assume_world("Megatron-LM")
    draft.divide_world("TP x PP x CP")
    draft.settle_batch()
    length = draft.settle_sequence(usual_sequence)
    _read_stages(line, draft)
    imported = Imported(
        engine="Megatron-LM",
        plan=draft.plan(),
        workload=Workload(sequence_length=length, global_batch=draft.global_batch or 1),
        not_understood=tuple(line.rest()),
        assumed=tuple(draft.assumed),
        differs=tuple(differences(shape, asked.model)),
        fuses_loss=line.has("cross-entropy-loss-fusion"),
    )
    return imported, draft.problems


def _command(text: str) -> list[str] | None:
    """The last command of a text that has Megatron-LM's arguments."""
    fitting = [words for words in commands(text) if set(_MARKS) & {w.split("=")[0] for w in words}]
    return fitting[-1] if fitting else None


def _arguments(words: Sequence[str]) -> dict[str, list[str]]:
    """Arguments behind the script's name; `--a 1 2` and `--a=1` alike, names without dashes."""
    start = next((i for i, word in enumerate(words) if word.endswith(".py")), -1)
    values: dict[str, list[str]] = {}
    name = ""
    for word in words[start + 1 :]:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            name = name if "_" not in name else name.replace("_", "-")
            values[name] = [value] if equals else []
        elif re.match(r"\d*[<>]", word):
            break  # the shell's, not the program's
        elif name and word != "$@":
            values[name].append(word)
    return values


def _world(words: Sequence[str], text: str) -> int | None:
    """Ranks that the launcher starts: torchrun's, else Slurm's."""
    end = next((i for i, word in enumerate(words) if word.endswith(".py")), 0)
    launched = " ".join(words[:end])
    nodes = _option(launched, r"--nnodes[= ](?:\d+:)?(\d+)")
    per_node = _option(launched, r"--nproc[_-]per[_-]node[= ](\d+)")
    if per_node is None:
        nodes = nodes or _option(text, r"#SBATCH\s+(?:--nodes|-N)[= ](\d+)")
        per_node = _option(text, r"#SBATCH\s+--(?:ntasks|gpus|gres=gpu)[\w:-]*[= :](\d+)")
    return None if per_node is None else per_node * (nodes or 1)


def _option(text: str, pattern: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None


# --- what each argument means --------------------------------------------------------------------


def _read_sizes(line: _Line, draft: Draft) -> None:
    for name, axis in (
        ("tensor-model-parallel-size", "tp"),
        ("pipeline-model-parallel-size", "pp"),
        ("context-parallel-size", "cp"),
        ("expert-model-parallel-size", "ep"),
    ):
        degree = line.number(name)
        if degree is not None or axis not in draft.asked.pins:
            draft.settings[axis] = degree or 1
    microbatch = line.number("micro-batch-size")
    if microbatch is None and not line.has("micro-batch-size"):
        rule = "Megatron-LM asks for it"
        draft.problems.append(Problem("no --micro-batch-size", rule, "--micro-batch-size 1"))
    draft.settings["microbatch"] = microbatch or 1
    draft.global_batch = line.number("global-batch-size")
    draft.sequence_length = line.number("seq-length")
    if (size := line.number("expert-tensor-parallel-size")) not in (None, draft.degree("tp")):
        draft.assumed.append(f"experts divided like the rest, not {size} ways")
    for name in ("rampup-batch-size", "step-batch-size-schedule"):
        if line.has(name):
            draft.assumed.append(f"the full global batch: --{name} is over")


def _read_tensor(line: _Line, draft: Draft) -> None:
    asks = line.has("sequence-parallel")
    draft.settings["sequence_parallel"] = asks and draft.degree("tp") > 1
    kind = line.text("cp-comm-type")
    ours = {theirs: our for our, theirs in CONTEXT.items()}
    if kind and draft.degree("cp") > 1:
        draft.settings["context_method"] = ours.get(kind, "ring")
        if kind not in ours:
            draft.assumed.append(f"ring attention for --cp-comm-type {kind}")


def _read_data(line: _Line, draft: Draft) -> None:
    is_sharded = line.has("use-distributed-optimizer")
    strategy = line.text("data-parallel-sharding-strategy") or "optim_grads_params"
    draft.settings["zero"] = int(is_sharded)
    if line.has("use-megatron-fsdp") or line.has("use-custom-fsdp"):
        stages = {name: stage for stage, name in SHARDING.items()}
        draft.settings["zero"] = {"no_shard": 0, "optim": 1, **stages}.get(strategy, 3)
    elif line.has("use-torch-fsdp2"):
        draft.settings["zero"] = 2 if line.has("torch-fsdp2-no-reshard-after-forward") else 3
    line.has("ddp-average-in-collective")
    line.has("create-all-gather-group")
    overlaps = line.has("overlap-grad-reduce")
    if not overlaps and draft.settings["zero"] < 2:
        draft.assumed.append("gradients reduced during the backward (no --overlap-grad-reduce)")
    if not line.has("overlap-param-gather") and draft.settings["zero"] == 1:
        draft.assumed.append("parameters gathered as our ZeRO-1 does (no --overlap-param-gather)")


def _read_shards(line: _Line, draft: Draft) -> None:
    """How many ranks share one set of shards, and buckets: both need degrees and dtypes."""
    copies = line.number("num-distributed-optimizer-instances") or 1
    ranks = (draft.world or draft.asked.cluster.num_devices) // max(
        1, draft.degree("tp") * draft.degree("pp")
    )
    if copies > 1 and ranks % copies:
        what = f"--num-distributed-optimizer-instances {copies}"
        rule = f"it divides the {ranks} ranks that hold the same shard"
        draft.problems.append(Problem(what, rule, "1"))
    elif copies > 1:
        draft.settings["hybrid_shard"] = ranks // copies
    usual = max(40_000_000, 1_000_000 * ranks)  # its default, in elements
    size = line.number("ddp-bucket-size") or usual
    if draft.settings["zero"] < 2:
        draft.settings["bucket_bytes"] = int(size * DTYPE_BYTES[draft.dtypes["gradient"]])


def _read_recompute(line: _Line, draft: Draft) -> None:
    kind = line.text("recompute-granularity")
    if line.has("recompute-activations"):
        kind = kind or "selective"
    method, count = line.text("recompute-method"), line.number("recompute-num-layers")
    modules = line.text("recompute-modules")
    draft.settings["recompute"] = kind if kind in ("selective", "full") else "none"
    if kind == "selective" and modules not in (None, "core_attn"):
        draft.assumed.append(f"attention recomputed for --recompute-modules {modules}")
    if kind == "full" and method == "block" and count:
        stages = draft.degree("pp") * (line.number("num-virtual-stages-per-pipeline-rank") or 1)
        held = -(-draft.asked.model.num_layers // max(1, stages))
        every = max(1, round(held / count))
        if every > 1:
            draft.settings["recompute_every"] = every
        draft.assumed.append(f"every {every}. layer recomputed for {count} layers a stage")
    elif kind == "full" and (count or 1) > 1:
        draft.assumed.append(f"inputs kept of every layer, not of each {count}.")
    draft.settings["shard_activations"] = line.has("distribute-saved-activations")


def _read_precision(line: _Line, draft: Draft) -> None:
    bf16, fp16 = line.has("bf16"), line.has("fp16")
    if bf16 and fp16:
        rule = "a run has one dtype of parameters"
        draft.problems.append(Problem("both --bf16 and --fp16", rule, "one of them"))
    stored = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    is_eight = line.text("fp8-format") is not None
    in_fp32 = line.has("accumulate-allreduce-grads-in-fp32")
    is_low = line.has("grad-reduce-in-bf16") or (stored == "fp16" and not in_fp32)
    draft.dtypes["parameter"] = "fp8" if is_eight else stored
    gradient = stored if is_low else "fp32"
    draft.dtypes |= {"gradient": gradient, "reduction": gradient}
    if line.has("use-precision-aware-optimizer"):
        draft.dtypes["master"] = line.text("main-params-dtype") or "fp32"
        first, second = (line.text(f"{name}-dtype") for name in ("exp-avg", "exp-avg-sq"))
        draft.dtypes["moments"] = first or "fp32"
        if first != second:
            draft.assumed.append(f"both moments in {draft.dtypes['moments']}")
        line.has("main-grads-dtype")
    if line.has("fp8-param-gather"):
        draft.assumed.append("weights in 16 bit, products in fp8 (--fp8-param-gather says fp8)")


def _read_rest(line: _Line, draft: Draft) -> None:
    ours = {theirs: our for our, theirs in ATTENTION.items()}
    kind = line.text("attention-backend") or "auto"
    draft.settings["attention"] = ours.get(kind.split(".")[-1], "sdpa")
    fraction = line.text("optimizer-offload-fraction")
    if line.has("optimizer-cpu-offload"):
        draft.settings["offload"] = "optimizer"
        if fraction and fraction not in ("1", "1.0"):
            draft.assumed.append(f"all optimizer state in host memory, not {fraction} of it")


def _read_stages(line: _Line, draft: Draft) -> None:
    """Chunks and layers by stage."""
    total, pp = draft.asked.model.num_layers, draft.degree("pp")
    layout = line.text("pipeline-model-parallel-layout")
    ends = [line.number(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last")]
    chunks = line.number("num-virtual-stages-per-pipeline-rank")
    a_chunk = line.number("num-layers-per-virtual-pipeline-stage")
    if layout:
        counts = layout_counts(layout)
        draft.layers = counts
        chunks, rest = divmod(len(counts), pp)
        if rest:
            what, rule = f"{len(counts)} stages in {layout}", f"a multiple of PP = {pp}"
            draft.problems.append(Problem(what, rule))
    elif a_chunk:
        chunks = max(1, total // pp // a_chunk)
        if total % (pp * a_chunk):
            what = f"{total} layers with PP = {pp} and {a_chunk} layers a virtual stage"
            draft.problems.append(Problem(what, "they divide", f"{total // pp} layers"))
    if chunks and chunks > 1:
        draft.settings["chunks"] = chunks
    if any(ends) and not layout:
        draft.layers = _with_ends(total, pp, chunks or 1, ends)
    elif not layout and total % (pp * (chunks or 1)):
        what = f"{total} layers of {draft.asked.model.name} on PP = {pp} x {chunks or 1} stages"
        rule = "Megatron-LM divides layers evenly, unless a layout says how"
        draft.problems.append(Problem(what, rule, f"PP in the divisors of {total}"))


def _with_ends(total: int, pp: int, chunks: int, ends: Sequence[int | None]) -> list[int]:
    """Layers by stage when the first or the last rank has a number of layers of its own."""
    first, last = ends
    middle = pp - sum(end is not None for end in ends)
    rest = even_split(total - (first or 0) - (last or 0), max(1, middle))
    ranks = [first] * bool(first) + list(rest) + [last] * bool(last)
    return [count // chunks for _ in range(chunks) for count in ranks if count is not None]


def layout_counts(layout: str) -> list[int]:
    """Transformer layers by stage of a layout: `Et*3|(tt|)*2L` -> [3, 2, 2, 0]."""
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return [stage.count("t") for stage in text.split("|")]


_READERS: tuple[Callable[[_Line, Draft], None], ...] = (
    _read_sizes,
    _read_tensor,
    _read_data,
    _read_precision,
    _read_shards,
    _read_recompute,
    _read_rest,
)
