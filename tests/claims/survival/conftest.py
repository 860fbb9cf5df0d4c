"""The tests of this folder import what they share, such as `outcomes`, by its name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
