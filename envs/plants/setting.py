"""A training's setting: from profiles and the way one trains to what `physics` computes with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...runtime.errors import ConfigError
from . import physics
from .profile import GIB, FrameworkProfile, HardwareProfile, ModelProfile, load_framework

Tuner = Literal["full", "zero", "lora"]
Quantization = Literal["none", "gptq4", "gptq8", "bnb4"]
Targets = Literal["attention", "all-linear"]


@dataclass(frozen=True)
class TrainingSetting:
    """How a model is trained.

    Raises:
        ConfigError: a value that is none of the known ones, or full tuning of quantised weights.
    """

    tuner: Tuner = "lora"  #: "zero": full tuning under DeepSpeed's ZeRO on one GPU, with 32-bit optimizer state
    quantization: Quantization = "none"
    lora_rank: float = 8.0
    lora_targets: Targets = "all-linear"
    train_embeddings: bool = False  #: embedding and output layer are trained beside the adapters
    flash_attention: bool = True
    sharded_engine: bool = False  #: runs under DeepSpeed, whose hooks cost host time

    def __post_init__(self) -> None:
        for name, known in (
            ("tuner", ("full", "zero", "lora")),
            ("quantization", ("none", "gptq4", "gptq8", "bnb4")),
            ("lora_targets", ("attention", "all-linear")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if self.tuner != "lora" and self.quantization != "none":
            raise ConfigError(f"tuner {self.tuner!r} cannot train quantised weights; use tuner 'lora'")
        if self.tuner == "lora" and not self.lora_rank >= 1:
            raise ConfigError(f"lora_rank must be at least 1, not {self.lora_rank}")


def architecture(model: ModelProfile) -> physics.Architecture:
    """Sizes and parameter counts of a model."""
    hidden = model.hidden_size.value
    attention = model.heads.value * model.head_size.value
    key_value = model.key_value_heads.value * model.head_size.value
    layer = hidden * (2 * attention + 2 * key_value) + 3 * hidden * model.intermediate_size.value
    head = model.vocabulary.value * hidden
    return physics.Architecture(
        layers=model.layers.value,
        hidden_size=hidden,
        intermediate_size=model.intermediate_size.value,
        heads=model.heads.value,
        attention_width=attention,
        vocabulary=model.vocabulary.value,
        matmul_parameters=model.layers.value * layer,
        head_parameters=head,
        embedding_parameters=head if model.tied_embeddings else 2 * head,
    )


def implementation(
    model: ModelProfile, setting: TrainingSetting, framework: FrameworkProfile
) -> physics.Implementation:
    """Costs of a model family's code with the attention that the setting gives it."""
    kind = model.attention if setting.flash_attention or model.attention != "flash" else "eager"
    traffic = {"flash": 0.0, "masked": framework.masked_traffic.value, "alibi": framework.alibi_traffic.value}
    transient = {"flash": 0.0, "masked": framework.masked_bytes.value, "alibi": framework.alibi_bytes.value}
    launch = {
        "qwen": framework.launch_seconds_qwen.value,
        "llama": framework.launch_seconds_llama.value,
        "other": framework.launch_seconds_other.value,
        "recent": framework.launch_seconds_llama.value,  # as many kernels a layer
    }
    # transformers 5 holds the 16-bit logits, and two of their 32-bit copy, its softmax and its gradient at a time:
    # 10 bytes an entry, the kind of code to which logits_bytes was fitted. The shifted copies of 2023 are gone.
    logits = framework.logits_bytes_llama if model.family == "llama" else framework.logits_bytes
    return physics.Implementation(
        launch_seconds=launch[model.family],
        logits_bytes=logits.value,
        logits_traffic=framework.logits_traffic.value,
        attention_traffic=traffic.get(kind, framework.eager_traffic.value),
        attention_bytes=transient.get(kind, framework.eager_bytes.value),
        attention_stored=0.0 if kind == "flash" else framework.eager_stored.value,
    )


