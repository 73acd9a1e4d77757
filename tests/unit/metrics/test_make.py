"""The metric that the documentation shows."""

import json
import math
import re
from typing import Any

import torch

from samebits.data.samples import Batch
from samebits.metrics.make import make_metric
from tests.runs import ROOT


def test_the_metric_of_the_documentation_is_exact_in_any_order() -> None:
    page = (ROOT / "docs" / "own-model.md").read_text(encoding="utf-8")
    code = re.search(r"## The metric\n.*?```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"math": math}
    exec(code[1], names)
    outputs = torch.randn(30, generator=torch.Generator().manual_seed(0)) * 1000
    results = []
    for order in (range(3), reversed(range(3))):
        total = make_metric(names["MeanError"])
        for place in order:
            counted = make_metric(names["MeanError"])
            rows = torch.arange(place * 10, place * 10 + 10)
            counted.add(outputs[rows], Batch(None, torch.zeros(10), rows))
            total.merge(json.loads(json.dumps(counted.state())))
        results.append((total.num_samples, total.result()))
    assert results[0] == results[1]
    assert results[0][0] == 30
