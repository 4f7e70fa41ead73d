"""Opens a model: puts together what an engine is made of, part by part."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from strata_cli.engine.compiling import compile_ahead
from strata_cli.engine.decode.residency import Residency
from strata_cli.engine.decode.sharing import ShareRules, Sharing
from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import Device, Stream
from strata_cli.engine.device.timing import Spans
from strata_cli.engine.experts.placing import ExpertHome
from strata_cli.engine.experts.window_pool import WindowPool, pool_threads
from strata_cli.engine.forward.layers import Forward
from strata_cli.engine.forward.loading import Loaded, Notice, Progress, load_weights
from strata_cli.engine.forward.places import Places, Planned
from strata_cli.engine.forward.planning import Plan, plan_model
from strata_cli.engine.forward.rows import RowPort
from strata_cli.engine.forward.workspace import Workspace
from strata_cli.engine.kernels.jit import is_cold, why_uncached
from strata_cli.engine.learning import ProfileLearner
from strata_cli.engine.model.chat_template import ChatTemplate
from strata_cli.engine.model.shards import model_stem
from strata_cli.engine.model.spec import ModelSpec
from strata_cli.engine.model.tensors import ModelFile, load_model_file
from strata_cli.engine.model.tokenizer import Tokenizer
from strata_cli.engine.options import EngineOptions, context_of, wishes_of
from strata_cli.engine.prefill.dump import ResidualDump
from strata_cli.engine.prefill.prompt_stream import Setting
from strata_cli.engine.prefill.streamer import PromptStreamer
from strata_cli.engine.prefill.watching import Watch
from strata_cli.engine.profiling import Known, find_profile, measure_profile

logger = logging.getLogger(__name__)

COLD_NOTICE = "compiling kernels for this processor; later starts find them in the cache"


class Listeners(NamedTuple):
    """Who is told how far the opening is; see Engine.open."""

    progress: Progress | None = None
    notice: Notice | None = None
    compiling: Progress | None = None
    planned: Planned | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an engine is made of.

    Attributes:
        spec: the model's dimensions.
        model_name: what the file calls itself, or the file's name.
        tokenizer: text to ids and back.
        chat_template: the model's own, or None.
        context_tokens: tokens a sequence may hold.
        device: computes.
        stream: of the device, where everything is computed.
        forward: the model's layers.
        port: token ids in, logits out.
        watch: looks on while prompts are read.
        streamer: brings prompts the experts that lie in host memory; None: all stay put.
        residency: the same for steps, and counts what they use; None: nobody asks.
        learner: of the expert profile; None: nothing is learned.
    """

    spec: ModelSpec
    model_name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    context_tokens: int
    device: Device
    stream: Stream
    forward: Forward
    port: RowPort
    watch: Watch
    streamer: PromptStreamer | None
    residency: Residency | None
    learner: ProfileLearner | None


def open_parts(options: EngineOptions, resources: ExitStack, listeners: Listeners) -> Parts:
    """Load a model; on a first start on the host, compile its kernels. See Engine.open.

    Args:
        options: what to load, where, and how large.
        resources: gets everything that has to be given back.
        listeners: are told.
    """
    model = resources.enter_context(load_model_file(options.model))
    device = resources.enter_context(_open_device(options))
    is_cold_host = options.compile_ahead and device.name == "host" and is_cold()
    if is_cold_host:
        _announce_compiling(listeners.notice)
    tokenizer = Tokenizer.from_metadata(model.metadata)
    chat_template = _chat_template(options, model, resources)
    stream = device.stream("compute")
    context_tokens = context_of(model.spec, options.max_context)
    plan = plan_model(model, device, stream, wishes_of(options, context_tokens))
    if listeners.planned is not None:
        listeners.planned(Places.of(model, device, plan))
    known = find_profile(
        model,
        options.expert_profile if plan.cache or options.profile_save else None,
        keeps_own=plan.cache is not None and device.has_own_memory,
    )
    loaded = load_weights(
        model,
        device,
        stream,
        plan,
        ranking=known.profile.ranking(),
        stager=options.stager,
        progress=listeners.progress,
        notice=listeners.notice,
    )
    resources.callback(loaded.close)
    workspace = Workspace(model.spec, device, plan.sizes.chunk_tokens, plan.sizes.logit_rows)
    resources.callback(workspace.close)
    port = RowPort(device, stream, workspace)
    resources.callback(port.close)
    resources.callback(stream.close)
    forward = Forward(model.spec, loaded.weights, workspace, stream, loaded.fetcher)
    if is_cold_host:
        compile_ahead(forward, device, options.model, listeners.compiling)
    watch = _watch(options, device)
    resources.callback(watch.close)
    streamer = _streamer(options, device, stream, plan, loaded, known, resources)
    name = model.spec.name or model_stem(options.model)
    _tell(options, name, model.spec, device, plan, loaded)
    profile = known.profile
    if streamer is not None and known.target is not None:
        profile = measure_profile(known, tokenizer, forward, port, streamer, context_tokens)
    learner = None
    if options.profile_save is not None:
        learner = ProfileLearner(options.profile_save, profile, options.profile_save_every_s)
        resources.callback(learner.close)
    residency = _residency(options, device, forward, loaded, learner, resources)
    return Parts(
        spec=model.spec,
        model_name=name,
        tokenizer=tokenizer,
        chat_template=chat_template,
        context_tokens=context_tokens,
        device=device,
        stream=stream,
        forward=forward,
        port=port,
        watch=watch,
        streamer=streamer,
        residency=residency,
        learner=learner,
    )


