"""Generated pages say what the code says; every public name is documented; claims name things that exist."""

import ast
import re
from pathlib import Path

import pytest
from tools import docs, features, floors, marks, reference, sentences

from peertile.config import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = [ROOT / "README.md", *sorted(set((ROOT / "docs").rglob("*.md")) - {ROOT / p.path for p in docs.PAGES})]


@pytest.mark.parametrize("page", docs.PAGES, ids=lambda page: page.path)
def test_generated_page_is_up_to_date(page) -> None:
    assert not page.stale, "python tools/docs.py --write"


@pytest.mark.parametrize("module", [reference.LANGUAGE, *reference.API])
def test_every_public_name_has_a_docstring(module) -> None:
    assert reference.public(module), f"{module}.__all__ is empty"
    assert reference.undocumented(module) == []


@pytest.mark.parametrize("module", [reference.LANGUAGE, *reference.API])
def test_every_public_name_is_in_the_reference(module) -> None:
    page = ROOT / "docs" / "reference" / ("language.md" if module == reference.LANGUAGE else "api.md")
    prefix = {reference.LANGUAGE: "T", "peertile": "pt"}.get(module, f"pt.{module.partition('.')[2]}")
    text = page.read_text()
    assert [name for name in reference.public(module) if f"`{prefix}.{name}`" not in text] == []


def test_public_names_are_exported_once() -> None:
    # One object once: `pt.zeros` and `pt.op.zeros` are two, a short form and the lazy one.
    names = [(name, id(value)) for module in reference.API for name, value in reference.public(module).items()]
    assert sorted(name for name, found in set(names) if names.count((name, found)) > 1) == []


@pytest.mark.feature("U4", "cpu")
def test_every_environment_variable_is_in_the_table() -> None:
    declared = {variable.name for variable in VARIABLES}
    used = set()
    for text in (path.read_text() for path in floors.modules().values()):
        for node in ast.walk(ast.parse(text)) if "PEERTILE_" in text else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.update(re.findall(r"^PEERTILE_[A-Z0-9_]+$", node.value))
    assert used - declared == set()
    documented = {name for path in WRITTEN for name in re.findall(r"\bPEERTILE_[A-Z0-9_]+", path.read_text())}
    assert documented - declared == set()


def test_claims_of_features_name_cells_that_can_be() -> None:
    assert features.wrong_claims() == []


@pytest.mark.slow
def test_claims_of_sentences_name_sentences_that_exist() -> None:
    assert sentences.wrong_claims() == []


@pytest.mark.slow
def test_every_sentence_has_a_test_or_defines_a_word() -> None:
    assert sentences.open_sentences() == []
    assert set(sentences.DEFINES) <= set(sentences.sentences())


def test_feature_rows_are_unique() -> None:
    listed = [row.id for _, group in features.sections() for row in group]
    assert len(listed) == len(set(listed)) == 88


def test_marks_are_found_on_functions_classes_and_modules(tmp_path, monkeypatch) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "pytestmark = [pytest.mark.feature('K1', 'cpu')]\n"
        "@pytest.mark.feature('K2', 'cpu')\nclass TestA:\n    @pytest.mark.slow\n    def test_one(self): ...\n"
    )
    monkeypatch.setattr(marks, "ROOT", tmp_path)
    monkeypatch.setattr(marks, "TESTS", tmp_path / "tests")
    found = [(mark.args, mark.test) for mark in marks.marks("feature")]
    assert found == [(("K1", "cpu"), "test_one"), (("K2", "cpu"), "test_one")]


def test_a_cell_names_its_test_or_says_that_it_is_open_or_cannot_be() -> None:
    row = features.Row("D6", "title", na={"sim": "no hardware"}, note={"cpu": "stand-ins"})
    claim = marks.Mark("feature", ("D6", "cpu"), "tests/a/test_b.py", "test_c", 1)
    assert features.cell(row, "cpu", [claim]) == "[`test_c`](../tests/a/test_b.py) (stand-ins)"
    assert features.cell(row, "sim", [claim]) == "n/a: no hardware"
    assert features.cell(row, "cuda", [claim]) == "open"


@pytest.mark.parametrize("prefix", ["T", "pt"])
def test_names_that_the_documentation_speaks_of_exist(prefix) -> None:
    known = set(reference.public(reference.LANGUAGE if prefix == "T" else "peertile"))
    wrong = set()
    for path in WRITTEN:
        for name in re.findall(rf"(?<![\w.]){prefix}\.([A-Za-z_]\w*)", path.read_text()):
            if name not in known and name.rstrip("_") not in {"testing", "language"}:
                wrong.add(f"{path.relative_to(ROOT)}: {prefix}.{name}")
    assert sorted(wrong) == []


def _anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize(
    "path",
    [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_links_lead_somewhere(path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            wrong.append(link)
    assert wrong == []
