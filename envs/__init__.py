"""The lab: a training as a plant to be controlled, simulated from physics, and as a Gymnasium environment.

``gymnasium.make("swiftcruise.envs:SwiftCruise/Training-v0")`` is one training, ``gymnasium.make_vec`` with the same
name many of them in one compiled loop. `SwiftCruise/MOTraining-v0` has the reward vector as reward.
"""

from __future__ import annotations

from gymnasium.envs.registration import register, registry

for _name, _single, _vector in (
    ("Training", "TrainingEnv", "TrainingVectorEnv"),
    ("MOTraining", "MOTrainingEnv", "MOTrainingVectorEnv"),
):
    if f"SwiftCruise/{_name}-v0" not in registry:  # registering twice would warn
        register(
            id=f"SwiftCruise/{_name}-v0",
            entry_point=f"swiftcruise.envs.training_env:{_single}",
            vector_entry_point=f"swiftcruise.envs.vector_env:{_vector}",
        )
