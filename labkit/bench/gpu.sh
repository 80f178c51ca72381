#!/usr/bin/env bash
# One run on a CUDA machine, in under 10 minutes: the tests that touch tensors, on the device; then every number that the
# lab gives for a GPU. From the repository's root, in an environment that has labkit with its test tools and a CUDA torch:
#
#     bash labkit/bench/gpu.sh                 results: figures/gpu_tests.txt, figures/gpu.jsonl
#     MODEL=llama-3.2-3b bash labkit/bench/gpu.sh
#     bash labkit/bench/gpu.sh --rehearse      on any machine, tiny, into a scratch folder: does the script itself work?
#
# Weights are random, of the named model's shapes: nothing is downloaded. Each part has its own limit, and a part that
# fails does not keep the next from running; the script ends with 1 if any did.
set -u
cd "$(dirname "$0")/../.."
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
  echo "== $name (at most $limit s)"
  if timeout --kill-after=5 "$limit" "$@"; then echo "== $name: done in $((SECONDS - began)) s"
  else echo "== $name: FAILED after $((SECONDS - began)) s" >&2; failed=1; fi
}

part tests "${TEST_SECONDS:-240}" bash -c '"$0" -m pytest -q -p no:cacheprovider --device "$1" -m "$2" ${4:-tests} 2>&1 | tee "$3/gpu_tests.txt" | tail -40; exit "${PIPESTATUS[0]}"' \
  "$PYTHON" "$DEVICE" "$PICK" "$OUT" "${TESTS:-tests}"
part measurements 330 "$PYTHON" -m labkit.bench.gpu --device "$DEVICE" --model "$MODEL" --new-tokens "$TOKENS" --out "$OUT/gpu.jsonl"
echo "Results: $OUT/gpu_tests.txt and $OUT/gpu.jsonl"
exit "$failed"
