"""All private or undocumented PyTorch names that the package uses; their removal in a release fails here.

Their results are compared with a plain computation elsewhere: test_linear.py, test_matrix_product.py,
test_convolutions.py, test_shapes.py, tests/invariants/test_padding_is_invisible.py.
"""

import ast
import importlib
import re
from collections.abc import Callable

import pytest
import torch

from konkanivani.models.attention import RotaryPositions, SequenceLayout
from konkanivani.models.conformer import Encoder
from konkanivani.ops import packing, products
from konkanivani.ops.packing import PackedLayout, PackedSelfAttention, pack_encoder
from tests.conftest import ROOT
from tests.invariants.parts import MODEL

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
OPERATORS = {
    "mkldnn._linear_pointwise": "(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm) -> "
    "Tensor Y",
    f"aten.{ATTENTION}": "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
    "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)",
    f"aten.{ATTENTION}_backward": "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    "aten.native_layer_norm_backward": "(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, "
    "Tensor rstd, Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
    "aten.silu_backward": "(Tensor grad_output, Tensor self) -> Tensor",
    "aten.gelu_backward": '(Tensor grad_output, Tensor self, *, str approximate="none") -> Tensor',
    "aten.convolution": "(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor",
    "aten.native_layer_norm": "(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
    "float eps) -> (Tensor, Tensor, Tensor)",
    "aten._unsafe_view": "(Tensor self, SymInt[] size) -> Tensor",
    "aten._softmax_backward_data": "(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor",
    "aten._ctc_loss_backward": "(Tensor grad, Tensor log_probs, Tensor targets, int[] input_lengths, "
    "int[] target_lengths, Tensor neg_log_likelihood, Tensor log_alpha, int blank, bool zero_infinity=False) -> Tensor",
}
NAMES = {
    "torch._fused_adamw_",
    "torch._foreach_zero_",
    "torch.optim.adamw.adamw",
    "torch._ops.OpOverload",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.Tensor._make_wrapper_subclass",
    "torch._C._disabled_torch_function_impl",
    "torch.utils._mode_utils.no_dispatch",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch.utils._pytree.tree_leaves",
    "torch.utils.data.dataloader._BaseDataLoaderIter",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers",
}


def resolve(name: str) -> object:
    """Return the object with a dotted name."""
    module, rest = name, []
    while True:
        try:
            place = importlib.import_module(module)
            break
        except ImportError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for part in rest:
        place = getattr(place, part)
    return place


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_operator_schema_is_unchanged(name):
    schema = str(resolve(f"torch.ops.{name}").default._schema)
    assert schema.partition("(")[2] == OPERATORS[name].partition("(")[2]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_private_name_exists(name):
    assert resolve(name) is not None


def private_names_in(source: str) -> set[str]:
    """Return the operators, and torch names with a part that starts with one underscore, in imports and attributes."""
    names = set(re.findall(r"torch\.ops\.((?:aten|mkldnn)\.\w+)", source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    private = re.compile(r"torch(\.\w+)*\._[a-zA-Z]")
    return {name for name in names if private.match(name) or name.startswith(("aten.", "mkldnn."))}


def test_package_uses_only_listed_private_names():
    used = set()
    for path in (ROOT / "konkanivani").rglob("*.py"):
        used |= private_names_in(path.read_text(encoding="utf-8"))
    used = {name.removeprefix("torch.ops.").removesuffix(".default") for name in used}
    parts = {name for name in used if any(other.startswith(f"{name}.") for other in used)}
    assert used - parts <= OPERATORS.keys() | NAMES
    assert private_names_in("import torch\nx = torch._C._spoken(1)\n") - NAMES  # negative control


def test_pytorch_product_is_used_without_onednn_operator(monkeypatch):
    monkeypatch.setattr(products, "_is_onednn_faster", lambda: True)
    rows, matrix = torch.randn(64, 1024), torch.randn(1024, 1024)
    assert products.is_by_onednn(rows, 1024, 1024)
    monkeypatch.setattr(products, "HAS_OPERATOR", False)
    assert not products.is_by_onednn(rows, 1024, 1024)
    assert torch.equal(products.fast_linear(rows, matrix), torch.nn.functional.linear(rows, matrix))


class RecordingRunner:
    """`WrapBlock` that records the layout of the blocks' frames."""

    def __init__(self) -> None:
        self.layouts: list[SequenceLayout] = []

    def __call__(self, number: int, block: torch.nn.Module) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
            if number > 0:
                self.layouts.append(layout)
            return block(x, layout)

        return run


def test_batch_is_padded_without_packed_attention_operator(monkeypatch):
    torch.manual_seed(0)
    holder, features = torch.nn.ModuleDict({"encoder": Encoder(MODEL, 80).eval()}), torch.randn(2, 90, 80)
    pack_encoder(holder)
    encoder = holder["encoder"]
    results = []
    for has_operator in (True, False):
        monkeypatch.setattr(packing, "HAS_OPERATOR", has_operator)
        runner = RecordingRunner()
        encoded, lengths = encoder(features, (90, 50), runner)
        results.append([row[:length] for row, length in zip(encoded, lengths, strict=True)])
        assert runner.layouts and all(isinstance(layout, PackedLayout) == has_operator for layout in runner.layouts)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_packed_attention_equals_attention_per_span():
    """The kernel and its gradients equal the plain computation."""
    torch.manual_seed(0)
    attention, norm = PackedSelfAttention(12, heads=3, causal=False).double(), torch.nn.LayerNorm(12).double()
    x, tables = torch.randn(1, 12, 12, dtype=torch.float64, requires_grad=True), RotaryPositions(4)
    positions = tuple(torch.cat([table[:5], table[:7]]) for table in tables(7, x))
    together = attention(norm(x), PackedLayout(positions, lengths=(5, 7)))
    parts = x.split((5, 7), 1)
    alone = torch.cat([attention(norm(part), SequenceLayout(tables(part.shape[1], x))) for part in parts], 1)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    inputs = [x, *attention.parameters(), *norm.parameters()]
    for one, other in zip(
        torch.autograd.grad(together.square().sum(), inputs),
        torch.autograd.grad(alone.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    whole = attention(norm(x), SequenceLayout(tables(12, x)))
    assert (whole - together).abs().max() > 1e-3  # negative control
