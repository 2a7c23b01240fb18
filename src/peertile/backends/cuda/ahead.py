"""What Triton makes of a divided loop, put in a better order. Text of its own form in and out; loads no Triton.

In a loop as attention has it, each of the groups of warps that multiply waits for its scores, forms weights of them,
multiplies these, and waits again: its part of the tensor cores has nothing to do meanwhile, unless another group
happens to need it. Put in order here, a group asks for the scores of a block and for the weighted sum of the block
before at once, and forms the weights of the former while the latter goes on (Shah et al., "FlashAttention-3", 2024).
Blocks in which no score is masked are not compared, either. All numbers are formed by the same operations in the same
order as before, so the result has the same bits.

A loop that is not in every point as it was when this was written and tried is left as it is: it may be a user's own,
which looks at the sum within a trip, say, or hides other keys.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["put_in_order"]

FIRST_BARRIER: Final = 8
"""Named barriers of a group's own: Triton has those from 0 on, one for each group and two more."""
THREADS: Final = 128
"""Of a group."""
FARTHEST: Final = 1 << 30
"""Most that is added to the number of a query in 32 bits, so that the sum is right."""

_GROUP = re.compile(r"(?=^    (?:default|partition\d+\(.*) *\{?$)", re.MULTILINE)
_HEAD = re.compile(
    r"^ *(?P<results>%\w+):(?P<count>\d+) = scf\.for (?P<at>%\w+) = (?P<low>%\w+) to (?P<high>%\w+) "
    r"step (?P<step>%\w+) iter_args\((?P<carried>[^()]*)\) -> \((?P<types>.*)\)  : i64 \{\n$"
)
_ID: Final = r"%[\w.$-]+"
_END: Final = r"(?![\w.$-])"
"""Behind a name, so that it is the whole one."""
_RESULT = re.compile(rf"^ *({_ID})(?::\d+)? = ", re.MULTILINE)
_NAME = re.compile(_ID)
_TYPE = re.compile(r"!?[\w.]+<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>|\b[if]\d+\b")


class _OtherwiseError(Exception):
    """The loop is not what it was when this was written."""


def _expect(known: object) -> None:
    if not known:
        raise _OtherwiseError


@dataclass(frozen=True)
class _Op:
    """An operation of the loop's body, with its region if it has one."""

    text: str

    @property
    def result(self) -> str:
        found = _RESULT.match(self.text)
        return "" if found is None else found[1]

    @property
    def type(self) -> str:
        """Of the result, or of the last one."""
        last = self.text.rstrip().rpartition("\n")[2]
        types: list[str] = _TYPE.findall(re.sub(r" loc\(.*", "", last).rpartition(" : ")[2])
        _expect(types)
        return types[-1]

    def has(self, *words: str) -> bool:
        return all(word in self.text.partition("\n")[0] for word in words)

    @property
    def uses(self) -> set[str]:
        return set(_NAME.findall(self.text)) - {self.result}


def put_in_order(text: str) -> str:
    """The module with its divided loop in a better order; `text` itself, where there is none that is known."""
    try:
        groups = _GROUP.split(text)
        multiplying = [n for n, group in enumerate(groups) if "ttng.warp_group_dot" in group]
        _expect(len(multiplying) == 2)
        for n, k in enumerate(multiplying):
            groups[k] = _ordered(groups[k], FIRST_BARRIER + n)
        return "".join(groups)
    except (_OtherwiseError, LookupError, ValueError):
        return text


def _body(lines: Sequence[str]) -> list[_Op]:
    ops, open_lines = [], ""
    for line in lines:
        open_lines += line
        if not line.rstrip().endswith("({") and (open_lines == line or line.lstrip().startswith("})")):
            ops.append(_Op(open_lines))
            open_lines = ""
    _expect(not open_lines)
    return ops


def _one(ops: Sequence[_Op], *words: str) -> int:
    found = [n for n, op in enumerate(ops) if op.has(*words)]
    _expect(len(found) == 1)
    return found[0]


