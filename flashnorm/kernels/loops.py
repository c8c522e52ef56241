"""Loops and branches that only a launch decides on. All others of the kernels run while tracing."""

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


def when(condition, carried, then, otherwise):
    """What `then` makes of the list of raw values `carried`, or `otherwise` where `condition` (int32) is 0.

    All threads must agree. As of `repeat`, nothing that is made inside may be used after it but the list.
    """
    condition, types = (condition != Int32(0)).ir_value(), [value.type for value in carried]
    # By its name: what `scf.IfOp` takes is not the same in all versions.
    branch = ir.Operation.create("scf.if", results=types, operands=[condition], regions=2)
    for region, body in zip(branch.regions, (then, otherwise), strict=True):
        with ir.InsertionPoint(region.blocks.append()):
            scf.yield_(body(list(carried)))
    return list(branch.results)
