"""Moves of one group of 8 elements, as raw 32-bit registers (2 for 8-bit dtypes, 4 for 16-bit ones, 8 for fp32).

The widest access is 16 bytes; `vec` says how many elements may be taken together. A predicate is an int32
0/1 value, or None for "always"; it becomes a PTX predicate, not a branch, so that all the loads of a row
are in flight together. What a predicate hides reads as +0, and its memory is never touched.

`full` guards the whole group; `tail` guards its first `tail_count` elements, for the last group of a row
whose H is no multiple of 8. At most one of the two is true.
"""

from cutlass.cutlass_dsl import T

from flashnorm.kernels.fp import asm, asm_many
from flashnorm.kernels.tile import LEAST_COPY, SLOT, WIDTH

GROUP = 8
# What accesses of less than a register go through, by the width of an element.
PART_REGS = {1: ".reg .b32 part;", 2: ".reg .b16 lo, hi, zero; mov.b16 zero, 0;", 4: ""}


def regs_of(dtype):
    """32-bit registers of one group."""
    return GROUP * WIDTH[dtype] // 4


def pieces(elements, vec, width):
    """(first element, count) of the accesses that cover `elements` elements, each aligned, of at most 16 bytes."""
    at = 0
    while at < elements:
        n = min(vec, 16 // width)
        while n > elements - at:
            n //= 2
        yield at, n
        at += n


def _load_text(space, at, n, width, guard, regs, addr):
    where = f"[{addr}+{at * width}]"
    if n * width >= 4:
        picked = regs[at * width // 4 : (at + n) * width // 4]
        vector = f".v{len(picked)}" if len(picked) > 1 else ""
        body = f"{{{', '.join(picked)}}}" if len(picked) > 1 else picked[0]
        return f"{guard}ld.{space}{vector}.b32 {body}, {where};"
    if width == 1:
        reg, bit = regs[at // 4], at % 4 * 8
        return f"{guard}ld.{space}.u{8 * n} part, {where}; {guard}bfi.b32 {reg}, part, {reg}, {bit}, {8 * n};"
    reg = regs[at // 2]
    if at % 2 == 0:
        return f"{guard}ld.{space}.b16 lo, {where}; {guard}mov.b32 {reg}, {{lo, zero}};"
    keep = f"mov.b32 {{lo, zero}}, {reg}; mov.b16 zero, 0;"  # the lower half, which was loaded before
    return f"{guard}ld.{space}.b16 hi, {where}; {keep} {guard}mov.b32 {reg}, {{lo, hi}};"


def _store_text(space, at, n, width, guard, regs, addr):
    where = f"[{addr}+{at * width}]"
    if n * width >= 4:
        picked = regs[at * width // 4 : (at + n) * width // 4]
        vector = f".v{len(picked)}" if len(picked) > 1 else ""
        body = f"{{{', '.join(picked)}}}" if len(picked) > 1 else picked[0]
        return f"{guard}st.{space}{vector}.b32 {where}, {body};"
    if width == 1:
        return f"shr.u32 part, {regs[at // 4]}, {at % 4 * 8}; {guard}st.{space}.u{8 * n} {where}, part;"
    return f"mov.b32 {{lo, hi}}, {regs[at // 2]}; {guard}st.{space}.b16 {where}, {'lo' if at % 2 == 0 else 'hi'};"


def _guards(first, full, tail):
    """PTX text, operands and names of the predicates; `first` is the number of the first operand free for them."""
    text, operands, names = "", [], {}  # type: ignore[var-annotated]
    for name, value in (("p", full), ("q", tail)):
        if value is not None:
            text += f".reg .pred {name}; setp.ne.b32 {name}, ${first + len(operands)}, 0; "
            operands.append(value)
            names[name] = f"@{name} "
    return text, operands, names


def load_group(addr, dtype, vec, *, full=None, tail=None, tail_count=0, streaming=False):
    """One group from global memory (`addr` an int64 address)."""
    width, n, space = WIDTH[dtype], regs_of(dtype), "global.cs" if streaming else "global"
    regs = [f"${i}" for i in range(n)]
    head, operands, names = _guards(n + 1, full, tail)
    lines = [PART_REGS[width], head]
    if full is not None or (vec * width < 4 and width == 1):
        lines += [f"mov.b32 {r}, 0;" for r in regs]
    for guard, count in ((names.get("p", ""), GROUP), (names.get("q"), tail_count)):
        if guard is not None:
            lines += [_load_text(space, at, c, width, guard, regs, f"${n}") for at, c in pieces(count, vec, width)]
    constraints = ",".join(["=&r"] * n + ["l"] + ["r"] * len(operands))
    return asm_many(T.i32(), n, "{ " + " ".join(lines) + " }", constraints, (addr, *operands), effect=True)


def store_group(addr, regs_in, dtype, vec, *, full=None, tail=None, tail_count=0, streaming=False):
    """One group to global memory."""
    width, n, space = WIDTH[dtype], regs_of(dtype), "global.cs" if streaming else "global"
    regs = [f"${i + 1}" for i in range(n)]
    head, operands, names = _guards(n + 1, full, tail)
    lines = [PART_REGS[width], head]
    for guard, count in ((names.get("p", ""), GROUP), (names.get("q"), tail_count)):
        if guard is not None:
            lines += [_store_text(space, at, c, width, guard, regs, "$0") for at, c in pieces(count, vec, width)]
    constraints = ",".join(["l"] + ["r"] * (n + len(operands)))
    asm(None, "{ " + " ".join(lines) + " }", constraints, (addr, *regs_in, *operands), effect=True)


def store_pairs(addr, reg, vec, pred):
    """The codes of one group, two to a byte, at an address of `vec` bytes' alignment."""
    n = min(4, vec)
    head, operands, names = _guards(2, pred, None)
    lines = [PART_REGS[1], head]
    for at in range(0, 4, n):
        value = "$1" if at == 0 else "part"
        shift = "" if at == 0 else f"shr.u32 part, $1, {8 * at}; "
        lines.append(f"{shift}{names.get('p', '')}st.global.{'b' if n == 4 else 'u'}{8 * n} [$0+{at}], {value};")
    constraints = ",".join(["l"] + ["r"] * (1 + len(operands)))
    asm(None, "{ " + " ".join(lines) + " }", constraints, (addr, reg, *operands), effect=True)


def prefetch(addr, pred):
    """Ask for the line of `addr` to be brought to L2, where `pred` (int32 or None) holds."""
    if pred is None:
        asm(None, "prefetch.global.L2 [$0];", "l", (addr,), effect=True)
    else:
        code = "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p prefetch.global.L2 [$0]; }"
        asm(None, code, "l,r", (addr, pred), effect=True)


def store_f32(addr, value, pred):
    asm(
        None,
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.f32 [$0], $1; }",
        "l,f,r",
        (addr, value, pred),
        effect=True,
    )


def store_floats(addr, values, pred):
    """One or four fp32 values, where `pred` holds."""
    n = len(values)
    vector, body = (".v4", "{$1, $2, $3, $4}") if n == 4 else ("", "$1")
    code = f"{{ .reg .pred p; setp.ne.b32 p, ${n + 1}, 0; @p st.global{vector}.b32 [$0], {body}; }}"
    asm(None, code, ",".join(["l"] + ["f"] * n + ["r"]), (addr, *values, pred), effect=True)


def store_one(addr, reg, dtype, pred):
    """One element of 16 or 32 bits, the low half of a register or all of it, where `pred` holds."""
    short = WIDTH[dtype] == 2
    text = (
        ".reg .b16 lo, hi; mov.b32 {lo, hi}, $1; @p st.global.b16 [$0], lo;" if short else "@p st.global.b32 [$0], $1;"
    )
    asm(None, f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; {text} }}", "l,r,r", (addr, reg, pred), effect=True)


def store_byte(addr, value, pred):
    """The low byte of an int32."""
    code = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.u8 [$0], $1; }"
    asm(None, code, "l,r,r", (addr, value, pred), effect=True)


def leave(pred):
    """End the threads for which `pred` (int32) holds. Barriers do not wait for a whole CTA that has left."""
    asm(None, "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p exit; }", "r", (pred,), effect=True)


def load_one(addr, dtype, pred=None):
    """One element: fp32 of a float, int64 of an integer; +0 where `pred` (int32 or None) does not hold."""
    code, result, constraint = {
        "float32": ("ld.global.f32 $0, [$1];", T.f32, "f"),
        "bfloat16": ("ld.global.b16 h, [$1]; mov.b32 $0, {z, h};", T.f32, "f"),
        "float16": ("ld.global.b16 h, [$1]; cvt.f32.f16 $0, h;", T.f32, "f"),
        "int32": ("ld.global.s32 $0, [$1];", T.i64, "l"),
        "int64": ("ld.global.s64 $0, [$1];", T.i64, "l"),
    }[dtype]
    head, operands = ".reg .b16 h, z; mov.b16 z, 0;", [addr]
    if pred is not None:
        operands.append(pred)
        zero = "mov.b64 $0, 0;" if constraint == "l" else "mov.b32 $0, 0;"
        head += f" .reg .pred p; setp.ne.b32 p, $2, 0; {zero}"
        code = " ".join(f"@p {statement.strip()};" for statement in code.split(";") if statement.strip())
    constraints = ",".join([f"=&{constraint}", "l", "r"][: 1 + len(operands)])
    return asm(result(), "{ " + f"{head} {code}" + " }", constraints, operands, effect=True)


def load_floats(addr, count, pred):
    """One or four fp32 values; +0 where `pred` (int32) does not hold, and nothing is read."""
    names = [f"${i}" for i in range(count)]
    vector, body = (".v4", f"{{{', '.join(names)}}}") if count == 4 else ("", "$0")
    zero = " ".join(f"mov.b32 {name}, 0;" for name in names)
    code = f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {zero} @p ld.global{vector}.b32 {body}, [${count}]; }}"
    return asm_many(T.f32(), count, code, ",".join(["=&f"] * count + ["l", "r"]), (addr, pred), effect=True)


