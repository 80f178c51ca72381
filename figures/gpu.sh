#!/usr/bin/env bash
# Run the tests that touch tensors on a CUDA machine, then measure every number that the lab
# gives for a GPU, in under 10 minutes. Start it in the repository's root, in an environment
# that has labkit, its test tools and a CUDA build of PyTorch:
#
#     bash figures/gpu.sh                 results: figures/gpu_tests.txt, figures/gpu.jsonl
#     MODEL=llama-3.2-3b bash figures/gpu.sh
#     bash figures/gpu.sh --rehearse      tiny, on any machine, into a temporary folder
#
# Weights are random, in the shapes of the named model: nothing is downloaded. Each part has
# its own time limit. If a part fails, the next one still runs, and the script ends with 1.
set -u
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}"
MODEL="${MODEL:-qwen2.5-1.5b}" DEVICE=cuda OUT=figures TOKENS=128 PICK="on_device or gpu" failed=0
if [ "${1:-}" = "--rehearse" ]; then
  MODEL=tiny DEVICE=cpu OUT="$(mktemp -d)" TOKENS=8 PICK="on_device and not slow"
  export CUDA_VISIBLE_DEVICES=
elif ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu.sh: PyTorch sees no CUDA device here; run it where there is one, or with --rehearse." >&2
  exit 2
fi
mkdir -p "$OUT"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

part() {  # part NAME SECONDS COMMAND...
  local name="$1" limit="$2" began=$SECONDS
  shift 2
  echo "== $name (limit: $limit s)"
  if timeout --kill-after=5 "$limit" "$@"; then echo "== $name: done in $((SECONDS - began)) s"
  else echo "== $name: FAILED after $((SECONDS - began)) s" >&2; failed=1; fi
}

part tests "${TEST_SECONDS:-240}" bash -c '"$0" -m pytest -q -p no:cacheprovider --device "$1" -m "$2" ${4:-tests} 2>&1 | tee "$3/gpu_tests.txt" | tail -40; exit "${PIPESTATUS[0]}"' \
  "$PYTHON" "$DEVICE" "$PICK" "$OUT" "${TESTS:-tests}"
part measurements 330 "$PYTHON" figures/gpu.py --device "$DEVICE" --model "$MODEL" --new-tokens "$TOKENS" --out "$OUT/gpu.jsonl"
echo "Results: $OUT/gpu_tests.txt and $OUT/gpu.jsonl"
exit "$failed"
