#!/usr/bin/env python3
"""`test_layer_by_layer.py`, under the name that its users know.

python3 scripts/test_layer_by_layer_v2.py --model minimax-m2-tiny --backend torchscript
python3 scripts/test_layer_by_layer_v2.py --skip-compile
"""

import sys

from test_layer_by_layer import main

if __name__ == "__main__":
    sys.exit(main())
