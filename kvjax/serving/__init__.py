# SPDX-License-Identifier: Apache-2.0
"""Loops over a model and a cache: single steps, decoding on the device, generation, and continuous batching."""

from kvjax._compile import compiler_options
from kvjax.model import Model
from kvjax.serving.capacity import worst_step
from kvjax.serving.constraints import Constraints, chain, constrain
from kvjax.serving.decode import Decoded, Rows, decode, decode_log, step
from kvjax.serving.engine import Engine, QueueFull
from kvjax.serving.generation import Progress, generate, run_batch, stream
from kvjax.serving.handle import EngineError, Handle, Times
from kvjax.serving.interrupt import GenerationInterrupted
from kvjax.serving.options import Scheduler
from kvjax.serving.park import Parked, park, unpark
from kvjax.serving.penalties import Penalties, penalize
from kvjax.serving.replicas import Replicas, Route
from kvjax.serving.request import Request, RunOptions, make_requests
from kvjax.serving.requests import Finish, Output, Requests, Serving, init_serving, results
from kvjax.serving.rollout import Rollout, rollout, rollout_log
from kvjax.serving.routing import choose_replica
from kvjax.serving.sampling import Sampling
from kvjax.serving.score import score
from kvjax.serving.serve import serve, serve_step, what_if
from kvjax.serving.show import show_requests, show_step
from kvjax.serving.speculation import Drafter, Drafting, Drafts
from kvjax.serving.speculation_cost import measured_pass_cost
from kvjax.serving.speculation_models import draft_model, early_exit
from kvjax.serving.speculation_ngram import ngram
from kvjax.serving.submit import cancel, drain, submit
from kvjax.verbs.free_rows import free_rows

__all__ = [
    "Constraints", "Decoded", "Drafter", "Drafting", "Drafts", "Engine", "EngineError", "Finish",
    "GenerationInterrupted", "Handle", "Model", "Output", "Parked", "Penalties", "Progress", "QueueFull", "Replicas",
    "Request", "Requests", "Rollout", "Route", "Rows", "RunOptions", "Sampling", "Scheduler", "Serving", "Times",
    "cancel", "chain", "choose_replica", "compiler_options", "constrain", "decode", "decode_log", "draft_model",
    "drain", "early_exit", "free_rows", "generate", "init_serving", "make_requests", "measured_pass_cost", "ngram",
    "park", "penalize", "results", "rollout", "rollout_log", "run_batch", "score", "serve", "serve_step",
    "show_requests", "show_step", "step", "stream", "submit", "unpark", "what_if", "worst_step",
]  # fmt: skip
