"""The quickstart with a batch that 128 chips can share."""

import dataclasses

from maxmars.config.load import load_config


def get_config():
    return dataclasses.replace(load_config("quickstart"), global_batch_size=128)
