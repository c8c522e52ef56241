"""Loops whose length only a launch knows. All other loops of the kernels run while tracing."""

from cutlass import Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import scf

_ONCE = "#llvm.loop_annotation<unroll = <disable = true>>"  # a body is a row's work: long enough as it is


def repeat(count, carried, body):
    """Run `body` `count` times, from the raw values `carried`; it takes the list of them and returns the next one.

    What is made inside exists inside: nothing that the body makes may be used after the loop but the list that this
    returns. A value that a service keeps for later must be made before the loop.
    """
    loop = scf.ForOp(Int32(0).ir_value(), count.ir_value(), Int32(1).ir_value(), [*carried])
    loop.attributes["loop_annotation"] = ir.Attribute.parse(_ONCE)
    with ir.InsertionPoint(loop.body):
        scf.yield_(body(list(loop.inner_iter_args)))
    return list(loop.results)
