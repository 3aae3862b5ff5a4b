"""The policy. Its configuration is defined in ``megarl.config.policy``, and is also available here under
NeMo-RL's names."""

from megarl.config.policy import (
    DTensorConfig,
    DynamicBatchingConfig,
    MegatronConfig,
    MegatronDDPConfig,
    MegatronOptimizerConfig,
    MegatronSchedulerConfig,
    PolicyConfig,
    PytorchOptimizerConfig,
    RewardModelConfig,
    SequencePackingConfig,
    SinglePytorchSchedulerConfig,
    TokenizerConfig,
)

__all__ = [
    "DTensorConfig",
    "DynamicBatchingConfig",
    "MegatronConfig",
    "MegatronDDPConfig",
    "MegatronOptimizerConfig",
    "MegatronSchedulerConfig",
    "PolicyConfig",
    "PytorchOptimizerConfig",
    "RewardModelConfig",
    "SequencePackingConfig",
    "SinglePytorchSchedulerConfig",
    "TokenizerConfig",
]
