"""The training loop: schedules by the clock, steps, log, checkpoints, closing evaluation."""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from tools.demo_model.architecture import DemoConfig, hugging_face_config
from tools.demo_model.checkpoint import write_checkpoint
from tools.demo_model.feed import EvaluationBatches, Feed, FeedPlan
from tools.demo_model.network import (
    OPTION_HEAD,
    Losses,
    LossWeights,
    Network,
    Parameters,
    make_parameters,
)
from tools.demo_model.optimizer import Optimizer
from tools.demo_model.rows import Batch

Tensor = Any

WARM_UP_STEPS = 60
FLAT_UNTIL, LAST_FACTOR = 0.5, 0.03  # of the learning rates
SPARSE_FROM = 0.6  # from here on attention reads only the blocks that the indexer chooses
QUANTIZED_FROM = 0.88  # from here on experts and n-gram table are seen as Q4_0 stores them
CHECKPOINTS_AT = (0.75, 0.95)  # earlier checkpoints, in case the end is never reached
CLOSING_S = 25.0  # kept back for the last checkpoint and the evaluation
LOG_STEPS = 25
PROFILED_STEP, SPEED_STEP = 30, 120  # when the time of two steps is taken apart, and judged
EXACT_ENDS = ("mlp.gate.weight", "A_log", "dt_bias", "norm.weight", "layernorm.weight",
              "norm_key.weight", "norm_query.weight", "norm_conv.weight")  # fmt: skip
