"""What is made when the documentation is built: the reference from the public names, pictures, plots, tables."""

from __future__ import annotations

import ast
import html
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))

import pictures

ROOT = Path(__file__).parents[1]
# Modules beside the public functions; those that this version lacks are left out.
MODULES = {
    "functional": "Differentiable functions",
    "nn": "Modules",
    "cake_rmsnorm_train": "Training, with the names of FlashInfer's Cake kernels",
    "integrations/transformers": "Hugging Face models",
    "integrations/flashinfer": "In the place of FlashInfer",
    "integrations/vllm": "vLLM",
    "integrations/sglang": "SGLang",
    "config": "Settings",
}
PLOTS = {
    "bench_h200.json": ("rmsnorm", "fused_add_rmsnorm", "rmsnorm_quant", "layernorm"),
    "bench_scaled_h200.json": ("fused_rmsnorm_silu", "rmsnorm_fp4quant/nvfp4"),
}
_FORMULA = re.compile(r'<(div|span) class="arithmatex">\\[\[(](.*?)\\[\])]</\1>', re.DOTALL)


def public_names() -> list[str]:
    """`flashnorm.__all__`, read and not imported."""
    tree = ast.parse((ROOT / "flashnorm" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets):
            return [name for name in ast.literal_eval(node.value) if not name.startswith("_")]
    raise ValueError("flashnorm/__init__.py has no __all__")


def reference() -> str:
    """The page of operators, modules and settings."""
    lines = [
        "# Operators and interfaces",
        "",
        "Everything that is public, from its docstrings.",
        "",
        "## Functions",
        "",
    ]
    lines += [line for name in public_names() for line in (f"::: flashnorm.{name}", "")]
    for path, title in MODULES.items():
        if (ROOT / "flashnorm" / f"{path}.py").is_file() or (ROOT / "flashnorm" / path / "__init__.py").is_file():
            lines += [f"## {title}", "", f"::: flashnorm.{path.replace('/', '.')}", ""]
    return "\n".join(lines)


def versions() -> str:
    """The table of supported versions, from pyproject.toml and the changelog."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    tested = re.search(r"^Tested with: (.*)\.$", changelog, re.MULTILINE)
    assert tested, "CHANGELOG.md says what it was tested with"
    python = re.search(r'^requires-python = "(.*)"', project, re.MULTILINE)
    assert python
    rows = [("Python", python[1])]
    block = re.search(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert block
    for line in block[1].splitlines():
        found = re.match(r'\s*"([\w.-]+)([^";]*)', line)
        if found:
            rows.append((found[1], found[2].strip() or "any"))
    table = "\n".join(f"| {name} | {wanted.replace(',', ', ')} |" for name, wanted in rows)
    drop_in = (ROOT / "flashnorm" / "integrations" / "flashinfer.py").read_text(encoding="utf-8")
    interface = re.search(r'^INTERFACE = "(.*)"', drop_in, re.MULTILINE)
    assert interface
    head = "# Supported versions\n\n| what | accepted |\n|---|---|\n"
    return (
        f"{head}{table}\n\nThis version was tested with {tested[1]}.\n\n"
        "| route | needs |\n|---|---|\n"
        "| `cute` | an NVIDIA GPU from sm_80 on that the installed CuTe DSL can target |\n"
        "| `cuda` | an NVIDIA GPU from sm_75 on, nvcc 12.0 or newer (of a toolkit or of wheels) and a host compiler |\n"
        "| `cpu` | x86-64 with AVX2 and FMA, or AArch64; g++ or clang++ with C++17 |\n"
        "| `torch` | PyTorch alone |\n\n"
        "| interface of | version |\n|---|---|\n"
        f"| FlashInfer's norms (`flashnorm.integrations.flashinfer`) | {interface[1]} |\n"
        "| Liger-Kernel's norms (`flashnorm.nn`, `flashnorm.functional`) | 0.8.2 |\n"
        "| Hugging Face transformers (`patch`) | 4.50 and newer |\n"
        "| vLLM, SGLang | stand-ins of their plugin interfaces; no release is tested |\n\n"
        "What a machine lacks of all that is named by `python -m flashnorm doctor`.\n"
    )


def on_files(files: Any, config: Any) -> Any:
    made = {"reference.md": reference(), "versions.md": versions()}
    made |= {f"pictures/{f.__name__}.svg": f() for f in (pictures.nibbles, pictures.tile, pictures.columns)}
    for name, ops in PLOTS.items():
        rows = pictures.load(name)["rows"]
        made |= {f"pictures/{op.replace('/', '_')}.svg": pictures.bandwidth(rows, op) for op in ops}
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_content(text: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw by themselves."""

    def draw(found: re.Match[str]) -> str:
        display = "block" if found[1] == "div" else "inline"
        return str(convert(html.unescape(found[2]).strip(), display=display))

    return _FORMULA.sub(draw, text)
