"""Where there is no GPU its tests are not even collected, so that `pytest tests/gpu` fails ("no tests ran").

`make test-gpu` first says why.
"""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
