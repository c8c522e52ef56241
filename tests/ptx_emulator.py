"""Runs the CuTe kernels without a GPU: their own tracing code, with numpy in place of MLIR.

Every value of a kernel becomes an array over [CTA, thread], and every piece of inline PTX is interpreted, so
what is tested is the code that makes the kernels (lane mapping, masks, staging, exchange, PTX text) and not a
second description of it. Threads run in lockstep, so a missing barrier would not show; memory that is touched
without permission, or not aligned to the access, or before the wait for the earlier kernel, raises.
"""

import contextlib
import re
import types

import numpy as np

GLOBAL_BASE = 1 << 40
CTA_SHIFT = 24  # a shared::cluster address is rank << 24 | offset


class Int:
    """An integer for every thread, in place of the DSL's Int32 and Int64."""

    def __init__(self, value):
        self.a = value.a if isinstance(value, Int) else np.asarray(value, np.int64)

    def ir_value(self):
        return self.a

    def to(self, _type):
        return Int(self.a.astype(np.int64))


def _operator(name):
    def apply(self, other):
        return Int(np.asarray(getattr(self.a, name)(other.a if isinstance(other, Int) else np.int64(other))))

    return apply


for _name in ("add", "sub", "mul", "floordiv", "mod", "lshift", "rshift", "and", "or", "lt", "eq", "ne"):
    setattr(Int, f"__{_name}__", _operator(f"__{_name}__"))


def fma32(a, b, c):
    """fma of fp32 arrays, rounded once: an exact product, a sum rounded to odd in fp64, then to fp32."""
    with np.errstate(all="ignore"):
        p, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
        s = p + c
        t = s - p
        err = (p - (s - t)) + (c - t)
        inexact = np.isfinite(s) & (err != 0) & (s.view(np.int64) & 1 == 0)
        odd = np.nextafter(s, np.where(err > 0, np.inf, -np.inf))
        return np.where(inexact, odd, s).astype(np.float32)


def to_bf16(v):
    """Bits of fp32 values rounded to bfloat16, nearest even."""
    bits = v.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(v), np.uint16(0x7FFF), rounded)


def round_bits(v, dtype):
    """Storage bits of fp32 values."""
    if dtype == "float32":
        return np.ascontiguousarray(v, np.float32).view(np.uint32)
    with np.errstate(over="ignore"):
        return to_bf16(v) if dtype == "bfloat16" else v.astype(np.float16).view(np.uint16)


def widen(bits, dtype):
    """fp32 values of storage bits."""
    if dtype == "float32":
        return bits.view(np.float32)
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


ARITHMETIC = {
    "add.rn.f32": lambda a, b: a + b,
    "mul.rn.f32": lambda a, b: a * b,
    "div.rn.f32": lambda a, b: a / b,
    "fma.rn.f32": fma32,
    "sqrt.rn.f32": np.sqrt,
    "rcp.rn.f32": lambda a: np.float32(1) / a,
}
INTEGER = {
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
}
SIGNED = {"sub.s32": np.subtract, "max.s32": np.maximum, "min.s32": np.minimum}