# ------------------------------------------------------------------ shared memory; addresses are int32
def stage_group(slot, plane, addr, dtype, vec, valid_bytes=None):
    """Start the copy of one group to shared memory: 16 bytes at `slot`, the next 16 of an fp32 group at slot + plane.

    `valid_bytes` (int32, or None for all) are read; what follows is filled with +0 and not read.
    """
    width = WIDTH[dtype]
    step = min(16, vec * width)
    if step < LEAST_COPY:
        raise ValueError(f"cp.async moves {LEAST_COPY} bytes or more, not {step}")
    kind = "cg" if step == 16 else "ca"
    lines = [".reg .s32 n;"] if valid_bytes is not None else []
    for at in range(0, GROUP * width, step):
        where = f"[$0+{at % 16 + (plane if at >= 16 else 0)}]"
        size = ""
        if valid_bytes is not None:
            lines.append(f"sub.s32 n, $2, {at}; max.s32 n, n, 0; min.s32 n, n, {step};")
            size = ", n"
        lines.append(f"cp.async.{kind}.shared.global {where}, [$1+{at}], {step}{size};")
    operands = (slot, addr) if valid_bytes is None else (slot, addr, valid_bytes)
    asm(None, "{ " + " ".join(lines) + " }", ",".join(["r", "l", "r"][: len(operands)]), operands, effect=True)


