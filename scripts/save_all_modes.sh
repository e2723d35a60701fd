#!/bin/sh
# Save the first and the last layer's output of every mode: ./save_all_modes.sh [fp_only|quant_only|essential|MODES...]
# The model is loaded once. What follows the modes goes to save_layer_outputs.py: ./save_all_modes.sh 0 --calib_data_num 2
MODEL="quamba-130m-w8a8"
PRETRAINED_DIR="pretrained_models/Quamba1-pa9999/pa-0.9999"  # absent: the weights that come with layerscope
OUTPUT_DIR="layer_outputs"
CALIB_DATA_NUM=10
CALIB_SEQLEN=512

here=$(dirname -- "$(readlink -f -- "$0")")
python="$here/../.venv/bin/python"
[ -x "$python" ] || python=python3
case "${1-}" in "" | -*) set -- all "$@" ;; esac
exec "$python" "$here/save_layer_outputs.py" "$MODEL" \
    --pretrained_dir "$PRETRAINED_DIR" \
    --output_dir "$OUTPUT_DIR" \
    --calib_data_num "$CALIB_DATA_NUM" \
    --calib_seqlen "$CALIB_SEQLEN" \
    --mode "$@"
