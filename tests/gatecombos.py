"""What is tested of operators with gates: combinations of operator, dtypes, operands and options; their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

A, B, C = (
    "fused_dit_gate_residual_layernorm_gamma_beta",
    "fused_dit_gate_residual_layernorm_scale_shift",
    "fused_dit_residual_layernorm_scale_shift",
)
MIX, NEXT, GATE = "gated_residual_rmsnorm", "gated_residual_next_rmsnorm", "rmsnorm_sigmoid_gate"
DIT, MIXES = (A, B, C), (MIX, NEXT)
OPS = (*DIT, *MIXES, GATE)
BLOCK = {"": 1, "nvfp4": 16, "mxfp8": 32}
# How modulation lies over [B, R, H], by what is written of its shape.
OVER = ("H", "1H", "BH", "B1H", "BRH")


@dataclass(frozen=True)
class GateCombo:
    """What a kernel is made for.

    Attributes:
        op: the public function.
        x, residual, vec, bias: dtypes of the input, of the residual, of vectors (and a gate of the input's shape), and
            of their biases or the first weight; None: left out.
        numerics: the mode.
        form: of a diffusion transformer's output: "", "nvfp4" or "mxfp8".
        number: where s, G and alpha are: "" (left out; alpha is a vector), "value" or "device".
        over: how modulation lies.
        activation, before, group: of the norm under a gate.
    """

    op: str
    x: str = "bf16"
    residual: str | None = "bf16"
    vec: str = "bf16"
    bias: str | None = "f32"
    numerics: str = "flashinfer"
    form: str = ""
    number: str = ""
    over: str = "B1H"
    activation: str = "sigmoid"
    before: bool = True
    group: int | None = None

    def __str__(self) -> str:
        dtypes = "-".join(str(d) for d in (self.x, self.residual, self.vec, self.bias))
        more = [self.form, self.number, self.over if self.op in DIT and self.over != "B1H" else ""]
        more += [self.activation if self.activation != "sigmoid" else "", "" if self.before else "after"]
        more += [f"group={self.group}"] if self.group else []
        return "-".join([self.op, self.numerics, dtypes, *[word for word in more if word]])

    @property
    def whole(self) -> int:
        """What the length of a row must be a multiple of."""
        return self.group or BLOCK[self.form]

    @property
    def written(self) -> tuple[str, ...]:
        """What a call leaves, by public name."""
        if self.op in DIT:
            return ("residual_out", "norm_out", *(("sf_out",) if self.form else ()))
        return {MIX: ("out",), NEXT: ("residual_out", "ffn_input"), GATE: ("input",)}[self.op]

    @property
    def aliases(self) -> dict[str, str]:
        """Outputs that may be an input."""
        found = {"residual_out": "residual"} if self.residual and self.op != MIX else {}
        found |= {"out": "residual"} if self.op == MIX else {"ffn_input": "branch"} if self.op == NEXT else {}
        return found | ({"norm_out": "input"} if self.op in DIT and not self.form else {})


def _combos() -> Iterator[GateCombo]:
    """Each dtype in each place, each operand there and not there, each mode, format, place of a number."""
    yield GateCombo(A)
    yield GateCombo(A, "f16", "f32", "bf16", None, "hf-gemma", number="value", over="BRH")
    yield GateCombo(A, "f32", "f16", "f32", "f16", number="device", over="H")
    yield GateCombo(A, form="nvfp4", number="value", over="BH")
    yield GateCombo(A, "f16", "bf16", "f16", None, "hf-llama", form="mxfp8")
    yield GateCombo(B)
    yield GateCombo(B, "f16", "f16", "f32", None, number="device", over="1H")
    yield GateCombo(B, "f32", "f32", "bf16", "f32", "torch", number="value", over="BRH")
    yield GateCombo(B, form="nvfp4", number="device", over="BRH")
    yield GateCombo(B, "bf16", "f32", "bf16", "bf16", form="mxfp8", number="value")
    yield GateCombo(C)
    yield GateCombo(C, residual=None)
    yield GateCombo(C, "f16", None, "f32", None, number="value", over="BH")
    yield GateCombo(C, "f32", "bf16", "f16", "f32", "hf-gemma", over="BRH")
    yield GateCombo(C, "bf16", None, "bf16", "f32", form="nvfp4", number="value")
    yield GateCombo(C, "f16", "f16", "bf16", None, form="mxfp8", number="device", over="1H")
    for op in MIXES:
        yield GateCombo(op, residual="f32", vec="f32", bias="bf16")
        yield GateCombo(op, residual="f32", vec="f32", bias=None, number="value")
        yield GateCombo(op, "f16", "bf16", "f16", "f32", "hf-llama")
        yield GateCombo(op, "f32", "f16", "bf16", "f16", number="value")
    yield GateCombo(GATE, residual=None, bias=None)
    yield GateCombo(GATE, residual=None, bias="f32", activation="silu", group=64)
    yield GateCombo(GATE, "f16", None, "f32", "f16", before=False)
    yield GateCombo(GATE, "f32", None, "f16", None, activation="silu", before=False, group=16)
    yield GateCombo(GATE, "bf16", None, "bf16", "bf16", activation="silu")


COMBOS = tuple(_combos())
USUAL = tuple(next(c for c in COMBOS if c.op == op) for op in OPS)
assert len({str(c) for c in COMBOS}) == len(COMBOS)


def of_shape(combo: GateCombo, count: int, hidden: int) -> tuple[int, ...]:
    """About so many rows, as the operator takes them, whole blocks long."""
    hidden = -(-hidden // combo.whole) * combo.whole
    if combo.op not in DIT:
        return (count, hidden)
    batches = 3 if count % 3 == 0 else 2 if count % 2 == 0 else 1
    return (batches, count // batches, hidden)


def modulation_shape(over: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    batches, _, hidden = shape
    return {"H": (hidden,), "1H": (1, hidden), "BH": (batches, hidden), "B1H": (batches, 1, hidden), "BRH": shape}[over]
