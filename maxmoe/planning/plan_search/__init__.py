"""Search for the fastest plan of a model on a number of ranks, without a cluster."""

from maxmoe.planning.plan_search.fastest import search
from maxmoe.planning.plan_search.found_plan import FoundPlan
from maxmoe.planning.plan_search.prediction import predict
from maxmoe.planning.plan_search.result import NoPlanFits, SearchResult

__all__ = ["FoundPlan", "NoPlanFits", "SearchResult", "predict", "search"]
