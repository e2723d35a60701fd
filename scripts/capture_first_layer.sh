#!/bin/sh
# Save the first layer's input and output of every mode in one file: ./capture_first_layer.sh [essential|quant_only|MODES...]
# The model is loaded once. What follows the modes goes to save_first_layer_io.py: ./capture_first_layer.sh 0 --seq_len 64
MODEL="quamba-130m-w8a8"
PRETRAINED_DIR="pretrained_models/Quamba1-pa9999/pa-0.9999"  # absent: the weights that come with layerscope
OUTPUT_FILE="first_layer_io_all_modes.npz"
SEQ_LEN=512

here=$(dirname -- "$(readlink -f -- "$0")")
python="$here/../.venv/bin/python"
[ -x "$python" ] || python=python3
case "${1-}" in "" | -*) set -- all "$@" ;; esac
exec "$python" "$here/save_first_layer_io.py" \
    --model "$MODEL" \
    --pretrained_dir "$PRETRAINED_DIR" \
    --output_file "$OUTPUT_FILE" \
    --seq_len "$SEQ_LEN" \
    --modes "$@"
