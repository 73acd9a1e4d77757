"""What the site has, and in which order. A page of docs/ that no section lists fails the build."""

from __future__ import annotations

import posixpath
import re
from itertools import chain
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
# A line of each page that generate.py writes; they are committed.
GENERATED = "<!-- Generated: edit the code or docs/site, then run `make reference` and commit. -->"

# Section page: (title, its first paragraph, the pages that it lists: by the heading of their group, "" for none).
SECTIONS: dict[str, tuple[str, str, dict[str, list[str]]]] = {
    "guides.md": (
        "Guides",
        "One page for each job.",
        {
            "Train on your data": [
                "own-images",
                "segment",
                "text",
                "pose",
                "backbones",
                "own-model",
                "data",
                "notebooks",
            ],
            "Make your training script exact": [
                "launch",
                "own-loop",
                "detection",
                "lightning",
                "accelerate",
                "transformers",
            ],
            "Look after runs": ["resume", "run-folder", "runs", "trackers", "sweeps"],
            "Check and share a model": [
                "check-compare-debug",
                "trust",
                "training-statement",
                "diff",
                "export",
                "publish",
            ],
            "Several machines": ["launchers", "slurm", "containers", "clusters"],
            "When something fails": ["debug-a-hang", "faults"],
            "Memory and speed": ["memory", "speed", "portable"],
            "Versions and other tools": ["versions", "comparison"],
            "Recipes": [f"recipes/{name}" for name in ("mnist", "classify", "text", "pose", "segment")],
        },
    ),
    "reference/index.md": (
        "Reference",
        "Generated from the code.",
        {"": ["reference/cli", "reference/settings", "reference/api"]},
    ),
    "developers.md": (
        "Development",
        "For those who change Samebits.",
        {"": ["contributing", "tour", "adr/README", "results", "security", "changelog"]},
    ),
}
ROOT = ["getting-started", "guides", "reference/index", "developers", "zh-CN/index"]


def section_pages(docs: Path, generated: dict[str, str]) -> list[tuple[str, str]]:
    """The pages that list others, with the first sentence of each.

    Args:
        docs: The folder docs/.
        generated: Pages that are generated with these, by name.
    """
    found = []
    for name, (title, intro, groups) in SECTIONS.items():
        lines = [f"# {title}\n", f"{intro}\n"]
        for group, pages in groups.items():
            if group:
                lines.append(f"## {group}\n")
            for page in pages:
                file = docs.parent / STAGED[f"{page}.md"] if f"{page}.md" in STAGED else docs / f"{page}.md"
                text = generated.get(f"{page}.md") or file.read_text(encoding="utf-8")
                target = posixpath.relpath(file.as_posix(), (docs / name).parent.as_posix())
                lines.append(f"- [{heading(text)}]({target}){summary(text, page)}")
            lines.append("")
        found.append((name, "\n".join(lines)))
    return found


def write_sections(out: Path) -> None:
    """Append the tables of contents to the pages of the site, and write the list of the Chinese ones."""
    chinese = {path.stem for path in (out / "zh-CN").glob("*.md")} - {"index"}
    in_order = [name for name in ("getting-started", *chain(*SECTIONS["guides.md"][2].values())) if name in chinese]
    lines = [
        "# 中文文档\n",
        "Samebits 在任意多个进程、GPU 和机器上训练 PyTorch 视觉模型，并且每次得到同一个模型。其他页面只有英文版。\n",
    ]
    for name in in_order:
        text = (out / f"zh-CN/{name}.md").read_text(encoding="utf-8")
        lines.append(f"- [{heading(text)}]({name}.md){summary(text, name)}")
    (out / "zh-CN/index.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    contents = {name: groups for name, (_, _, groups) in SECTIONS.items()}
    contents["index.md"] = {"": ROOT}
    contents["zh-CN/index.md"] = {"": [f"zh-CN/{name}" for name in in_order]}
    contents["adr/README.md"] = {"": [f"adr/{path.stem}" for path in sorted((out / "adr").glob("[0-9]*.md"))]}
    settings = sorted((out / "reference").glob("settings-*.md"))
    contents["reference/settings.md"] = {"": [f"reference/{path.stem}" for path in settings]}
    for name, groups in contents.items():
        with (out / name).open("a", encoding="utf-8") as file:
            file.write("".join(toctree(group, pages) for group, pages in groups.items()))


def toctree(group: str, pages: list[str]) -> str:
    """A table of contents that only the navigation shows, below the name of its group."""
    options = [":hidden:", *([f":caption: {group}"] if group else [])]
    return "\n".join(["\n", "```{toctree}", *options, "", *(f"/{page}" for page in pages), "```", ""])


def heading(text: str) -> str:
    """A page's title."""
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return found.group(1) if found else "?"


def summary(text: str, page: str) -> str:
    """A page's first sentence, without links; "" for the changelog."""
    if page == "changelog":
        return ""
    text = text.replace(f"{GENERATED}\n\n", "")
    text = re.sub(r"^(# .+\n\n)\[English\]\(.*\)\n\n", r"\1", text)
    found = re.search(r"^# .+\n\n((?!\[|`|#|!).+(?:\n.+)*)", text, re.MULTILINE)
    if not found:
        return ""
    paragraph = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(found.group(1).split()))
    sentence = re.match(r".+?(?:[.。](?=\s|$)|。|$)", paragraph)
    return f"<br>{sentence.group(0)}" if sentence else ""
