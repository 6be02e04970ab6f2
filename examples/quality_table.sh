#!/usr/bin/env bash
# The quality rows of the README for one model: calibrate at every bit width, evaluate, keep reports and JSON.
#
#     bash examples/quality_table.sh MODEL DATA_DIR OUT_DIR [DEVICE]
#
# DATA_DIR holds calibration.jsonl, text.jsonl and tasks.jsonl. Settings come from the environment:
# SEQUENCES LENGTH LIMIT BATCH EPOCHS RATE SAMPLES (texts the model writes for fine-tuning, 0 for none) ARMS WORK.
# JOBS arms run side by side: on one large GPU that is faster, as a single arm does not fill it. An evaluation of a 23 M
# model at BATCH=100 takes 35 GB; six at once did not fit 140 GB.
set -euo pipefail

model=$1 data=$2 out=$3 device=${4:-cuda}
: "${SEQUENCES:=48}" "${LENGTH:=2048}" "${LIMIT:=200}" "${BATCH:=100}" "${EPOCHS:=4}" "${RATE:=auto}" "${SAMPLES:=0}"
: "${ARMS:=half one quarter two cq-half cq-one paper-half}" "${WORK:=$out/artifacts}" "${JOBS:=3}"
run="python3 -m hf_lowbit.cli"
mkdir -p "$out" "$WORK"

extra=()
if [ "$SAMPLES" -gt 0 ]; then
    $run sample "$model" --data "$data/calibration.jsonl" --output "$WORK/samples.jsonl" --count "$SAMPLES" \
        --length "$LENGTH" --batch-size "$BATCH" --device "$device" --dtype bfloat16 --quiet
    extra=(--extra-data "$WORK/samples.jsonl")
fi

arm() {
    local name=$1 tasks=(--tasks "$data/tasks.jsonl")
    local tuned=(--epochs "$EPOCHS" --learning-rate "$RATE" ${extra[@]+"${extra[@]}"})
    # k-means alone is at its best on many tokens; as a start for fine-tuning the short default is better.
    local paper=(--encoder-metric none) long=(--kmeans-vectors 32768 --kmeans-iterations 100) flags=()
    case $name in
        quarter) flags=(--bits 0.25 "${tuned[@]}") ;;
        half) flags=(--bits 0.5 "${tuned[@]}") ;;
        one) flags=(--bits 1 "${tuned[@]}") ;;
        two) flags=(--bits 2 "${tuned[@]}") ;;
        paper-half) flags=(--bits 0.5 "${paper[@]}" "${tuned[@]}") ;;
        paper-one) flags=(--bits 1 "${paper[@]}" "${tuned[@]}") ;;
        cq-half) flags=(--bits 0.5 --loop-group-size 1 "${paper[@]}" "${long[@]}" --epochs 0) tasks=() ;;
        cq-one) flags=(--bits 1 --loop-group-size 1 "${paper[@]}" "${long[@]}" --epochs 0) tasks=() ;;
        *) echo "unknown arm $name" >&2; return 2 ;;
    esac
    $run calibrate "$model" --method loopvq --data "$data/calibration.jsonl" --output "$WORK/$name" --overwrite \
        --sequences "$SEQUENCES" --sequence-length "$LENGTH" --device "$device" --dtype float32 --quiet "${flags[@]}"
    cp "$WORK/$name/calibration_report.json" "$out/$name.calibration.json"
    $run eval "$WORK/$name" --text "$data/text.jsonl" ${tasks[@]+"${tasks[@]}"} --limit "$LIMIT" --text-tokens "$LENGTH" \
        --batch-size "$BATCH" --device "$device" --dtype float32 --json "$out/$name.json" --quiet
    echo "$name done after $SECONDS s"
}

for name in $ARMS; do
    while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n || true; done
    (arm "$name" >"$out/$name.log" 2>&1 || echo "$name failed, see $out/$name.log") &
done
wait
tail -qn 1 "$out"/*.log
