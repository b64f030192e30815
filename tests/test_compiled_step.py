"""What the compiled train step does with its buffers, under every optimizer, and how it grows."""

import dataclasses
import re

import jax
import pytest
from test_resume_every_optimizer import OPTIMIZERS
from tiny import MODEL, tiny_config

from maxmars import sharding
from maxmars.config import MeshConfig
from maxmars.train_step import make_train_step


def lowered(config):
    return make_train_step(config, sharding.make_mesh(config.mesh)).lower()


def aliased_arguments(text):
    """Numbers of the arguments whose buffers become outputs, of a compiled program."""
    header = text.partition("\n")[0]
    return {int(n) for n in re.findall(r"\((\d+), \{\}, (?:may|must)-alias\)", header)}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_buffer_of_the_state_is_reused(name):
    config = tiny_config(optimizer=OPTIMIZERS[name], mesh=MeshConfig(fsdp=8))
    step = make_train_step(config, sharding.make_mesh(config.mesh))
    leaves = jax.tree.leaves(step.abstract_state)
    text = step.lower().compile().as_text()
    assert aliased_arguments(text) >= set(range(len(leaves)))


@pytest.mark.parametrize("optimizer", ["adamw", "mars shampoo"])
def test_more_layers_do_not_make_a_larger_program(optimizer):
    def lines(num_layers):
        model = dataclasses.replace(MODEL, num_layers=num_layers)
        config = tiny_config(optimizer=OPTIMIZERS[optimizer], mesh=MeshConfig(fsdp=8), model=model)
        return lowered(config).as_text().count("\n")

    assert lines(48) <= lines(8)  # fewer where all owners get as many matrices


def test_queries_keys_and_values_come_from_one_product():
    text = lowered(tiny_config(mesh=MeshConfig(data=8))).as_text()
    heads = f"{MODEL.num_heads}x{MODEL.head_dim}xf32>"
    weights = re.findall(
        rf"stablehlo.dot_general.*tensor<{MODEL.embed_dim}x([\dx]*){heads}\) ->", text
    )
    assert set(weights) == {"3x"}  # forward and backward, and none of D x D


@pytest.mark.parametrize("optimizer", ["adamw", "mars"])
def test_parameters_are_not_transposed(optimizer):
    """But for the gradient of each kernel, which the product that makes it can write that way."""
    model = dataclasses.replace(MODEL, embed_dim=48)  # unlike other sizes
    text = lowered(tiny_config(optimizer=OPTIMIZERS[optimizer], model=model)).as_text()
    found = re.findall(r"stablehlo.transpose .*-> tensor<([\dx]*)xf32>", text)
    heads = f"{model.num_heads}x{model.head_dim}"
    kernels = [f"48x3x{heads}", f"{heads}x48", "48x192", "192x48"]
    assert sorted(dims for dims in found if "48" in dims.split("x")) == sorted(kernels)
