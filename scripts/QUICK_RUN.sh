#!/bin/sh
# Measure every mode on a text: perplexity, next-token agreement, KL divergence and layer errors: ./QUICK_RUN.sh [MODES...]
# MODES with commas, as `layerscope modes --mode` takes them; TEXT is a file or the text itself.
MODEL="${MODEL:-quamba-130m-w8a8}"
PRETRAINED_DIR="pretrained_models/Quamba1-pa9999/pa-0.9999"  # absent: the weights that come with layerscope
CALIB_SEQLEN="${CALIB_SEQLEN:-512}"

here=$(dirname -- "$(readlink -f -- "$0")")
python="$here/../.venv/bin/python"
[ -x "$python" ] || python=python3
exec "$python" -m layerscope modes "$MODEL" \
    --pretrained_dir "$PRETRAINED_DIR" \
    --calib_seqlen "$CALIB_SEQLEN" \
    --mode "${1:-all}" \
    --evaluate "${TEXT:-$here/README.md}"
