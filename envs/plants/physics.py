"""How long a micro-batch of a fine-tuning takes, what memory and what power it needs.

Pure functions of floats (tuples of floats where there are many), in the part of Python that numba compiles: run as they
are or through `compiling.compiled`, they give the same to the last bit.

What does not change within a run (model, tuning, hardware) is boiled down once, by `time_coefficients` and
`memory_coefficients`; each control step then costs a few multiplications. Notation in the comments: b samples in a
micro-batch, S the length of its longest, T = b S padded tokens, g the checkpointed share of the layers (0..1),
L layers, h hidden size, ffn intermediate size, V vocabulary.

The constants are not here but in the profiles (`envs/profiles`), each with its source. `benchmarks/plant_fidelity.py`
fits them and measures how well the equations hold.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Architecture(NamedTuple):
    """A decoder-only transformer."""

    layers: float  #: L
    hidden_size: float  #: h
    intermediate_size: float  #: ffn, width of the gated feed-forward network
    heads: float  #: query heads
    attention_width: float  #: query heads x head size
    vocabulary: float  #: V, entries of the output layer
    matmul_parameters: float  #: parameters of the layers' matrices
    head_parameters: float  #: parameters of the output layer, V h
    embedding_parameters: float  #: parameters of embedding and output layer together (V h when they are tied)


class Implementation(NamedTuple):
    """What the code of a model family and its attention cost."""

    launch_seconds: float  #: host time to launch one layer's kernels, forward + backward + recomputation, s
    logits_bytes: float  #: peak bytes for one token and one vocabulary entry around the loss
    logits_traffic: float  #: bytes moved for one token and one vocabulary entry
    attention_traffic: float  #: bytes moved for one score of the attention matrix and pass; 0 with flash attention
    attention_bytes: float  #: transient bytes for one score; 0 with flash attention
    attention_stored: float  #: bytes kept for one score until backward, uncheckpointed; 0 with flash attention


class Tuning(NamedTuple):
    """Which parameters are trained, and how the frozen ones are stored."""

    full: float  #: 1 if the layers' matrices are trained, 0 with adapters
    head_trained: float  #: 1 if embedding and output layer are trained
    adapter_width: float  #: inputs + outputs of the adapted matrices, summed over one layer
    adapted_matrices: float  #: adapted matrices in one layer
    adapter_parameters: float  #: parameters of all adapters
    weight_bytes: float  #: stored bytes of one parameter of the layers' matrices
    embedding_weight_bytes: float  #: stored bytes of one parameter of embedding and output layer
    dequantization_traffic: float  #: bytes moved to dequantise one parameter in one pass; 0 if not quantised
    quantized: float  #: 1 if quantised
    load_bytes: float  #: bytes of one parameter that loading (quantising) leaves in the allocator's pool
    state_bytes: float  #: gradient and optimizer bytes of one fully trained parameter
    step_bytes: float  #: temporary bytes of one fully trained parameter during the optimizer's step
    adapter_state_bytes: float  #: weight, gradient and optimizer bytes of one adapter parameter
    head_state_bytes: float  #: the same of one parameter of a trained embedding or output layer beside adapters
    launch_extra_seconds: float  #: further host time a layer (a sharding engine's hooks), s


class Hardware(NamedTuple):
    """An accelerator (or a CPU)."""

    flops: float  #: peak dense 16-bit matrix throughput, FLOP/s
    bandwidth: float  #: peak memory bandwidth, bytes/s
    memory_bytes: float  #: capacity that a process can reserve, bytes
    context_bytes: float  #: what the framework holds beside tensors, bytes
    matmul_efficiency: float  #: reached share of `flops` in large matrix products
    attention_efficiency: float  #: reached share of `flops` in flash attention
    launch_scale: float  #: host time to launch a kernel, relative to the host of the A100 tables
    time_scale: float  #: all times, relative to what the other constants give; `calibration` sets it
    activation_scale: float  #: all activations, likewise


class Framework(NamedTuple):
    """Constants of training with transformers and peft, common to all models."""

    elementwise_traffic: float  #: bytes moved a token, layer and unit of (2 h + ffn), checkpointed
    adapter_traffic: float  #: bytes moved a token, layer and unit of `Tuning.adapter_width`
    gradient_traffic: float  #: bytes moved a micro-batch and fully trained parameter
    optimizer_traffic: float  #: bytes moved an optimizer step and fully trained parameter
    launch_recomputed: float  #: share of `Implementation.launch_seconds` that recomputation causes
    adapter_launch_seconds: float  #: host time for one adapted matrix, checkpointed, s
    quantized_launch_seconds: float  #: host time for one quantised layer, checkpointed, s
    layer_bytes: float  #: transient bytes a token and unit of (4 h + 2 ffn) while one layer is recomputed
    stored_bytes: float  #: bytes kept a token, layer and unit of (4 h + 2 ffn) when not checkpointed
    checkpoint_bytes: float  #: bytes kept a token, layer and unit of h when checkpointed


class TimeCoefficients(NamedTuple):
    """Time of a micro-batch, boiled down (see `micro_batch_seconds`); `_g` is what the checkpointed share adds."""

    token: float  #: s a padded token
    token_g: float
    token_length: float  #: s a padded token and token of length (flash attention)
    token_length_g: float
    score: float  #: s a score of the attention matrix (other attention), b S^2
    score_g: float
    fixed: float  #: s a micro-batch on the device
    fixed_g: float
    launch: float  #: s a micro-batch on the host
    launch_g: float
    weights: float  #: s a micro-batch to read the weights
    weights_g: float
    optimizer: float  #: s an optimizer step


class MemoryCoefficients(NamedTuple):
    """Memory of a micro-batch, boiled down (see `allocated_bytes`)."""

    static: float  #: weights, optimizer state, adapters, context, bytes
    pool: float  #: what loading left in the allocator's pool, bytes; given back when memory is short
    step: float  #: temporary bytes of the optimizer's step, when activations are gone
    stored: float  #: bytes a padded token kept until backward, nothing checkpointed
    checkpointed: float  #: the same, everything checkpointed
    stored_score: float  #: bytes a score kept until backward, nothing checkpointed
    logits: float  #: transient bytes a padded token around the loss
    head_gradient: float  #: bytes of the output layer's gradient before it is added to that of the step so far
    layer: float  #: transient bytes a padded token within one layer
    layer_score: float  #: transient bytes a score within one layer


def time_coefficients(
    architecture: Architecture,
    implementation: Implementation,
    tuning: Tuning,
    hardware: Hardware,
    framework: Framework,
) -> TimeCoefficients:
    """Boil a run's constants down to what `micro_batch_seconds` needs.

    A pass over the layers costs 2 FLOP a matrix parameter and token. Adapters need two (forward, and the gradient of
    the activations), full tuning a third (the gradient of the weights), checkpointing another (recomputation).
    Elementwise operations and dequantisation run at memory bandwidth; they cost a third of their checkpointed amount
    in each of the three passes forward, recomputation, backward, so (2 + g) / 3 of it in all.
    """
    matmul = hardware.flops * hardware.matmul_efficiency / hardware.time_scale
    attention = hardware.flops * hardware.attention_efficiency / hardware.time_scale
    bandwidth = hardware.bandwidth / hardware.time_scale
    layers = architecture.layers
    third = 1.0 / 3.0
    # Bytes a token through all layers, checkpointed, but for those of matrix products.
    traffic = layers * (
        framework.elementwise_traffic * (2.0 * architecture.hidden_size + architecture.intermediate_size)
        + framework.adapter_traffic * tuning.adapter_width
    )
    # Flash attention: forward 1, backward 2.5 times 4 S attention_width FLOP a token, halved by the causal mask.
    flash = 2.0 * layers * architecture.attention_width / attention if implementation.attention_traffic == 0.0 else 0.0
    score = architecture.heads * layers * implementation.attention_traffic / bandwidth
    dequantization = architecture.matmul_parameters * tuning.dequantization_traffic / bandwidth
    trained = (
        tuning.full * architecture.matmul_parameters
        + max(tuning.full, tuning.head_trained) * architecture.embedding_parameters
    )
    launch = layers * hardware.launch_scale * hardware.time_scale
    launch_passes = framework.adapter_launch_seconds * tuning.adapted_matrices
    launch_passes += framework.quantized_launch_seconds * tuning.quantized
    recomputed = framework.launch_recomputed
    weights = architecture.matmul_parameters * tuning.weight_bytes / bandwidth
    return TimeCoefficients(
        token=2.0 * architecture.matmul_parameters * (2.0 + tuning.full) / matmul
        + 2.0 * architecture.head_parameters * (2.0 + max(tuning.full, tuning.head_trained)) / matmul
        + (2.0 * third * traffic + implementation.logits_traffic * architecture.vocabulary) / bandwidth,
        token_g=2.0 * architecture.matmul_parameters / matmul + third * traffic / bandwidth,
        token_length=3.5 * flash,
        token_length_g=flash,
        score=2.0 * score,
        score_g=score,
        fixed=2.0 * third * dequantization + framework.gradient_traffic * trained / bandwidth,
        fixed_g=third * dequantization,
        launch=launch
        * (
            implementation.launch_seconds * (1.0 - recomputed)
            + tuning.launch_extra_seconds
            + 2.0 * third * launch_passes
        ),
        launch_g=launch * (implementation.launch_seconds * recomputed + third * launch_passes),
        weights=(2.0 + tuning.full) * weights,
        weights_g=weights,
        optimizer=framework.optimizer_traffic * (trained + tuning.adapter_parameters) / bandwidth,
    )


def device_seconds(coefficients: TimeCoefficients, tokens: float, length: float, checkpointed: float) -> float:
    """Time that the device computes for a micro-batch, s. Arguments as in `micro_batch_seconds`."""
    c = coefficients
    g = checkpointed
    return (
        tokens * (c.token + c.token_g * g)
        + tokens * length * (c.token_length + c.token_length_g * g + c.score + c.score_g * g)
        + c.fixed
        + c.fixed_g * g
    )


def micro_batch_seconds(coefficients: TimeCoefficients, tokens: float, length: float, checkpointed: float) -> float:
    """Time of one forward and backward pass, s.

    Device time grows with the tokens. Host (launching kernels) and memory (reading the weights) take their time
    whatever the size, in parallel with the device; the slowest decides. The three are joined by a 2-norm, which is
    the roofline with its corner rounded, as the measurements show it.

    Args:
        coefficients: Of the run.
        tokens: Padded tokens T = b S (or the sum of lengths, padding-free).
        length: Length S of the longest sample, tokens.
        checkpointed: Share g of the layers that is checkpointed, 0..1.
    """
    c = coefficients
    device = device_seconds(c, tokens, length, checkpointed)
    launch = c.launch + c.launch_g * checkpointed
    weights = c.weights + c.weights_g * checkpointed
    return math.sqrt(device * device + launch * launch + weights * weights)


def memory_coefficients(
    architecture: Architecture,
    implementation: Implementation,
    tuning: Tuning,
    hardware: Hardware,
    framework: Framework,
) -> MemoryCoefficients:
    """Boil a run's constants down to what `allocated_bytes` needs."""
    width = 4.0 * architecture.hidden_size + 2.0 * architecture.intermediate_size
    parameters = architecture.matmul_parameters + architecture.embedding_parameters
    weights = architecture.matmul_parameters * tuning.weight_bytes
    weights += architecture.embedding_parameters * tuning.embedding_weight_bytes
    state = tuning.full * tuning.state_bytes * parameters
    state += tuning.adapter_state_bytes * tuning.adapter_parameters
    state += (1.0 - tuning.full) * tuning.head_trained * tuning.head_state_bytes * architecture.embedding_parameters
    scale = hardware.activation_scale
    return MemoryCoefficients(
        static=weights + state + hardware.context_bytes,
        pool=architecture.matmul_parameters * tuning.load_bytes,
        step=tuning.full * tuning.step_bytes * parameters,
        stored=scale * framework.stored_bytes * architecture.layers * width,
        checkpointed=scale * framework.checkpoint_bytes * architecture.layers * architecture.hidden_size,
        stored_score=scale * implementation.attention_stored * architecture.heads * architecture.layers,
        logits=scale * implementation.logits_bytes * architecture.vocabulary,
        head_gradient=scale * 2.0 * max(tuning.full, tuning.head_trained) * architecture.head_parameters,
        layer=scale * framework.layer_bytes * width,
        layer_score=scale * implementation.attention_bytes * architecture.heads,
    )


