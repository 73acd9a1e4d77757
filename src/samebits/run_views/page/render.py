"""Fill the templates of pages. Texts of strangers are escaped where a template writes them."""

import base64
import hashlib
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined  # a requirement of torch
from markupsafe import Markup

from samebits.errors import printable
from samebits.report.format import clock, duration, metric_name, metric_value
from samebits.run_views.files import plain_text
from samebits.run_views.table import cut, when


def render(template: str, **values: Any) -> str:
    """Return a template of this folder with values filled in.

    Raises:
        jinja2.UndefinedError: The template uses a value that is not given.
    """
    return _environment().get_template(f"{template}.j2").render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("samebits.run_views.page", ""),
        autoescape=True,
        # HTML has no form for control characters; changes of the text direction could hide a part of a line.
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelled name is an error, not an empty text.
        undefined=StrictUndefined,
    )
    # NaN is no JSON: the browser would refuse all data of the page.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    used = (clock, cut, duration, metric_name, metric_value, plain_text, when)
    environment.filters |= {each.__name__: each for each in used}
    environment.filters |= {
        "grouped": lambda number: f"{number:,}",
        "at_minute": lambda seconds: f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}",
        "at_second": lambda seconds: f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}",
        "sha256_base64": lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode(),
    }
    return environment
