"""Engines per device, and the environment of their processes."""

import pytest

from service.engines.launch import make_environment
from service.engines.local_engines import EnginePlan, plan_engines


@pytest.mark.parametrize(
    ("devices", "together", "plans"),
    [
        ((), False, [EnginePlan("")]),
        (("cpu:0",), False, [EnginePlan("cpu:0", ("cpu:0",))]),
        (
            ("cpu:0", "cpu:0"),
            False,
            [EnginePlan(name, ("cpu:0",), variables={"NPROC": "3"}) for name in ("cpu:0", "cpu:0#2")],
        ),
        (("tpu:0", "tpu:1"), False, [EnginePlan("tpu", ("tpu:0", "tpu:1"))]),
        (("cpu:0", "cpu:1"), True, [EnginePlan("cpu:0+cpu:1", ("cpu:0", "cpu:1"), True)]),
        (
            ("cuda:0", "cuda:1"),
            False,
            [EnginePlan(f"cuda:{n}", ("cuda:0",), variables={"CUDA_VISIBLE_DEVICES": f"{n}"}) for n in range(2)],
        ),
    ],
)
def test_each_device_has_an_engine(
    devices: tuple[str, ...], together: bool, plans: list[EnginePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    monkeypatch.delenv("NPROC", raising=False)
    assert plan_engines(devices, together=together) == plans


def test_engines_of_one_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    plans = plan_engines(("gpu:1", "gpu:1"))
    assert [plan.name for plan in plans] == ["gpu:1", "gpu:1#2"]
    for plan in plans:
        assert plan.devices == ("gpu:0",)
        assert plan.variables == {"CUDA_VISIBLE_DEVICES": "7", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"}


def test_engines_get_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "ROBOJAX_DATABASE", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "API_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("ROBOJAX_COMPILE_CACHE", "/cache")
    monkeypatch.setenv("XLA_FLAGS", "--flag")
    found = make_environment({"MORE": "1"})
    assert "secret" not in found.values()
    assert (found["ROBOJAX_COMPILE_CACHE"], found["XLA_FLAGS"], found["MORE"]) == ("/cache", "--flag", "1")