def _open_device(options: EngineOptions) -> Device:
    return open_device(
        options.device,
        threads=options.threads,
        vram_bytes=options.vram_bytes,
        vram_reserve_bytes=options.vram_reserve_bytes,
    )


def _announce_compiling(notice: Notice | None) -> None:
    problem = why_uncached()
    if problem:
        logger.warning("compiling kernels at every start, they cannot be kept: %s", problem)
    elif notice is not None:
        notice(COLD_NOTICE)


def _chat_template(
    options: EngineOptions, model: ModelFile, resources: ExitStack
) -> ChatTemplate | None:
    template = ChatTemplate.from_metadata(model.metadata)
    if template is not None:
        resources.callback(template.close)
        if options.will_chat:
            template.start()
    return template


def _watch(options: EngineOptions, device: Device) -> Watch:
    path = options.prefill_dump_r
    dump = None if path is None else ResidualDump(path, device)
    return Watch(Spans(device, options.trace), dump)


def _streamer(
    options: EngineOptions,
    device: Device,
    stream: Stream,
    plan: Plan,
    loaded: Loaded,
    known: Known,
    resources: ExitStack,
) -> PromptStreamer | None:
    """What brings prompts the experts that are not on the device, if there may be any."""
    if loaded.store is None or plan.cache is None:
        return None
    setting = Setting(device, stream, loaded.store, options.trace)
    scores, own_slots = known.profile.scores, plan.cache.ring_slots
    streamer = PromptStreamer(setting, options.streaming, scores, own_slots)
    resources.callback(streamer.close)
    # Again, and thus before the ring: kernels that run know its slots by address alone.
    resources.callback(stream.close)
    logger.info("experts: %s", streamer.describe(plan.sizes.chunk_tokens))
    return streamer


def _tell(
    options: EngineOptions,
    name: str,
    spec: ModelSpec,
    device: Device,
    plan: Plan,
    loaded: Loaded,
) -> None:
    """Log and trace what was loaded."""
    logger.info("%s on %s: %s", name, device.name, plan.sizes.describe())
    options.trace.event(
        "run.begin",
        model=name,
        device=device.name,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        chunk_tokens=plan.sizes.chunk_tokens,
        num_resident=_num_resident(spec, plan, loaded),
    )


def _residency(
    options: EngineOptions,
    device: Device,
    forward: Forward,
    loaded: Loaded,
    learner: ProfileLearner | None,
    resources: ExitStack,
) -> Residency | None:
    """What counts and moves the experts of steps, where some are cached or a profile learns."""
    sharing = _share(options, device, forward, loaded, resources)
    if loaded.store is None and learner is None:
        return None
    residency = Residency(
        device,
        forward,
        loaded.store,
        options.adapt,
        sharing=sharing,
        trace=options.trace,
        learn=None if learner is None else learner.add_pairs,
    )
    resources.callback(residency.close)
    resources.callback(forward.stream.close)  # which writes into it
    resources.callback(residency.abandon)  # so that the device waits for nobody
    return residency


def _share(
    options: EngineOptions, device: Device, forward: Forward, loaded: Loaded, resources: ExitStack
) -> Sharing | None:
    """What shares misses out, if that is wanted and there may be any."""
    store, top_k = loaded.store, forward.spec.num_experts_per_tok
    rules = ShareRules(options.tail_skip, options.link_share)
    leaves_out = 0 < rules.tail_skip < top_k
    if store is None or not (leaves_out or rules.has_pool):
        return None
    if store.cache.num_slots == store.num_layers * store.num_experts:
        return None
    if not store.is_pinned.all():
        return None
    pool = None
    if rules.has_pool:
        num_threads = options.pool_threads or pool_threads()
        addresses, is_host = store.host_addresses, not device.has_own_memory
        pool = WindowPool(device, store.layouts, addresses, top_k, num_threads, is_exact=is_host)
        resources.callback(pool.close)
    return Sharing(device, forward, store, rules, pool)


def _num_resident(spec: ModelSpec, plan: Plan, loaded: Loaded) -> int:
    """Experts, of all layers together, in the memory that kernels read at full speed."""
    if loaded.store is not None:
        return int(loaded.store.cache.is_resident.sum())
    is_mapped = plan.placement.experts is ExpertHome.MAPPED
    return 0 if is_mapped else spec.num_layers * spec.num_experts
