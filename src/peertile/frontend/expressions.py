"""Expressions of a kernel: AST node -> abstract value. Calls of words and helpers are in `calls.py`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, Final

import peertile.language as T
from peertile.frontend.calls import call
from peertile.frontend.control import choose, negation, short_circuit, truth
from peertile.frontend.convert import int_arg
from peertile.frontend.operators import as_value, binary, compare, elementwise, unary
from peertile.frontend.registry import implementation
from peertile.frontend.resolve import did_you_mean, here, known_attribute, lookup
from peertile.frontend.scope import Build
from peertile.frontend.values import (
    Abstract,
    Accumulate,
    Counter,
    ExclusiveTile,
    Known,
    Mailbox,
    Method,
    Multicast,
    Peer,
    Pointer,
    Round,
    Signal,
    Tile,
    Tup,
    View,
    describe,
    is_number,
)
from peertile.ir import ops
from peertile.ir.ops import Binary
from peertile.ir.types import MAX_TILE_RANK
from peertile.language.word import word_of

__all__ = ["evaluate", "receiver"]

_REFUSED: Final[dict[type[ast.AST], str]] = {
    ast.Lambda: "lambda; write a function with def outside the kernel and call it",
    ast.ListComp: "list comprehension; write a for loop",
    ast.SetComp: "set comprehension; write a for loop",
    ast.DictComp: "dict comprehension; write a for loop",
    ast.GeneratorExp: "generator expression; write a for loop",
    ast.Dict: "dict; pass values as parameters, or use a tuple",
    ast.Set: "set; use a tuple",
    ast.List: "list; use a tuple, or a tile for numbers",
    ast.NamedExpr: "assignment expression (:=); assign in a statement of its own",
    ast.Await: "await; a kernel runs on the device: use s.wait() or T.wait_ge(...)",
    ast.Yield: "yield; a kernel is no generator",
    ast.YieldFrom: "yield from; a kernel is no generator",
    ast.Starred: "star argument; write the arguments one by one",
    ast.Slice: "slice; load a tile by its index, or use T.reshape",
}


def evaluate(b: Build, node: ast.expr) -> Abstract:
    """The value of an expression. A mailbox is none: it can only be a receiver or a helper's argument."""
    value = argument(b, node)
    if isinstance(value, Mailbox):
        b.fail(
            f"`{value.name}`: a mailbox is only a receiver, as in {value.name}.post(tile), or an argument of a helper "
            "(rule B7), got a use as a value; write its own name where it is used",
            node,
        )
    return value


def argument(b: Build, node: ast.expr) -> Abstract:
    """As `evaluate`, for an argument of a helper: a mailbox may stand here, but none of its methods by itself."""
    value = receiver(b, node)
    if isinstance(value, Method) and isinstance(value.receiver, Mailbox | Round):
        whole = value.word.name  # as in Mailbox.post
        kind, _, method = whole.rpartition(".")
        what = "a mailbox" if kind == "Mailbox" else "a round of a mailbox"
        b.fail(
            f"`{ast.unparse(node)}`: {what} is only a receiver (rule B7), got its method {method} as a value; "
            "call it where it is written",
            node,
        )
    return value


def receiver(b: Build, node: ast.expr) -> Abstract:
    """As `evaluate`, in a place where a mailbox or a method may stand: before a dot, or what is called."""
    with b.locate(node), b.nested(node):
        refused = _REFUSED.get(type(node))
        if refused is not None:
            b.fail(f"unsupported in a kernel: {refused}")
        handler = _HANDLERS.get(type(node))
        if handler is None:
            b.fail(f"unsupported in a kernel: {type(node).__name__}")
        return handler(b, node)


def _constant(b: Build, node: ast.Constant) -> Abstract:
    if isinstance(node.value, bool | int | float | str | None):
        return Known(node.value)
    b.fail(f"unsupported in a kernel: the constant {node.value!r}; numbers, text, True, False and None are supported")


def _name(b: Build, node: ast.Name) -> Abstract:
    return lookup(b, node.id)


def _tuple(b: Build, node: ast.Tuple) -> Abstract:
    return Tup(tuple(evaluate(b, item) for item in node.elts))


def _bin_op(b: Build, node: ast.BinOp) -> Abstract:
    left, right = evaluate(b, node.left), evaluate(b, node.right)
    return binary(b, type(node.op), left, right)


def _unary_op(b: Build, node: ast.UnaryOp) -> Abstract:
    value = evaluate(b, node.operand)
    return negation(b, value) if isinstance(node.op, ast.Not) else unary(b, type(node.op), value)


def _bool_op(b: Build, node: ast.BoolOp) -> Abstract:
    return _decide(b, isinstance(node.op, ast.And), node.values)


