"""Continuous delivery of policies: from a push to a robot that acts by it, or to a record that says why not."""

from hooks.deployment.deployments import Deployments
from hooks.deployment.folder_source import FolderSource
from hooks.deployment.hub_source import HubLimits, HubSource
from hooks.deployment.journal import EVENTS
from hooks.deployment.quarantine import Quarantine, Quarantined
from hooks.deployment.records import RESULTS, Record, Stage
from hooks.deployment.rollout import Follower, Rollout, Verdict
from hooks.deployment.settings import DeploymentSettings
from hooks.deployment.source import Source
from hooks.deployment.trigger import Reading, Target

__all__ = [
    "EVENTS",
    "RESULTS",
    "DeploymentSettings",
    "Deployments",
    "FolderSource",
    "Follower",
    "HubLimits",
    "HubSource",
    "Quarantine",
    "Quarantined",
    "Reading",
    "Record",
    "Rollout",
    "Source",
    "Stage",
    "Target",
    "Verdict",
]
