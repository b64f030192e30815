"""The quickstart with a batch that 128 chips can share."""

import dataclasses
import runpy
from pathlib import Path


def get_config():
    path = Path(__file__).parents[2] / "configs" / "quickstart.py"
    return dataclasses.replace(runpy.run_path(str(path))["get_config"](), global_batch_size=128)
