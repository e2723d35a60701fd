#!/usr/bin/env python3
"""`test_layer_by_layer.py`, under the name that its users know.

python3 scripts/test_layer_by_layer_v2.py --model minimax-m2-tiny --backend torchscript
python3 scripts/test_layer_by_layer_v2.py --skip-compile
"""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("test_layer_by_layer.py")), run_name="__main__")
