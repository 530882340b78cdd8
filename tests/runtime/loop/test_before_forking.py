"""What the zygote imports for its workers, in an interpreter of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

PROGRAM = """
import json, sys
from everstep.runtime.examples import tiny
from everstep.runtime.loop import main

main._import_before_forking()
from everstep.runtime.agent.zygote import why_not_forkable

why = why_not_forkable()
before = set(sys.modules)

import jax, numpy
from everstep.runtime.engine.state import flatten
from everstep.runtime.loop import data, placement, randomness, reduction

mesh = jax.sharding.Mesh(numpy.array(jax.devices()).reshape(1, 1, 1), ("slice", "data", "fsdp"))
init = tiny.make_init(8)
abstract = placement.abstract_of(init)
shardings = placement.resolve_shardings(tiny.shardings(mesh), abstract, mesh)
state = placement.build_fresh(init, abstract, shardings)
flatten(state)
gradients_of = reduction.fast_gradients(mesh, tiny.loss_fn)
batch = data.place_batch(tiny.dataset(12), 0, mesh)
_, _, gradients = gradients_of(state["params"], batch, randomness.key_of(0, 0, mesh))
update = tiny.make_update(jax.tree.map(lambda leaf: leaf.sharding, state))
jax.block_until_ready(update(state, gradients))
print(json.dumps({
    "why": why,
    "storage": "tensorstore" in before,
    "restore": "everstep.runtime.restore.assemble" in before,
    "worker": "everstep.runtime.loop.worker" in before,
    "later": sorted(set(sys.modules) - before),
}))
"""


def test_a_zygote_can_be_forked_after_its_imports_and_a_first_step_imports_nothing_more() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = json.loads(done.stdout)
    assert found == {
        "why": None,
        "storage": False,
        "restore": True,
        "worker": True,
        "later": [],
    }
