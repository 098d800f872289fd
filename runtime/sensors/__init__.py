"""Sensors: the GPU (`nvml`), CUDA's allocator (`cuda`), the host (`host`), saved activations (`activation_meter`)."""
