"""Rotary frequencies against values of transformers, tables against sines and cosines of wider floats."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.config import ModelConfig
from edgeinfer.errors import ModelFormatError
from edgeinfer.formats.gguf import open_gguf
from edgeinfer.rope import RopeScaling, RopeTable, frequencies, magnitude

_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
assert _spec and _spec.loader
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

LLAMA3_SMALL = RopeScaling("llama3", factor=8.0, original=64)
LLAMA3 = RopeScaling("llama3", factor=32.0, original=8192)
YARN = RopeScaling("yarn", factor=4.0, original=32768)
YARN_FAST = RopeScaling("yarn", factor=16.0, original=4096, beta_fast=64.0, beta_slow=2.0)
# head size, base, scaling, attention factor, inverse frequencies: transformers 5.24's ROPE_INIT_FUNCTIONS (float32)
TRANSFORMERS: list[tuple[int, float, RopeScaling, float, list[float]]] = [
    (8, 1e4, LLAMA3_SMALL, 1.0, [1.0, 0.013042256, 0.00125, 0.00012500001]),
    (16, 1e4, RopeScaling("linear", factor=8.0), 1.0,
     [0.125, 0.03952847, 0.0125, 0.0039528473, 0.00125, 0.00039528473, 0.00012500001, 3.9528473e-05]),
    (64, 5e5, LLAMA3, 1.0,
     [1.0, 0.66360128, 0.44036663, 0.29222783, 0.19392276, 0.12868738, 0.085397102, 0.056669619, 0.037606031,
      0.024955409, 0.016560441, 0.010989529, 0.0072926651, 0.0048394212, 0.0032114461, 0.001290548, 0.00042955671,
      9.7082862e-05, 1.9461639e-05, 1.2914767e-05, 8.5702559e-06, 5.6872323e-06, 3.7740544e-06, 2.5044671e-06,
      1.6619674e-06, 1.1028836e-06, 7.3187493e-07, 4.8567313e-07, 3.2229329e-07, 2.1387423e-07, 1.419272e-07,
      9.4183065e-08]),
    (64, 1e6, YARN, 1.138629436111989,
     [1.0, 0.64938164, 0.42169651, 0.27384198, 0.17782794, 0.1154782, 0.074989416, 0.048696753, 0.031622779,
      0.020535251, 0.013335215, 0.0086596431, 0.0051547955, 0.0030431177, 0.0017785303, 0.0010266177, 0.00058333337,
      0.00032469083, 0.00017570687, 9.128065e-05, 4.4456985e-05, 2.8869548e-05, 1.8747356e-05, 1.2174189e-05,
      7.9056936e-06, 5.1338125e-06, 3.3338035e-06, 2.1649109e-06, 1.4058534e-06, 9.1293532e-07, 5.9284343e-07,
      3.8498163e-07]),
    (32, 1e4, YARN_FAST, 1.2772588722239782,
     [1.0, 0.56234133, 0.31622776, 0.17782794, 0.1, 0.048702773, 0.023152392, 0.010637921, 0.0046428568, 0.0018577346,
      0.00062116171, 0.00011114246, 6.2500003e-05, 3.5146331e-05, 1.9764237e-05, 1.1114246e-05]),
]  # fmt: skip


def test_plain_frequencies_are_powers_of_the_base() -> None:
    found = frequencies(80, 1e4, RopeScaling())
    np.testing.assert_allclose(found, [10000.0 ** (-2 * i / 80) for i in range(40)], rtol=1e-14)
    assert magnitude(RopeScaling()) == 1.0


@pytest.mark.parametrize("dims, base, scaling, factor, expected", TRANSFORMERS)
def test_scaled_frequencies_are_those_of_transformers(dims: int, base: float, scaling: RopeScaling, factor: float,
                                                      expected: list[float]) -> None:  # fmt: skip
    np.testing.assert_allclose(frequencies(dims, base, scaling), expected, rtol=1e-6)
    assert magnitude(scaling) == pytest.approx(factor, rel=1e-14)


def test_llama3_scaling_by_hand() -> None:
    """Within 64 tokens pair 0 turns 10 times (kept), pair 1 once and a bit (blended), pairs 2 and 3 less (stretched)."""
    kept, blend = 1.0, (64 * 0.1 / (2 * math.pi) - 1) / 3
    expected = [kept, blend * 0.1 + (1 - blend) * 0.1 / 8, 0.01 / 8, 0.001 / 8]
    np.testing.assert_allclose(frequencies(8, 1e4, LLAMA3_SMALL), expected, rtol=1e-12)
    np.testing.assert_allclose(expected, [1, 0.0130423, 0.00125, 0.000125], rtol=1e-5)


def test_factors_of_a_file_divide_the_frequencies() -> None:
    """Files of Llama 3 models have its scaling not as settings but as a tensor of divisors."""
    plain = frequencies(8, 1e4, RopeScaling())
    factors = (plain / frequencies(8, 1e4, LLAMA3_SMALL)).astype(np.float32)
    np.testing.assert_allclose(frequencies(8, 1e4, RopeScaling(), factors), [1, 0.0130423, 0.00125, 0.000125], rtol=1e-5)


def test_yarn_temperature() -> None:
    assert magnitude(RopeScaling("yarn", 1.0, 100)) == 1.0
    assert magnitude(RopeScaling("yarn", 4.0, 100, attention_factor=0.5)) == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))


@pytest.mark.parametrize("options", [("dynamic", 2.0), ("longrope", 2.0), ("LLAMA3", 2.0, 64), ("linear", 0.0),
                                     ("linear", math.nan), ("linear", -1.0), ("yarn", 2.0), ("llama3", 2.0)])  # fmt: skip
def test_what_is_unknown_or_senseless_is_refused(options: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="rope scaling"):
        RopeScaling(*options)


# from a file


def config(folder: Path, architecture: str = "llama", **metadata: Any) -> ModelConfig:
    keys = {f"{architecture}.rope.{key}": value for key, value in metadata.items()}
    path = tiny.tiny_gguf(folder / "model.gguf", architecture, layers=6 if architecture == "gemma3" else 1, metadata=keys)
    with open_gguf(path) as file:
        return ModelConfig.from_gguf(file)


SMALL = {"scaling.factor": 8.0, "scaling.original_context_length": 64}


def test_settings_of_a_file_reach_every_layer(tmp_path: Path) -> None:
    assert config(tmp_path).ropes[0].scaling == RopeScaling()
    (rope,) = config(tmp_path, **{"scaling.type": "llama3", **SMALL}).ropes
    assert rope.base == 10000.0 and rope.scaling == LLAMA3_SMALL
    (rope,) = config(tmp_path, **{"scaling.type": "yarn", **SMALL, "scaling.yarn_beta_fast": 16.0}).ropes
    assert rope.scaling == RopeScaling("yarn", 8.0, 64, beta_fast=16.0)
    (rope,) = config(tmp_path, **{"scaling.type": "linear", "scaling.factor": 4.0}).ropes
    assert rope.scaling == RopeScaling("linear", 4.0)
    (rope,) = config(tmp_path, scale_linear=4.0).ropes  # as old files have it
    assert rope.scaling == RopeScaling("linear", 4.0)


def test_gemma3_scales_the_layers_that_see_everything_alone(tmp_path: Path) -> None:
    *local, everywhere = config(tmp_path, "gemma3", **{"scaling.type": "linear", "scaling.factor": 8.0}).ropes
    assert {(rope.base, rope.scaling.kind) for rope in local} == {(10000.0, "none")}
    assert (everywhere.base, everywhere.scaling) == (1e6, RopeScaling("linear", 8.0))


@pytest.mark.parametrize("settings", [{"scaling.type": "longrope", **SMALL}, {"scaling.type": 3, **SMALL},
                                      {"scaling.type": "llama3", "scaling.factor": 8.0},
                                      {"scaling.type": "linear"}, {"scaling.type": "linear", "scaling.factor": 0.0}])  # fmt: skip
def test_a_file_with_unknown_or_missing_settings_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"rope\.scaling"):
        config(tmp_path, **settings)


# tables


def table(context: int, *reached: int, dims: int = 64, base: float = 1e4) -> np.ndarray:
    made = RopeTable(context, frequencies(dims, base, RopeScaling()))
    for positions in reached:
        made.reach(positions)
    return made.data


@pytest.mark.parametrize("base", [1e4, 1e6])
def test_a_table_is_cosines_and_sines_rounded_once(base: float) -> None:
    context = 1 << 17
    found = table(context, context, dims=16, base=base)
    places = np.r_[0:3000, context - 3000 : context]
    angles = places[:, None].astype(np.longdouble) * frequencies(16, base, RopeScaling())
    half_unit = 2.0**-25 * 1.002  # of f32 below 1; what is beyond is the angle's own rounding to float64
    assert np.abs(found[places, 0] - np.cos(angles)).max() <= half_unit
    assert np.abs(found[places, 1] - np.sin(angles)).max() <= half_unit
    assert found[0, 0].tolist() == [1.0] * 8 and found[0, 1].tolist() == [0.0] * 8


def test_a_table_has_the_same_bits_however_it_was_filled() -> None:
    whole = table(1000, 1000)
    assert np.array_equal(table(1000, *range(1, 1001, 7), 1000), whole)
    assert np.array_equal(table(1000, 1, 255, 256, 257, 5, 1000), whole)
    assert np.array_equal(table(4096, 1000)[:1000], whole)


def test_reaching_fills_what_is_asked_for_and_never_beyond_the_context() -> None:
    assert not table(1000)[:, 0].any()
    found = table(1000, 300)
    assert np.all(found[:300, 0, -1] != 0) and not found[512:].any()
    assert np.array_equal(table(100, 5000), table(5000, 100)[:100])


def test_the_magnitude_scales_cosines_and_sines() -> None:
    scaled, plain = RopeTable(16, frequencies(8, 1e4, RopeScaling()), 1.25), RopeTable(16, frequencies(8, 1e4, RopeScaling()))
    scaled.reach(16)
    plain.reach(16)
    np.testing.assert_allclose(scaled.data, 1.25 * plain.data, rtol=2e-7)


def test_tables_have_the_same_bits_on_every_computer() -> None:
    """Recorded once: logits can only be the same bits everywhere if the tables are."""
    made = [RopeTable(2000, frequencies(dims, base, scaling), magnitude(scaling)) for dims, base, scaling, *_ in TRANSFORMERS]
    for one in made:
        one.reach(2000)
    digest = hashlib.sha256(b"".join(one.data.astype("<f4").tobytes() for one in made)).hexdigest()
    assert digest == "e82a0ead1d6bf20aad42db4b9048750d41ef641df70473ff4b16c67dd7d74a2b"
