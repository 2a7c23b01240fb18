"""The frontend's door: a Python function and the types of its arguments in, a typed `ir.Kernel` out.

Reads source, specialises on types and constants, inlines helpers. Runs no pass and knows no backend;
`passes.mailbox_rules` and the verifier come after it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from peertile.errors import CompileError
from peertile.frontend.convert import shape_arg
from peertile.frontend.impl_tiles import known_tuple
from peertile.frontend.merge import RETURN, RETURNED, merge
from peertile.frontend.parse import ParsedFunction, assigned_names, parse_function
from peertile.frontend.registry import bind_arguments
from peertile.frontend.resolve import lift
from peertile.frontend.scope import Binding, Build, Exit, Flow, Function, NeedsLoop, Region, RegionKind
from peertile.frontend.statements import run_block
from peertile.frontend.values import (
    NONE,
    Abstract,
    Accumulate,
    Barrier,
    Counter,
    Exclusive,
    Known,
    Mailbox,
    Multicast,
    MulticastPointer,
    Peer,
    Pointer,
    Poison,
    Signal,
    Tile,
    View,
)
from peertile.ir import ops
from peertile.ir.core import Block, Kernel, Op, Value
from peertile.ir.types import (
    INDEX,
    Access,
    BarrierType,
    CounterType,
    MailboxType,
    MulticastType,
    PointerType,
    SignalType,
    Space,
    SymmetricType,
    TileType,
    Type,
    ViewType,
)
from peertile.language.word import REQUIRED, Word, WordParam, read_signature
from peertile.source import Loc

__all__ = ["build_kernel"]

_MAX_INLINE_DEPTH = 64


def build_kernel(
    fn: FunctionType,
    param_types: Mapping[str, Type],
    constants: Mapping[str, Any] | None = None,
    *,
    unsafe: bool = False,
    name: str | None = None,
    grid_rank: int = 1,
    groups: Mapping[str, int] | None = None,
) -> Kernel:
    """Compiles `fn` to tile IR.

    Every parameter is in `param_types` (it becomes a kernel parameter, in the function's order), in
    `constants`, or has a default and is a constant. `groups` numbers the group of each symmetric or
    communication parameter; without it all are taken to be of one group. Raises CompileError.

    `facts["captures"]` of the result holds the globals and closure constants that it was compiled with: with
    other values it is another kernel. `facts["notes"]` are sentences for the user (a widened scope).
    """
    parsed = parse_function(fn)
    title = name or fn.__name__
    loc = parsed.loc(parsed.node)
    loc = Loc(loc.file, loc.line, loc.col, None, loc.function)
    names, known = _sort_parameters(fn, param_types, constants or {}, loc)
    body = Block([param_types[n] for n in names], names)
    b = Build(body, name=title, unsafe=unsafe, grid_rank=grid_rank, groups=groups)
    b.run_block, b.inline = run_block, _inline
    function = Function(fn, parsed, {}, assigned_names(parsed.node), body, is_kernel=True)
    b.functions.append(function)
    b.builder.loc = loc
    for n, value in zip(names, body.args, strict=True):
        b.params[n] = _handle(b, n, value)
    for n in fn.__code__.co_varnames[: fn.__code__.co_argcount + fn.__code__.co_kwonlyargcount]:
        b.bind(n, b.params[n] if n in b.params else lift(b, known[n], f"constant `{n}`"), loc)
    flow = run_block(b, parsed.node.body)
    if flow is Flow.NEXT:
        b.builder.emit(ops.Return)
    _prune(body)
    facts = {"captures": dict(b.captures), "notes": tuple(b.notes)}
    return Kernel(title, tuple(names), body, unsafe, grid_rank, loc, facts)


def _sort_parameters(
    fn: FunctionType, param_types: Mapping[str, Type], constants: Mapping[str, Any], loc: Loc
) -> tuple[list[str], dict[str, Any]]:
    """Names of the run-time parameters in order, and the values of the constants."""
    params, rest = read_signature(fn)
    if rest is not None or fn.__code__.co_flags & 0x08:
        raise CompileError(f"kernel `{fn.__name__}`: expected named parameters only, got *args or **kwargs", loc)
    own = {p.name for p in params}
    for given in (*param_types, *constants):
        if given not in own:
            raise CompileError(f"kernel `{fn.__name__}`: expected {', '.join(sorted(own))}, got `{given}`", loc)
    names, known = [], {}
    for p in params:
        if p.name in param_types:
            names.append(p.name)
        elif p.name in constants:
            known[p.name] = constants[p.name]
        elif p.default is not REQUIRED:
            known[p.name] = p.default
        else:
            raise CompileError(f"kernel `{fn.__name__}`: missing argument `{p.name}`", loc)
    return names, known


def _handle(b: Build, name: str, value: Value) -> Abstract:
    """What a parameter of a type can be used for in the kernel."""
    match value.type:
        case ViewType(partition=None, access=Access.WRITE, space=Space.DEVICE):
            return Accumulate(name, value)
        case ViewType(partition=None):
            return View(name, value)
        case ViewType(partition=partition) as t:
            assert partition is not None
            shape_arg(b, known_tuple(partition.tile_shape), f"parameter `{name}`: tile of the partition")
            if partition.persistent:
                return Exclusive(name, value, ())
            # At the entry, so that every path sees it; taken out again where nobody asks.
            program = b.builder.value(ops.ProgramId, (), INDEX, axis=0)
            index = b.builder.emit(ops.TileIndex, (value, program), [INDEX] * t.rank).results
            return Exclusive(name, value, tuple(index))
        case TileType():
            return Tile(value)
        case SymmetricType():
            return Peer(name, value)
        case MulticastType(pointer=True):
            return MulticastPointer(name, value)
        case MulticastType():
            return Multicast(name, value)
        case SignalType():
            return Signal(name, value)
        case CounterType():
            return Counter(name, value)
        case BarrierType():
            return Barrier(name, value)
        case MailboxType() as t:
            shape_arg(b, known_tuple(t.tile_shape), f"parameter `{name}`: tile of the mailbox")
            return Mailbox(name, value)
        case PointerType():
            if not b.unsafe:
                b.fail(
                    f"parameter `{name}`: T.Pointer is a raw address, which only unsafe kernels take; "
                    "mark the kernel @pt.kernel(unsafe=True), or take T.Shared, T.Exclusive or T.Peer"
                )
            return Pointer(value)
    b.fail(f"parameter `{name}`: expected a type of a kernel parameter, got {value.type}")


# ---------------------------------------------------------------- helpers


def _inline(b: Build, fn: FunctionType, args: list[Abstract], kwargs: dict[str, Abstract]) -> Abstract:
    """Compiles a helper's body in place of its call."""
    if any(f.fn.__code__ is fn.__code__ for f in b.functions):
        b.fail(f"`{fn.__name__}` calls itself: recursion is not supported in kernels; write a loop")
    if len(b.functions) > _MAX_INLINE_DEPTH:
        b.fail(f"`{fn.__name__}`: helpers are nested more than {_MAX_INLINE_DEPTH} deep")
    params, rest = read_signature(fn)
    if rest is not None or fn.__code__.co_flags & 0x08:
        b.fail(f"`{fn.__name__}`: a helper takes named parameters only, got *args or **kwargs")
    here = b.here
    try:
        parsed = parse_function(fn)
    except CompileError as error:
        raise CompileError(error.message, here) from None
    required = tuple(WordParam(p.name, p.default, p.keyword_only) for p in params)
    bound = bind_arguments(b, f"`{fn.__name__}`", Word(fn.__name__, required), args, kwargs)
    given = {p.name for p, _ in zip(params, args, strict=False)} | set(kwargs)
    for p in params:
        if p.name not in given:
            bound[p.name] = lift(b, p.default, f"default of `{p.name}` of `{fn.__name__}`")
    block = b.builder.block
    mark = block.ops[-1] if block.ops else None
    call_site = fn.__code__, here
    if call_site in b.needs_loop:
        return _run_helper(b, fn, parsed, bound, wrapped=True)
    try:
        return _run_helper(b, fn, parsed, bound, wrapped=False)
    except NeedsLoop as needs:
        if needs.function.fn is not fn:
            raise
    b.needs_loop.add(call_site)
    # Compiled again from where it began: nothing but ops of this block has been changed.
    keep = next((k + 1 for k, op in enumerate(block.ops) if op is mark), 0)
    del block.ops[keep:]
    return _run_helper(b, fn, parsed, bound, wrapped=True)


def _run_helper(
    b: Build, fn: FunctionType, parsed: ParsedFunction, bound: dict[str, Abstract], *, wrapped: bool
) -> Abstract:
    here = b.here
    body = parsed.node.body
    entry = Block() if wrapped else b.builder.block
    env = {name: Binding(value, here) for name, value in bound.items()}
    function = Function(fn, parsed, env, assigned_names(parsed.node), entry, inlined_at=here, wrapped=wrapped)
    b.functions.append(function)
    try:
        if wrapped:
            return _wrapped_body(b, function, body, entry)
        flow = run_block(b, body)
        if flow is Flow.ENDED:
            b.fail(f"`{fn.__name__}` never returns: every path of it loops for ever", here)
        return function.returned if flow is Flow.RETURNED and function.returned is not None else NONE
    finally:
        b.functions.pop()
        b.builder.loc = here


def _wrapped_body(b: Build, function: Function, body: list[ast.stmt], entry: Block) -> Abstract:
    """A helper that returns from inside control flow: a loop of one trip, left by `break` with the result."""
    region = Region(RegionKind.HELPER, entry)
    function.env[RETURNED] = Binding(Known(False), None)
    function.regions.append(region)
    with b.inside(entry):
        flow = run_block(b, body)
        if flow is Flow.NEXT:
            b.bind(RETURN, NONE)
            region.breaks.append(Exit(b.env, b.builder.emit(ops.Break)))
    function.regions.pop()
    results = [e.env[RETURN] for e in region.breaks]
    nothing = [r.value == NONE for r in results]
    if any(nothing) and not all(nothing):
        b.fail(
            f"`{function.name}` returns a value on some paths only; return one on every path, the end included",
            function.inlined_at,
        )
    exits = [Exit({RETURN: e.env[RETURN]}, e.op) for e in region.breaks]
    types, finish = merge(b, exits)
    op = b.builder.emit(ops.Loop, (), types, [entry])
    result = finish(op.results)[RETURN].value
    if isinstance(result, Poison):
        b.fail(f"`{function.name}`: {result.message}; convert it with .astype(...) on each path", function.inlined_at)
    return result


# ---------------------------------------------------------------- clean up


def _prune(block: Block) -> None:
    """Takes out ops without effects whose results nobody uses, so that the IR shows what the kernel does."""
    used: set[Value] = set()

    def visit(current: Block) -> None:
        kept: list[Op] = []
        for op in reversed(current.ops):
            live = op.TERMINATOR or op.blocks or op.effects
            if not live and not any(r in used for r in op.results):
                continue
            for inner in op.blocks:
                visit(inner)
            used.update(op.operands)
            kept.append(op)
        current.ops[:] = reversed(kept)

    visit(block)
