"""The every-step readings against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradaudit.capture.reading import floating_tensors, largest, largest_each, layer_weight, mean, mean_square

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

QUICK = settings(max_examples=60, deadline=None, derandomize=True)

FLOATING = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn,
    torch.complex32, torch.complex64, torch.complex128,
]  # fmt: skip

HALVES = hnp.arrays(np.uint16, st.integers(0, 20), elements=st.integers(0, 2**16 - 1))


def wide(x: torch.Tensor) -> np.ndarray:
    """Magnitudes in float64."""
    x = x.detach()
    return np.abs(x.to(torch.complex128 if x.is_complex() else torch.float64).numpy())


@QUICK
@given(st.lists(HALVES, max_size=4))
def test_the_largest_magnitude_says_also_whether_all_is_finite(several: list[np.ndarray]) -> None:
    tensors = [torch.from_numpy(bits.view(np.int16).copy()).view(torch.float16) for bits in several]
    for x, value in zip(tensors, largest_each(tensors), strict=True):
        magnitudes = wide(x)
        # NaN if there is one, else the largest, inf included; 0 where there is nothing
        assert float(value) == pytest.approx(magnitudes.max(initial=0.0), nan_ok=True, rel=0)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)], ids=str)
def test_every_dtype_and_shape_can_be_read(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.from_numpy(np.random.default_rng(2).normal(size=shape)).to(dtype)
    magnitudes = wide(x)
    assert float(largest(x)) == pytest.approx(magnitudes.max(initial=0.0), rel=1e-3)
    if magnitudes.size:
        # a loss has a sign, unless it is complex
        signed = magnitudes if dtype.is_complex else x.double().numpy()
        assert float(mean(x)) == pytest.approx(signed.mean(), rel=1e-3)
        assert float(mean_square(x)) == pytest.approx((magnitudes**2).mean(), rel=1e-3)


def test_a_complex_number_whose_parts_are_finite_is_finite() -> None:
    x = torch.tensor([complex(60000, 60000)], dtype=torch.complex64).to(torch.complex32)
    assert float(largest(x)) == pytest.approx(60000 * 2**0.5)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(3, -1),
    "COO": lambda x: x.to_sparse(),
    "CSR": lambda x: x.to_sparse_csr(),
    "MKLDNN": lambda x: x.to_mkldnn(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_can_be_read_as_if_dense(layout: str) -> None:
    dense = torch.tensor([[0.0, -3.0, 0.0], [1.0, 0.0, 2.0]])
    x = LAYOUTS[layout](dense)
    whole = x.double().numpy() if x.layout is torch.strided else dense.double().numpy()
    assert float(largest(x)) == np.abs(whole).max()
    assert float(mean(x)) == pytest.approx(whole.mean())
    assert float(mean_square(x)) == pytest.approx((whole**2).mean())


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_is_read_over_the_elements_it_holds(layout: torch.layout) -> None:
    x = torch.nested.nested_tensor([torch.full((2, 3), 2.0), torch.full((1, 3), -4.0)], layout=layout)
    assert float(largest(x)) == 4.0
    assert float(mean(x)) == 0.0
    assert float(mean_square(x)) == 8.0


def test_duplicates_of_a_sparse_gradient_are_summed_before_they_are_compared() -> None:
    x = torch.sparse_coo_tensor([[1, 1, 0]], [3.0, 4.0, 5.0], (4,))
    assert float(largest(x)) == 7.0
    assert float(mean(x)) == 3.0


@dataclass
class _Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] | None = None
    kind: str = "x"


def test_tensors_are_found_in_whatever_a_module_returns() -> None:
    a, b, c = torch.ones(1), torch.ones(2, dtype=torch.complex64), torch.ones(3, dtype=torch.int64)
    assert floating_tensors(_Output(a, (b, c))) == [a, b]
    assert floating_tensors({"x": [a, None, "text"], "y": (b, 3.0)}) == [a, b]
    assert floating_tensors(_Output) == []
    assert floating_tensors(iter([a])) == []


def test_a_container_that_holds_itself_is_left_in_finite_time() -> None:
    loop: list[object] = [torch.ones(1)]
    loop.append(loop)
    assert len(floating_tensors(loop)) == 5


@pytest.mark.parametrize(
    ("module", "fan_in"),
    [
        (torch.nn.Linear(5, 7), 5),
        (torch.nn.Conv2d(6, 8, 3, groups=2), 27),
        (torch.nn.ConvTranspose2d(6, 8, 3), 54),
        (torch.nn.MultiheadAttention(8, 2), 8),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_layers_fan_in_is_how_many_products_make_one_output(module: torch.nn.Module, fan_in: int) -> None:
    weight, found = layer_weight(module)
    assert weight in set(module.parameters())
    assert found == fan_in


@pytest.mark.parametrize("module", [torch.nn.LayerNorm(4), torch.nn.ReLU(), torch.nn.Flatten()], ids=repr)
def test_what_multiplies_nothing_has_no_layer_weight(module: torch.nn.Module) -> None:
    assert layer_weight(module) == (None, 0)


def test_looking_for_a_layers_weight_runs_none_of_its_code() -> None:
    module = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(64, 64))
    before = module.parametrizations.weight[0]._u.clone()
    layer_weight(module)
    assert torch.equal(module.parametrizations.weight[0]._u, before)