def stored_bytes(coefficients: MemoryCoefficients, tokens: float, length: float, checkpointed: float) -> float:
    """Activations kept from the forward to the backward pass, bytes. Arguments as in `micro_batch_seconds`."""
    c = coefficients
    kept = c.stored + c.stored_score * length
    return tokens * (kept + (min(c.checkpointed, kept) - kept) * checkpointed)


def transient_bytes(coefficients: MemoryCoefficients, tokens: float, length: float) -> float:
    """Bytes that live for a moment: around the loss, or within the layer that is computed. The larger counts."""
    c = coefficients
    return max(tokens * c.logits + c.head_gradient, tokens * (c.layer + c.layer_score * length))


def allocated_bytes(coefficients: MemoryCoefficients, tokens: float, length: float, checkpointed: float) -> float:
    """Peak of the memory in tensors, bytes: grows with tokens and length, falls with the checkpointed share.

    The optimizer's temporaries and the activations never live at the same time; the larger counts.
    Arguments as in `micro_batch_seconds`.
    """
    activations = stored_bytes(coefficients, tokens, length, checkpointed)
    activations += transient_bytes(coefficients, tokens, length)
    return coefficients.static + max(coefficients.step, activations)


def reserved_bytes(
    coefficients: MemoryCoefficients,
    tokens: float,
    length: float,
    checkpointed: float,
    fragmentation: float,
    capacity_bytes: float,
) -> float:
    """Peak of the memory that the caching allocator holds, bytes: at least what is allocated, at most the capacity.

    Blocks of transient tensors whose sizes change are kept and not found again: with variable lengths the allocator
    holds `fragmentation` (1 for fixed lengths) times the transient bytes. Near the capacity it gives blocks back
    instead of failing, so what is reserved stops there.

    Args:
        coefficients: Of the run.
        tokens: Padded tokens of the largest micro-batch so far.
        length: Its longest sample, tokens.
        checkpointed: Its checkpointed share of layers, 0..1.
        fragmentation: Reserved over allocated transient bytes, >= 1.
        capacity_bytes: What this process can reserve at most, bytes.
    """
    activations = stored_bytes(coefficients, tokens, length, checkpointed)
    activations += fragmentation * transient_bytes(coefficients, tokens, length)
    return min(coefficients.static + coefficients.pool + max(coefficients.step, activations), capacity_bytes)


