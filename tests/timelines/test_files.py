"""Timelines as files, tables and pictures: from events that are written here, so that every number is known."""

import json
import re
import time
from html.parser import HTMLParser

import pytest

from peertile.errors import ArgumentError
from peertile.timelines.events import Event, Heap, Kind, Part, in_order, part_path, read_part, write_lines
from peertile.timelines.picture import MOST_LANES, page
from peertile.timelines.summary import covered, spelled_ns, summary_of
from peertile.timelines.trace import (
    add_to,
    aligned,
    arrows_of,
    gather,
    read_timeline,
    rows_of,
    to_trace,
    write_timeline,
)

STREAM, PROGRAMS = "side", "side: programs"


def program(k, begin, end, launch=1, **info):
    return Event(Kind.PROGRAM, PROGRAMS, f"meet {k}", begin, end, {"program": k, "launch": launch, **info})


def wait(k, begin, end, word, value, **info):
    info = {"program": k, "launch": 1, "at": "a.py:7", "word": word, "value": value, **info}
    return Event(Kind.WAIT, PROGRAMS, "wait for ready", begin, end, info)


def notify(k, at, word, value):
    info = {"program": k, "launch": 1, "word": word, "value": value}
    return Event(Kind.NOTIFY, PROGRAMS, "notify ready", at, at, info)


def two_parts():
    """Rank 1 is late: rank 0 waits for it from 2 us to 6 us."""
    zero = [
        Event(Kind.SUBMIT, "host: MainThread", "meet", 0, 900, {"at": "a.py:3"}),
        Event(Kind.LAUNCH, STREAM, "meet", 1000, 7000, {"launch": 1, "programs": 1}),
        program(0, 1100, 6900), notify(0, 1500, "rank 1 +0x0", 1), wait(0, 2000, 6000, "rank 0 +0x8", 1),
        Event(Kind.COPY, STREAM, "copy", 8000, 9000, {"bytes": 64}),
    ]  # fmt: skip
    one = [
        Event(Kind.LAUNCH, STREAM, "meet", 5000, 6500, {"launch": 1, "programs": 1}),
        program(0, 5100, 6400), notify(0, 5500, "rank 0 +0x8", 1), wait(0, 5600, 5700, "rank 1 +0x0", 1),
    ]  # fmt: skip
    return [
        Part(0, 2, "job", "cpu:0", "the host's", dropped=0, events=zero),
        Part(1, 2, "job", "cpu:0", "the host's", dropped=3, events=one),
    ]


def test_a_trace_has_processes_threads_and_arrows_and_is_read_back():
    parts = two_parts()
    trace = json.loads(json.dumps(to_trace(parts)))
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "rank 0 (cpu:0)", 1: "rank 1 (cpu:0)"}
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0]
    assert threads == ["host: MainThread", "side", "side: programs"]
    launch = next(e for e in events if e["name"] == "meet" and e["ph"] == "X" and e["cat"] == "launch")
    assert (launch["ts"], launch["dur"], launch["args"]) == (1.0, 6.0, {"launch": 1, "programs": 1})
    starts = {e["id"]: (e["pid"], e["ts"]) for e in events if e["ph"] == "s"}
    ends = {e["id"]: (e["pid"], e["ts"]) for e in events if e["ph"] == "f"}
    assert {(starts[k], ends[k]) for k in starts} == {((1, 5.5), (0, 5.999)), ((0, 1.5), (1, 5.699))}


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = str(tmp_path / "t.json")
    write_timeline(path, two_parts())
    for found, part in zip(read_timeline(path), two_parts(), strict=True):
        assert found.head() == part.head()
        assert sorted(found.events, key=str) == sorted(part.events, key=str)


def test_ranks_of_one_job_add_to_a_file_and_another_job_begins_it_anew(tmp_path):
    path = str(tmp_path / "t.json")
    zero, one = two_parts()
    for part in (one, zero, zero):
        add_to(path, [part])
    assert [(p.rank, len(p.events)) for p in read_timeline(path)] == [(0, 6), (1, 4)]
    add_to(path, [Part(0, 1, "another", events=zero.events)])
    assert [p.rank for p in read_timeline(path)] == [0]