def stage_word(slot, addr, pred):
    """Start the copy of four bytes to shared memory where `pred` (int32) holds; +0 elsewhere, and nothing is read."""
    code = "{ .reg .s32 n; shl.b32 n, $2, 2; cp.async.ca.shared.global [$0], [$1], 4, n; }"
    asm(None, code, "r,l,r", (slot, addr, pred), effect=True)


def stage_commit():
    """Close a batch of copies, for `stage_wait` to count."""
    asm(None, "cp.async.commit_group;", "", (), effect=True)


def stage_wait(pending):
    """Wait until at most the last `pending` batches of this thread are under way."""
    asm(None, f"cp.async.wait_group {pending};", "", (), effect=True)


def planes_of(dtype):
    """Planes of 16 bytes a thread that a staged group takes."""
    return max(1, GROUP * WIDTH[dtype] // SLOT)


def read_slot(slot, plane, dtype):
    """One staged group of this thread."""
    n = regs_of(dtype)
    if n == 2:
        return asm_many(T.i32(), n, "ld.shared.v2.b32 {$0, $1}, [$2];", "=&r,=&r,r", (slot,), effect=True)
    code = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$%d];" % n
    if n == 8:
        code += f" ld.shared.v4.b32 {{$4, $5, $6, $7}}, [$8+{plane}];"
    return asm_many(T.i32(), n, code, ",".join(["=&r"] * n + ["r"]), (slot,), effect=True)


def read_floats(slot, count):
    """`count` consecutive fp32 values; more than one are read 2 or 4 at a time."""
    out, at = [], 0
    while at < count:
        n = min(4, count - at)
        vector = f".v{n}" if n > 1 else ""
        body = f"{{{', '.join(f'${i}' for i in range(n))}}}" if n > 1 else "$0"
        code = f"ld.shared{vector}.f32 {body}, [${n}+{at * 4}];"
        out += asm_many(T.f32(), n, code, ",".join(["=f"] * n + ["r"]), (slot,), effect=True)
        at += n
    return out


