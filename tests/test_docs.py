"""The documentation: pages are in the navigation, pictures well-formed, formulas and templates what they should be."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.dom import minidom

import pytest

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def load(name):
    """A module of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    made = {"reference.md", "versions.md"}
    assert named == {path.name for path in DOCS.glob("*.md")} | made


def test_links_lead_somewhere():
    pages = {path.name for path in DOCS.glob("*.md")} | {"reference.md", "versions.md"}
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"(?<!!)\[[^\]]*\]\(([\w/]+\.md)\)", page.read_text()):
            assert target in pages, (page.name, target)


@pytest.mark.parametrize("name", ["nibbles", "tile", "columns"])
def test_layouts_are_drawn(name):
    minidom.parseString(getattr(load("pictures"), name)())


def test_every_plot_is_of_results_that_are_there():
    pictures = load("pictures")
    used = set(re.findall(r"pictures/(\w+)\.svg", (DOCS / "performance.md").read_text()))
    drawn = set()
    for name in ("bench_h200.json", "bench_scaled_h200.json"):
        rows = pictures.load(name)["rows"]
        for op in dict.fromkeys(row["op"] for row in rows):
            if op.replace("/", "_") in used:
                text = pictures.bandwidth(rows, op)
                minidom.parseString(text)
                assert "flashnorm cute" in text or "flashnorm cuda" in text
                drawn.add(op.replace("/", "_"))
    assert drawn == used


def test_the_tile_is_that_of_the_kernels():
    """The formula that the page gives, against the program's own."""
    from flashnorm.program import swizzled_offset

    text = (DOCS / "formats.md").read_text()
    formula = re.search(r"blocks / 4\): `([^`]+)`", text)[1]
    for m, k, n in ((0, 0, 2), (33, 5, 2), (127, 3, 1), (200, 9, 3)):
        assert eval(formula, {"m": m, "k": k, "n": n}) == swizzled_offset(m, k, 4 * n)


def test_formulas_become_markdown():
    pytest.importorskip("griffe", reason="the extra docs is not installed")
    to_markdown = load("formulas").to_markdown
    text = "Sum.\n\n.. math:: y = x\n\nMore :math:`w + 1`.\n\n    .. math::\n        a = b,\n        c\n\nEnd."
    assert " ".join(to_markdown(text).split()) == "Sum. $$ y = x $$ More $w + 1$. $$ a = b, c $$ End."


def test_it_builds_without_a_warning(tmp_path):
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "reference" / "index.html").read_text()
    assert 'id="flashnorm.rmsnorm"' in page and "<math" in page and ".. math" not in page


def test_templates_ask_for_what_a_report_needs():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if "body" in form:
            fields = {part["id"]: part for part in form["body"]}
            assert "python -m flashnorm doctor" in fields["doctor"]["attributes"]["label"]
            assert fields["doctor"]["validations"]["required"]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert {"run": "bash .ci/run"} in workflow["jobs"]["cpu"]["steps"]
    assert shutil.which("bash")