def runs_out_of_memory(
    coefficients: MemoryCoefficients,
    tokens: float,
    length: float,
    checkpointed: float,
    least_fragmentation: float,
    capacity_bytes: float,
) -> bool:
    """Whether a micro-batch fails even after the allocator has given back every block that it can.

    Args:
        coefficients: Of the run.
        tokens: Padded tokens of the micro-batch.
        length: Its longest sample, tokens.
        checkpointed: Its checkpointed share of layers, 0..1.
        least_fragmentation: The fragmentation that giving back blocks does not mend, >= 1.
        capacity_bytes: What this process can have at most, bytes.
    """
    activations = stored_bytes(coefficients, tokens, length, checkpointed)
    activations += least_fragmentation * transient_bytes(coefficients, tokens, length)
    return coefficients.static + max(coefficients.step, activations) > capacity_bytes


def least_checkpointing(
    coefficients: MemoryCoefficients,
    tokens: float,
    length: float,
    layers: float,
    fragmentation: float,
    limit_bytes: float,
) -> float:
    """Least share of the layers, in whole layers, to checkpoint for a peak within `limit_bytes`; at most 1."""
    rest = coefficients.static + fragmentation * transient_bytes(coefficients, tokens, length)
    kept = stored_bytes(coefficients, tokens, length, 0.0)
    saved = kept - stored_bytes(coefficients, tokens, length, 1.0)
    excess = rest + kept - limit_bytes
    if excess <= 0.0:
        return 0.0
    if excess >= saved:
        return 1.0
    return min(1.0, math.ceil(excess / saved * layers - 1e-9) / layers)