def write_floats(slot, values, pred=None):
    """Four fp32 values to a slot, where `pred` (int32 or None) holds."""
    head, operands, names = _guards(5, pred, None)
    code = f"{{ {head} {names.get('p', '')}st.shared.v4.f32 [$0], {{$1, $2, $3, $4}}; }}"
    asm(
        None, code, ",".join(["r", "f", "f", "f", "f"] + ["r"] * len(operands)), (slot, *values, *operands), effect=True
    )


def write_float(slot, value, pred):
    code = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.shared.f32 [$0], $1; }"
    asm(None, code, "r,f,r", (slot, value, pred), effect=True)


def write_remote_float(slot, rank, value, pred):
    """Store to the same place in the shared memory of CTA `rank` of this cluster."""
    code = (
        "{ .reg .pred p; .reg .b32 a; setp.ne.b32 p, $3, 0; mapa.shared::cluster.u32 a, $0, $1; "
        "@p st.shared::cluster.f32 [a], $2; }"
    )
    asm(None, code, "r,r,f,r", (slot, rank, value, pred), effect=True)


# ------------------------------------------------------------------ mailboxes
# A barrier of the cluster waits for all stores of a thread, those of rows too. An mbarrier counts what arrives instead.
def open_mailbox(box, pred):
    """Make the mbarrier at `box`, of one arrival and counted bytes, by the thread for which `pred` holds."""
    code = "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p mbarrier.init.shared::cta.b64 [$0], 1; }"
    asm(None, code, "r,r", (box, pred), effect=True)


def publish_mailboxes():
    """Have the other CTAs of the cluster see mailboxes after their next barrier."""
    asm(None, "fence.mbarrier_init.release.cluster;", "~{memory}", (), effect=True)


def expect_bytes(box, count, pred):
    """Say, by one thread, how many bytes the mailbox is to get before those who wait go on."""
    code = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {count}; }}"
    asm(None, code, "r,r", (box, pred), effect=True)


def send_float(slot, rank, value, box, pred):
    """Send to the same place in CTA `rank` of this cluster, and have its mailbox count it."""
    code = (
        "{ .reg .pred p; .reg .b32 a, b; setp.ne.b32 p, $4, 0; mapa.shared::cluster.u32 a, $0, $1; "
        "mapa.shared::cluster.u32 b, $3, $1; "
        "@p st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [a], $2, [b]; }"
    )
    asm(None, code, "r,r,f,r,r", (slot, rank, value, box, pred), effect=True)


def await_mailbox(box, phase):
    """Wait until all bytes of a phase (0 or 1, in turn) are there."""
    code = "{ .reg .pred p; LOOK: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra DONE; bra LOOK; DONE: }"
    asm(None, code, "r,r,~{memory}", (box, phase), effect=True)


# ------------------------------------------------------------------ barriers and order between kernels
def barrier(index, count):
    """Wait for `count` threads at named barrier `index` (int32 or a Python int)."""
    if isinstance(index, int):
        asm(None, f"bar.sync {index}, {count};", "~{memory}", (), effect=True)
    else:
        asm(None, f"bar.sync $0, {count};", "r,~{memory}", (index,), effect=True)


def warp_barrier():
    """Wait for the warp; loads stay on their side of it."""
    asm(None, "bar.warp.sync 0xffffffff;", "~{memory}", (), effect=True)


def cluster_begin():
    """Say that this CTA runs, and no more: a barrier that orders writes would hold its first loads up."""
    asm(None, "barrier.cluster.arrive.relaxed.aligned;", "~{memory}", (), effect=True)


def cluster_arrive():
    """Say that what this CTA wrote may be read. Every thread of the cluster arrives."""
    asm(None, "barrier.cluster.arrive.release.aligned;", "~{memory}", (), effect=True)


def cluster_wait():
    asm(None, "barrier.cluster.wait.acquire.aligned;", "~{memory}", (), effect=True)


def wait_for_earlier_kernel():
    """Before the first global read: returns when the kernel before this one is done and its writes are visible."""
    asm(None, "griddepcontrol.wait;", "~{memory}", (), effect=True)


def let_next_kernel_start():
    asm(None, "griddepcontrol.launch_dependents;", "~{memory}", (), effect=True)
