"""Texts that act on a terminal or a page which does not escape them, and run folders full of them."""

import json
from pathlib import Path

import yaml

from tests.unit.run_views.folders import launcher_line, log_line, png

_SCRIPTS = (
    "<script>alert(1)</script>", "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>", "<svg/onload=alert(1)>", "<body onload=alert(1)>", "<iframe src=javascript:alert(1)>",
    "\"><script>alert(1)</script>", "'><script>alert(1)</script>", "\" onmouseover=\"alert(1)",
    "' onfocus='alert(1)' autofocus='",
    "javascript:alert(1)", "<a href=javascript:alert(1)>x</a>", "</style><script>alert(1)</script>",
    "</title><script>alert(1)</script>", "</textarea><script>alert(1)</script>", "<!--<script>alert(1)//-->",
    "--><script>alert(1)</script>", "]]><script>alert(1)</script>", "<![CDATA[<script>alert(1)</script>]]>",
    "<details open ontoggle=alert(1)>", "<video><source onerror=alert(1)>",
    "<math><mtext></mtext><img src=x onerror=alert(1)>",
    "<link rel=stylesheet href=http://attacker.invalid/x.css>", "<img src=http://attacker.invalid/x.png>",
    "<meta http-equiv=refresh content='0;url=http://attacker.invalid'>", "<base href=http://attacker.invalid>",
    "<form action=http://attacker.invalid><input autofocus>", "<object data=http://attacker.invalid>",
    "<embed src=http://attacker.invalid>",
    "url(http://attacker.invalid/x)", "@import 'http://attacker.invalid/x.css';", "expression(alert(1))",
    "{{7*7}}${alert(1)}#{alert(1)}", "%3Cscript%3Ealert(1)%3C/script%3E", "&lt;script&gt;alert(1)&lt;/script&gt;",
    "\\u003cscript\\u003ealert(1)\\u003c/script\\u003e", "<scr\x00ipt>alert(1)</script>", "<ScRiPt>alert(1)</sCrIpT>",
    "<script\n>alert(1)</script\n>", "＜script＞alert(1)＜/script＞", "__proto__", "constructor", "toString",
)  # fmt: skip
_CONTROLS = (
    "\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]8;;http://attacker.invalid\x07link\x1b]8;;\x07",
    "\x9b31m", "a\rb\x08\x08c",
    "\u202egnp.exe", "\u2066x\u2069\u2028y\u2029", "[bold red]x[/] [link=http://attacker.invalid]y[/link]",
    "\ud800half", "\x00\x7f",
    "x" * 20_000, "日本語" * 400, "🏳️‍🌈" * 200,
)  # fmt: skip
HOSTILE = (*_SCRIPTS, *_CONTROLS)


def poison(run: Path, text: str) -> Path:
    """Write a text into all places of a run folder that hold a text."""
    values = {
        "recipe": text, "epochs": 3, "optim": {"lr": 0.1, text: text}, "model": {"name": text}, "data": {"root": text},
    }  # fmt: skip
    try:
        (run / "config.yaml").write_text(yaml.safe_dump(values, allow_unicode=True))
    except UnicodeEncodeError:
        (run / "config.yaml").write_text("recipe: x\nepochs: 3\n")
    world = {"size": 2, "from_step": 0, "environment": {text: text}, "code": {text: text}}
    environment = {
        "name": text, "python": text, "commit": text, "command": [text, text], "world": {"size": 2, "host": text},
    }  # fmt: skip
    (run / "environment.json").write_text(json.dumps({**environment, "worlds": [world]}))
    result = json.loads((run / "result.json").read_text())
    result |= {"weights_sha256": text, "chain": text, "root": text, "worlds": [world], "name": text}
    result["metrics"][text], result["best"]["metric"] = 0.5, text
    (run / "result.json").write_text(json.dumps(result))
    (run / "dataset_info.json").write_text(json.dumps({"classes": [text, text]}))
    data = {"predicate": {"buildDefinition": {"internalParameters": {"data": {text: text}}}}}
    (run / "provenance.json").write_text(json.dumps(data))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({**each, text: 1.0, f"top1/{text}": 0.5}) for each in records]
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    plain = text.encode("utf-8", "replace").decode()
    (run / "logs/launcher.log").write_text(launcher_line(5, f"launch error: {plain}\n  cause {plain}"))
    warning = log_line(6, "WARNING", plain) + log_line(7, "ERROR", f"ended by X\n{plain}")
    (run / "logs/rank-0.log").write_text((run / "logs/rank-0.log").read_text() + warning)
    (run / "pictures").mkdir(exist_ok=True)
    name = plain.replace("/", "_").replace("\x00", "")[:60].encode()[:200].decode(errors="ignore")
    (run / "pictures" / f"{name}.png").write_bytes(png())
    return run