class Machine:
    """A grid of threads, its shared memory, and a piece of global memory.

    Attributes:
        memory: the bytes from GLOBAL_BASE on.
        readable, writable: which of them a kernel may touch.
    """

    def __init__(self, ctas, threads, memory, readable, writable, cluster=1, shared=0):
        self.shape, self.cluster = (ctas, threads), cluster
        self.memory, self.readable, self.writable = memory, readable, writable
        self.shared = np.full((ctas, max(shared, 1)), 0xA5, np.uint8)
        self.waited = False
        self.batches = [[]]  # copies under way, the last batch still open

    # ------------------------------------------------------------------ memory
    def _lanes(self, value, dtype):
        return np.broadcast_to(np.asarray(value).astype(dtype), self.shape)

    def _place(self, space, addr, size, active):
        """(flat memory, indices of shape [..., size]) of an access by the active threads."""
        if np.any(addr[active] % size):
            raise AssertionError(f"misaligned {space} access of {size} bytes")
        if space == "global":
            return self.memory, (addr - GLOBAL_BASE)[active][:, None] + np.arange(size)
        own = np.arange(self.shape[0])[:, None] + np.zeros(self.shape, np.int64)
        if space == "shared::cluster":
            own = own // self.cluster * self.cluster + (addr >> CTA_SHIFT)
            addr = addr & ((1 << CTA_SHIFT) - 1)
        if np.any(addr[active] + size > self.shared.shape[1]):
            raise AssertionError("shared memory overrun")
        return self.shared.reshape(-1), (own * self.shared.shape[1] + addr)[active][:, None] + np.arange(size)

    def load(self, space, addr, size, active):
        out = np.zeros((*self.shape, size), np.uint8)
        flat, at = self._place(space, addr, size, active)
        if space == "global":
            self._permit(self.readable, at, "read")
        out[active] = flat[at]
        return out

    def store(self, space, addr, data, active):
        flat, at = self._place(space, addr, data.shape[-1], active)
        if space == "global":
            self._permit(self.writable, at, "write")
        flat[at] = data[active]

    def _permit(self, mask, at, what):
        if not self.waited:
            raise AssertionError(f"global {what} before griddepcontrol.wait")
        if at.size and (at.min() < 0 or at.max() >= mask.size or not mask[at].all()):
            raise AssertionError(f"forbidden global {what}")

    # ------------------------------------------------------------------ PTX
    def asm(self, result, code, constraints, args, *, effect=False):
        out = self.run(code, constraints, args)
        return out[0] if out else None

    def asm_many(self, _type, count, code, constraints, args, *, effect=False):
        return self.run(code, constraints, args)

    def run(self, code, constraints, args):
        kinds = [c for c in constraints.split(",") if c and not c.startswith("~")]
        outputs = [c for c in kinds if c.startswith("=")]
        env = {}
        for i, (kind, value) in enumerate(zip(kinds[len(outputs) :], args, strict=True)):
            value = np.asarray(value)
            if kind == "f":
                assert value.dtype == np.float32, value.dtype
                value = value.view(np.uint32)
            env[f"${len(outputs) + i}"] = self._lanes(value, np.int64 if kind == "l" else np.uint32)
        text = code.strip()
        if text.startswith("{ ") and text.endswith(" }"):
            text = text[2:-2]
        for statement in text.split(";"):
            if statement.strip():
                self._statement(statement.strip(), env)
        got = [np.array(env[f"${i}"]) for i in range(len(outputs))]
        return [v.view(np.float32) if "f" in kind else v for v, kind in zip(got, outputs, strict=True)]

    def _statement(self, text, env):
        active = np.ones(self.shape, bool)
        if text.startswith("@"):
            guard, text = text.split(None, 1)
            active = env[guard[1:]]
        op, _, rest = text.partition(" ")
        if op == ".reg" or op.startswith((".reg", "bar.sync", "barrier.cluster")):
            return
        if op == "cp.async.commit_group":
            self.batches.append([])
            return
        if op == "cp.async.wait_group":  # what is not waited for does not arrive
            arrived = len(self.batches) - 1 - int(rest)
            for to, data, active in (copy for batch in self.batches[:arrived] for copy in batch):
                self.store("shared", to, data, active)
            del self.batches[:arrived]
            return
        if op.startswith("griddepcontrol"):
            self.waited |= op == "griddepcontrol.wait"
            return
        if op == "prefetch.global.L2":  # allowed before the wait, but only of what may be read
            flat = (self._address(rest.strip(), env) - GLOBAL_BASE)[active]
            assert self.readable[flat].all(), "prefetch of memory that is no input"
            return
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        if op.startswith(("ld.", "st.", "cp.async.")):
            self._move(op, operands, env, active)
            return
        self._compute(op, operands, env, active)

    def _read(self, name, env, dtype=np.uint32):
        if name.startswith("{"):
            low, high = (self._read(n.strip(), env, np.uint16).astype(np.uint32) for n in name[1:-1].split(","))
            return low | high << np.uint32(16)
        if name in env:
            return env[name].astype(dtype)
        return self._lanes(int(name, 0), dtype)

    def _write(self, name, value, env, active):
        if name.startswith("{"):
            low, high = (n.strip() for n in name[1:-1].split(","))
            self._write(low, (value & np.uint32(0xFFFF)).astype(np.uint16), env, active)
            self._write(high, (value >> np.uint32(16)).astype(np.uint16), env, active)
            return
        if active.all():
            env[name] = value
        else:
            old = env.get(name, np.full(self.shape, 0xDEAD, np.int64)).astype(value.dtype)
            env[name] = np.where(active, value, old)

    def _compute(self, op, names, env, active):
        if op in ARITHMETIC:
            args = [self._read(n, env).view(np.float32) for n in names[1:]]
            with np.errstate(all="ignore"):
                value = ARITHMETIC[op](*args).astype(np.float32).view(np.uint32)
        elif op in INTEGER:
            value = INTEGER[op](*(self._read(n, env) for n in names[1:]))
        elif op in SIGNED:
            value = SIGNED[op](*(self._read(n, env).view(np.int32) for n in names[1:])).view(np.uint32)
        elif op in ("mov.b32", "mov.b16"):
            value = self._read(names[1], env, np.uint16 if op.endswith("16") else np.uint32)
        elif op == "setp.ne.b32":
            value = self._read(names[1], env) != self._read(names[2], env)
        elif op == "cvt.f32.f16":
            value = self._read(names[1], env, np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        elif op in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
            dtype = "bfloat16" if "bf16" in op else "float16"
            high, low = (round_bits(self._read(n, env).view(np.float32), dtype).astype(np.uint32) for n in names[1:])
            value = low | high << np.uint32(16)
        elif op == "mapa.shared::cluster.u32":
            value = self._read(names[1], env) | self._read(names[2], env) << np.uint32(CTA_SHIFT)
        else:
            raise AssertionError(f"unknown instruction {op}")
        self._write(names[0], value, env, active)

    def _address(self, name, env):
        base, _, offset = name[1:-1].partition("+")
        return self._read(base, env, np.int64) + int(offset or 0)

    def _move(self, op, names, env, active):
        if op.startswith("cp.async."):
            to, source, size = self._address(names[0], env), self._address(names[1], env), int(names[2])
            if size not in (4, 8, 16):
                raise AssertionError(f"cp.async of {size} bytes")
            count = self._read(names[3], env, np.int64) if len(names) > 3 else self._lanes(size, np.int64)
            data = np.zeros((*self.shape, size), np.uint8)
            for byte in range(size):
                data[..., byte] = self.load("global", source + byte, 1, active & (byte < count))[..., 0]
            if np.any((source % size)[active & (count > 0)]):
                raise AssertionError("misaligned cp.async")
            self.batches[-1].append((to, data, active))
            return
        parts = op.split(".")
        width = 2 if parts[-1] == "b16" else 4
        space = parts[1]
        registers, where = (names[0], names[1]) if parts[0] == "ld" else (names[1], names[0])
        registers = [n.strip() for n in registers.strip("{}").split(",")]
        addr, kind = self._address(where, env), np.uint16 if width == 2 else np.uint32
        if parts[0] == "ld":
            data = self.load(space, addr, width * len(registers), active)
            for i, name in enumerate(registers):
                piece = np.ascontiguousarray(data[..., i * width : (i + 1) * width])
                self._write(name, piece.view(kind)[..., 0], env, active)
        else:
            data = [np.ascontiguousarray(self._read(n, env, kind)[..., None]).view(np.uint8) for n in registers]
            self.store(space, addr, np.concatenate(data, -1), active)


# ------------------------------------------------------------------ running a kernel
class Tensor:
    """What the kernels read of a CuTe tensor."""

    def __init__(self, offset, shape, stride):
        self.shape, self.stride = shape, stride
        self.iterator = types.SimpleNamespace(toint=lambda: Int(GLOBAL_BASE + offset))


@contextlib.contextmanager
def _patched(machine):
    from flashnorm.kernels import fp, frame, memory, reduce, row_forward

    lane = np.arange(machine.shape[1])

    def shuffle_xor(value, offset):
        return np.broadcast_to(value, machine.shape)[:, (lane // 32 * 32) + ((lane % 32) ^ offset)]

    class Allocator:
        def allocate(self, size, byte_alignment):
            return types.SimpleNamespace(toint=lambda: 0)

    types_ = types.SimpleNamespace(f32=lambda: "f32", i32=lambda: "i32")
    view = types.SimpleNamespace(bitcast=lambda t, v: v.view(np.float32 if t == "f32" else np.uint32))
    changes = [
        (fp, "asm", machine.asm),
        (fp, "asm_many", machine.asm_many),
        (fp, "T", types_),
        (fp, "llvm", view),
        (memory, "asm", machine.asm),
        (memory, "asm_many", machine.asm_many),
        (memory, "T", types_),
        (frame, "Int32", Int),
        (frame, "Int64", Int),
        (reduce, "Int32", Int),
        (reduce, "_shuffle_xor", shuffle_xor),
        (reduce, "_select", lambda c, a, b: np.where(c, a, b)),
        (row_forward, "Int32", Int),
        (row_forward, "Int64", Int),
        (row_forward, "cutlass", types.SimpleNamespace(utils=types.SimpleNamespace(SmemAllocator=Allocator))),
    ]
    saved = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield row_forward
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


def launch(variant, tile, machine, tensors, scalars):
    """Run the kernel of one tile over the machine's whole grid.

    Args:
        tensors: a `Tensor` for each operand of the variant's program, in order.
        scalars: fp32 values by name.
    """
    from flashnorm.kernels.row_forward import RowForward

    with _patched(machine):
        kernel = object.__new__(RowForward)
        kernel.variant, kernel.plans, kernel.has_pdl = variant, ((None, tile),), True
        kernel.names = tuple(o.name for o in variant.program.operands())
        tid = Int(np.broadcast_to(np.arange(machine.shape[1]), machine.shape))
        bid = Int(np.broadcast_to(np.arange(machine.shape[0])[:, None], machine.shape))
        values = [types.SimpleNamespace(ir_value=lambda v=v: np.float32(v)) for v in scalars.values()]
        kernel.body(0, values, tensors, tid, bid)
