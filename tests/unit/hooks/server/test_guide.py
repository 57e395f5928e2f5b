"""Scripts of docs/operate/webhooks.md answer deliveries as the guide says; tests/test_guides.py runs its commands."""

import re
from pathlib import Path

from hooks.payload import sample
from tests.unit.hooks.server.conftest import ask, end

GUIDE = Path(__file__).parents[4] / "docs" / "operate" / "webhooks.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]


def test_the_first_script_serves_both_of_its_endpoints(script):
    with script(PYTHON[0]) as (process, url):
        response = ask(f"{url}/webhooks/trigger_training", sample(repo_type="dataset", repo="lab/cubes", sha="c0ffee"))
        assert response.json() == {"train": "lab/cubes", "at": "c0ffee"}
        assert ask(f"{url}/webhooks/robots/arm", sample(repo="lab/arm", sha="c0ffee")).json() == "c0ffee"
        code, errors = end(process)
        assert (code, "Traceback" in errors) == (0, False)


def test_options_of_the_registry_are_settings():
    from service.settings import FIELDS

    for option in re.findall(r"--(registry[\w-]*)", GUIDE.read_text()):
        assert option.replace("-", "_") in FIELDS, option
