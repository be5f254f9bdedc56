"""Costs of a plan, without a cluster: shardings, memory, communication and time of a step, and a search."""

from maxmoe.planning.estimate import Estimate, estimate
from maxmoe.planning.explain import Explanation, explain
from maxmoe.planning.plan_search.fastest import search
from maxmoe.planning.plan_search.predicted_plan import PredictedPlan
from maxmoe.planning.plan_search.prediction import predict
from maxmoe.planning.plan_search.result import NoPlanFits, SearchResult
from maxmoe.planning.state_dtypes import StateDtypes
from maxmoe.planning.time_model.device import Device, Link
from maxmoe.planning.traffic import Traffic

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
