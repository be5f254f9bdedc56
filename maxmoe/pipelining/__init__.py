"""Pipeline stages: a model whose blocks are cut over the mesh axis `stage`."""

from maxmoe.pipelining.pipeline import Pipeline, PipelineOutput, pipeline

__all__ = ["Pipeline", "PipelineOutput", "pipeline"]
