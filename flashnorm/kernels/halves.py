"""Groups of an fp32 vector, whose two halves of 16 bytes neighbouring threads read in turn.

Eight threads that read their first halves together meet in pairs in the banks of L1, since their groups are 32 bytes
apart. Four of them read the second half first: the sixteen bytes of all eight then lie in banks of their own.
"""

from cutlass import Int32, Int64

from flashnorm.kernels import memory
from flashnorm.kernels.fp import choose
from flashnorm.kernels.tile import SLOT


def alternates(k, name):
    """Whether a vector's halves are read in turn: those of whole groups in fp32 are."""
    if not k.tile.alternate or k.operands[name].kind != "vec" or name in k.by_row:
        return False
    return k.variant.dtype(name) == "float32" and k.tile.vec >= 4 and k.tile.hidden_size % memory.GROUP == 0


def _second_first(k):
    """Whether this thread reads its second half first, as int32."""
    return (k.thread >> Int32(2)) & Int32(1)


def load(k, name, j, full, stay):
    """Raw registers of round j, in the order of reading."""
    if name not in k.halves:
        later = Int64(_second_first(k)) * Int64(SLOT)
        base = k._base(name)
        k.halves[name] = base + later, base + Int64(SLOT) - later
    offset = Int64(j * k.tile.threads * memory.GROUP * 4)
    first, second = ((half + offset).ir_value() for half in k.halves[name])
    return memory.load_halves(first, second, full, stay)


def ordered(k, values):
    """The values of a group in order."""
    half, second = len(values) // 2, _second_first(k).ir_value()
    return [choose(second, values[(i + half) % len(values)], v) for i, v in enumerate(values)]