def test_what_ranks_left_is_put_together_a_cut_off_line_too(tmp_path):
    path = str(tmp_path / "t.json")
    zero, one = two_parts()
    (tmp_path / "t.json.rank0").write_text(write_lines(zero, zero.events[:3]) + write_lines(zero, zero.events[3:]))
    (tmp_path / "t.json.rank1").write_text(write_lines(one, one.events[:2]) + '["wait", "side: pro')
    (tmp_path / "t.json.ranks").write_text("of somebody else")
    assert part_path(path, 1) == str(tmp_path / "t.json.rank1")
    assert gather(path, zero.job) == [0, 1]
    assert [(p.rank, len(p.events), p.dropped) for p in read_timeline(path)] == [(0, 6, 0), (1, 2, 3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.json", "t.json.ranks"]
    assert gather(path, zero.job) == []


def test_parts_of_an_earlier_job_stay_where_they_are_and_what_cannot_be_written_is_told_of(tmp_path, caplog):
    path = tmp_path / "t.json"
    zero, one = two_parts()
    one.job = "earlier"
    for part in (zero, one):
        (tmp_path / f"t.json.rank{part.rank}").write_text(write_lines(part, part.events))
    (tmp_path / "t.json.new").mkdir()
    assert gather(str(path), zero.job) == [0]
    assert f"expected a file that can be written, got {path} (" in caplog.text
    (tmp_path / "t.json.new").rmdir()
    assert gather(str(path), zero.job) == [0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.json", "t.json.rank1"]


def trace_with(**event):
    trace = to_trace([Part(0)])
    trace["traceEvents"].append({"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"track": "side"}})
    trace["traceEvents"].append({"ph": "X", "cat": "copy", "name": "copy", "pid": 0, "tid": 1, "ts": 1, **event})
    return json.dumps(trace)


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[]", '{"traceEvents": []}', '{"version": 2, "rank": 0}\n', "no json\n", "[" * 100_000,
        trace_with(args=[1]), trace_with(ts=float("inf")), trace_with(cat="another"), trace_with(tid=[]),
        json.dumps({**Part(0).head(), "rank": "one"}) + "\n",
        json.dumps(Part(0).head()) + '\n["copy", "side", "copy", 1, "two", {}]\n',
    ],
    ids=range(13),
)  # fmt: skip
def test_another_file_is_refused(text, tmp_path):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ArgumentError) as refused:
        read_timeline(str(path))
    assert str(refused.value) == f"timeline: expected a file that a timeline was written to, got {str(path)!r}"
    with pytest.raises(ArgumentError):
        read_part(str(tmp_path / "missing"))


def test_operations_of_a_stream_lie_behind_each_other():
    copies = [Event(Kind.COPY, STREAM, name, begin, end, {}) for name, begin, end in (("a", 0, 10), ("b", 1, 30))]
    host = Event(Kind.SYNC, "host: MainThread", "wait for b", 2, 31, {})
    assert [(e.name, e.begin_ns, e.end_ns) for e in in_order([copies[1], host, copies[0]])] == [
        ("a", 0, 10), ("wait for b", 2, 31), ("b", 10, 30),
    ]  # fmt: skip


def test_a_picture_of_many_far_apart_goes_to_the_right():
    events = [Event(Kind.LAUNCH, STREAM, "meet", k * 10**9, k * 10**9 + 10**6, {}) for k in range(200)]
    drawn = page("t", [Part(0, events=events)])
    places = [float(x) for x in re.findall(r'class="kernel" x="([\d.-]+)"', drawn)]
    assert places == sorted(places)
    assert len(places) == 200
    assert "cut out" not in drawn
    events = [Event(Kind.LAUNCH, STREAM, "meet", k**4 * 10**9, k**4 * 10**9 + 10**6, {}) for k in range(200)]
    assert page("t", [Part(0, events=events)]).count("cut out") == 20


def test_releases_of_a_word_are_looked_up_however_many_there_were():
    notifies = [Event(Kind.NOTIFY, PROGRAMS, "n", 10 * k, 10 * k, {"word": "w", "value": 1}) for k in range(2000)]
    waits = [wait(0, 10 * k, 10 * k + 5, "w", k) for k in range(2000)]
    begin = time.monotonic()
    arrows = arrows_of([Part(0, events=notifies), Part(1, events=waits, error_ns=3)])
    assert time.monotonic() - begin < 1  # 2 s where each was compared with each
    assert [arrow.notify.begin_ns for arrow in arrows] == [10 * k for k in range(2000)]


def test_programs_share_as_few_lanes_as_ran_at_once():
    events = [program(0, 0, 10), program(1, 5, 20), program(2, 12, 15), wait(1, 6, 8, "w", 1), wait(2, 13, 14, "w", 1)]
    rows = rows_of(Part(0, events=events))
    assert [(row.name, [e.name for e in row.events]) for row in rows] == [
        ("side: programs 0", ["meet 0", "meet 2", "wait for ready"]), ("side: programs 1", ["meet 1", "wait for ready"]),
    ]  # fmt: skip


def test_a_wait_ends_by_the_store_of_its_value_or_else_by_the_last_add():
    stores = [notify(0, at, "w", value) for at, value in ((10, 1), (20, 2), (30, 3))]
    late = Part(0, events=[*stores, wait(0, 5, 40, "w", 2)])
    assert [a.notify.begin_ns for a in arrows_of([late])] == [20]
    adds = [notify(0, at, "c", 1) for at in (10, 20, 50)]
    counted = Part(0, events=[*adds, wait(0, 5, 40, "c", 7)])
    assert [a.notify.begin_ns for a in arrows_of([counted])] == [20]
    assert arrows_of([Part(0, events=[wait(0, 5, 40, "other", 1), wait(1, 5, 9, "c", 1, unfinished=True)])]) == []


def test_clocks_of_two_ranks_may_disagree_by_what_both_may_be_off():
    early = wait(0, 5, 90, "w", 1)
    for error, count in ((4, 0), (5, 1)):
        parts = [Part(0, error_ns=error, events=[early]), Part(1, error_ns=5, events=[notify(0, 100, "w", 1)])]
        assert len(arrows_of(parts)) == count
    assert arrows_of([Part(0, error_ns=50, events=[early, notify(1, 100, "w", 1)])]) == []


def test_times_of_ranks_are_moved_so_that_no_wait_ends_before_its_release(tmp_path):
    host = Event(Kind.SYNC, "host: MainThread", "meet", 10, 20, {})
    zero = Part(0, error_ns=20, events=[wait(0, 5, 90, "w", 1), notify(0, 40, "v", 1), host])
    one = Part(1, error_ns=6, events=[notify(0, 110, "w", 1), wait(0, 50, 200, "v", 1)])
    found = aligned([zero, one])
    assert [part.moved_ns for part in found] == [14, -6]
    assert [event.end_ns for event in found[0].events] == [104, 54, 20]
    assert [event.begin_ns for event in found[1].events] == [104, 44]
    path = str(tmp_path / "t.json")
    write_timeline(path, [zero, one])
    again = read_timeline(path)
    assert [part.moved_ns for part in aligned(again)] == [14, -6]
    assert sorted(again[0].events, key=str) == sorted(found[0].events, key=str)
    exact = [Part(0, events=zero.events), Part(1, error_ns=5, events=[notify(0, 100, "w", 1)])]
    assert [part.moved_ns for part in aligned(exact)] == [0, 0]  # which would not do


def test_a_heap_knows_its_words_by_rank_and_offset():
    heap = Heap("heap 0.0.8", (4096, 8192), 1024)
    assert heap.word(8200) == "heap 0.0.8 rank 1 +0x8"
    assert heap.word(4096 + 1024) is None


def test_the_summary_counts_what_each_rank_did():
    found = summary_of(two_parts(), longest=1)
    assert found.ns == 9000
    zero, one = found.ranks
    assert (zero.kernel_ns, zero.copy_ns, zero.idle_ns, zero.launches, zero.programs) == (6000, 1000, 2000, 1, 1)
    assert (zero.program_ns, zero.wait_ns) == (5800, 4000)
    assert (one.kernel_ns, one.idle_ns, one.dropped, one.wait_ns) == (1500, 7500, 3, 100)
    (longest,) = found.waits
    assert (longest.rank, longest.by, longest.event.ns) == (0, 1, 4000)
    assert found.as_dict()["waits"][0]["at"] == "a.py:7"
    assert summary_of([]).as_dict() == {"ns": 0, "ranks": [], "waits": []}


def test_times_are_joined_and_spelled():
    assert covered([(5, 7), (0, 3), (2, 4), (6, 7)]) == 6
    assert [spelled_ns(ns) for ns in (12, 1_230, 45_600, 7_000_000, 12_345_000_000)] == [
        "12 ns", "1.23 us", "45.6 us", "7.00 ms", "12.3 s",
    ]  # fmt: skip


class _Counts(HTMLParser):
    def __init__(self):
        super().__init__()
        self.count = {}
        self.texts = []

    def handle_starttag(self, tag, attributes):
        key = tag, dict(attributes).get("class", "")
        self.count[key] = self.count.get(key, 0) + 1

    def handle_data(self, data):
        self.texts.append(data)


def drawn(parts, *times):
    found = _Counts()
    found.feed(page("a <run>", parts, *times))
    return found


def test_the_picture_has_rows_waits_and_arrows_and_runs_nothing():
    found = drawn(two_parts())
    kinds = {kind: found.count.get(("rect", kind), 0) for kind in ("kernel", "program", "wait", "copying", "submit")}
    assert kinds == {"kernel": 2, "program": 2, "wait": 2, "copying": 1, "submit": 1}
    assert found.count["path", "arrow"] == 2
    assert found.count["text", "rank"] == 2
    assert ("script", "") not in found.count
    assert "a <run>" in found.texts
    assert any("wait for ready: 4.00 us" in text for text in found.texts)


def test_the_picture_cuts_out_long_times_in_which_nothing_happened():
    zero, one = two_parts()
    late = [event._replace(begin_ns=event.begin_ns + 10**9, end_ns=event.end_ns + 10**9) for event in zero.events]
    found = drawn([Part(0, events=[*zero.events, *late]), one])
    assert found.count["rect", "cut"] == 1
    assert any("ms in which nothing happened are cut out" in text for text in found.texts)
    assert ("rect", "cut") not in drawn([Part(0, events=[*zero.events, *late]), one], 0, 7_000).count


def test_the_picture_says_how_many_lanes_it_leaves_out():
    many = [program(k, k, 1000) for k in range(MOST_LANES + 5)]
    found = drawn([Part(0, events=many)])
    assert found.count["rect", "program"] == MOST_LANES
    assert "5 more lanes of side: programs are not drawn" in found.texts
    assert "0 ns on 0 ranks" in page("nothing", [])