def _adapters(model: ModelProfile, targets: Targets) -> tuple[float, float]:
    """Inputs + outputs of the adapted matrices of a layer, and their number."""
    shape = architecture(model)
    hidden, ffn, query = shape.hidden_size, shape.intermediate_size, shape.attention_width
    key_value = model.key_value_heads.value * model.head_size.value
    matrices = 1.0 if model.fused_qkv else 3.0
    width = matrices * hidden + query + 2 * key_value
    if targets == "all-linear":
        width += (query + hidden) + 3 * (hidden + ffn)
        matrices += 4.0
    return width, matrices


def tuning(model: ModelProfile, setting: TrainingSetting, framework: FrameworkProfile) -> physics.Tuning:
    """What is trained, and how the rest is stored."""

    def constant(name: str) -> float:
        return getattr(framework, name).value

    lora = setting.tuner == "lora"
    zero = setting.tuner == "zero"
    width, matrices = _adapters(model, setting.lora_targets) if lora else (0.0, 0.0)
    quantized = setting.quantization != "none"
    stored = constant("weight_bytes")
    return physics.Tuning(
        full=0.0 if lora else 1.0,
        head_trained=1.0 if setting.train_embeddings else 0.0,
        adapter_width=width,
        adapted_matrices=matrices,
        adapter_parameters=setting.lora_rank * width * model.layers.value if lora else 0.0,
        weight_bytes=constant(f"{setting.quantization}_weight_bytes") if quantized else stored,
        embedding_weight_bytes=stored,
        dequantization_traffic=constant(f"{setting.quantization}_traffic") if quantized else 0.0,
        quantized=1.0 if quantized else 0.0,
        load_bytes=constant("bnb4_load_bytes") if setting.quantization == "bnb4" else 0.0,
        state_bytes=constant("zero_state_bytes") if zero else constant("state_bytes"),
        step_bytes=constant("zero_step_bytes") if zero else constant("step_bytes"),
        adapter_state_bytes=constant("adapter_state_bytes"),
        head_state_bytes=constant("head_state_bytes"),
        launch_extra_seconds=constant("zero_launch_seconds") if zero or setting.sharded_engine else 0.0,
    )


def framework_constants(framework: FrameworkProfile) -> physics.Framework:
    """The framework's constants as `physics` takes them."""
    return physics.Framework(**{name: getattr(framework, name).value for name in physics.Framework._fields})


def hardware_constants(hardware: HardwareProfile) -> physics.Hardware:
    """A device's constants as `physics` takes them."""
    return physics.Hardware(
        flops=hardware.flops.value,
        bandwidth=hardware.bandwidth.value,
        memory_bytes=hardware.memory_gib.value * GIB,
        context_bytes=hardware.context_gib.value * GIB,
        matmul_efficiency=hardware.matmul_efficiency.value,
        attention_efficiency=hardware.attention_efficiency.value,
        launch_scale=hardware.launch_scale.value,
        time_scale=hardware.time_scale.value,
        activation_scale=hardware.activation_scale.value,
    )


def power_curve(hardware: HardwareProfile) -> physics.PowerCurve:
    """How a device answers to a power limit."""
    values = hardware.values()
    return physics.PowerCurve(**{name: values[f"power_{name}"] for name in physics.PowerCurve._fields})


def coefficients(
    hardware: HardwareProfile,
    model: ModelProfile,
    setting: TrainingSetting,
    framework: FrameworkProfile | None = None,
) -> tuple[physics.TimeCoefficients, physics.MemoryCoefficients]:
    """What time and memory of a micro-batch are computed from, for one run."""
    framework = framework or load_framework()
    parts = (
        architecture(model),
        implementation(model, setting, framework),
        tuning(model, setting, framework),
        hardware_constants(hardware),
        framework_constants(framework),
    )
    return physics.time_coefficients(*parts), physics.memory_coefficients(*parts)
