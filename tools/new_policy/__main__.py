"""Write the files of a new policy type: ``python -m tools.new_policy NAME``.

The files are copies of those in ``template``, which are a working policy type with the name ``example_policy``.
"""

import argparse
import keyword
import re
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = Path(__file__).parent / "template"
POLICIES = "jaxmodels/policies"
TESTS = "tests/unit/jaxmodels/training"
MAX_LENGTH = 24
NEXT_STEPS = """
Next steps:
1. Run its test: make test ARGS={test}
2. Write the config, the network and the table of weights in {policy}.
3. Describe the type in docs/policies/policies.md. The error of tests/unit/jaxmodels/test_ranges.py
   lists the rows that the table of ranges must have.
"""


def write_policy_type(name: str, root: Path = ROOT) -> list[Path]:
    """Write the files of a policy type into a checkout, and return their paths.

    Args:
        name: snake case, for example ``wave_policy``.
        root: folder of the checkout.

    Raises:
        ValueError: the name is not snake case, is too long, or is taken.
        OSError: a file cannot be written; the files before it are removed.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name) or len(name) > MAX_LENGTH:
        raise ValueError(
            f"the name is {name!r}; wanted snake case of at most {MAX_LENGTH} characters, for example wave_policy"
        )
    files = {
        root / POLICIES / name / "__init__.py": "__init__.py",
        root / POLICIES / name / "policy.py": "policy.py",
        root / TESTS / f"test_{name}.py": "round_trip.py",
    }
    module = root / POLICIES / f"{name}.py"
    if taken := [path for path in (*files, module) if path.exists()]:
        raise ValueError(f"the name {name!r} is taken: {taken[0].relative_to(root)} exists; wanted another name")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    try:
        for path, source in files.items():
            text = (TEMPLATE / source).read_text().replace("example_policy", name).replace("ExamplePolicy", class_name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except BaseException:
        for path in files:
            with suppress(OSError):
                path.unlink()
        with suppress(OSError):
            (root / POLICIES / name).rmdir()
        raise
    return list(files)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.new_policy", description="Write a new policy type.")
    parser.add_argument("name", help="name of the type in snake case, for example wave_policy")
    name = parser.parse_args().name
    try:
        files = write_policy_type(name)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename or 'the files'} cannot be written ({error.strerror}); nothing was kept")
    *_, policy, test = (path.relative_to(ROOT) for path in files)
    print("\n".join(f"wrote {path.relative_to(ROOT)}" for path in files))
    print(NEXT_STEPS.format(policy=policy, test=test), end="")


if __name__ == "__main__":
    main()
