"""Runs the CuTe kernels without a GPU: the machine of `ptx_emulator` with the instructions that codes need.

Conversions to codes are the model's where the architecture has instructions for them; below, and for everything else,
the kernels' own arithmetic is interpreted. NaN that arithmetic makes is the one NaN that GPUs make, 0x7fffffff. An
approximate reciprocal, or power of two, is the rounded one or a neighbour of it, whichever its argument's bits say; a
reciprocal of a significand of ones alone is the rounded one, as it must be where `rcp.rn` is made of it.
"""

import contextlib
import re
import types

import numpy as np
import torch

from flashnorm.model import formats
from tests import ptx_emulator as base
from tests.ptx_emulator import Int, Tensor

__all__ = ["Machine", "Tensor", "launch", "patched"]

for _name in ("ge", "gt", "le"):
    setattr(Int, f"__{_name}__", base._operator(f"__{_name}__"))

CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
NAN = np.uint32(0x7FFFFFFF).view(np.float32)
MARK = np.frombuffer(b"mbarrier", np.uint8)  # what a mailbox looks like to whoever writes over it


def _encode(values, fp8):
    codes = formats.encode(torch.from_numpy(np.ascontiguousarray(values)), CODES[fp8])
    return codes.view(torch.uint8).numpy().astype(np.uint16)


def _pairs(low, high):
    """A byte of two e2m1 codes."""
    both = np.ascontiguousarray(np.stack([low, high], -1)).astype(np.float32)
    codes = formats.encode(torch.from_numpy(both), torch.float4_e2m1fn_x2)
    return codes.view(torch.uint8).numpy()[..., 0].astype(np.uint32)


def _with_nan(join):
    return lambda a, b: np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), join(a, b))


def _saturated(v):
    return np.where(np.isnan(v), np.float32(0), np.clip(v, np.float32(0), np.float32(1)))


def _reciprocal(v):
    bits = np.ascontiguousarray(v, np.float32).view(np.uint32)
    exact = (np.float32(1) / v).astype(np.float32)
    off = (bits * np.uint32(2654435761) >> np.uint32(30)).astype(np.int32) % 3 - 1
    off = np.where((bits & 0x7FFFFF == 0x7FFFFF) | ~np.isfinite(exact) | (exact == 0), 0, off)
    return (exact.view(np.int32) + off.astype(np.int32)).view(np.float32)


def _power(v):
    """2^v, by the same rule, within 1.41 ulp; what is subnormal is zero.

    That is the error of the tables in S. Oberman, M. Siu, A high-performance area-efficient multifunction interpolator,
    2005.
    """
    bits = np.ascontiguousarray(v, np.float32).view(np.uint32)
    exact = np.exp2(v.astype(np.float64))
    rounded = exact.astype(np.float32)
    off = (bits * np.uint32(2654435761) >> np.uint32(30)).astype(np.int32) % 3 - 1
    with np.errstate(all="ignore"):
        neighbour = (rounded.view(np.int32) + off).view(np.float32)
        near = np.abs(neighbour - exact) <= 1.41 * np.spacing(rounded.astype(np.float32)).astype(np.float64)
    value = np.where((v != 0) & np.isfinite(rounded) & near, neighbour, rounded)
    return np.where(rounded < np.float32(2.0**-126), np.float32(0), value)


FLOAT = {
    "sub.rn.f32": lambda a, b: a - b,
    "mul.rn.sat.f32": lambda a, b: _saturated(a * b),
    "max.NaN.f32": _with_nan(np.fmax),
    "min.NaN.f32": _with_nan(np.fmin),
    "max.f32": np.fmax,
    "min.f32": np.fmin,
    "abs.f32": np.abs,
    "neg.f32": np.negative,
    "rcp.approx.ftz.f32": _reciprocal,
    "ex2.approx.ftz.f32": _power,
}
KEEPS_NAN = ("abs.f32", "neg.f32")
UNSIGNED = {
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "or.b32": lambda a, b: a | b,
    "add.u32": lambda a, b: a + b,
    "add.s32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "min.u32": np.minimum,
    "max.u32": np.maximum,
}
COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
DIRECT = {**base.ARITHMETIC, **FLOAT}
OPERANDS = ("$0, $1;", "$0, $1, $2;", "$0, $1, $2, $3;")
JOIN = {"and": np.logical_and, "or": np.logical_or}
WIDTHS = {"u8": 1, "u16": 2, "b16": 2, "b32": 4, "f32": 4, "s32": 4, "s64": 8}


