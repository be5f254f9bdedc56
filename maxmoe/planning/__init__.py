"""Costs of a plan, without a cluster: shardings, memory, communication and time of a step, and a search."""

from maxmoe.planning.communication import Traffic
from maxmoe.planning.device import Device, Link
from maxmoe.planning.estimate import Estimate, estimate
from maxmoe.planning.explain import Explanation, explain
from maxmoe.planning.memory import StateDtypes
from maxmoe.planning.predict import PredictedPlan, predict
from maxmoe.planning.search import search
from maxmoe.planning.search_result import NoPlanFits, SearchResult

__all__ = [
    "Device",
    "Estimate",
    "Explanation",
    "Link",
    "NoPlanFits",
    "PredictedPlan",
    "SearchResult",
    "StateDtypes",
    "Traffic",
    "estimate",
    "explain",
    "predict",
    "search",
]