def _decide(b: Build, is_and: bool, nodes: list[ast.expr]) -> Abstract:
    value = evaluate(b, nodes[0])
    if len(nodes) == 1:
        return value
    decided = truth(b, value, "`and`" if is_and else "`or`")
    if isinstance(decided, bool):
        return _decide(b, is_and, nodes[1:]) if decided == is_and else value
    return short_circuit(b, is_and, decided, lambda: _decide(b, is_and, nodes[1:]))


def _compare(b: Build, node: ast.Compare) -> Abstract:
    left_node, left = node.left, evaluate(b, node.left)
    result: Abstract | None = None
    for op, right_node in zip(node.ops, node.comparators, strict=True):
        right = evaluate(b, right_node)
        if isinstance(op, ast.Is | ast.IsNot):
            _tested_by_name(b, op, left_node, left, right)
            _tested_by_name(b, op, right_node, right, left)
        link = compare(b, op, left, right)
        if result is None or result == Known(True):
            result = link
        elif link != Known(True):
            result = link if link == Known(False) else elementwise(b, Binary.AND, result, link, "comparison")
        if result == Known(False):
            return result
        left_node, left = right_node, right
    assert result is not None
    return result


def _tested_by_name(b: Build, op: ast.cmpop, node: ast.expr, value: Abstract, other: Abstract) -> None:
    """`is None` asks whether a parameter was given, which only a name can be in doubt about; of a tile that was
    computed on the spot it would be a constant that looks like a comparison of elements."""
    if other == Known(None) and isinstance(value, Tile | Pointer) and not isinstance(node, ast.Name):
        kind = "tile" if isinstance(value, Tile) else "pointer"
        b.fail(
            f"`{'is' if isinstance(op, ast.Is) else 'is not'}`: a {kind} is never None, got {value.type}; only a name "
            "may be tested, as in `bias is None` of a parameter that may be None"
        )


def _if_exp(b: Build, node: ast.IfExp) -> Abstract:
    condition = truth(b, evaluate(b, node.test))
    if isinstance(condition, bool):
        return evaluate(b, node.body if condition else node.orelse)
    return choose(b, condition, lambda: evaluate(b, node.body), lambda: evaluate(b, node.orelse))


_CONVERSIONS: Final[dict[int, Callable[[Any], str]]] = {ord("r"): repr, ord("s"): str, ord("a"): ascii}


def _joined_str(b: Build, node: ast.JoinedStr) -> Abstract:
    text = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += str(part.value)
            continue
        assert isinstance(part, ast.FormattedValue)
        value = evaluate(b, part.value)
        try:
            known = as_value(value)
        except TypeError:
            b.fail(
                f"f-string: expected compile-time values, got {describe(value)}; "
                "give T.print_ the value as an argument of its own",
                part.value,
            )
        spec = evaluate(b, part.format_spec) if part.format_spec is not None else Known("")
        convert = _CONVERSIONS.get(part.conversion)
        text += format(known if convert is None else convert(known), str(as_value(spec)))
    return Known(text)


# ---------------------------------------------------------------- attributes and subscripts


def _words_of(value: Abstract) -> type[T.Tile] | type[Any] | None:
    if isinstance(value, View):
        return T.View if value.peer else T.Shared
    if is_number(value):
        return T.Tile
    return value.WORDS


def _attribute(b: Build, node: ast.Attribute) -> Abstract:
    value, name = receiver(b, node.value), node.attr
    words = _words_of(value)
    if isinstance(value, Known) and words is None:
        return known_attribute(b, value.value, name)
    member = getattr(words, name, None) if words is not None and not name.startswith("_") else None
    if isinstance(member, property):
        word = word_of(member.fget)
        assert word is not None
        return implementation(word)(b, value)
    word = word_of(member)
    if word is None:
        b.fail(_no_attribute(value, words, name))
    return Method(value, word)