def _ordered(group: str, barrier: int) -> str:
    lines = group.splitlines(keepends=True)
    heads = [n for n, line in enumerate(lines) if " scf.for " in line]
    _expect(len(heads) == 1)
    head = _HEAD.match(lines[heads[0]])
    _expect(head is not None)
    assert head is not None
    end = next((n for n in range(heads[0], len(lines)) if re.match(r"      \} ?(\{|loc|$)", lines[n])), None)
    _expect(end is not None)
    assert end is not None
    loop = _Loop(head, _body(lines[heads[0] + 1 : end]), "".join(lines[: heads[0]]), barrier)
    return "".join(lines[: heads[0]]) + loop.text() + "".join(lines[end + 1 :])


class _Loop:
    """The loop of one group, in parts: what they are called is what a block goes through."""

    def __init__(self, head: re.Match[str], ops: list[_Op], before: str, barrier: int) -> None:
        self.head, self.barrier, self.before = head, barrier, before
        self.carried = [tuple(pair.split(" = ")) for pair in head["carried"].split(", ")]
        self.types = _TYPE.findall(head["types"])
        _expect(len(self.carried) == len(self.types) == int(head["count"]))
        ops, last = ops[:-1], ops[-1]
        _expect(last.has("scf.yield"))
        self.yields = _NAME.findall(last.text)
        dots = [n for n, op in enumerate(ops) if op.has("ttng.warp_group_dot")]
        waits = [n for n, op in enumerate(ops) if op.has("ttng.wait_barrier")]
        arrivals = [n for n, op in enumerate(ops) if op.has("ttng.arrive_barrier")]
        _expect(len(dots) == len(waits) == len(arrivals) == 2)
        scores, values = dots
        _expect(scores < arrivals[0] < values < arrivals[1] and max(waits) < scores)
        _expect(all(ops[n].has(f", {THREADS} ") for n in arrivals))
        self.scores, self.values = ops[scores], ops[values]
        self.scored, self.weighted = self._dot(self.scores), self._dot(self.values)
        # The buffer of values, and the wait in front of it; so of keys, that neither is taken for the other.
        kept = _one(ops[:scores], f"{self.weighted[1]} = ttg.memdesc_index")
        _expect(kept - 1 in waits)
        (keys,) = [n + 1 for n in waits if n != kept - 1]
        _expect(ops[keys].has("ttg.memdesc_index"))
        _one(ops[:scores], f"{self.scored[1]} = ttg.memdesc_trans {ops[keys].result} ")
        # With one alone, who loads may wait for it before the next keys, for which we wait before we give it back.
        buffers = re.search(r" : !ttg\.memdesc<(\d+)x", ops[kept].text)
        _expect(buffers is not None and int(buffers[1]) > 1)
        full = re.search(r"ttng\.wait_barrier (%\w+),", ops[kept - 1].text)
        _expect(full is not None)
        assert full is not None
        self.for_values = [ops[_one(ops, f"{full[1]} = ttg.memdesc_index")], ops[kept - 1], ops[kept]]
        self.freed = ops[values + 1 : arrivals[1] + 1]
        # Scores of a block: all that is in front of them, without what the values alone need.
        self.for_scores = [op for op in ops[:scores] if op not in self.for_values]
        self.scores_read = ops[scores + 1 : arrivals[0] + 1]
        weights = ops[arrivals[0] + 1 : values]
        total = [op for op in weights if op.has('"tt.reduce"')]
        _expect(len(total) == 2)
        self.total = total[1]
        summed = re.search(r'"tt\.reduce"\((%\w+)\)', self.total.text)
        _expect(summed is not None and "arith.addf" in self.total.text and "xf32" in self.total.type)
        assert summed is not None
        _one(weights, f"{summed[1]} = ", "ex2.approx")  # see _not_before
        scaling = [op for op in weights if op.result == self.weighted[2]]
        _expect(len(scaling) == 1 and scaling[0].has("arith.mulf"))
        self.scaling = scaling[0]
        late = [op for op in weights if op.has("arith.truncf") or op.has("ttg.convert_layout")]
        _expect(len(late) == 2 and late[1].result == self.weighted[0] and late[0].result in late[1].uses)
        self.late = late
        moved = (*late, self.scaling)
        weights = [op for op in weights if op not in moved]
        _expect(not any(op.uses & {later.result for later in moved} for op in weights))
        self.weights = self._compared_where_needed(weights)
        self.counting = ops[arrivals[1] + 1 :]
        _expect(all(op.has("arith.addi") for op in self.counting))
        names = [name for name, _ in self.carried]
        self.sum = next((n for n, name in enumerate(names) if name in self.scaling.uses), -1)
        _expect(self.sum >= 0 and self.yields[self.sum] == self.values.result and len(self.yields) == len(names))
        # The sum is a block behind: nobody but its scaling may look at it.
        sums = {names[self.sum], self.values.result}
        _expect(not any(op.uses & sums for op in ops if op is not self.scaling))
        _expect(sum(name in sums for name in self.yields) == 1)
        _expect(all(op.has("ttg.memdesc_index") or op.has("ttng.arrive_barrier") for op in self.freed))
        # What the values' buffer and barriers are found by, one block later.
        inside = {op.result: op for op in (*self.for_scores, *self.for_values) if op.result}
        own = {op.result for op in (*self.for_values, *self.freed)}
        found = {name for op in (*self.for_values, *self.freed) for name in op.uses if name in inside}
        self.handed = sorted(found - own)
        self.handed_types = [inside[name].type for name in self.handed]
        _expect(all(t in ("i1", "i32", "i64") for t in self.handed_types))
        _expect(not any(op.uses & {*names, head["at"]} for op in (*self.for_values, *self.freed)))

    @staticmethod
    def _dot(op: _Op) -> tuple[str, str, str, str, str]:
        """The factors, what the product is added to, and the factors' types."""
        found = re.search(
            rf"ttng\.warp_group_dot ({_ID}), ({_ID}), ({_ID})(?: \{{.*?\}})? : (.*) \* (!ttg\.memdesc<.*>) -> tensor<",
            op.text,
        )
        _expect(found is not None)
        assert found is not None
        return found[1], found[2], found[3], found[4], found[5]

    def _compared_where_needed(self, weights: list[_Op]) -> list[_Op]:
        """The comparison of keys with queries under a condition, where it has the form iota <= iota + a number."""
        chosen = [n for n, op in enumerate(weights) if op.has(" = arith.select ", f", {self.scores.result}, ")]
        if not chosen:
            return weights
        _expect(len(chosen) == 1)
        select = weights[chosen[0]]
        made = {op.result: op for op in weights}

        def source(name: str, *words: str) -> tuple[str, ...]:
            line = made[name].text if name in made else self._line_before(name)
            _expect(all(word in line for word in words))
            found = _NAME.findall(line.partition(" = ")[2])
            return tuple(found)

        condition = re.search(r"arith\.select (%\w+),", select.text)
        _expect(condition is not None)
        assert condition is not None
        keys, queries = source(condition[1], "arith.cmpi sle,")
        (spread,) = source(queries, "tt.broadcast")
        (both,) = source(spread, "tt.expand_dims")
        iota, number = source(both, "arith.addi")
        (number,) = source(number, "tt.splat")
        (spread,) = source(keys, "tt.broadcast")
        (keys,) = source(spread, "tt.expand_dims")
        # The sum of both does not wrap: the number is an i64 that was clamped.
        _, bound = source(*source(number, "arith.trunci", " : i64 to i32"), "arith.minsi")
        most = re.search(r" = arith\.constant (?:\{.*\} )?(-?\d+) : i64", self._line_before(bound))
        _expect(most is not None and int(most[1]) <= FARTHEST)
        first = re.search(r"tt\.make_range .*\bstart = (\d+) : i32", self._line_before(iota))
        last = re.search(r"tt\.make_range .*\bend = (\d+) : i32", self._line_before(keys))
        _expect(first is not None and last is not None)
        assert first is not None
        assert last is not None
        # What the comparison alone needs moves under the condition, but for the number itself.
        needed, moved = {condition[1]}, [select]
        for op in reversed(weights[: chosen[0]]):
            if op.result in needed and op.type.startswith("tensor<"):
                moved.insert(0, op)
                needed |= op.uses
        rest = [op for op in weights if op not in moved]
        _expect(not any(m.result in op.uses for m in moved[:-1] for op in rest))
        _expect(number in {op.result for op in weights[: chosen[0]]})
        t = select.type
        inner = "".join(op.text for op in moved).replace(f"{select.result} = ", "%pt_masked = ", 1)
        whole = [
            _new(f"%pt_least = arith.constant {int(last[1]) - 1 - int(first[1])} : i32"),
            _new(f"%pt_some = arith.cmpi slt, {number}, %pt_least : i32"),
            f"        {select.result} = scf.if %pt_some -> ({t}) {{\n",
            inner,
            _new(f"scf.yield %pt_masked : {t}"),
            "        } else {\n",
            _new(f"scf.yield {self.scores.result} : {t}"),
            _new("}"),
        ]
        at = max(n for n, op in enumerate(rest) if op in weights[: chosen[0]])
        return [*rest[: at + 1], _Op("".join(whole)), *rest[at + 1 :]]

    def _line_before(self, name: str) -> str:
        found = re.search(rf"^ *{re.escape(name)} = .*$", self.before, re.MULTILINE)
        _expect(found is not None)
        assert found is not None
        return found[0]

    def _renamed(self, ops: Sequence[_Op], suffix: str, names: dict[str, str]) -> str:
        """The operations once more, under names of their own; `names` says what others are to be called."""
        text = "".join(op.text for op in ops)
        local = set(_RESULT.findall(text))

        def name(found: re.Match[str]) -> str:
            old = found[0]
            if old in local:
                return f"%pt_{suffix}_{old[1:]}"
            return names.get(old, old)

        return _NAME.sub(name, text)

    def text(self) -> str:
        head, step, types = self.head, self.head["step"], self.head["types"]
        names = [name for name, _ in self.carried]
        once = [
            *self.for_scores, self.scores, *self.scores_read, *self.weights, *self.late, self.scaling, *self.counting
        ]  # fmt: skip
        ends = [self.scaling.result if n == self.sum else name for n, name in enumerate(self.yields)]
        handed = [f"%pt_h{n}" for n in range(len(self.handed))]
        more = ", ".join([types, self.weighted[3], *self.handed_types])
        # The first block's weights, from where the loop goes on.
        out = [
            _new(f"%pt_any = arith.cmpi slt, {head['low']}, {head['high']} : i64"),
            f"      {head['results']}:{head['count']} = scf.if %pt_any -> ({types}) {{\n",
            self._renamed(once, "a", {**dict(self.carried), head["at"]: head["low"]}),
            _new(f"%pt_low = arith.addi {head['low']}, {step} : i64"),
        ]
        entry = [f"%pt_a_{name[1:]}" for name in (*ends, self.weighted[0], *self.handed)]
        carried = ", ".join(f"{a} = {b}" for a, b in zip([*names, "%pt_w", *handed], entry, strict=True))
        out += [
            f"        %pt_loop:{len(entry)} = scf.for {head['at']} = %pt_low to {head['high']} step {step} "
            f"iter_args({carried}) -> ({more})  : i64 {{\n",
            "".join(op.text for op in self.for_scores),
            _asynchronous(self.scores.text).replace(f"{self.scores.result} =", "%pt_s =", 1),
        ]
        # The sum of the block before: its buffer is found by what that trip handed on.
        past = dict(zip(self.handed, handed, strict=True))
        kept = f"%pt_v_{self.weighted[1][1:]}"
        score = re.compile(re.escape(self.scores.result) + _END)
        out += [
            self._renamed(self.for_values, "v", past),
            _asynchronous(self._product("%pt_o", "%pt_w", kept, names[self.sum])),
            _awaited(f"{self.scores.result}:3", 1, ("%pt_s", *self.scored[:2]), (self.scores.type, *self.scored[3:])),
            "".join(op.text for op in self.scores_read),
            score.sub(f"{self.scores.result}#0", "".join(op.text for op in self.weights)),
            self._not_before(),
            _awaited("%pt_done:2", 0, ("%pt_o", kept), (self.values.type, self.weighted[4])),
            self._renamed(self.freed, "u", past),
            "".join(op.text for op in self.late),
            re.sub(re.escape(names[self.sum]) + _END, "%pt_done#0", self.scaling.text),
            "".join(op.text for op in self.counting),
            _new(f"scf.yield {', '.join([*ends, self.weighted[0], *self.handed])} : {more}"),
            _new("}"),
        ]
        # The sum of the last block.
        final = {name: f"%pt_loop#{len(names) + 1 + n}" for n, name in enumerate(self.handed)}
        kept = f"%pt_z_{self.weighted[1][1:]}"
        results = ", ".join("%pt_sum" if n == self.sum else f"%pt_loop#{n}" for n in range(len(names)))
        out += [
            self._renamed(self.for_values, "z", final),
            self._product("%pt_sum", f"%pt_loop#{len(names)}", kept, f"%pt_loop#{self.sum}"),
            self._renamed(self.freed, "y", final),
            _new(f"scf.yield {results} : {types}"),
            "      } else {\n",
            _new(f"scf.yield {', '.join(start for _, start in self.carried)} : {types}"),
            _new("}"),
        ]
        return "".join(out)

    def _product(self, result: str, weights: str, values: str, onto: str) -> str:
        a, b, c = self.weighted[:3]
        old = f"{self.values.result} = ttng.warp_group_dot {a}, {b}, {c} "
        _expect(old in self.values.text)
        return self.values.text.replace(old, f"{result} = ttng.warp_group_dot {weights}, {values}, {onto} ", 1)

    def _not_before(self) -> str:
        """What keeps the assembler from waiting for the products before the weights are formed: a store that depends on
        all of them, as far as it can know, in front of a barrier. No sum of powers is negative: it never stores."""
        t = self.total.type
        asm = (
            "{ .reg .pred p; .reg .u32 a; mov.u32 a, 0; setp.lt.f32 p, $1, 0f00000000; @p st.shared.f32 [a], $1; "
            "mov.b32 $0, $1; }"
        )
        formed = f'constraints = "=f,f", packed_element = 1 : i32, pure = false}} {self.total.result} : {t} -> {t}'
        met = 'constraints = "=r", packed_element = 1 : i32, pure = false} -> i32'
        wait = f"bar.sync {self.barrier}, {THREADS}; mov.b32 $0, 0;"
        return _new(f'%pt_formed = tt.elementwise_inline_asm "{asm}" {{{formed}') + _new(
            f'%pt_met = tt.elementwise_inline_asm "{wait}" {{{met}'
        )


def _new(operation: str) -> str:
    """A line that nobody wrote: it stands at no place of the source."""
    return f"        {operation} loc(unknown)\n"


def _awaited(results: str, left: int, waited: Sequence[str], types: Sequence[str]) -> str:
    """A wait until so many of the products that were asked for are left, for these."""
    return _new(
        f"{results} = ttng.warp_group_dot_wait {', '.join(waited)} {{pendings = {left} : i32}} : {', '.join(types)}"
    )


def _asynchronous(dot: str) -> str:
    if " {" in dot.partition(" : ")[0]:
        return dot.replace(" {", " {isAsync = true, ", 1)
    return dot.replace(" : ", " {isAsync = true} : ", 1)