def fitting_tokens(
    coefficients: MemoryCoefficients, length: float, checkpointed: float, fragmentation: float, limit_bytes: float
) -> float:
    """Most padded tokens of a micro-batch whose peak keeps `limit_bytes`; 0 where none does.

    Arguments as in `least_checkpointing`; the inverse of the peak over tokens.
    """
    c = coefficients
    room = limit_bytes - c.static
    if c.step > room:
        return 0.0
    kept = c.stored + c.stored_score * length
    kept += (min(c.checkpointed, kept) - kept) * checkpointed
    around_loss = (room - fragmentation * c.head_gradient) / (kept + fragmentation * c.logits)
    within_layer = room / (kept + fragmentation * (c.layer + c.layer_score * length))
    return max(0.0, min(around_loss, within_layer))


class PowerCurve(NamedTuple):
    """How a device answers to a power limit. Powers are in units of its thermal design power."""

    static: float  #: power that does not depend on the clock
    steepness: float  #: slope of speed over dynamic power where the clock is low; above 1
    slope: float  #: slope of speed over dynamic power near full clock; below 1
    sharpness: float  #: how sharp the two slopes meet; above 0
    clock_bound: float  #: share of the time that follows the clock (the rest waits for memory or host), 0..1
    evenness: float  #: how evenly power is drawn: infinite if it never exceeds its mean; above 1


