"""One decision: every candidate verified, then measured, in step with the other ranks of the group. Keeps no state
between decisions but what `store.py` writes.

Everything a rank does goes through `_together`: it acts, then all ranks say how it went. So every rank knows the same
figures and takes the same next step, and a failure on one rank is a fact about the candidate on all of them. A rank
that fails inside an operation marks the group as failed, which releases the others from their waits; then all recover.
Only a rank that is gone for good ends the decision, with PeerFailed everywhere. Every wait is the group's, and bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from peertile.comm.group import Group, describe
from peertile.errors import ArgumentError, PeerFailed, SymmetryError, UnsupportedError
from peertile.runtime.op import DeviceOp
from peertile.runtime.tensor import Tensor
from peertile.tuning.outputs import Arrays, Saved, arrays_of, difference, outputs_among, spoil, tensors_of
from peertile.tuning.rules import Rules, batch_calls, finalists, group_bests, group_medians, order, winner
from peertile.tuning.store import Question, Store, provenance

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Decision", "Session"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What tuning found for one key.

    `index` and `name` say which candidate won; `seconds` of a call by candidate, of the slowest rank: the median of the
    final, or the best of the rounds before where a candidate was not in it; `dropped` says why candidates are out;
    `path` is the file that keeps it, None where nothing is kept; `is_new` whether anything was measured for it now.
    """

    index: int
    name: str
    seconds: dict[str, float]
    dropped: dict[str, str]
    path: Path | None
    is_new: bool


class _Said(NamedTuple):
    """What a rank says after it acted: why it failed, a number, seconds since the decision began."""

    error: str | None
    value: float
    elapsed_s: float


