"""The gradients of RMSNorm and LayerNorm: private operators behind the differentiable functions and modules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flashnorm import reference
from flashnorm.core.op import Op
from flashnorm.program import BackwardProgram, workspace_floats

Tensor = torch.Tensor
Wanted = Mapping[str, torch.dtype | torch.Tensor | None]

_YES: dict[Any, str] = {"no": "no", "yes": "yes", False: "no", True: "yes"}


class _Offsets(Mapping[Any, str]):
    """Any finite number, by the text that stands for it in the schema."""

    def __getitem__(self, offset: Any) -> str:
        number = float(offset)  # a text that is no number: KeyError, as of every mapping
        if not math.isfinite(number):
            raise KeyError(offset)
        return repr(number)

    def __iter__(self) -> Iterator[str]:
        return iter(("0.0", "1.0"))

    def __len__(self) -> int:
        return 2


def _rms(present: frozenset[str], options: Mapping[str, Any]) -> BackwardProgram:
    # Who asks for kernels ahead of time knows the forward's mode instead.
    rounds = options["round_norm"] == "yes" or options.get("numerics") == "hf-llama"
    return BackwardProgram(
        "rms",
        weight="weight" in present,
        offset=float(options["weight_offset"]) if "weight" in present else 0.0,
        round_norm=rounds and "dweight" in present,
        g_residual="g_residual" in present,
        dx="dx" in present,
        dresidual="dresidual" in present,
        dweight="dweight" in present,
    )


def _layer(present: frozenset[str], options: Mapping[str, Any]) -> BackwardProgram:
    return BackwardProgram(
        "layer",
        weight="weight" in present,
        g_residual="g_residual" in present,
        dx="dx" in present,
        dresidual="dresidual" in present,
        dweight="dweight" in present,
        dbias="dbias" in present,
    )


_OPTIONAL = ("weight", "g_residual", "dx", "dresidual", "dweight", "dbias", "workspace")
_ROUTES = ("cute", "cuda", "cpu", "torch")
_LABELS = {"x": "x"}

RMSNORM_BACKWARD = Op(
    "rmsnorm_backward",
    program=_rms,
    reference=reference.rmsnorm_backward,
    options={"weight_offset": _Offsets(), "round_norm": _YES},
    optional=_OPTIONAL,
    routes=_ROUTES,
    broadcast_vecs=True,
    labels=_LABELS,
    plainly=("dx", "dweight", "workspace"),
    public=False,
)
LAYERNORM_BACKWARD = Op(
    "layernorm_backward",
    program=_layer,
    reference=reference.layernorm_backward,
    options={},
    optional=_OPTIONAL,
    routes=_ROUTES,
    labels=_LABELS,
    plainly=("dx", "dweight", "dbias", "workspace"),
    public=False,
)
_rmsnorm, _layernorm = RMSNORM_BACKWARD.behind(), LAYERNORM_BACKWARD.behind()


def rmsnorm_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    wanted: Wanted,
    g_residual: Tensor | None = None,
    weight_offset: float = 0.0,
    round_norm: bool = False,
    workspace: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> dict[str, Tensor]:
    """The gradients of `rmsnorm`, of its Gemma form, and of both with a residual.

    dx = rstd * (gw - n * mean(gw * n)) + g_residual, dweight = sum(dout * n), with n = x * rstd and
    gw = dout * (weight + offset): in fp32, every operation rounded, every sum in one fixed order that depends on H and
    the number of weight rows alone.

    Args:
        dout: [..., H], the gradient of the output; any strides, also those of an expanded tensor.
        x: [..., H], what was normalised: the input, or the stored sum with the residual.
        weight: [H], or anything that broadcasts to x with last dimension H; None for no weight.
        rstd: fp32, [...] or one value a row in another shape, as the forward saved it.
        wanted: which gradients, and how: "dx" (in dout's dtype), "dresidual" (the same values in x's dtype) and
            "dweight" (in any of the three dtypes, of the weight's shape). A dtype makes a new tensor, a tensor is
            written and returned; dx may be written over dout, dresidual over x. None, or absent: not wanted.
        g_residual: [..., H], a gradient of x itself, added to dx in fp32; None for none.
        weight_offset: added to the weight in fp32; 0 adds nothing.
        round_norm: the forward rounded n to the output's dtype before the weight ("hf-llama"): so does dweight.
        workspace: `backward_workspace` of the same sizes, or larger; None makes one.
        enable_pdl: programmatic dependent launch. None and True mean on from compute capability 9.0.

    Returns:
        The gradients that are wanted, by name. Nothing that is not wanted is computed.

    Raises:
        TypeError, ValueError: for wrong arguments, before anything is launched.
    """
    made = _outputs(dout, x, weight, None, wanted)
    if made:
        given: dict[str, Any] = {"dout": dout, "x": x, "weight": weight, "rstd": rstd, "g_residual": g_residual, **made}
        by_rows = _by_weight_rows(x, weight, made.get("dweight"))
        if by_rows is not None:
            for name in ("dout", "x", "g_residual", "dx", "dresidual"):
                if given.get(name) is not None and given[name].shape == x.shape:
                    given[name] = by_rows.rows(given[name], written=name in made)
            given["weight"], given["rstd"] = by_rows.vectors(given["weight"]), by_rows.per_row(rstd)
            given["dweight"] = by_rows.vectors(given["dweight"], written=True)
        given["workspace"] = _workspace(x, made, workspace)
        operands = (given.get(o.name) for o in RMSNORM_BACKWARD.operands)
        _rmsnorm(*operands, repr(float(weight_offset)), "yes" if round_norm else "no", enable_pdl)
        if by_rows is not None:
            by_rows.finish()
    return made


def layernorm_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rest: Tensor,
    rstd: Tensor,
    *,
    wanted: Wanted,
    g_residual: Tensor | None = None,
    workspace: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> dict[str, Tensor]:
    """The gradients of `layernorm`, plain and with a residual.

    dx = rstd * (gw - mean(gw) - n * mean(gw * n)) + g_residual, dweight = sum(dout * n), dbias = sum(dout), with
    n = (x - mean - rest) * rstd and gw = dout * weight. Arguments, results and errors are those of `rmsnorm_backward`.

    Args:
        weight: [H] or None.
        mean, rest, rstd: fp32, one value a row, as the forward saved them (`SaveMeans`, `SaveRstd`).
        wanted: also "dbias", [H] in any of the three dtypes.
    """
    made = _outputs(dout, x, weight, x.shape[-1:], wanted)
    if made:
        given = {"dout": dout, "x": x, "weight": weight, "mean": mean, "rest": rest, "rstd": rstd}
        given |= {"g_residual": g_residual, "workspace": _workspace(x, made, workspace)}
        named = given | made
        _layernorm(*(named.get(o.name) for o in LAYERNORM_BACKWARD.operands), enable_pdl)
    return made


def backward_workspace(weight_rows: int, hidden_size: int, device: Any, *, sums: int = 1) -> Tensor:
    """fp32 memory for the partial sums of a backward: for any number of rows, again and again, also in a CUDA graph.

    Args:
        weight_rows: rows of the weight, 1 where all rows share it.
        hidden_size: H.
        device: of the tensors.
        sums: gradients that are sums over rows: 1, or 2 of a weight and a bias.
    """
    return torch.empty(sums * workspace_floats(weight_rows, hidden_size), dtype=torch.float32, device=device)


def _outputs(dout: Any, x: Any, weight: Any, bias_shape: Any, wanted: Wanted) -> dict[str, Tensor]:
    """The tensors that are written."""
    for name, tensor in (("dout", dout), ("x", x)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    shapes = {"dx": dout, "dresidual": x, "dweight": weight, "dbias": bias_shape}
    made: dict[str, Tensor] = {}
    for name, how in wanted.items():
        like = shapes.get(name)
        if how is None:
            continue
        if like is None:
            raise ValueError(f"there is no gradient {name!r} of these arguments")
        if isinstance(how, torch.Tensor):
            made[name] = how
        elif name in ("dx", "dresidual"):  # of an expanded gradient, a dense one
            made[name] = torch.empty_like(x, dtype=how)
        else:
            made[name] = torch.empty(getattr(like, "shape", like), dtype=how, device=x.device)
    return made


def _workspace(x: Tensor, made: Mapping[str, Tensor], given: Tensor | None) -> Tensor | None:
    sums = [made[name] for name in ("dweight", "dbias") if name in made]
    if not sums or given is not None:
        return given if sums else None
    hidden = x.shape[-1]
    return backward_workspace(sums[0].numel() // hidden, hidden, x.device, sums=len(sums))


def _by_weight_rows(x: Tensor, weight: Any, dweight: Any) -> _ByWeightRows | None:
    """How a call with several weight rows is taken; None where there is one, or the operator refuses them anyway."""
    if weight is None or dweight is None or not 1 < weight.dim() <= x.dim() or dweight.shape != weight.shape:
        return None
    fits = all(a in (1, b) for a, b in zip(reversed(weight.shape), reversed(x.shape), strict=False))
    return _ByWeightRows(x, weight) if fits else None


class _ByWeightRows:
    """A call's tensors as [T, R, H]: T rows for each of R weight rows, which vary last; and as [R, H].

    They are views where strides allow it. Else inputs are copied, and results come through a copy.
    """

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        lead = (1,) * (x.dim() - weight.dim()) + tuple(weight.shape[:-1])
        varying = [i for i, n in enumerate(lead) if n != 1]
        shared = [i for i, n in enumerate(lead) if n == 1]
        self.order = (*shared, *varying)
        self.sizes = math.prod([x.shape[i] for i in shared]), math.prod([lead[i] for i in varying])
        self.split = len(shared)
        self.shape = x.shape
        self._back: list[tuple[Tensor, Tensor]] = []

    def rows(self, tensor: Tensor, *, written: bool = False) -> Tensor:
        """A "row" operand."""
        return self._merged(tensor.permute(*self.order, -1), (*self.sizes, tensor.shape[-1]), written)

    def per_row(self, tensor: Tensor) -> Tensor:
        """One value a row."""
        if tensor.numel() != math.prod(self.shape[:-1]):
            return tensor  # the operator says what is wrong with it
        return self._merged(tensor.reshape(self.shape[:-1]).permute(*self.order), self.sizes, False)

    def vectors(self, tensor: Tensor, *, written: bool = False) -> Tensor:
        """The weight, or its gradient."""
        shape = (self.sizes[1], tensor.shape[-1]) if self.sizes[1] > 1 or tensor.numel() == 0 else tensor.shape[-1:]
        if not written or tensor.is_contiguous():
            return tensor.reshape(shape)
        made = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        self._back.append((tensor, made.view(tensor.shape)))
        return made

    def _merged(self, tensor: Tensor, shape: tuple[int, ...], written: bool) -> Tensor:
        if _merges(tensor, 0, self.split) and _merges(tensor, self.split, len(self.order)):
            return tensor.view(shape)
        if not written:
            return tensor.reshape(shape)
        made = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        self._back.append((tensor, made.view(tensor.shape)))
        return made

    def finish(self) -> None:
        """Copies results to where they belong."""
        for target, made in self._back:
            target.copy_(made)


def _merges(tensor: Tensor, first: int, last: int) -> bool:
    """Whether neighbouring dimensions are one dimension of a view."""
    kept = [(tensor.shape[i], tensor.stride(i)) for i in range(first, last) if tensor.shape[i] != 1]
    return all(outer == n * inner for (_, outer), (n, inner) in itertools.pairwise(kept))
