"""The launcher and the scenarios are imported by name, as the other helpers of the tests are."""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))
