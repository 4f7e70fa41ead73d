"""What a model would take of a device, worked out on paper by the engine's own rules."""

from __future__ import annotations

from strata_cli.engine.device.host import HostDevice
from strata_cli.engine.device.paper import DescribedGpu, PaperDevice
from strata_cli.engine.forward.planning import Plan, plan_model
from strata_cli.engine.model.tensors import ModelFile
from strata_cli.engine.options import EngineOptions, context_of, wishes_of


def fit_on_paper(model: ModelFile, options: EngineOptions, gpu: DescribedGpu | None) -> Plan:
    """What Engine.open would do with these options. Reads no weights, allocates nothing large.

    Args:
        model: an opened, checked model file.
        options: of the engine; its device and its limits of device memory are not looked at.
        gpu: where the model is to run, its free memory being all that may be used; None: the host.

    Raises:
        InputError: the model has no such context.
        OutOfMemory: it does not fit.
    """
    wishes = wishes_of(options, context_of(model.spec, options.max_context))
    if gpu is not None:
        paper = PaperDevice(gpu, gpu)
        return plan_model(model, paper, paper.stream("compute"), wishes)
    with HostDevice(options.threads) as host:
        return plan_model(model, host, host.stream("compute"), wishes)