class Session:
    """The making of one decision. `make(k)` builds the operation of candidate k anew, `outputs(result)` picks what is
    compared of its result, `reference()` gives the expected arrays, if the user said so."""

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        question: Question,
        make: Callable[[int], DeviceOp[Any]],
        outputs: Callable[[Any], Any],
        reference: Callable[[], Any] | None,
        arguments: Sequence[Tensor],
        group: Group | None,
        store: Store,
        rules: Rules,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.names = names
        self.question = question
        self.make = make
        self.outputs = outputs
        self.reference = reference
        self.arguments = arguments
        self.group = group if group is not None and group.size > 1 else None
        self.store = store
        self.rules = rules
        self.clock = clock
        self._begin = clock()
        self._saved: Saved | None = None
        self._expected: Arrays | None = None
        self._oracle: int | None = None
        self._written: list[Tensor] = []
        """Outputs of the last run that lie in the arguments."""
        self._spoils: bool | None = None
        """Whether outputs can be spoiled before a run; None until it is known."""
        self._record: dict[str, Any] = {}
        self._is_over = False

    # ---------------------------------------------------------------- the course

    def decide(self) -> Decision:
        """Collective where there is a group. UnsupportedError if no candidate is right."""
        self._record = self._load()
        if self._record.get("winner") is not None:
            return self._decision(is_new=False)
        self._saved = Saved(self.arguments)
        try:
            self._measure()
        finally:
            self._saved.put_back()
        return self._decision(is_new=True)

    def _load(self) -> dict[str, Any]:
        """The record of rank 0, finished or not, on every rank: they may see different disks."""
        import json  # takes 2 ms, which `import peertile` does not pay

        fresh: dict[str, Any] = {
            **{"winner": None, "verdicts": {}, "calls": {}, "screen": {}, "final": {}, "is_cut_short": False},
            "measured": [],
        }
        if self.group is None:
            return self.store.read(self.question) or fresh
        self.group.agree(tuple(sorted(self.question.items())), f"what autotune({self.name}) is asked")
        found = self.store.read(self.question) if self.group.rank == 0 else None
        text = self.group.broadcast(json.dumps(found).encode(), f"autotune({self.name}): the record")
        return json.loads(text) or fresh

    def _measure(self) -> None:
        verdicts: dict[str, str | None] = self._record["verdicts"]
        self._record["measured"] = [*self._record["measured"], provenance()]
        for k in range(len(self.names)):
            if str(k) in verdicts or (self._is_over and any(v is None for v in verdicts.values())):
                continue
            verdicts[str(k)] = self._verify(k)
            self._write()
        self._expected = None
        right = self._right()
        if not right:
            reasons = "; ".join(f"{self.names[int(k)]}: {why}" for k, why in verdicts.items())
            raise UnsupportedError(f"autotune({self.name}): no candidate is left: {reasons}")
        self._rounds("screen", right, self.rules.screen)
        if len(self._right()) > 1 and not self._is_over:
            bests = group_bests(self._figures("screen", self._right()))
            self._rounds("final", finalists(bests, self.rules.close), self.rules.rounds)
        left = self._right()
        if not left:
            reasons = "; ".join(f"{self.names[int(k)]}: {why}" for k, why in verdicts.items() if why)
            raise UnsupportedError(f"autotune({self.name}): no candidate is left: {reasons}")
        medians = group_medians(self._figures("final", left)) or group_bests(self._figures("screen", left))
        self._record["winner"] = winner(medians, self.rules.tie) if medians else left[0]
        self._record["is_cut_short"] = self._is_over
        self._write()

    def _right(self) -> list[int]:
        """Candidates that were verified and have not failed since, as listed."""
        return [k for k in range(len(self.names)) if self._record["verdicts"].get(str(k), "") is None]

    def _figures(self, stage: str, candidates: Sequence[int]) -> dict[int, list[list[float]]]:
        return {k: self._record[stage][str(k)] for k in candidates if self._record[stage].get(str(k))}

    def _rounds(self, stage: str, candidates: Sequence[int], rounds: int) -> None:
        """Whole rounds only: what an interruption or the end of the budget cuts is not counted."""
        figures: dict[str, list[list[float]]] = self._record[stage]
        done = min((len(figures.get(str(k), ())) for k in candidates), default=0)
        for k in candidates:
            figures[str(k)] = figures.get(str(k), [])[:done]
        for turn in range(done, rounds):
            new: dict[int, list[float]] = {}
            for k in order([k for k in candidates if k in self._right()], turn):
                if self._is_over:
                    return
                said, error = self._timed(k)
                if error is not None:
                    self._record["verdicts"][str(k)] = error
                    figures.pop(str(k), None)
                    continue
                new[k] = [s.value for s in said]
            for k, seconds in new.items():
                figures[str(k)].append(seconds)
            self._write()

    def _timed(self, k: int) -> tuple[list[_Said], str | None]:
        """The seconds of a call on each rank. The first time, one call says how many make a batch."""
        calls: dict[str, int] = self._record["calls"]
        if str(k) not in calls:
            said, error = self._together(partial(self._batch, k, 1), f"a call of {self.names[k]}")
            if error is not None:
                return said, error
            calls[str(k)] = batch_calls(max(s.value for s in said), self.rules.batch_s)
        return self._together(partial(self._batch, k, calls[str(k)]), f"timing of {self.names[k]}")

    # ---------------------------------------------------------------- one candidate

    def _verify(self, k: int) -> str | None:
        """Why candidate k is out, or None. All are verified before one is timed: timing leaves right results in memory
        that another candidate may get.

        It runs twice: on the arguments as they were given, and with its outputs spoiled, so that what another run left
        there does not pass for its own result. In-place operations read what they write: they run on what was given.
        """
        error = self._expect(k)
        if error is None and self._oracle != k:
            error = self._together(lambda: self._check(k), f"first run of {self.names[k]}")[1]
        if error is None and self._spoils is None:
            said, failed = self._together(lambda: self._is_independent(k), "a run with spoiled outputs")
            self._spoils = failed is None and all(s.value for s in said)
        if error is None and self._spoils:
            error = self._together(lambda: self._check(k, spoiled=True), f"second run of {self.names[k]}")[1]
        return error

    def _expect(self, k: int) -> str | None:
        """Make the expected arrays, if they are not there: of the reference, else of the first candidate that is right,
        which is k where there is none yet. Why that failed, if it is about k."""
        while self._expected is None:
            right = self._right()
            made: list[Arrays] = []
            if self.reference is not None:
                error = self._together(partial(self._note_referred, made), "the reference")[1]
                if error is not None:
                    raise UnsupportedError(f"autotune({self.name}): the reference failed: {error}")
            else:
                oracle = self._oracle = right[0] if right else k
                what = f"first run of {self.names[oracle]}"
                error = self._together(partial(self._note_fresh, made, oracle), what)[1]
                if error is not None and oracle == k:
                    return error
                if error is not None:  # it was right before an interruption, and is not any more
                    self._record["verdicts"][str(oracle)] = error
                    continue
            self._expected = made[0]
        return None

    def _note_referred(self, made: list[Arrays]) -> float:
        return self._note(made, self._referred())

    def _note_fresh(self, made: list[Arrays], k: int) -> float:
        return self._note(made, self._fresh(k))

    def _note(self, made: list[Arrays], arrays: Arrays) -> float:
        if not arrays:
            raise ArgumentError(
                f"autotune({self.name}): expected a result with tensors, arrays or numbers, by which candidates are "
                "compared, got none; return the output from the operation"
            )
        made.append(arrays)
        return 0.0

    def _is_independent(self, k: int) -> float:
        """Whether the expected arrays stay what they are when the outputs of k held something else before: 1 or 0."""
        assert self._expected is not None
        self._put_back()
        spoil(self._written)
        again = self._referred() if self.reference is not None else self._arrays(self._run(k))
        return float(difference(again, self._expected, self.rules.tolerance) is None)

    def _put_back(self) -> None:
        assert self._saved is not None
        self._saved.put_back()

    def _fresh(self, k: int) -> Arrays:
        """What candidate k makes of the arguments as they were given."""
        self._put_back()
        result = self._run(k)
        self._written = outputs_among(result, self.arguments)
        return self._arrays(result)

    def _referred(self) -> Arrays:
        assert self.reference is not None
        self._put_back()
        result = self.reference()
        return arrays_of(result.sync() if isinstance(result, DeviceOp) else result)

    def _run(self, k: int) -> Any:
        op = self.make(k)
        if not isinstance(op, DeviceOp):
            raise ArgumentError(
                f"autotune({self.name}): expected the function to return an operation, got {type(op).__name__} for "
                f"candidate {self.names[k]}"
            )
        return self.outputs(op.sync())

    def _arrays(self, result: Any) -> Arrays:
        """The contents of a result. What lies in memory of its own is spoiled, which the next candidate may get."""
        arrays = arrays_of(result)
        written = {id(t) for t in outputs_among(result, self.arguments)}
        spoil(t for t in tensors_of(result) if id(t) not in written)
        return arrays

    def _check(self, k: int, *, spoiled: bool = False) -> float:
        assert self._expected is not None
        if spoiled:
            self._put_back()
            spoil(self._written)
            got = self._arrays(self._run(k))
        else:
            got = self._fresh(k)
        wrong = difference(got, self._expected, self.rules.tolerance)
        if wrong is not None:
            raise _Wrong(wrong)
        return 0.0

    def _batch(self, k: int, calls: int) -> float:
        """Seconds of a call: the mean over a batch, behind one call that does not count."""
        if self._spoils is not True:
            self._put_back()  # it may work on what it wrote last, which must not grow without end
        self.make(k).sync()
        start = self.clock()
        for _ in range(calls):
            self.make(k).sync()
        return (self.clock() - start) / calls

    # ---------------------------------------------------------------- in step

    def _together(self, action: Callable[[], float], what: str) -> tuple[list[_Said], str | None]:
        """`action` here, then what every rank says; and why it failed, by the first rank where it did."""
        error: str | None = None
        value = 0.0
        try:
            value = action()
        except Exception as problem:
            error = describe(problem) if not isinstance(problem, _Wrong) else str(problem)
            # What is wrong after its end holds nobody up; anything else may have left the others waiting for us.
            if self.group is not None and not isinstance(problem, _Wrong) and self.group.failure() is None:
                self.group.fail(f"{what} in autotune({self.name}): {error}")
        except BaseException as problem:  # an interruption: the others must not wait for a rank that leaves
            if self.group is not None and self.group.failure() is None:
                self.group.fail(f"{what} in autotune({self.name}): {describe(problem)}")
            raise
        said = self._exchange(_Said(error, value, self.clock() - self._begin), what)
        self._is_over = self._is_over or max(s.elapsed_s for s in said) > self.rules.budget_s
        return said, self._blamed(said)

    def _blamed(self, said: Sequence[_Said]) -> str | None:
        failed = [(rank, s.error) for rank, s in enumerate(said) if s.error is not None]
        if not failed:
            return None
        # Who was released because of another rank is not the cause.
        rank, error = next((f for f in failed if not f[1].startswith("PeerFailed")), failed[0])
        return error if self.group is None else f"rank {rank}: {error}"

    def _exchange(self, mine: _Said, what: str) -> list[_Said]:
        import json

        if self.group is None:
            return [mine]
        call = f"autotune({self.name}): {what}"
        payload = json.dumps(mine).encode()
        replies: list[bytes] | None = None
        for _ in range(2):
            try:
                replies = self.group.exchange(payload, call)
                break
            except PeerFailed:
                self.group.recover()  # PeerFailed where a rank is gone: there is no group to decide for
            except SymmetryError:
                pass  # another rank was still in a collective call of the candidate's own, and is sent out of it
        if replies is None:
            replies = self.group.exchange(payload, call)
        return [_Said(*json.loads(reply)) for reply in replies]

    # ---------------------------------------------------------------- the record

    def _write(self) -> None:
        if self.group is None or self.group.rank == 0:
            self._record["measured"][-1]["seconds"] = round(self.clock() - self._begin, 3)
            self.store.write(self.question, self._record)

    def _decision(self, *, is_new: bool) -> Decision:
        right = self._right()
        seconds = group_bests(self._figures("screen", right)) | group_medians(self._figures("final", right))
        verdicts = self._record["verdicts"]
        unmeasured = f"not run: the budget of {self.rules.budget_s:g} s was over"
        found = {name: verdicts.get(str(k), unmeasured) for k, name in enumerate(self.names)}
        dropped = {name: why for name, why in found.items() if why is not None}
        index = int(self._record["winner"])
        return Decision(
            index,
            self.names[index],
            {self.names[k]: seconds[k] for k in sorted(seconds)},
            dropped,
            self.store.path(self.question),
            is_new,
        )


class _Wrong(Exception):
    """A candidate ran to its end and was wrong."""