def limited_share(curve: PowerCurve, full: float, limit: float) -> float:
    """Share of the dynamic power under the largest limit that a device draws under a smaller one, 0..1.

    Dynamic power d is a smooth minimum of what the workload would draw, w, and what the limit leaves above the static
    power s: d^-e = w^-e + (limit - s)^-e. Power fluctuates around its mean, so a limit cuts peaks long before it
    reaches the mean, the largest limit too; w follows from the power under that. Fitted to Zeus's traces.

    Args:
        curve: Of the device.
        full: Mean power of the workload under the largest limit, in units of that limit (the thermal design power).
        limit: Power limit, same units; 1 or more is no further limit.
    """
    dynamic = full - curve.static
    if dynamic <= 1e-6 or limit >= 1.0:  # draws no more than its static power, or is not limited
        return 1.0
    e = curve.evenness
    # Ratios to `dynamic`: (w / d(1))^-e = 1 - ((1 - s) / d(1))^-e, and 0 where even the largest limit is exceeded.
    workload = max(0.0, 1.0 - math.pow((1.0 - curve.static) / dynamic, -e))
    room = max(0.01, (limit - curve.static) / dynamic)
    return min(1.0, math.pow(workload + math.pow(room, -e), -1.0 / e))


def slowdown(curve: PowerCurve, share: float) -> float:
    """Time of a step relative to its time under the largest limit, >= 1. `share` is from `limited_share`.

    Speed over dynamic power u is the smooth minimum of a steep line through 0 (voltage at its floor: clock
    proportional to power) and a gentle one through full speed (clock^3 proportional to power).
    """
    q = curve.sharpness
    steep = math.pow(curve.steepness * share, -q)
    gentle = math.pow(1.0 - curve.slope * (1.0 - share), -q)
    full = math.pow(curve.steepness, -q) + 1.0
    speed = math.pow((steep + gentle) / full, -1.0 / q)
    return 1.0 - curve.clock_bound + curve.clock_bound / min(1.0, speed)


def busy_power(curve: PowerCurve, full: float, share: float) -> float:
    """Power while computing, in units of the thermal design power. `full` and `share` as in `limited_share`."""
    return min(full, curve.static) + max(0.0, full - curve.static) * share


def saturating_seconds(fixed: float, per_sample: float, batch: float, sharpness: float) -> float:
    """Step time over the batch size: `fixed` while the device is not full, `per_sample` x `batch` when it is, s."""
    return math.pow(math.pow(fixed, sharpness) + math.pow(batch * per_sample, sharpness), 1.0 / sharpness)


#: All of them, for `compiling.register`, callees before callers.
FUNCTIONS = (
    time_coefficients,
    device_seconds,
    micro_batch_seconds,
    memory_coefficients,
    stored_bytes,
    transient_bytes,
    allocated_bytes,
    reserved_bytes,
    runs_out_of_memory,
    least_checkpointing,
    fitting_tokens,
    limited_share,
    slowdown,
    busy_power,
    saturating_seconds,
)
