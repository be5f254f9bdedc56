"""Pipeline stages: a model whose blocks are cut over the mesh axis `stage`."""

from maxmoe.pipelining.pipeline import Pipeline, pipeline
from maxmoe.pipelining.step_statistics import PipelineOutput

__all__ = ["Pipeline", "PipelineOutput", "pipeline"]
