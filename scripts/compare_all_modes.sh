#!/bin/sh
# Compare every mode in a folder with the reference, print the summary table, and save each comparison as
# comparisons/mode_{M}_comparison.json. OUTPUT_DIR and REFERENCE, or --output_dir and --reference, say which.
here=$(dirname -- "$(readlink -f -- "$0")")
exec "$here/comparewithfp" --all \
    --output_dir "${OUTPUT_DIR:-layer_outputs}" \
    --reference "${REFERENCE:-fp32}" \
    --save_comparison "comparisons/mode_{mode}_comparison.json" \
    "$@"