Q4_ENDS = ("experts.gate_up_proj", "experts.down_proj", "ngram_embedding.weight")
Q4_SCALES = (1.0, 0.92, 0.84)  # the exporter searches finer
TRIAL = DemoConfig(
    hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=32, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    hc_count=2, hc_lowrank=16, ngram_size=3, heads_per_ngram=1, ngram_vocab_size_base=512,
    indexer_head_dim=32, indexer_budget=64,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunPlan:
    """How long a run lasts and where."""

    seconds: float
    device: str
    compiled: bool
    least_speed: float = 0.0  # tokens per second below which a run is not worth its time
    trial: bool = False  # a much smaller model, for trying the code out

    @property
    def dtype(self) -> Any:
        """Return the type that the forward pass computes in."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32


def rate_factor(step: int, progress: float) -> float:
    """Return the factor of all learning rates: warm up, stay, fall linearly."""
    rising = min(1.0, (step + 1) / WARM_UP_STEPS)
    falling = min(1.0, (1 - progress) / (1 - FLAT_UNTIL))
    return rising * (LAST_FACTOR + (1 - LAST_FACTOR) * max(0.0, falling))


def fake_q4(values: Tensor) -> Tensor:
    """Round to what Q4_0 stores; the gradient passes straight through."""
    blocks = values.detach().unflatten(-1, (-1, 32))
    peak = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    best, error = blocks, torch.full_like(peak, float("inf"))
    for step in Q4_SCALES:
        scale = (peak / -8 * step).half().float()
        codes = (blocks / torch.where(scale == 0, 1.0, scale)).round().clamp(-8, 7)
        stored = codes * scale
        missed = (stored - blocks).square().sum(-1, keepdim=True)
        best = torch.where(missed < error, stored, best)
        error = torch.minimum(missed, error)
    return values + (best.flatten(-2) - values.detach())


class Run:
    """One training run; owns the parameters, the optimizer and the log."""

    def __init__(self, plan: RunPlan, feed_plan: FeedPlan, output: Path, started: float) -> None:
        self.plan, self.output, self.started = plan, output, started
        torch.set_float32_matmul_precision("high")
        if plan.device == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # slow to plan for masks that change
        self.config = TRIAL if plan.trial else DemoConfig()
        self.parameters = make_parameters(self.config, 0, plan.device)
        self.network = Network(self.config, self.parameters, feed_plan.short)
        self.quantizer: Callable[[Tensor], Tensor] = fake_q4
        if plan.compiled:
            self.network.compile_blocks()
            self.quantizer = torch.compile(fake_q4, dynamic=False)
        self.optimizer = Optimizer(self.parameters)
        self.log = (output / "log.jsonl").open("w")
        self.tokens = 0
        # Since the last line of the log: families of the answers, their hits and losses.
        self.answered: list[tuple[list[str], Tensor, Tensor]] = []

    def elapsed(self) -> float:
        """Return the seconds since the command started."""
        return time.monotonic() - self.started

    def write(self, **values: Any) -> None:
        """Write one line of the log, also to standard output."""
        line = json.dumps({"s": round(self.elapsed(), 1), **values})
        self.log.write(line + "\n")
        self.log.flush()
        print(line, flush=True)

    def weights(self, quantized: bool) -> Parameters:
        """Return the parameters as the forward pass uses them."""
        used = {}
        for name, parameter in self.parameters.items():
            if quantized and name.endswith(Q4_ENDS):
                parameter = self.quantizer(parameter)
            exact = name.endswith(EXACT_ENDS)
            used[name] = parameter if exact else parameter.to(self.plan.dtype)
        return used

    def tensors(self, batch: Batch) -> dict[str, Tensor]:
        """Move a batch to the device."""
        moved = {}
        for field in fields(batch):
            if field.name != "kinds":
                tensor = torch.from_numpy(getattr(batch, field.name))
                if self.plan.device == "cuda":
                    tensor = tensor.pin_memory().to("cuda", non_blocking=True)
                moved[field.name] = tensor
        return moved

    def step(self, batch: Batch, step: int, progress: float) -> tuple[Losses, Tensor]:
        """Take one optimizer step; returns the losses and the gradient norm."""
        dense = torch.tensor(progress < SPARSE_FROM, device=self.plan.device)
        weights = self.weights(progress >= QUANTIZED_FROM)
        losses = self.network.losses(weights, self.tensors(batch), dense, LossWeights())
        losses.total.backward()
        norm = self.optimizer.clip()
        self.optimizer.step(rate_factor(step, progress))
        self.tokens += batch.ids.size
        self.answered.append((batch.kinds, losses.hits.detach(), losses.missed))
        return losses, norm

    def by_family(self) -> dict[str, tuple[float, float, int]]:
        """Return mean loss, share of hits and number of answers of every family; starts anew."""
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        values = torch.stack([torch.stack(both) for _, *both in self.answered]).tolist()
        for (kinds, _, _), (hits, missed) in zip(self.answered, values, strict=True):
            for kind, hit, loss in zip(kinds, hits, missed, strict=False):
                found[kind].append((loss, hit))
        self.answered.clear()
        return {
            kind: (round(loss / len(own), 3), round(hit / len(own), 3), len(own))
            for kind, own in sorted(found.items())
            for loss, hit in [(sum(one[0] for one in own), sum(one[1] for one in own))]
        }

    def train(self, feed: Feed) -> None:
        """Step until only the closing time is left."""
        self.warm_up(feed)
        begin = self.elapsed()
        end = self.plan.seconds - CLOSING_S
        step, saved = 0, 0
        marks = (begin, self.tokens)
        while (progress := (self.elapsed() - begin) / max(1.0, end - begin)) < 1:
            feed.progress.value = progress
            batch = feed.next()
            losses, norm = self.step(batch, step, progress)
            if step % LOG_STEPS == 0:
                marks = self.report(step, progress, batch, losses, norm, marks)
            if saved < len(CHECKPOINTS_AT) and progress > CHECKPOINTS_AT[saved]:
                self.save()
                saved += 1
            step += 1
            if step == PROFILED_STEP and self.plan.device == "cuda":
                self.profile(feed, step, progress)
            if step == SPEED_STEP:
                self.check_speed(self.tokens - marks[1], self.elapsed() - marks[0])
        self.write(event="trained", steps=step, tokens=self.tokens)

    def profile(self, feed: Feed, step: int, progress: float) -> None:
        """Write where two steps spend their time to `profile.txt`; slow, so done once."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(2):
                self.step(feed.next(), step, progress)
            torch.cuda.synchronize()
        averages = profiler.key_averages()
        table = averages.table(sort_by="self_cuda_time_total", row_limit=60)
        (self.output / "profile.txt").write_text(table)

    def check_speed(self, tokens: int, seconds: float) -> None:
        """End a run that could not learn enough in its time.

        Raises:
            RuntimeError: fewer tokens per second than the plan asks for.
        """
        speed = tokens / max(1e-9, seconds)
        if speed < self.plan.least_speed:
            raise RuntimeError(
                f"{speed:.0f} tokens/s over {seconds:.0f} s, less than the "
                f"{self.plan.least_speed:.0f} asked for; see profile.txt"
            )

    def warm_up(self, feed: Feed) -> None:
        """Compile everything on one batch, whose step is undone by the learning rate of zero."""
        batch = feed.next(240.0)
        self.write(event="first batch")
        for quantized in (False, True):
            weights = self.weights(quantized)
            dense = torch.tensor(True, device=self.plan.device)
            losses = self.network.losses(weights, self.tensors(batch), dense, LossWeights())
            losses.total.backward()
            for parameter in self.parameters.values():
                parameter.grad = None
        self.write(event="compiled", loss=round(float(losses.total.detach()), 3))

    def report(
        self, step: int, progress: float, batch: Batch, losses: Losses, norm: Tensor,
        marks: tuple[float, int],
    ) -> tuple[float, int]:  # fmt: skip
        """Log a step; returns the marks from which the next speed is counted."""
        values = {
            k: round(float(v.detach()), 4) for k, v in losses._asdict().items() if v.ndim == 0
        }
        hits = float(losses.hits.sum()) / max(1.0, float(batch.valid.sum()))
        now = self.elapsed()
        speed = (self.tokens - marks[1]) / max(1e-9, now - marks[0])
        memory = torch.cuda.max_memory_allocated() / 1e9 if self.plan.device == "cuda" else 0.0
        self.write(
            step=step, progress=round(progress, 4), **values, hits=round(hits, 3),
            norm=round(float(norm), 3), tokens=self.tokens, per_s=round(speed),
            gb=round(memory, 1), families=self.by_family(),
        )  # fmt: skip
        return now, self.tokens

    def save(self) -> None:
        """Write the checkpoint; replaces an earlier one."""
        arrays = {
            name: parameter.detach().float().cpu().numpy()
            for name, parameter in self.parameters.items()
            if name != OPTION_HEAD
        }
        write_checkpoint(self.output, arrays)
        text = json.dumps(hugging_face_config(self.config), indent=1)
        (self.output / "config.json").write_text(text + "\n")

    def finish(self, evaluation: EvaluationBatches) -> None:
        """Write the last checkpoint, then evaluate it as it will be stored."""
        self.save()
        self.write(event="saved")
        prompts, texts, bytes_per_token = evaluation.take()
        metrics = self.evaluate(prompts, texts, bytes_per_token)
        (self.output / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
        self.write(event="evaluated", **metrics)
        self.log.close()

    def evaluate(
        self, prompts: list[Batch], texts: list[Batch], bytes_per_token: float
    ) -> dict[str, Any]:
        """Return the accuracy of every evaluation set and the bits per byte of held-out text.

        Gradients stay enabled: the compiled blocks would be compiled anew without them.
        """
        dense = torch.tensor(False, device=self.plan.device)
        weights = self.weights(quantized=True)
        found: dict[str, list[float]] = defaultdict(list)
        for batch in prompts:
            losses = self.network.losses(weights, self.tensors(batch), dense, LossWeights())
            for kind, hit in zip(batch.kinds, losses.hits.tolist(), strict=False):
                found[kind].append(hit)
        nats, counted = 0.0, 0.0
        for batch in texts:
            losses = self.network.losses(weights, self.tensors(batch), dense, LossWeights())
            weight = float(batch.weights[:, 1:].sum())
            nats, counted = nats + float(losses.text.detach()) * weight, counted + weight
        bits = nats / max(1.0, counted) / 0.6931471805599453 / bytes_per_token
        return {
            "accuracy": {kind: round(sum(h) / len(h), 4) for kind, h in found.items()},
            "prompts": {kind: len(h) for kind, h in found.items()},
            "bits_per_byte": round(bits, 4),
            "text_tokens": int(counted),
        }
