"""Learning rates and updates compared with LeRobot, diffusers and PyTorch."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmodels.errors import ConfigError
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.config import PolicyConfig
from jaxmodels.training import OptimizerConfig, SchedulerConfig, optimizer_preset, scheduler_preset
from jaxmodels.training.optimizers import make_optimizer
from tests.testing.models import small_config
from tests.testing.peers import require_peers

STEPS = (0, 1, 4, 5, 9, 10, 25, 49, 50, 99, 110)


@pytest.mark.parametrize(
    ("steps", "expected"),
    # CosineDecayWithWarmupSchedulerConfig(10, 100, 1e-3, 1e-4) of lerobot 0.4.4, evaluated at STEPS.
    [
        (200, (0.090909, 0.181818, 0.454545, 0.545455, 0.909091, 0.977975, 0.868198, 0.564135, 0.55, 0.100222, 0.1)),
        (50, (0.166667, 0.333333, 0.833333, 0.977975, 0.929948, 0.914058, 0.55, 0.100888, 0.1, 0.1, 0.1)),
    ],
)
def test_cosine_decay_with_warmup_equals_lerobot(steps: int, expected: tuple[float, ...]) -> None:
    schedule = SchedulerConfig("cosine_decay_with_warmup", "cosine", 10, 100, 1e-3, 1e-4)
    np.testing.assert_allclose([schedule.factor(step, steps) for step in STEPS], expected, atol=1e-6)


@pytest.mark.needs_peers
@pytest.mark.parametrize("name", ["constant", "constant_with_warmup", "linear", "cosine"])
def test_other_schedules_equal_diffusers(name: str) -> None:
    require_peers("torch", "diffusers")
    import torch
    from diffusers import optimization

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = optimization.get_scheduler(name, optimizer, num_warmup_steps=6, num_training_steps=20)
    schedule = SchedulerConfig("diffuser", name, 6)
    for step in range(20):
        np.testing.assert_allclose(schedule.factor(step, 20), theirs.get_last_lr()[0], atol=1e-6, err_msg=str(step))
        optimizer.step()
        theirs.step()


@pytest.mark.needs_peers
@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_updates_equal_pytorch_with_a_separate_backbone_rate(kind: str) -> None:
    require_peers("torch")
    import torch

    random = np.random.default_rng(0)
    start = {name: random.standard_normal((3, 4)).astype(np.float32) for name in ("head.kernel", "backbone.kernel")}
    targets = {name: random.standard_normal((3, 4)).astype(np.float32) for name in start}
    config = OptimizerConfig(kind, 1e-2, 3e-3, 0.1, (0.9, 0.95), 1e-8, 2.0)
    schedule = SchedulerConfig("diffuser", "linear", 3)

    theirs = {name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, array in start.items()}
    rates = {"head.kernel": 1e-2, "backbone.kernel": 3e-3}
    groups = [{"params": [theirs[name]], "lr": rate} for name, rate in rates.items()]
    made = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[kind]
    optimizer = made(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(schedule.factor(step, 20)), -1)
    rule = make_optimizer(config, schedule, 20, start)
    ours = {name: jnp.asarray(array) for name, array in start.items()}
    memory = rule.init(ours)
    for _ in range(20):
        optimizer.zero_grad()
        sum((4 * (theirs[name] - torch.from_numpy(targets[name])) ** 2).sum() for name in start).backward()
        torch.nn.utils.clip_grad_norm_(theirs.values(), 2.0)
        optimizer.step()
        scheduler.step()
        slope = {name: 8 * (array - targets[name]) for name, array in ours.items()}
        updates, memory = rule.update(slope, memory, ours)
        ours = optax.apply_updates(ours, updates)
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name].detach().numpy(), atol=2e-6, err_msg=name)
        assert np.abs(np.asarray(array) - start[name]).max() > 1e-3


def test_only_matrices_decay_on_request() -> None:
    parameters = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    still = {name: jnp.zeros_like(array) for name, array in parameters.items()}
    for decayed, bias in (("matrices", 0.0), ("all", -0.1)):
        rule = make_optimizer(OptimizerConfig(lr=1.0, weight_decay=0.1, decayed=decayed), SchedulerConfig(), 5, still)
        updates, _ = rule.update(still, rule.init(parameters), parameters)
        np.testing.assert_allclose(updates["kernel"], -0.1, rtol=1e-6)
        np.testing.assert_allclose(updates["bias"], bias, rtol=1e-6)


def test_config_of_a_policy_sets_its_training_defaults() -> None:
    policy: ActConfig = small_config(optimizer_lr=2e-4, optimizer_lr_backbone=1e-6, optimizer_weight_decay=0.3)
    assert optimizer_preset(policy) == OptimizerConfig("adamw", 2e-4, 1e-6, 0.3)
    assert scheduler_preset(policy) == SchedulerConfig()

    class Warm(PolicyConfig):
        scheduler_name, scheduler_warmup_steps = "cosine", 500

        def __post_init__(self) -> None:
            """Check nothing, because this config has no features."""

    assert scheduler_preset(Warm()) == SchedulerConfig("diffuser", "cosine", 500)
    Warm.scheduler_name = "constant"
    assert scheduler_preset(Warm()) == SchedulerConfig("diffuser", "constant_with_warmup", 500)
    with pytest.raises(ConfigError, match=r"type is 'cosine'.*num_warmup_steps is -1.*decay_lr is 2"):
        SchedulerConfig("cosine", "cosine", -1, None, 1.0, 2.0)
