"""What the site has, and in which order. A page of docs/ that no section lists fails the build."""

from __future__ import annotations

import re
from pathlib import Path

# Pages that are files outside docs/.
STAGED = {
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "recipes/mnist.md": "src/samebits/recipes/mnist/README.md",
    "recipes/classify.md": "src/samebits/recipes/classify/README.md",
    "recipes/text.md": "src/samebits/recipes/text/README.md",
    "recipes/pose.md": "src/samebits/recipes/pose/README.md",
    "recipes/segment.md": "src/samebits/recipes/segment/README.md",
}
# Links to these lead to a page of the site.
FOLDERS = {
    "README.md": "index.md",
    "README.zh-CN.md": "zh-CN/index.md",
    "docs/adr": "adr/README.md",
    **{path.removesuffix("/README.md"): page for page, path in STAGED.items() if page.startswith("recipes/")},
}
# Pages that generate.py and `write_sections` write are in docs/ too, with a line for readers of the repository.

# Section page: (title, its first paragraph, the pages that it lists).
SECTIONS: dict[str, tuple[str, str, list[str]]] = {
    "guides.md": (
        "Guides",
        "One page for each job.",
        [
            "own-images",
            "segment",
            "own-model",
            "data",
            "lightning",
            "notebooks",
            "own-loop",
            "accelerate",
            "transformers",
            "resume",
            "run-folder",
            "runs",
            "trackers",
            "trust",
            "diff",
            "two-machines",
            "slurm",
            "launchers",
            "containers",
            "export",
            "publish",
            "debug-a-hang",
            "faults",
            "recovery",
            "find",
            "sweeps",
            "memory",
            "speed",
            "simulate",
            "kernels",
            "clusters",
            *(f"recipes/{name}" for name in ("mnist", "classify", "text", "pose", "segment")),
        ],
    ),
    "reference/index.md": (
        "Reference",
        "Generated from the code of this version.",
        ["reference/cli", "reference/settings", "reference/api"],
    ),
    "developers.md": (
        "Development",
        "For those who change Samebits.",
        ["contributing", "tour", "adr/README", "results", "security", "changelog"],
    ),
}
ROOT = ["getting-started", "guides", "reference/index", "developers", "zh-CN/index"]


def write_sections(out: Path) -> None:
    """Write the section pages, and append the tables of contents to the others."""
    sections = dict(SECTIONS)
    decisions = sorted(path.stem for path in (out / "adr").glob("[0-9]*.md"))
    chinese = {path.stem for path in (out / "zh-CN").glob("*.md")} - {"index"}
    in_order = [name for name in ("getting-started", *SECTIONS["guides.md"][2]) if name in chinese]
    intro = "Samebits 在任意多个进程、GPU 和机器上训练 PyTorch 视觉模型，并且每次得到同一个模型。其他页面只有英文版。"
    sections["zh-CN/index.md"] = ("中文文档", intro, [f"zh-CN/{name}" for name in in_order])
    for name, (title, intro, pages) in sections.items():
        lines = [f"# {title}\n", f"{intro}\n"]
        for page in pages:
            text = (out / f"{page}.md").read_text(encoding="utf-8") if (out / f"{page}.md").exists() else ""
            lines.append(f"- [{heading(text)}](/{page}.md){summary(text, page)}")
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([*lines, toctree(pages)]), encoding="utf-8")
    with (out / "index.md").open("a", encoding="utf-8") as file:
        file.write(toctree(ROOT))
    with (out / "adr/README.md").open("a", encoding="utf-8") as file:
        file.write(toctree([f"adr/{name}" for name in decisions]))
    settings = [path.stem for path in sorted((out / "reference").glob("settings-*.md"))]
    with (out / "reference/settings.md").open("a", encoding="utf-8") as file:
        file.write(toctree([f"reference/{name}" for name in settings]))


def toctree(pages: list[str]) -> str:
    """A table of contents that only the navigation shows."""
    return "\n".join(["\n", "```{toctree}", ":hidden:", *(f"/{page}" for page in pages), "```", ""])


def heading(text: str) -> str:
    """A page's title."""
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return found.group(1) if found else "?"


def summary(text: str, page: str) -> str:
    """A page's first sentence, without links; "" for the changelog."""
    if page == "changelog":
        return ""
    text = re.sub(r"^(# .+\n\n)\[English\]\(.*\)\n\n", r"\1", text)
    found = re.search(r"^# .+\n\n((?!\[|`|#|!).+(?:\n.+)*)", text, re.MULTILINE)
    if not found:
        return ""
    paragraph = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(found.group(1).split()))
    sentence = re.match(r".+?(?:[.。](?=\s|$)|。|$)", paragraph)
    return f"<br>{sentence.group(0)}" if sentence else ""
