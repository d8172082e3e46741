#!/usr/bin/env bash
# Plan, train, resume on another layout, export and generate, from real text, on this machine.
# `make demo` installs Triptych into .venv and calls this. Everything it writes is in demo-run/.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
quoted() {  # the arguments as one would type them
  local word
  for word in "$@"; do
    case $word in *[!A-Za-z0-9_=,./:+-]*) word="'$word'" ;; esac
    printf '%s ' "$word"
  done
}
run() { printf '\033[36m$ %s\033[0m\n' "$(quoted "$@")"; "$@"; }

step "1. Text: the Python standard library's own sources, every twentieth file held out"
run rm -rf demo-run
run python examples/demo/text.py demo-run/text

step "2. A byte-level BPE tokenizer on that text"
run triptych tokenizer demo-run/text/train --vocab-size 4096 --out demo-run/tokenizer

step "3. How should a small Llama be split over two devices of this machine?"
gpus=$(nvidia-smi -L 2>/dev/null | wc -l || true)
run triptych plan examples/demo/config.json --cluster "$([ "$gpus" = 1 ] && echo local || echo 2xlocal)" \
  --seq 256 --batch 2 --out demo-run/plan.toml

step "4. Train it under that plan"
run triptych train examples/demo/job.toml --plan demo-run/plan.toml

step "5. Resume on 4 ranks, TP2 x PP2, from the same checkpoint: the loss goes on"
if [ "$gpus" -gt 0 ] && [ "$gpus" -lt 4 ]; then
  echo "(this machine has $gpus GPUs: 4 ranks run on its CPUs)"
  export CUDA_VISIBLE_DEVICES=
fi
run triptych train examples/demo/job.toml --plan tp=2,pp=2,sp=1,microbatch=1 --set train.steps=2000

step "6. Export a Hugging Face directory; stock transformers loads it"
run triptych export demo-run/run demo-run/hf
run python -c '
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("demo-run/hf")
tokenizer = AutoTokenizer.from_pretrained("demo-run/hf")
print(type(model).__name__, f"{model.num_parameters():,} parameters", tokenizer("def main():"))'

step "7. Complete a line of code"
run triptych generate demo-run/hf --prompt '    def __init__(self' --max-new-tokens 8

step "8. A page with plan, memory, loss, and the predicted beside the recorded pipeline"
run triptych report demo-run/run --out demo-run/report.html

printf '\nThe demo took %d s. Open demo-run/report.html; README.md says what to try next.\n' "$SECONDS"