def _no_attribute(value: Abstract, words: type | None, name: str) -> str:
    if isinstance(value, View) and not value.peer and name in ("store", "atomic", "atomic_add"):
        return (
            f"`{value.name}.{name}`: expected T.Exclusive or T.Peer, got T.Shared, which is only read; "
            "declare the parameter T.Exclusive and pass a partition"
        )
    if isinstance(value, Peer) and name in ("load", "store", "load_like", "num_tiles", "atomic", "atomic_add"):
        return (
            f"`{value.name}.{name}`: expected one rank's part, got the symmetric parameter; "
            f"write {value.name}.local.{name}(...) or {value.name}.at(rank).{name}(...)"
        )
    if isinstance(value, Multicast) and name in ("load", "store", "load_like", "atomic", "atomic_add", "at", "local"):
        return (
            f"`{value.name}.{name}`: expected an operation on every rank's part, got an ordinary access; write "
            f"{value.name}.partition(shape).multimem_..., or pass the tensor as T.Peer too and reach one part there"
        )
    if isinstance(value, Accumulate) and name in ("load", "store", "load_like"):
        return (
            f"`{value.name}.{name}`: expected an atomic update, got an access that another program's update could "
            f"meet; write {value.name}.atomic_add(index, tile), and read the tensor in the next launch"
        )
    if isinstance(value, Accumulate) and not did_you_mean(name, (n for n in dir(words) if not n.startswith("_"))):
        return (
            f"{describe(value)} has no `.{name}`; write {value.name}.atomic_add(index, tile) to add to it, or "
            f"{value.name}.atomic(index, T.Rmw.MAX, tile) for another function"
        )
    if isinstance(value, ExclusiveTile) and name in ("load_like", "num_tiles", "at"):
        return f"{describe(value)} has no `.{name}`; it is owned already: z.load() and z.store(tile) take no index"
    if isinstance(value, Tile):
        word = word_of(getattr(T, name, None))
        if word is not None and word.params and word.params[0].name == "x":
            return f"{describe(value)} has no `.{name}`; write T.{name}(tile)"
        if here(name):
            return f"{describe(value)} has no `.{name}`{here(name)}"
    public = [n for n in dir(words) if not n.startswith("_")] if words is not None else []
    return f"{describe(value)} has no `.{name}`{did_you_mean(name, public)}"


def _subscript(b: Build, node: ast.Subscript) -> Abstract:
    value = evaluate(b, node.value)
    match value:
        case Tup():
            return _tuple_item(b, value, node.slice)
        case Signal():
            return _slot(b, T.Signal.__getitem__, value, node.slice)
        case Counter():
            return _slot(b, T.Counter.__getitem__, value, node.slice)
        case Tile():
            return _insert_axes(b, value, node.slice)
        case View() | ExclusiveTile() | Peer():
            b.fail(
                f"`{value.name}[...]`: memory is not indexed; load a tile with {value.name}.load(...), "
                "or one element with T.ld"
            )
    b.fail(f"`[...]`: expected a tuple, a tile, a signal or a counter, got {describe(value)}")


def _slot(b: Build, getitem: Any, value: Abstract, index: ast.expr) -> Abstract:
    word = word_of(getitem)
    assert word is not None
    return implementation(word)(b, value, evaluate(b, index))


def _tuple_item(b: Build, value: Tup, index: ast.expr) -> Abstract:
    if isinstance(index, ast.Slice):
        parts = [
            None if part is None else int_arg(b, evaluate(b, part), "slice of a tuple")
            for part in (index.lower, index.upper, index.step)
        ]
        return Tup(value.items[slice(*parts)])
    k = int_arg(b, evaluate(b, index), "index of a tuple")
    if not -len(value.items) <= k < len(value.items):
        b.fail(f"index of a tuple: expected {-len(value.items)} to {len(value.items) - 1}, got {k}")
    return value.items[k]


def _insert_axes(b: Build, tile: Tile, index: ast.expr) -> Abstract:
    """`t[:, None]`: None inserts an axis of extent 1."""
    shape: list[int] = []
    left = list(tile.type.shape)
    for item in index.elts if isinstance(index, ast.Tuple) else [index]:
        whole = isinstance(item, ast.Slice) and item.lower is item.upper is item.step is None
        if isinstance(item, ast.Constant) and item.value is None:
            shape.append(1)
        elif whole and left:
            shape.append(left.pop(0))
        else:
            b.fail(
                f"`[...]` of a tile {tile.type}: expected `:` for its axes and None for new ones; "
                "elements are not indexed: select with T.where and reduce, or load what is needed",
                item,
            )
    shape += left
    if len(shape) > MAX_TILE_RANK:
        b.fail(f"`[...]` of a tile: expected at most {MAX_TILE_RANK} axes, got {len(shape)}")
    to = tile.type.with_shape(tuple(shape))
    return tile if to == tile.type else Tile(b.builder.value(ops.Reshape, (tile.value,), to))


# ---------------------------------------------------------------- calls


def _call(b: Build, node: ast.Call) -> Abstract:
    function = receiver(b, node.func)
    for arg in node.args:
        if isinstance(arg, ast.Starred):
            b.fail("unsupported in a kernel: star argument; write the arguments one by one", arg)
    for keyword in node.keywords:
        if keyword.arg is None:
            b.fail("unsupported in a kernel: ** argument; write the arguments one by one", keyword.value)
    return call(b, function, node, evaluate, argument)


_HANDLERS: Final[dict[type[ast.AST], Callable[[Build, Any], Abstract]]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Tuple: _tuple,
    ast.BinOp: _bin_op,
    ast.UnaryOp: _unary_op,
    ast.BoolOp: _bool_op,
    ast.Compare: _compare,
    ast.IfExp: _if_exp,
    ast.JoinedStr: _joined_str,
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    ast.Call: _call,
}