class Machine(base.Machine):
    """`ptx_emulator.Machine` with integer arithmetic, bytes and codes."""

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.alive = np.ones(self.shape, bool)
        self.awake = np.ones(self.shape, bool)
        self.jumped, self.boxes = {}, {}
        self.ahead, self.peers, self.unseen = 0, False, (False, False)  # arrivals that nobody has waited for

    def load(self, space, addr, size, active):
        return super().load(space, addr, size, active & self.alive)

    def store(self, space, addr, data, active):
        super().store(space, addr, data, active & self.alive)

    def _statement(self, text, env):
        label, colon, after = text.partition(":")
        if colon and label.isidentifier():  # where those who jumped there meet the others
            self.awake = self.awake | self.jumped.pop(label)
            text = after.strip()
        words = text.split()
        if "exit" in words:
            self.alive &= ~env[words[0][1:]]
        elif "bra" in words or "bra.uni" in words:  # forward, within its block
            going = self.awake & env[words[0][1:]] if words[0][0] == "@" else self.awake
            self.jumped[words[-1]] = self.jumped.get(words[-1], False) | going
            self.awake = self.awake & ~going
        elif text.startswith("barrier.cluster"):
            self._cluster_barrier(text)
        elif text and not text.startswith("bar.warp.sync"):
            super()._statement(text, env)

    def _write(self, name, value, env, active):
        super()._write(name, value, env, active & self.awake)

    def asm(self, result, code, constraints, args, *, effect=False):
        """One instruction of fp32 arithmetic, the most frequent case by far, needs no reading of its text."""
        if "mbarrier" in code and "st.async" not in code:
            return self._mailbox(code, args)
        op, _, operands = code.partition(" ")
        join = DIRECT.get(op)
        if join is None or operands not in OPERANDS:
            return super().asm(result, code, constraints, args, effect=effect)
        with np.errstate(all="ignore"):
            value = join(*map(np.asarray, args)).astype(np.float32)
        return value if op in KEEPS_NAN else np.where(np.isnan(value), NAN, value)

    def _mailbox(self, code, args):
        """Threads run in lockstep and nobody waits: a mailbox was made, shown to all, left alone, and is full."""
        if "fence" in code:
            self.unseen = self.unseen[0], True
            return
        box, given = (np.broadcast_to(np.asarray(a), self.shape) for a in args)
        (at,) = np.unique(box)
        if "try_wait" in code:
            self._whole(at)
            state, here = self.boxes[at], self.alive.any(1)
            (phase,) = np.unique(given)
            full = state.expected is not None and (state.arrived[here] == state.expected).all()
            assert full and phase == state.turn & 1, "a mailbox would wait for ever"
            state.arrived[:], state.expected, state.turn = 0, None, state.turn + 1
            return
        by = (given != 0) & self.alive
        assert (by.sum(1)[self.alive.any(1)] == 1).all(), "one thread of a CTA"
        if "mbarrier.init" in code:
            assert re.search(r"\], 1;", code) and at not in self.boxes
            self.store("shared", box, np.broadcast_to(MARK, (*self.shape, 8)), by)
            self.boxes[at] = types.SimpleNamespace(arrived=np.zeros(self.shape[0], int), expected=None, turn=0)
            self.unseen = True, False
        else:
            self._whole(at)
            assert self.boxes[at].expected is None
            self.boxes[at].expected = int(re.search(r"(\d+); }", code).group(1))

    def _whole(self, at):
        """A mailbox is there for the whole cluster, and nothing else has been written to its place."""
        assert at in self.boxes and not self.unseen[0], "a mailbox that the cluster has not seen"
        found = self.shared[self.alive.any(1), at : at + 8]
        assert (found == MARK).all(), "a mailbox was overwritten"

    def _cluster_barrier(self, text):
        if ".arrive" in text:
            self.ahead += 1
            return
        self.ahead -= 1
        assert self.ahead == 0, "a wait without an arrival"
        self.peers, made = True, self.unseen[0]
        assert not made or self.unseen[1], "mailboxes without their fence"
        self.unseen = False, False

    def _read(self, name, env, dtype=np.uint32):
        if name.startswith("0f"):
            return self._lanes(int(name[2:], 16), dtype)
        return super()._read(name, env, dtype)

    def _compute(self, op, names, env, active):
        def read(i, dtype=np.uint32):
            return self._read(names[i], env, dtype)

        def as_float(i):
            return np.ascontiguousarray(read(i)).view(np.float32)

        if op in DIRECT:
            with np.errstate(all="ignore"):
                value = np.ascontiguousarray(DIRECT[op](*map(as_float, range(1, len(names)))), np.float32)
            value = value if op in KEEPS_NAN else np.where(np.isnan(value), NAN, value)
            value = value.view(np.uint32)
        elif op in UNSIGNED:
            with np.errstate(over="ignore"):
                value = UNSIGNED[op](read(1), read(2))
        elif op.startswith("setp."):
            _, how, *joined, kind = op.split(".")
            seen = {"f32": np.float32, "s32": np.int32}.get(kind, np.uint32)
            pair = [np.ascontiguousarray(read(i)).view(seen) for i in (1, 2)]
            value = np.isnan(pair[0]) | np.isnan(pair[1]) if how == "nan" else COMPARE[how](*pair)
            for each in joined:
                value = JOIN[each](value, env[names[3]])
        elif op == "or.pred":
            value = env[names[1]] | env[names[2]]
        elif op in ("selp.b32", "selp.f32"):
            value = np.where(env[names[3]], read(1), read(2))
        elif op == "prmt.b32":
            source = (read(1).astype(np.uint64) | read(2).astype(np.uint64) << np.uint64(32))[..., None]
            picks = (read(3)[..., None] >> np.arange(0, 16, 4, dtype=np.uint32)).astype(np.uint64) & np.uint64(15)
            picked = (source >> (picks & np.uint64(7)) * np.uint64(8)) & np.uint64(0xFF)
            picked = np.where(picks & np.uint64(8) != 0, (picked >> np.uint64(7)) * np.uint64(0xFF), picked)
            value = (picked << np.array([0, 8, 16, 24], np.uint64)).sum(-1).astype(np.uint32)
        elif op == "bfi.b32":
            at, length = int(names[3]), int(names[4])
            field = np.uint32(((1 << length) - 1) << at)
            value = (read(2) & ~field) | ((read(1) << np.uint32(at)) & field)
        elif op == "min.f16x2":
            value = np.minimum(*(np.ascontiguousarray(read(i), np.uint32).view(np.float16) for i in (1, 2)))
            value = np.ascontiguousarray(value).view(np.uint32)
        elif op == "cvt.rn.satfinite.e2m1x2.f32":
            value = _pairs(as_float(2), as_float(1))
        elif op == "mov.b32" and names[1].count(",") == 3:
            parts = (env[n.strip()].astype(np.uint32) for n in names[1].strip("{}").split(","))
            value = sum(part << np.uint32(8 * i) for i, part in enumerate(parts))
        elif op.startswith("cvt.rn.satfinite."):
            fp8 = op.split(".")[3].removesuffix("x2")
            value = (_encode(as_float(1), fp8) << np.uint16(8)) | _encode(as_float(2), fp8)
        elif op == "cvt.rni.s32.f32":
            with np.errstate(invalid="ignore"):
                whole = np.clip(np.nan_to_num(np.rint(as_float(1).astype(np.float64)), nan=0.0), -(2**31), 2**31 - 1)
            value = whole.astype(np.int64).astype(np.uint32)
        elif op == "mov.b64":
            value = read(1, np.int64)
        else:
            super()._compute(op, names, env, active)
            return
        self._write(names[0], value, env, active)

    def _move(self, op, names, env, active):
        if "shared::cluster" in op:
            assert self.peers, "a peer that may not run yet"
        if op.startswith("st.async."):
            active = active & self.alive
            box = self._address(names[2], env)
            (at,) = np.unique(box & ((1 << base.CTA_SHIFT) - 1))
            self._whole(at)
            op, names = "st.shared::cluster.f32", names[:2]
            to = self._address(names[0], env)[active] >> base.CTA_SHIFT
            assert (box[active] >> base.CTA_SHIFT == to).all(), "counted in another CTA"
            own = np.broadcast_to(np.arange(self.shape[0])[:, None], self.shape)[active]
            np.add.at(self.boxes[at].arrived, own // self.cluster * self.cluster + to, 4)
        parts = op.split(".")
        width = WIDTHS.get(parts[-1])
        if parts[0] not in ("ld", "st") or width is None or parts[-1] in ("b16", "b32") or "shared" in parts[1]:
            super()._move(op, names, env, active)
            return
        register, where = (names[0], names[1]) if parts[0] == "ld" else (names[1], names[0])
        kind = {1: np.uint8, 2: np.uint16, 4: np.int32 if parts[-1] == "s32" else np.uint32, 8: np.int64}[width]
        if parts[0] == "ld":
            data = self.load(parts[1], self._address(where, env), width, active)
            value = np.ascontiguousarray(data).view(kind)[..., 0]
            self._write(register, value.astype(np.int64 if parts[-1][0] == "s" else np.uint32), env, active)
        else:
            data = np.ascontiguousarray(self._read(register, env).astype(kind)[..., None]).view(np.uint8)
            self.store(parts[1], self._address(where, env), data, active)


def repeat(count, carried, body):
    """`loops.repeat`: threads run in lockstep, so all of them must count the same."""
    (times,) = np.unique(count.a)
    for _ in range(times):
        carried = body(list(carried))
    return list(carried)


def when(condition, carried, then, otherwise):
    """`loops.when`: on which all threads must agree."""
    (holds,) = np.unique(condition.a)
    return then(list(carried)) if holds else otherwise(list(carried))


@contextlib.contextmanager
def patched(machine):
    from flashnorm.kernels import (
        blocks,
        codec,
        codec4,
        columns,
        fp,
        frame,
        gradient,
        memory,
        partials,
        reduce,
        row_backward,
        row_forward,
        scales,
        silu,
        stream_frame,
    )

    lane = np.arange(machine.shape[1])

    def shuffle_xor(value, offset):
        return np.broadcast_to(value, machine.shape)[:, (lane // 32 * 32) + ((lane % 32) ^ offset)]

    class Allocator:
        def allocate(self, size, byte_alignment):
            return types.SimpleNamespace(toint=lambda: 0)

    def extent(tensor, axis):
        return Int(tensor.shape[axis])

    streams = (columns, gradient, partials, row_backward, stream_frame)
    allocators = types.SimpleNamespace(utils=types.SimpleNamespace(SmemAllocator=Allocator))
    names = types.SimpleNamespace(f32=lambda: "f32", i32=lambda: "i32", i64=lambda: "i64")
    view = types.SimpleNamespace(bitcast=lambda t, v: v.view(np.float32 if t == "f32" else np.uint32))
    changes = [
        *((module, "asm", machine.asm) for module in (fp, codec, codec4, memory, scales)),
        *((module, "asm_many", machine.asm_many) for module in (codec, memory, scales, silu)),
        *((module, "T", names) for module in (fp, codec, codec4, memory, scales, silu)),
        *((module, "Int32", Int) for module in (frame, reduce, blocks, row_forward, *streams)),
        *((module, "Int64", Int) for module in (frame, row_forward, *streams) if hasattr(module, "Int64")),
        *((module, "repeat", repeat) for module in (gradient, columns)),
        (gradient, "when", when),
        (codec, "llvm", view),
        *((module, "extent", extent) for module in (frame, stream_frame, row_backward)),
        (reduce, "_shuffle_xor", shuffle_xor),
        (reduce, "_select", lambda c, a, b: np.where(c, a, b)),
        *((module, "cutlass", allocators) for module in (row_forward, row_backward)),
    ]
    saved = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield row_forward
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


def launch(variant, tile, machine, tensors, scalars, sm=90, native_fp4=False):
    """Run the kernel of one tile over the machine's whole grid.

    Args:
        tensors: a `Tensor` for each operand of the variant's program, in order.
        scalars: fp32 values by name.
        sm: the compute capability that it is traced for; 90 has programmatic dependent launch.
        native_fp4: the target has conversions to e2m1.
    """
    from flashnorm.kernels.row_forward import RowForward

    machine.waited = sm < 90
    with patched(machine):
        kernel = object.__new__(RowForward)
        kernel.variant, kernel.plans, kernel.sm, kernel.has_pdl = variant, ((None, tile),), sm, sm >= 90
        kernel.native_fp4 = native_fp4
        kernel.names = tuple(o.name for o in variant.program.operands())
        tid = Int(np.broadcast_to(np.arange(machine.shape[1]), machine.shape))
        bid = Int(np.broadcast_to(np.arange(machine.shape[0])[:, None], machine.shape))
        values = [types.SimpleNamespace(ir_value=lambda v=v: np.float32(v)) for v in scalars.values()]
        kernel.body(0, values, tensors, tid, bid)
